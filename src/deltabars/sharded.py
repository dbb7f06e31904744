"""Eigenvectors of which each rank has its own columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltabars.columns import Columns
from deltabars.errors import StorageError
from deltabars.ranks import Ranks
from deltabars.space import Space


@dataclass(frozen=True, eq=False)
class ShardedVectors:
    """Rows (K, P) in a space that is shared out between ranks.

    What is asked of them is asked by all ranks at once.

    Attributes:
        part: the columns that are here, (K, p).
        space: ℝᴾ.
    """

    part: Tensor
    space: Space

    @property
    def shape(self) -> tuple[int, int]:
        """(K, P)."""
        return (len(self.part), self.space.size)

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers."""
        return self.part.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.part.device

    def __len__(self) -> int:
        return len(self.part)

    def __reduce__(self) -> Any:
        raise StorageError(
            f"Eigenvectors: expected whole ones to be copied or pickled, got those that "
            f"{self.space.ranks.count} ranks share. Save the fit, and load it where it is wanted."
        )

    def first(self, count: int) -> ShardedVectors:
        """The first rows."""
        return replace(self, part=self.part[:count])

    def columns(self, places: slice) -> Tensor:
        """Some of the columns on every rank, (K, n). Cost: one message."""
        start, stop, _ = places.indices(self.space.size)
        bounds = [min(max(bound, start), stop) - start for bound in self.space.columns.bounds]
        wanted = Columns(tuple(bounds), self.space.columns.rank)
        shift = start - self.space.own.start
        own = self.part[:, slice(wanted.own.start + shift, wanted.own.stop + shift)]
        return self.space.ranks.all_columns(own, wanted)

    def whole(self) -> Tensor:
        """All of them on every rank, (K, P)."""
        return self.columns(slice(None))


def ranks_of(spectra: Mapping[str, Any]) -> Ranks:
    """The ranks that the eigenvectors of a fit are shared out between; one alone if they are not.

    Args:
        spectra: eigenpairs by matrix.
    """
    for pairs in spectra.values():
        if isinstance(pairs.vectors, ShardedVectors):
            return pairs.vectors.space.ranks
    return Ranks()


def here(vectors: Any, start: int, stop: int) -> tuple[Any, int, int]:
    """What has the columns from `start` to `stop` on this rank, and where it has them."""
    if not isinstance(vectors, ShardedVectors):
        return vectors, start, stop
    shift = vectors.space.own.start
    return vectors.part, start - shift, stop - shift
