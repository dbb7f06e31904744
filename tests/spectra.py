"""Symmetric matrices of prescribed eigenvalues, and the hard spectra that solvers must survive."""

from __future__ import annotations

import torch
from torch import Tensor

SIZE = 60


def matrix_with(values: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues, in a random orthonormal basis."""
    size = values.shape[0]
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return (basis * values) @ basis.T


def _linspace(low: float, high: float, count: int = SIZE) -> Tensor:
    return torch.linspace(low, high, count, dtype=torch.float64)


SPECTRA: dict[str, Tensor] = {
    "spread": _linspace(0.01, 3.0),
    "decaying": 10.0 ** _linspace(-2, 1.5),
    "clustered": torch.cat([1.0 + 1e-7 * _linspace(0, 1, 30), 2.0 + 1e-7 * _linspace(0, 1, 30)]),
    "repeated": torch.cat([torch.full((50,), 0.01), torch.full((6,), 5.0), torch.full((4,), 9.0)]),
    "rank_deficient": torch.cat([torch.full((52,), 0.01), _linspace(1, 4, 8)]),
    "identity": torch.full((SIZE,), 0.3),
    "indefinite": _linspace(-2.0, 3.0),
    "negative": _linspace(-5.0, -1.0),
    "tiny": 1e-6 * 10.0 ** _linspace(-2, 0),
    "zero": torch.zeros(SIZE),
}
SPECTRA = {name: values.double() for name, values in SPECTRA.items()}
