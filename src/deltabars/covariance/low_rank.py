"""The one matrix form behind everything: low rank plus a multiple of the identity."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deltabars.vectors import Basis, combined, projected


@dataclass(frozen=True, eq=False)
class LowRankPlusIdentity:
    """M = Q D Qᵀ + c (I − QQᵀ), with Q's orthonormal columns given as rows (K, P).

    Functions of M are of the same form: a square root takes √D and √c, an inverse 1/D and 1/c.
    """

    vectors: Basis  # (K, P)
    values: Tensor  # D (K,)
    tail: float  # c

    def apply(self, rows: Tensor) -> Tensor:
        """M f for each row f of (b, P): Q((d − c)∘Qᵀf) + c f. Cost: 4·b·K·P operations."""
        weights = (self.values - self.tail).to(rows.dtype)
        inside = projected(rows, self.vectors) * weights
        return combined(inside, self.vectors) + self.tail * rows
