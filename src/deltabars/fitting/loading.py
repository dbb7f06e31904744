"""load(): from a file or a folder to a DeltaFit, with everything in it checked."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltabars.covariance.estimators import ESTIMATORS
from deltabars.eigen.pairs import ROUNDING, EigenPairs
from deltabars.errors import (
    BadValueError,
    CorruptFileError,
    ModelError,
    ModelWarning,
    WeightsMismatchError,
    first_line,
    shortened,
)
from deltabars.fitting.fitted import DeltaFit
from deltabars.fitting.saving import OUTPUTS, OVERLAP, SMALL
from deltabars.likelihoods.losses import from_description
from deltabars.problem.data import GENERATED, Signature
from deltabars.problem.network import (
    MOST_GENERATED,
    Behaviour,
    Network,
    weights_fingerprint,
)
from deltabars.problem.parameters import ParameterSpace, Prior, as_written, plain_model
from deltabars.runtime.memory import CHUNK, ran_out, resolve_budget, share
from deltabars.runtime.vectors import Part, PartedVectors, whole
from deltabars.storage import format as storage
from deltabars.storage import shards
from deltabars.storage.shards import DTYPES
from deltabars.storage.writing import read_settled

_LONGEST_NAME, _MOST_DIMENSIONS = 200, 25
_SLACK, _MOST_SLACK = 1e-3, 0.1  # relative: of orders, norms and products
_COMPARED, _COLUMNS = 8, 1 << 20  # vectors, and columns of them that are held at a time
# Looked up here, because to ask torch for a name from a file may import a module.
_TYPES = {str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
_DTYPES = {"torch.float32": torch.float32, "torch.float64": torch.float64}
_SCALARS = (str, int, float, type(None))


def load(
    path: Any,
    model: torch.nn.Module,
    *,
    check_weights: bool = True,
    device: torch.device | str | None = None,
    memory_budget: int | None = None,
    offload: bool | None = None,
    progress: bool = True,
) -> DeltaFit:
    """Read a fit that `DeltaFit.save` wrote, for the model it was fitted to.

    Args:
        path: the file, or the folder of several.
        model: the network, with the same weights.
        check_weights: refuse a model whose weights differ from the fitted ones, or that computes
            something else with them (other code, unsaved buffers or plain tensors). With False only
            the names and shapes of the parameters must agree, and the error bars are those of
            the *given* weights under the fitted curvature.
        device: where to compute; the model's own by default.
        memory_budget, progress: as for `fit`.
        offload: with True the eigenvectors stay in the files, mapped into memory, and their columns
            come to the device when they are needed; with False they are read as one tensor. By
            default they stay where they take more than three quarters of the memory budget. The
            files are read through in either case, to see that they are whole.

    Raises:
        CorruptFileError, FormatVersionError, WeightsMismatchError, StorageError.

    Example:
        >>> import tempfile, deltabars
        >>> from deltabars.recipes.digits import L2, trained_digits
        >>> digits, model, train = trained_digits()
        >>> fit = deltabars.fit(model, train, l2=L2, rank=20, progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fit.save(f"{folder}/digits.deltabars")
        ...     again = deltabars.load(f"{folder}/digits.deltabars", model)
        >>> some = digits.test_images[:5]
        >>> bool((again.predict(some).std == fit.predict(some).std).all())
        True
    """
    model = plain_model(model)
    if isinstance(path, str | os.PathLike):
        header, tensors, parts = read_settled(Path(path), lambda: _read(path))
    else:
        header, tensors, parts = _read(path)
    try:
        _check_header(header)
        space = ParameterSpace(
            tuple(as_written(entry["name"]) for entry in header["parameters"]),
            tuple(tuple(entry["shape"]) for entry in header["parameters"]),
        )
        dtype = _DTYPES[header["dtype"]]
        spectra = {
            name: EigenPairs(
                **{field: tensors[f"{name}.{field}"] for field in SMALL},
                vectors=PartedVectors(
                    parts[name], len(parts[name][0].rows), dtype, torch.device("cpu")
                ),
                statistics=header["statistics"][name],
            )
            for name in ESTIMATORS[header["estimator"]]
        }
        signature = _signature(header["inputs"])
        likelihood = from_description(header["likelihood"])
        _check_spectra(spectra, space.size)
        behaviour = _behaviour(header.get("behaviour"), tensors.get(OUTPUTS))
        overlap = tensors.get(OVERLAP)
        if overlap is not None:  # inner products of unit vectors
            shape = len(spectra["hessian"]), len(spectra["opg"])
            right = tuple(overlap.shape) == shape and overlap.dtype == torch.float64
            _expect(right and bool((overlap.abs() < 2).all()), "overlap")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFileError(
            f"{path} is altered: its content is not that of a fit "
            f"({first_line(error)}). Save the fit again."
        ) from error
    _check_model(path, model, space, header["weights"] if check_weights else None)
    network = Network.capture(model, space, device, dtype, header.get("deterministic", False))
    network = _verified(network, signature, behaviour)
    if check_weights:
        _check_function(path, network, signature, behaviour)
    scales = header.get("scales", {})
    stays = _stays(offload, spectra, memory_budget, network.device)
    return DeltaFit(
        estimator=header["estimator"],
        prior=Prior(header["l2"], header.get("level", header["l2"]), scales),
        num_examples=header["num_examples"],
        num_outputs=header["num_outputs"],
        spectra={name: _placed(pairs, network.device, stays) for name, pairs in spectra.items()},
        diagnostics=header["diagnostics"],
        likelihood=likelihood,
        network=replace(network, scales=scales),
        signature=signature,
        weights=header["weights"],
        behaviour=behaviour,
        memory_budget=memory_budget,
        progress=progress,
        known_overlap=None if overlap is None else overlap.to(network.device),
    )


def _read(path: Any) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, tuple[Part, ...]]]:
    """Read the header and the small tensors; map the eigenvectors by matrix."""
    if isinstance(path, str | os.PathLike) and os.path.isdir(path):
        return shards.read(Path(path))
    header, there = storage.read_mapped(path)
    ending = ".vectors"
    parts: dict[str, tuple[Part, ...]] = {
        name.removesuffix(ending): (shards.map_one(path, header, name, rows),)
        for name, rows in there.items()
        if name.endswith(ending) and rows.ndim == 2
    }
    small = {name: tensor.clone() for name, tensor in there.items() if not name.endswith(ending)}
    return header, small, parts


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{what} has a value that no fit has")


def _check_header(header: Mapping[str, Any]) -> None:
    """Refuse a header whose entries are of other kinds than those of a fit.

    Raises:
        KeyError, ValueError: an entry is missing, or has a value that no fit has.
    """
    for name in ("num_examples", "num_outputs"):
        _expect(_is_whole(header[name]) and header[name] > 0, name)
    for name, kind in {
        "estimator": str, "dtype": str, "weights": str, "parameters": list,
        "diagnostics": dict, "statistics": dict, "inputs": dict,
    }.items():  # fmt: skip
        _expect(isinstance(header[name], kind), name)
    names = [entry["name"] for entry in header["parameters"]]
    _expect(all(isinstance(name, str) for name in names), "parameters")
    _expect(0 < len(names) == len(set(names)), "parameters")
    for entry in header["parameters"]:
        _expect(_is_shape(entry["shape"]) and all(entry["shape"]), "parameters")
    given, scales = header["l2"], header.get("scales", {})
    levels = given.values() if isinstance(given, dict) else [given]
    _expect(isinstance(scales, dict) and set(scales) in (set(), set(names)), "scales")
    numbers = [*levels, header.get("level", given), *scales.values()]
    _expect(all(_is_real(number) and number > 0 for number in numbers), "l2")
    for statistics in header["statistics"].values():
        _expect(isinstance(statistics, dict), "statistics")
        _expect(all(isinstance(value, _SCALARS) for value in statistics.values()), "statistics")
    inputs, behaviour = header["inputs"], header.get("behaviour")
    names, count = inputs["names"], len(_list(inputs["dtypes"]))
    named = names is None or (len(_list(names)) == count and all(map(_is_argument, names)))
    _expect(named and all(map(_is_type, inputs["dtypes"])), "inputs")
    _expect(len(_list(inputs["shapes"])) == count, "inputs")
    _expect(all(shape is None or _is_shape(shape) for shape in inputs["shapes"]), "inputs")
    if behaviour is not None:
        ranges = _list(behaviour["ranges"])
        _expect(len(ranges) in (0, count), "behaviour")
        total = 0
        for (shape, low, high), like in zip(ranges, inputs["shapes"][: len(ranges)], strict=True):
            right = _is_shape(shape) and like in (None, shape) and _is_real(low) and _is_real(high)
            _expect(right, "behaviour")
            total += GENERATED * math.prod(shape)
        _expect(total <= MOST_GENERATED, "behaviour")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list is expected")
    return value


def _is_argument(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and len(name) <= _LONGEST_NAME


def _is_type(name: Any) -> bool:
    return isinstance(name, str) and name in _TYPES


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _is_shape(value: Any) -> bool:
    return len(_list(value)) <= _MOST_DIMENSIONS and all(map(_is_whole, value))


def _is_real(value: Any) -> bool:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and math.isfinite(value)


def _check_spectra(spectra: Mapping[str, EigenPairs], size: int) -> None:
    """Refuse eigenpairs that no fit has, whoever computed the digest of their file.

    There are K finite values in descending order, as many unit vectors of `size`, of which some
    are tested for orthogonality, and bounds of residuals from zero on.

    Raises:
        ValueError: they are not.
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
        _expect(pairs.vectors.shape == (count, size), f"{name}.vectors")
        assert isinstance(pairs.vectors, PartedVectors)
        _check_vectors(f"{name}.vectors", pairs.vectors.parts, count, slack)


def _check_vectors(name: str, parts: tuple[Part, ...], count: int, slack: float) -> None:
    some = sorted({k * (count - 1) // (_COMPARED - 1) for k in range(_COMPARED)})
    squares = torch.zeros(count, dtype=torch.float64)
    products = torch.zeros(len(some), len(some), dtype=torch.float64)
    for rows in (part.rows for part in parts):
        _expect(rows.dtype in DTYPES.values() and len(rows) == count, name)
        wide = torch.promote_types(rows.dtype, torch.float32)
        # Row by row, and some columns at a time: a file of them may be larger than the memory.
        norms = [torch.linalg.vector_norm(row, dtype=wide) for row in rows]
        squares += torch.stack(norms).double().square()
        for start in range(0, rows.shape[1], _COLUMNS):
            few = torch.stack([rows[k, start : start + _COLUMNS] for k in some]).to(wide)
            products += (few @ few.T).double()
    off = products - products.diag().diag()
    near = ((squares.sqrt() - 1).abs() < slack).all() & (off.abs() < slack).all()
    _expect(bool(near), name)  # also where a number is NaN


def _signature(raw: dict[str, Any]) -> Signature:
    return Signature(
        None if raw["names"] is None else tuple(raw["names"]),
        tuple(raw["dtypes"]),
        tuple(None if shape is None else tuple(shape) for shape in raw["shapes"]),
    )


def _behaviour(raw: dict[str, Any] | None, outputs: Tensor | None) -> Behaviour | None:
    if raw is None or outputs is None:
        return None
    real = outputs.ndim == 2 and outputs.dtype == torch.float64
    _expect(real and bool(outputs.isfinite().all()), "behaviour")
    return Behaviour(
        tuple((tuple(shape), low, high) for shape, low, high in raw["ranges"]), outputs
    )


def _stays(
    offload: bool | None,
    spectra: dict[str, EigenPairs],
    memory_budget: int | None,
    device: torch.device,
) -> bool:
    """Return whether eigenvectors stay in their files."""
    if offload is not None:
        if not isinstance(offload, bool):
            raise BadValueError(f"offload: expected None, True or False, got {offload!r}.")
        return offload
    budget = resolve_budget(memory_budget, device)
    if memory_budget is None and device.type == "cpu":  # which the processes of torchrun share
        budget //= max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    needed = sum(
        len(pairs) * pairs.vectors.shape[1] * pairs.vectors.dtype.itemsize
        for pairs in spectra.values()
    )
    return needed > budget - share(budget, CHUNK)


def _placed(pairs: EigenPairs, device: torch.device, stays: bool) -> EigenPairs:
    moved = pairs.to(device)
    return moved if stays else replace(moved, vectors=whole(moved.vectors))


def _check_model(
    path: Any, model: torch.nn.Module, space: ParameterSpace, weights: str | None
) -> None:
    shapes = {as_written(name): tuple(value.shape) for name, value in model.named_parameters()}
    for name, shape in zip(space.names, space.shapes, strict=True):
        if shapes.get(name) != shape:
            raise WeightsMismatchError(
                f"{path} was fitted to another model: expected a parameter {shortened(name)} of "
                f"shape {shortened(shape)}, got {shapes.get(name, 'none of that name')}."
            )
    if weights is not None and weights_fingerprint(model) != weights:
        raise WeightsMismatchError(
            f"{path} was fitted to other weights than this model has. Load the weights of the "
            "fit, or pass check_weights=False to use its curvature with these."
        )


def _verified(network: Network, signature: Signature, behaviour: Behaviour | None) -> Network:
    """Try the network's private copy on generated inputs, where it takes any."""
    ranges = () if behaviour is None else behaviour.ranges
    if not ranges and None not in signature.shapes:
        ranges = tuple((shape or (), 0.0, 1.0) for shape in signature.shapes)
    try:
        inputs = signature.generate(ranges, network.device, network.dtype)
        return network.verified(inputs)
    except Exception as error:  # of the user's code: it does not take these inputs
        if ran_out(error) or isinstance(error, ModelError):
            raise
        return replace(network, given=None)


def _check_function(
    path: Any, network: Network, signature: Signature, behaviour: Behaviour | None
) -> None:
    """Refuse a model that computes something else with the same weights."""
    if behaviour is None:
        warnings.warn(
            f"{path} was written by an earlier version, which noted the weights alone: expected to "
            "compare the model's code, plain tensors and unsaved buffers with those of the fit, "
            "got nothing to compare with. Save the fit again to have it noted.",
            ModelWarning,
            stacklevel=3,
        )
        return
    difference = behaviour.difference(network, signature)
    if difference:
        raise WeightsMismatchError(
            f"{path} was fitted to a model of the same weights that computes something else: "
            f"{difference}. Build the model as it was for the fit: its code, its buffers that are "
            "not saved, its plain tensors; or pass check_weights=False to use its curvature with "
            "this one."
        )
