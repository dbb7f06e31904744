"""What the header and the tensors of a saved fit must be like, whoever wrote the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deltabars.behaviour import COUNT, MOST_NUMBERS
from deltabars.eigen import EigenPairs
from deltabars.eigen.pairs import ROUNDING
from deltabars.rounding import DTYPES
from deltabars.vectors import PartedVectors

_LONGEST_NAME = 200
_SLACK, _MOST_SLACK = 1e-3, 0.1  # relative: of orders, norms and products
_COMPARED, _COLUMNS = 8, 1 << 20  # vectors, and columns of them that are held at a time
_MOST_DIMENSIONS = 25
# Looked up here, because to ask torch for a name of a file's may import a module.
_TYPES = {str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
_SCALARS = (str, int, float, type(None))


def check_header(header: Mapping[str, Any]) -> None:
    """Refuse a header whose entries are not of their kinds.

    Raises:
        KeyError, ValueError: one lacks, or has a value that no fit has.
    """
    for name in ("num_examples", "num_outputs"):
        _expect(_is_count(header[name]), name)
    for name in ("estimator", "dtype", "weights"):
        _expect(isinstance(header[name], str), name)
    for name in ("parameters", "diagnostics", "statistics", "inputs"):
        _expect(isinstance(header[name], list if name == "parameters" else dict), name)
    names = [entry["name"] for entry in header["parameters"]]
    _expect(all(isinstance(name, str) for name in names), "parameters")
    _expect(0 < len(names) == len(set(names)), "parameters")
    for entry in header["parameters"]:
        _expect(all(_is_count(size) for size in _list(entry["shape"])), "parameters")
    given = header["l2"]
    levels = given.values() if isinstance(given, dict) else [given]
    scales = header.get("scales", {})
    _expect(isinstance(scales, dict) and set(scales) in (set(), set(names)), "scales")
    numbers = [*levels, header.get("level", given), *scales.values()]
    _expect(all(_is_positive(number) for number in numbers), "l2")
    for statistics in header["statistics"].values():
        _expect(isinstance(statistics, dict), "statistics")
        _expect(all(isinstance(value, _SCALARS) for value in statistics.values()), "statistics")
    _check_inputs(header["inputs"])
    if header.get("behaviour") is not None:
        _check_behaviour(header["behaviour"], header["inputs"])


def check_spectra(spectra: Mapping[str, EigenPairs], size: int) -> None:
    """Refuse eigenpairs that no fit has, whoever computed the digest of their file.

    There are K finite values in descending order, as many unit vectors of `size`, of which some
    are looked at whether they are orthogonal, and bounds of residuals from zero on.

    Raises:
        ValueError: they are.
    """
    for name, pairs in spectra.items():
        count, lower = pairs.values.shape[0] if pairs.values.ndim else 0, pairs.smallest.numel()
        _expect(0 < count <= size and count + lower <= size, f"{name}.values")
        for field, shape in {
            "values": (count,), "residuals": (count,),
            "smallest": (lower,), "smallest_residuals": (lower,),
        }.items():  # fmt: skip
            tensor: Tensor = getattr(pairs, field)
            real = tensor.dtype in (torch.float32, torch.float64)
            _expect(tuple(tensor.shape) == shape and real, f"{name}.{field}")
            lowest = 0.0 if field.endswith("residuals") else -math.inf
            _expect(bool((tensor.isfinite() & (tensor >= lowest)).all()), f"{name}.{field}")
        scale = float(pairs.values.abs().max())
        _expect(bool((pairs.values.diff() <= _SLACK * scale).all()), f"{name}.values")
        _expect(0 <= pairs.rounding < math.inf, f"{name}.{ROUNDING}")
        slack = min(_SLACK + 3 * pairs.rounding, _MOST_SLACK)
        _check_vectors(name, pairs.vectors, (count, size), slack)


def check_overlap(overlap: Tensor, shape: tuple[int, int]) -> None:
    """Refuse inner products of eigenvectors of another shape, or beyond what those can be.

    Raises:
        ValueError: they are.
    """
    right = tuple(overlap.shape) == shape and overlap.dtype == torch.float64
    _expect(right and bool((overlap.abs() < 2).all()), "overlap")


def _check_vectors(name: str, vectors: Any, shape: tuple[int, int], slack: float) -> None:
    assert isinstance(vectors, PartedVectors)
    _expect(vectors.shape == shape, f"{name}.vectors")
    count = shape[0]
    some = sorted({k * (count - 1) // (_COMPARED - 1) for k in range(_COMPARED)})
    squares = torch.zeros(count, dtype=torch.float64)
    products = torch.zeros(len(some), len(some), dtype=torch.float64)
    for part in vectors.parts:
        rows = part.rows
        _expect(rows.dtype in DTYPES.values() and len(rows) == count, f"{name}.vectors")
        wide = torch.promote_types(rows.dtype, torch.float32)
        # Row by row, and some columns at a time: a file of them may be larger than the memory.
        norms = [torch.linalg.vector_norm(row, dtype=wide) for row in rows]
        squares += torch.stack(norms).double().square()
        for start in range(0, rows.shape[1], _COLUMNS):
            few = torch.stack([rows[k, start : start + _COLUMNS] for k in some]).to(wide)
            products += (few @ few.T).double()
    # Also where one is NaN.
    _expect(bool(((squares.sqrt() - 1).abs() < slack).all()), f"{name}.vectors")
    off = products - products.diag().diag()
    _expect(bool((off.abs() < slack).all()), f"{name}.vectors")


def _check_inputs(raw: Mapping[str, Any]) -> None:
    count = len(_list(raw["dtypes"]))
    names = raw["names"]
    named = names is None or (
        len(_list(names)) == count and all(_is_argument(name) for name in names)
    )
    _expect(named and all(_is_type(name) for name in raw["dtypes"]), "inputs")
    _expect(len(_list(raw["shapes"])) == count, "inputs")
    for shape in raw["shapes"]:
        fits = shape is None or (
            len(_list(shape)) <= _MOST_DIMENSIONS
            and all(_is_whole(size) and size < 1 << 62 for size in shape)
        )
        _expect(fits, "inputs")


def _check_behaviour(raw: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    ranges = _list(raw["ranges"])
    _expect(len(ranges) in (0, len(inputs["dtypes"])), "behaviour")
    numbers = 0
    for (shape, low, high), like in zip(ranges, inputs["shapes"] if ranges else [], strict=True):
        fits = len(_list(shape)) <= _MOST_DIMENSIONS and all(map(_is_whole, shape))
        _expect(fits and like in (None, shape) and _is_real(low) and _is_real(high), "behaviour")
        numbers += COUNT * math.prod(shape)
    _expect(numbers <= MOST_NUMBERS, "behaviour")
    _expect(isinstance(raw["tensors"], dict), "behaviour")
    for found in raw["tensors"].values():
        _expect(len(_list(found)) == 3 and all(map(_is_real, found)), "behaviour")


def _is_real(value: Any) -> bool:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and math.isfinite(value)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{what} cannot be so")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list is expected")
    return value


def _is_argument(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and len(name) <= _LONGEST_NAME


def _is_type(name: Any) -> bool:
    return isinstance(name, str) and name in _TYPES


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_count(value: Any) -> bool:
    return _is_whole(value) and 0 < value < 1 << 62


def _is_positive(value: Any) -> bool:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and 0 < value < math.inf
