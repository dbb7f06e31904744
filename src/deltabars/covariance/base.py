"""What every covariance of the trained parameters can be asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from deltabars.covariance.spread import Spread
from deltabars.vectors import Basis


class Covariance(ABC):
    """A covariance Σ of the trained parameters."""

    @abstractmethod
    def spread(
        self, squares: Tensor, projections: Mapping[str, Tensor], gram: Tensor | None = None
    ) -> Spread:
        """Standard deviations, bounds and (on demand) covariances of a batch of predictions.

        Args:
            squares: ‖f‖² of each row f of F, (B, C).
            projections: F Qᵀ (B, C, K) by the name of the matrix whose eigenvectors Q are.
            gram: F Fᵀ (B, C, C), where F Σ Fᵀ is wanted whole.
        """

    @abstractmethod
    def root(self, vectors: Mapping[str, Basis], rows: Tensor) -> Tensor:
        """Rows z (n, P) times a square root of Σ: standard normal z give draws of covariance Σ."""
