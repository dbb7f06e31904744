"""Inner products of long rows."""

from __future__ import annotations

import pytest
import torch

from deltabars.summation import inner


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 200_000])
def test_float32_products_are_good_to_float32(size):
    generator = torch.Generator().manual_seed(size)
    a = torch.rand(3, size, generator=generator)
    b = torch.rand(5, size, generator=generator)
    exact = a.double() @ b.double().T
    assert inner(a, b).dtype == torch.float64
    torch.testing.assert_close(inner(a, b), exact, rtol=1e-6, atol=0)


def test_batches_of_rows():
    a = torch.randn(2, 3, 3000, dtype=torch.float32)
    torch.testing.assert_close(inner(a, a), a.double() @ a.double().mT, rtol=0, atol=1e-3)
    b = torch.randn(4, 3000)
    torch.testing.assert_close(inner(a, b), a.double() @ b.double().T, rtol=0, atol=1e-3)


def test_float64_is_the_plain_product():
    a = torch.randn(3, 2000, dtype=torch.float64)
    assert torch.equal(inner(a, a), a @ a.T)
