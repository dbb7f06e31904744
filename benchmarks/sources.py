"""Files that a run reads and keeps: images, weights, published eigenvalues, eigenpairs."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deltabars.eigen.pairs import EigenPairs
from deltabars.errors import DataError
from deltabars.problem.network import weights_fingerprint


@dataclass(frozen=True)
class Sources:
    """Where things come from; None for what the user did not name.

    Attributes:
        mnist: a folder with MNIST's idx files.
        weights: an .npz file with weights of the paper's network.
        published: an .npz file with published eigenvalues `hessian` and `opg`.
        cache: a folder to keep eigenpairs in, for later runs.
        cifar10: a folder with CIFAR-10's binary batches.
    """

    mnist: Path | None = None
    weights: Path | None = None
    published: Path | None = None
    cache: Path | None = None
    cifar10: Path | None = None


@dataclass(frozen=True)
class Spectra:
    """Eigenpairs found on the way, for the works that come later; in files too, if asked.

    Attributes:
        folder: where the files go; None for this run only.
    """

    folder: Path | None
    _found: dict[str, EigenPairs] = field(default_factory=dict)

    def keep(self, matrix: str, pairs: EigenPairs, model: nn.Module, images: int) -> None:
        """Keep the pairs of a matrix, unless there are more of it already."""
        before = self.find(matrix, len(pairs), model, images)
        if before is not None and len(before) > len(pairs):
            return
        self._found[_key(matrix, model, images)] = pairs
        if self.folder is not None:
            parts = {
                "values": pairs.values,
                "vectors": pairs.vectors,
                "residuals": pairs.residuals,
                "statistics": dict(pairs.statistics),
            }
            torch.save(parts, self._path(matrix, model, images))

    def find(self, matrix: str, rank: int, model: nn.Module, images: int) -> EigenPairs | None:
        """`rank` pairs or more of the same matrix at the same weights, or None.

        Raises:
            DataError: the file of them is broken.
        """
        key = _key(matrix, model, images)
        if key not in self._found and self.folder is not None:
            path = self._path(matrix, model, images)
            if path.is_file():
                device = next(model.parameters()).device
                self._found[key] = _read(path, device)
        pairs = self._found.get(key)
        return pairs if pairs is not None and len(pairs) >= rank else None

    def _path(self, matrix: str, model: nn.Module, images: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{_key(matrix, model, images)}.pt"


def first_pairs(pairs: EigenPairs, rank: int) -> EigenPairs:
    """Return the largest `rank` pairs alone."""
    return EigenPairs(
        pairs.values[:rank],
        pairs.vectors[:rank],
        pairs.residuals[:rank],
        statistics=pairs.statistics,
    )


def _key(matrix: str, model: nn.Module, images: int) -> str:
    return f"{matrix}-{images}-{weights_fingerprint(model)}"


def _read(path: Path, device: torch.device) -> EigenPairs:
    try:
        parts: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(
            f"--cache: expected eigenpairs in {path}, got a broken file. Delete it."
        ) from error
    return EigenPairs(
        parts["values"], parts["vectors"], parts["residuals"], statistics=parts["statistics"]
    )
