"""Save a fit to a file or a folder: its header, small tensors, and eigenvectors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltabars.eigen.pairs import ROUNDING
from deltabars.errors import StorageError
from deltabars.fitting.state import FittedState
from deltabars.likelihoods.losses import LIKELIHOODS, described, is_own
from deltabars.runtime.distributed import Columns
from deltabars.runtime.memory import read_bytes
from deltabars.runtime.precision import full_precision
from deltabars.runtime.vectors import Basis, ShardedVectors, group_of
from deltabars.storage import format as storage
from deltabars.storage import shards
from deltabars.storage.shards import measured_loss, rounded, stored_dtype
from deltabars.storage.writing import write_whole_folder

SMALL = ("values", "residuals", "smallest", "smallest_residuals")
OVERLAP = "overlap"
OUTPUTS = "behaviour.outputs"
MAX_FILE_SIZE = "5GB"


def save(state: FittedState, path: Any, dtype: Any, max_file_size: int | str) -> None:
    """Write a fit; the arguments are those of `DeltaFit.save`."""
    with full_precision(state.network.device):
        _save(state, path, dtype, max_file_size)


def _save(state: FittedState, path: Any, dtype: Any, max_file_size: int | str) -> None:
    if not is_own(state.likelihood):
        raise StorageError(
            f"Cannot write {path}: expected one of the likelihoods {sorted(LIKELIHOODS)}, got one "
            "of your own, which a file cannot hold."
        )
    types = {name: stored_dtype(dtype, pairs.vectors) for name, pairs in state.spectra.items()}
    most = read_bytes(max_file_size, "max_file_size")
    losses = {
        name: measured_loss(pairs.vectors, types[name]) for name, pairs in state.spectra.items()
    }
    width = sum(len(pairs) * types[name].itemsize for name, pairs in state.spectra.items())
    target = Path(path)
    in_files = width * state.num_parameters > most
    group = group_of(state.spectra)
    if group.size > 1 or in_files or os.path.isdir(target) or str(path).endswith(os.sep):
        _check_replaceable(target)
        together = max(1, most // width)
        header, tensors = head_of(state, types, losses)
        write_whole_folder(
            target,
            lambda draft: _write_files(draft, state, types, together, header, tensors),
            group,
            replace=True,
        )
        return
    lossy = any(losses.values()) or any(map(_is_short, types.values()))
    reported = types if lossy or any(pairs.rounding for pairs in state.spectra.values()) else None
    header, tensors = head_of(state, reported, losses)
    size = state.num_parameters
    for name, pairs in state.spectra.items():
        as_it_is = isinstance(pairs.vectors, Tensor) and pairs.vectors.dtype == types[name]
        tensors[f"{name}.vectors"] = (
            pairs.vectors if as_it_is else rounded(pairs.vectors, 0, size, types[name])
        )
    version = storage.USUAL_VERSION if reported is None else storage.FORMAT_VERSION
    storage.write(path, header, tensors, version)


def head_of(
    state: FittedState,
    types: Mapping[str, torch.dtype] | None = None,
    losses: Mapping[str, Mapping[str, float]] | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header of a fit, and all of its tensors but the eigenvectors.

    Args:
        types: the types that eigenvectors are stored in, where the header reports them.
        losses: what they lose by that (see `storage.shards.measured_loss`).
    """
    space = state.network.parameters
    losses = losses or {}
    diagnostics, statistics = dict(state.diagnostics), {}
    for name, pairs in state.spectra.items():
        statistics[name] = dict(pairs.statistics)
        if losses.get(name):  # on top of what was lost before
            statistics[name][ROUNDING] = pairs.rounding + losses[name]["norm"]
    if types is not None:
        diagnostics["storage"] = {
            name: {"dtype": str(types[name]).removeprefix("torch."), **losses.get(name, {})}
            for name in state.spectra
        }
    header = {
        "estimator": state.estimator,
        "l2": dict(state.l2) if isinstance(state.l2, Mapping) else state.l2,
        "level": state.level,
        "scales": dict(state.prior.scales),
        "num_examples": state.num_examples,
        "num_outputs": state.num_outputs,
        "likelihood": described(state.likelihood),
        "dtype": str(state.network.dtype),
        "parameters": [
            {"name": name, "shape": list(shape)}
            for name, shape in zip(space.names, space.shapes, strict=True)
        ],
        "weights": state.weights,
        "deterministic": state.network.deterministic,
        "inputs": asdict(state.signature),
        "diagnostics": diagnostics,
        "statistics": statistics,
    }
    tensors = {
        f"{name}.{field}": getattr(pairs, field)
        for name, pairs in state.spectra.items()
        for field in SMALL
    }
    if state.behaviour is not None:
        header["behaviour"] = {
            "ranges": [list(each) for each in state.behaviour.ranges],
        }
        tensors[OUTPUTS] = state.behaviour.outputs
    if state.estimator == "sandwich" and types is not None:
        # Of rounded vectors it would be another one, and of large ones it takes long.
        tensors[OVERLAP] = state.overlap
    return header, tensors


def _write_files(
    folder: Path,
    state: FittedState,
    types: Mapping[str, torch.dtype],
    together: int,
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> None:
    """Write the columns of each process, and, in the first one, the index of all."""
    group = group_of(state.spectra)
    bounds = Columns.even(state.num_parameters, group).bounds
    ranges = [
        (rank, start, min(start + together, stop))
        for rank, (begin, stop) in enumerate(pairwise(bounds))
        for start in range(begin, stop, together)
    ]
    parts = []
    for number, (rank, start, stop) in enumerate(ranges, 1):
        if rank == group.rank:
            matrices = {
                name: rounded(*_own_columns(pairs.vectors, start, stop), types[name])
                for name, pairs in state.spectra.items()
            }
            parts.append(shards.write_part(folder, number, len(ranges), matrices, start, stop))
    everywhere = [part for own in group.gather_objects(parts) for part in own]
    if group.is_first:
        shards.write_index(folder, header, tensors, everywhere)


def _is_short(dtype: torch.dtype) -> bool:
    return dtype.itemsize < torch.float32.itemsize


def _check_replaceable(target: Path) -> None:
    """Refuse to replace a folder of something else."""
    if os.path.isdir(target) and any(target.iterdir()) and not shards.is_fit_folder(target):
        raise StorageError(
            f"Cannot write {target}: expected a new or empty folder, or that of a fit, got one "
            "with other files in it."
        )


def _own_columns(vectors: Basis, start: int, stop: int) -> tuple[Basis, int, int]:
    """Return the vectors of this process, and the range of these columns in them."""
    if not isinstance(vectors, ShardedVectors):
        return vectors, start, stop
    shift = vectors.space.own.start
    return vectors.part, start - shift, stop - shift
