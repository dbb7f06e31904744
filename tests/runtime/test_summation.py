"""Inner products of long rows."""

from __future__ import annotations

import pytest
import torch

from deltabars.runtime.vectors import add_inner, inner


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 1536, 5000, 200_000])
@pytest.mark.parametrize("shape", [(), (3, 2)], ids=["rows", "batches"])
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_those_of_float64(size, shape, paired, dtype):
    """Whole stretches, the rest of one, or both; each number counts once."""
    generator = torch.Generator().manual_seed(size)
    a = torch.randn(*shape, 3, size, generator=generator, dtype=dtype)
    b = torch.randn(*(shape if paired else ()), 4, size, generator=generator, dtype=dtype)
    exact = a.double() @ b.double().mT
    found = inner(a, b)
    assert found.dtype == torch.float64
    # A few float32 units of rounding of the norms' product, √size·√size; a lost number is O(1).
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-7 * size + 1e-6)
    ones = inner(torch.ones_like(a), torch.ones_like(b))
    assert torch.equal(ones, torch.full_like(exact, size))
    total = torch.full_like(exact, 1e6)
    assert add_inner(total, a, b) is total
    torch.testing.assert_close(total - 1e6, found, rtol=0, atol=1e-8)


def test_positive_sums_are_good_to_float32():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(n, 200_000, generator=generator) for n in (3, 5))
    torch.testing.assert_close(inner(a, b), a.double() @ b.double().T, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [2, 2100])
def test_rows_with_gaps_between_them(rows):
    """Columns of wider rows; so many that stretches are taken one at a time, too."""
    wide = torch.randn(rows + 4, 1400, generator=torch.Generator().manual_seed(0))
    a, b = wide[:rows, 100:1200], wide[4:, 100:1200]
    torch.testing.assert_close(
        inner(a, b), a.double() @ b.double().T, rtol=0, atol=5e-4
    )  # of up to 1,200
