"""Fits in files: save a fit, and load it with everything in the file checked.

What a file looks like is in `deltabars.storage.format`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltabars.covariance.estimators import ESTIMATORS, SPREADS
from deltabars.covariance.sampling import Meat
from deltabars.eigen.pairs import ROUNDING, EigenPairs
from deltabars.errors import (
    BadValueError,
    CorruptFileError,
    ModelError,
    ModelWarning,
    StorageError,
    WeightsMismatchError,
    first_line,
    shortened,
    warn,
)
from deltabars.fitting.state import Calibration, FittedState
from deltabars.likelihoods.base import LIKELIHOODS, described, from_description, is_own
from deltabars.problem.data import GENERATED, Signature
from deltabars.problem.network import MOST_GENERATED, Behaviour, Network, weights_fingerprint
from deltabars.problem.parameters import ParameterSpace, Prior, as_written, plain_model
from deltabars.runtime.distributed import Columns
from deltabars.runtime.memory import CHUNK, ran_out, read_bytes, resolve_budget, share
from deltabars.runtime.precision import full_precision
from deltabars.runtime.vectors import (
    Basis,
    PartedVectors,
    ShardedVectors,
    add_inner,
    columns,
    group_of,
    ranges,
    whole,
)
from deltabars.storage import format as storage
from deltabars.storage.writing import read_settled, write_whole_folder

MAX_FILE_SIZE = "5GB"
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
_SMALL = ("values", "residuals", "smallest", "smallest_residuals")
_OF_MEAT = ("within", "slopes", "beyond", "whole")
_OVERLAP, _OUTPUTS = "overlap", "behaviour.outputs"
_ROUNDING_UP = 1 + 1e-3  # of norms that are computed in float32 and float64
_LONGEST_NAME, _MOST_DIMENSIONS = 200, 25
_SLACK, _MOST_SLACK = 1e-3, 0.1  # relative: of orders, norms and products
_COMPARED, _AT_ONCE = 8, 1 << 20  # vectors, to one another; numbers of all of them
# Looked up here, because to ask torch for a name from a file may import a module.
_TYPES = {str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
_COMPUTED = {"torch.float32": torch.float32, "torch.float64": torch.float64}


def save(state: FittedState, path: Any, dtype: Any, max_file_size: int | str) -> None:
    """Write a fit; the arguments are those of `DeltaFit.save`."""
    if not is_own(state.likelihood):
        raise StorageError(
            f"Cannot write {path}: expected one of the likelihoods {sorted(LIKELIHOODS)}, got one "
            "of your own, which a file cannot hold."
        )
    target, spectra, size = Path(path), state.spectra, state.num_parameters
    types = {name: _stored_dtype(dtype, pairs.vectors) for name, pairs in spectra.items()}
    most = read_bytes(max_file_size, "max_file_size")
    width = sum(len(pairs) * types[name].itemsize for name, pairs in spectra.items())
    group = group_of(spectra)
    is_asked = os.path.isdir(target) or str(path).endswith(os.sep)
    in_folder = is_asked or width * size > most or group.size > 1
    plain = not in_folder and all(
        types[name] == pairs.vectors.dtype and not pairs.rounding for name, pairs in spectra.items()
    )
    with full_precision(state.network.device):
        losses = {n: _measured_loss(pairs.vectors, types[n]) for n, pairs in spectra.items()}
        header, tensors = _head_of(state, {} if plain else types, losses)
        if not in_folder:
            for name, pairs in spectra.items():
                tensors[f"{name}.vectors"] = _rounded(pairs.vectors, 0, size, types[name])
            version = storage.USUAL_VERSION if plain else storage.FORMAT_VERSION
            storage.write(path, header, tensors, version)
            return
        if os.path.isdir(target) and not storage.is_fit_folder(target):
            raise StorageError(
                f"Cannot write {target}: expected a new or empty folder, or that of a fit, got one "
                "with other files in it."
            )
        together = max(1, most // width)
        files = [
            (rank, start, min(start + together, stop))
            for rank, (begin, stop) in enumerate(pairwise(Columns.even(size, group).bounds))
            for start in range(begin, stop, together)
        ]

        def write(folder: Path) -> None:
            entries, items = [], spectra.items()
            for number, (rank, start, stop) in enumerate(files, 1):
                if rank == group.rank:
                    rows = {n: _rounded(p.vectors, start, stop, types[n]) for n, p in items}
                    entry = storage.write_part(folder, number, len(files), rows, start, stop)
                    entries.append(entry)
            everywhere = [entry for own in group.gather_objects(entries) for entry in own]
            if group.is_first:
                storage.write_index(folder, header, tensors, everywhere)

        write_whole_folder(target, write, group, replace=True)


def _stored_dtype(asked: Any, vectors: Basis) -> torch.dtype:
    """Return the type to store eigenvectors in: the one asked for, or their own."""
    if asked is None:
        return vectors.stored if isinstance(vectors, PartedVectors) else vectors.dtype
    found = DTYPES.get(asked) if isinstance(asked, str) else asked
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        raise BadValueError(
            f"dtype: expected None or one of {', '.join(DTYPES)}, got {asked!r}. None stores the "
            "eigenvectors as they are."
        )
    return found


def _rounded(vectors: Basis, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Round the columns `start` to `stop` to a type, (K, p), on the CPU."""
    if isinstance(vectors, ShardedVectors):
        shift = vectors.space.own.start
        return _rounded(vectors.part, start - shift, stop - shift, dtype)
    if isinstance(vectors, Tensor) and vectors.dtype == dtype:
        return vectors[:, start:stop]
    result = torch.empty(vectors.shape[0], stop - start, dtype=dtype)
    for some in _blocks(vectors, start, stop):
        result[:, some.start - start : some.stop - start] = columns(vectors, some).to(dtype)
    return result


def _blocks(vectors: Basis, start: int, stop: int) -> Iterator[slice]:
    return ranges(start, stop, vectors.shape[0] * vectors.dtype.itemsize, vectors.device)


def _measured_loss(vectors: Basis, dtype: torch.dtype) -> dict[str, float]:
    """Measure what eigenvectors Q lose when they are stored as Q̃, rounded to a type.

    `norm` is ‖Q̃ − Q‖₂, and `orthogonality` the largest entry of |Q̃Q̃ᵀ − I|. Empty where nothing
    is lost. Cost: 4·K²·P operations; memory: a block of columns three times.
    """
    if torch.promote_types(dtype, vectors.dtype) == dtype:
        return {}
    part = vectors.part if isinstance(vectors, ShardedVectors) else vectors
    count, size = part.shape
    sums = torch.zeros(2, count, count, dtype=torch.float64, device=part.device)
    for some in _blocks(part, 0, size):
        exact = columns(part, some)
        there = exact.to(dtype).to(exact.dtype)
        gap = there - exact
        add_inner(sums[0], gap, gap)
        add_inner(sums[1], there, there)
    if isinstance(vectors, ShardedVectors):
        sums = vectors.space.group.all_reduce_(sums)
    norm = float(torch.linalg.eigvalsh(sums[0])[-1].clamp(min=0).sqrt())
    beside = sums[1] - torch.eye(count, dtype=sums.dtype, device=sums.device)
    found = {"norm": norm * _ROUNDING_UP, "orthogonality": float(beside.abs().max())}
    return found if norm > 0 else {}


def _head_of(
    state: FittedState, types: Mapping[str, torch.dtype], losses: Mapping[str, dict[str, float]]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header of a fit, and all of its tensors but the eigenvectors.

    `types`, unless empty, and `losses` are of the stored eigenvectors.
    """
    space, behaviour = state.network.parameters, state.behaviour
    statistics = {name: dict(pairs.statistics) for name, pairs in state.spectra.items()}
    for name, loss in losses.items():
        if loss:  # on top of what was lost before
            statistics[name][ROUNDING] = state.spectra[name].rounding + loss["norm"]
    diagnostics = dict(state.diagnostics)
    if types:
        diagnostics["storage"] = {
            name: {"dtype": str(types[name]).removeprefix("torch."), **losses[name]}
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
        "meats": {
            name: {"curvature": meat.curvature, "level": meat.level}
            for name, meat in state.meats.items()
        },
        "calibration": {spread: asdict(found) for spread, found in state.calibration.items()},
        "temperature": state.temperature,
        "averages": state.averages,
    }
    tensors = {
        f"{name}.{field}": getattr(pairs, field)
        for name, pairs in state.spectra.items()
        for field in _SMALL
    }
    for name, meat in state.meats.items():
        tensors |= {f"{name}.meat.{field}": getattr(meat, field) for field in _OF_MEAT}
    if behaviour is not None:
        header["behaviour"] = {"ranges": [list(each) for each in behaviour.ranges]}
        tensors[_OUTPUTS] = behaviour.outputs
    if state.estimator == "sandwich" and types:  # that of rounded vectors would be another one
        tensors[_OVERLAP] = state.overlap
    return header, tensors


def read_fields(
    path: Any,
    model: torch.nn.Module,
    check_weights: bool,
    device: torch.device | str | None,
    memory_budget: int | None,
    offload: bool | None,
) -> dict[str, Any]:
    """Read the fields of a fit, by name; the arguments are those of `deltabars.load`."""
    model = plain_model(model)
    source = Path(path)
    header, tensors, parts = read_settled(source, lambda: storage.read_fit(source))
    try:
        _check_header(header)
        space = ParameterSpace(
            tuple(as_written(entry["name"]) for entry in header["parameters"]),
            tuple(tuple(entry["shape"]) for entry in header["parameters"]),
        )
        dtype = _COMPUTED[header["dtype"]]
        spectra = {}
        for name in ESTIMATORS[header["estimator"]]:
            count = len(parts[name][0].rows)
            vectors = PartedVectors(parts[name], count, dtype, torch.device("cpu"))
            small = {field: tensors[f"{name}.{field}"] for field in _SMALL}
            statistics = header["statistics"][name]
            spectra[name] = EigenPairs(vectors=vectors, statistics=statistics, **small)
            _check_pairs(name, spectra[name], space.size)
        inputs = header["inputs"]
        signature = Signature(
            None if inputs["names"] is None else tuple(inputs["names"]),
            tuple(inputs["dtypes"]),
            tuple(None if shape is None else tuple(shape) for shape in inputs["shapes"]),
        )
        likelihood = from_description(header["likelihood"])
        behaviour, outputs = None, tensors.get(_OUTPUTS)
        if header.get("behaviour") is not None and outputs is not None:
            right = outputs.ndim == 2 and outputs.dtype == torch.float64
            _expect(right and bool(outputs.isfinite().all()), "behaviour")
            noted = header["behaviour"]["ranges"]
            behaviour = Behaviour(tuple((tuple(s), low, high) for s, low, high in noted), outputs)
        meats = {}
        for name, numbers in header.get("meats", {}).items():
            known: dict[str, Any] = {f: tensors[f"{name}.meat.{f}"] for f in _OF_MEAT}
            meats[name] = Meat(**known, **numbers)
            _check_meat(name, meats[name], len(spectra[name]))
        calibration = {
            spread: Calibration(**found) for spread, found in header.get("calibration", {}).items()
        }
        overlap = tensors.get(_OVERLAP)
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
    if check_weights and behaviour is None:
        warn(
            f"{path}: expected what the model computes, to compare it with this one, got a file of "
            "an earlier version, which noted the weights alone. Save the fit again.",
            ModelWarning,
        )
    difference = behaviour.difference(network, signature) if check_weights and behaviour else ""
    if difference:
        raise WeightsMismatchError(
            f"{path} was fitted to a model of the same weights that computes something else: "
            f"{difference}. Build the model as it was for the fit, with its unsaved buffers and "
            "plain tensors; or pass check_weights=False to use its curvature with this one."
        )
    scales = header.get("scales", {})
    spectra = {name: pairs.to(network.device) for name, pairs in spectra.items()}
    if not _stays_in_files(offload, spectra, memory_budget):
        spectra = {n: replace(pairs, vectors=whole(pairs.vectors)) for n, pairs in spectra.items()}
    return {
        "estimator": header["estimator"],
        "prior": Prior(header["l2"], header.get("level", header["l2"]), scales),
        "num_examples": header["num_examples"],
        "num_outputs": header["num_outputs"],
        "spectra": spectra,
        "diagnostics": header["diagnostics"],
        "likelihood": likelihood,
        "network": replace(network, scales=scales),
        "signature": signature,
        "weights": header["weights"],
        "behaviour": behaviour,
        "meats": {name: meat.to(network.device) for name, meat in meats.items()},
        "calibration": calibration,
        "temperature": float(header.get("temperature", 1.0)),
        "averages": header.get("averages", "posterior"),
        "known_overlap": None if overlap is None else overlap.to(network.device),
    }


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{what} has a value that no fit has")


def _check_header(header: Mapping[str, Any]) -> None:
    """Refuse a header whose entries are missing or of other kinds than those of a fit."""
    parameters, inputs, behaviour = header["parameters"], header["inputs"], header.get("behaviour")
    own = [entry["name"] for entry in parameters]
    given, scales = header["l2"], header.get("scales", {})
    levels = [*(given.values() if isinstance(given, dict) else [given]), *scales.values()]
    names, types, shapes = inputs["names"], inputs["dtypes"], inputs["shapes"]
    ranges = [] if behaviour is None else behaviour["ranges"]
    statistics = [value for found in header["statistics"].values() for value in found.values()]
    for what, holds in {
        "num_examples": _is_whole(header["num_examples"]) and header["num_examples"] > 0,
        "num_outputs": _is_whole(header["num_outputs"]) and header["num_outputs"] > 0,
        "weights": isinstance(header["weights"], str),
        "diagnostics": isinstance(header["diagnostics"], dict),
        "statistics": all(isinstance(value, str | int | float | None) for value in statistics),
        "parameters": 0 < len(own) == len(set(own))
        and all(_is_shape(entry["shape"]) and all(entry["shape"]) for entry in parameters),
        "scales": set(scales) in (set(), set(own)),
        "temperature": _is_real(header.get("temperature", 1.0))
        and 1e-3 < header.get("temperature", 1.0) < 1e3,
        "meats": all(
            isinstance(found, dict) and set(found) == {"curvature", "level"}
            for found in header.get("meats", {}).values()
        ),
        "averages": header.get("averages", "posterior") in SPREADS,
        "calibration": all(
            spread in SPREADS
            and all(_is_real(found[each]) for each in ("factor", "standard_error", "r_squared"))
            and found["factor"] > 0
            and _is_whole(found["replicas"])
            for spread, found in header.get("calibration", {}).items()
        ),
        "l2": all(_is_real(each) and each > 0 for each in [*levels, header.get("level", 1.0)]),
        "inputs": len(types) == len(shapes)
        and len(types if names is None else names) == len(types)
        and all(name.isidentifier() and len(name) <= _LONGEST_NAME for name in names or ())
        and all(isinstance(each, str) and each in _TYPES for each in types)
        and all(shape is None or _is_shape(shape) for shape in shapes),
        "behaviour": len(ranges) in (0, len(types))
        and all(
            _is_shape(shape) and like in (None, shape) and _is_real(low) and _is_real(high)
            for (shape, low, high), like in zip(ranges, shapes, strict=False)
        )
        and sum(GENERATED * math.prod(shape) for shape, _, _ in ranges) <= MOST_GENERATED,
    }.items():
        _expect(holds, what)


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_shape(value: Any) -> bool:
    return type(value) is list and len(value) <= _MOST_DIMENSIONS and all(map(_is_whole, value))


def _is_real(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _check_pairs(name: str, pairs: EigenPairs, size: int) -> None:
    """Refuse eigenpairs that no fit has: values, residuals, and lengths and angles of vectors."""
    count, lower = pairs.values.shape[0] if pairs.values.ndim else 0, pairs.smallest.numel()
    _expect(count > 0 and count + lower <= size, f"{name}.values")
    for field in _SMALL:
        tensor: Tensor = getattr(pairs, field)
        _expect(tensor.shape == (lower if "smallest" in field else count,), f"{name}.{field}")
        _expect(tensor.dtype in _COMPUTED.values(), f"{name}.{field}")
        lowest = 0.0 if field.endswith("residuals") else -math.inf
        _expect(bool((tensor.isfinite() & (tensor >= lowest)).all()), f"{name}.{field}")
    scale = float(pairs.values.abs().max())
    _expect(bool((pairs.values.diff() <= _SLACK * scale).all()), f"{name}.values")
    _expect(0 <= pairs.rounding < math.inf, f"{name}.{ROUNDING}")
    vectors, what = pairs.vectors, f"{name}.vectors"
    assert isinstance(vectors, PartedVectors)
    _expect(vectors.shape == (count, size), what)
    right = (len(p.rows) == count and p.rows.dtype in DTYPES.values() for p in vectors.parts)
    _expect(all(right), what)
    some = sorted({k * (count - 1) // (_COMPARED - 1) for k in range(_COMPARED)})
    squares, products = torch.zeros(count).double(), torch.zeros(len(some), len(some)).double()
    step = max(1, _AT_ONCE // count)
    for start in range(0, size, step):  # a file of them may be larger than the memory
        rows = vectors.columns(slice(start, start + step))
        squares += torch.linalg.vector_norm(rows, dim=1).double().square()
        products += (rows[some] @ rows[some].T).double()
    slack = min(_SLACK + 3 * pairs.rounding, _MOST_SLACK)
    off = torch.cat([squares.sqrt() - 1, (products - products.diag().diag()).flatten()])
    _expect(bool((off.abs() < slack).all()), what)  # nor is it where a number is NaN


def _check_meat(name: str, meat: Meat, count: int) -> None:
    """Refuse a meat that no fit has."""
    size = meat.slopes.shape
    _expect(meat.within.shape == (count, count) and len(size) == 1, f"{name}.meat")
    _expect(meat.beyond.shape == size and meat.whole.shape == size and size[0] > 0, f"{name}.meat")
    for each in _OF_MEAT:
        tensor: Tensor = getattr(meat, each)
        right = tensor.dtype == torch.float64 and bool(tensor.isfinite().all())
        _expect(right and (each == "within" or bool((tensor >= 0).all())), f"{name}.meat.{each}")
    _expect(all(_is_real(x) and x >= 0 for x in (meat.curvature, meat.level)), f"{name}.meat")
    values = torch.linalg.eigvalsh(meat.within)
    _expect(bool(values[0] >= -_SLACK * values[-1].abs()), f"{name}.meat.within")


def _stays_in_files(
    offload: bool | None, spectra: Mapping[str, EigenPairs], memory_budget: int | None
) -> bool:
    """Return whether eigenvectors stay in their files."""
    if offload is not None:
        if not isinstance(offload, bool):
            raise BadValueError(f"offload: expected None, True or False, got {offload!r}.")
        return offload
    vectors = [pairs.vectors for pairs in spectra.values()]
    device = vectors[0].device
    budget = resolve_budget(memory_budget, device)
    if memory_budget is None and device.type == "cpu":  # which the processes of torchrun share
        budget //= max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    needed = sum(math.prod(each.shape) * each.dtype.itemsize for each in vectors)
    return needed > budget - share(budget, CHUNK)


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
