"""Inner products of long rows."""

from __future__ import annotations

import pytest
import torch

from deltabars.runtime import vectors as summation
from deltabars.runtime.sums import add_inner, inner


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 200_000])
def test_float32_products_are_good_to_float32(size):
    generator = torch.Generator().manual_seed(size)
    a = torch.rand(3, size, generator=generator)
    b = torch.rand(5, size, generator=generator)
    exact = a.double() @ b.double().T
    assert inner(a, b).dtype == torch.float64
    torch.testing.assert_close(inner(a, b), exact, rtol=1e-6, atol=0)


def test_batches_of_rows():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, 3, 3000, generator=generator)
    # The squares of a row sum up to 3,000, of which float32 keeps seven digits.
    torch.testing.assert_close(inner(a, a), a.double() @ a.double().mT, rtol=0, atol=3e-3)
    b = torch.randn(4, 3000, generator=generator)
    torch.testing.assert_close(inner(a, b), a.double() @ b.double().T, rtol=0, atol=1e-3)


def test_float64_is_the_plain_product():
    a = torch.randn(3, 2000, dtype=torch.float64)
    assert torch.equal(inner(a, a), a @ a.T)


@pytest.mark.parametrize("size", [1, 2, 511, 512, 513, 1536, 5000])
@pytest.mark.parametrize("shape", [(), (2,), (3, 2)], ids=["rows", "a batch", "batches"])
@pytest.mark.parametrize("paired", [True, False])
def test_any_number_of_stretches(size, shape, paired):
    """Whole ones, the rest of one, or both; each number counts once."""
    generator = torch.Generator().manual_seed(size)
    a = torch.randn(*shape, 3, size, generator=generator)
    b = torch.randn(*(shape if paired else ()), 4, size, generator=generator)
    exact = a.double() @ b.double().mT
    # A float32 unit of rounding of the product of the norms; a number left out is O(1).
    torch.testing.assert_close(inner(a, b), exact, rtol=0, atol=1e-7 * size + 1e-6)
    whole = torch.ones_like(a)
    assert torch.equal(inner(whole, torch.ones_like(b)), torch.full_like(exact, size))


def test_more_products_than_are_computed_together():
    """So many that stretches are taken one at a time."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2100, 1100, generator=generator) for _ in range(2))
    assert a.shape[0] * b.shape[0] > summation._AT_ONCE["cpu"]
    torch.testing.assert_close(inner(a, b), a.double() @ b.double().T, rtol=0, atol=1e-4)


def test_rows_with_gaps_between_them():
    """Parts of wider rows, as the columns of one layer are of a basis."""
    wide = torch.randn(6, 3000, generator=torch.Generator().manual_seed(0))
    part = wide[:, 100:1500]
    torch.testing.assert_close(
        inner(part[:2], part[2:]), part[:2].double() @ part[2:].double().T, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 3, 512, 1300])
def test_products_are_added_in_place(size, dtype):
    generator = torch.Generator().manual_seed(size)
    a, b = (torch.randn(4, size, generator=generator, dtype=dtype) for _ in range(2))
    total = torch.full((4, 4), 1e6, dtype=torch.float64)
    assert add_inner(total, a, b) is total
    torch.testing.assert_close(total - 1e6, a.double() @ b.double().T, rtol=0, atol=1e-4)
