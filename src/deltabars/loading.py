"""DeltaFit from a file: what is checked on the way back."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltabars import shards, storage
from deltabars.behaviour import Behaviour, generated
from deltabars.contents import check_header, check_overlap, check_spectra
from deltabars.covariance import ESTIMATORS
from deltabars.decay import Decay
from deltabars.eigen import EigenPairs
from deltabars.errors import (
    BadValueError,
    CorruptFileError,
    ModelWarning,
    WeightsMismatchError,
    first_line,
    shortened,
)
from deltabars.fitted import DeltaFit
from deltabars.inputs import Signature
from deltabars.likelihoods.named import from_description
from deltabars.memory import CHUNK, ran_out, resolve_budget, share
from deltabars.network import Network, fingerprint
from deltabars.parameters import ParameterSpace
from deltabars.plain import as_written, plain_model
from deltabars.saving import OUTPUTS, OVERLAP, SMALL
from deltabars.vectors import Part, PartedVectors, whole
from deltabars.writing import read_settled

_DTYPES = {"torch.float32": torch.float32, "torch.float64": torch.float64}


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
            default that is where they take up to three quarters of the memory budget. The files
            are read through in either case, to see that they are whole.

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
    header, tensors, parts = (
        read_settled(Path(path), lambda: _read(path))
        if isinstance(path, str | os.PathLike)
        else _read(path)
    )
    try:
        check_header(header)
        space = ParameterSpace(
            tuple(as_written(entry["name"]) for entry in header["parameters"]),
            tuple(tuple(entry["shape"]) for entry in header["parameters"]),
        )
        dtype = _DTYPES[header["dtype"]]
        spectra = {
            name: EigenPairs(
                **{field: tensors[f"{name}.{field}"] for field in SMALL},
                vectors=_vectors(parts[name], dtype),
                statistics=header["statistics"][name],
            )
            for name in ESTIMATORS[header["estimator"]]
        }
        signature = _signature(header["inputs"])
        likelihood = from_description(header["likelihood"])
        check_spectra(spectra, space.size)
        behaviour = _behaviour(header.get("behaviour"), tensors.get(OUTPUTS))
        if OVERLAP in tensors:
            check_overlap(tensors[OVERLAP], (len(spectra["hessian"]), len(spectra["opg"])))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFileError(
            f"{path} is altered: its content is not that of a fit "
            f"({first_line(error)}). Save the fit again."
        ) from error
    _check_model(path, model, space, header["weights"] if check_weights else None)
    network = Network.capture(model, space, device, dtype, header.get("deterministic", False))
    network = _settled(network, signature, behaviour)
    if check_weights:
        _check_behaviour(path, network, signature, behaviour)
    scales = header.get("scales", {})
    stays = _stays(offload, spectra, memory_budget, network.device)
    overlap = tensors.get(OVERLAP)
    return DeltaFit(
        estimator=header["estimator"],
        decay=Decay(header["l2"], header.get("level", header["l2"]), scales),
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
    """The header, the small tensors, and the eigenvectors by matrix, which stay in the files."""
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


def _vectors(parts: tuple[Part, ...], dtype: torch.dtype) -> PartedVectors:
    return PartedVectors(parts, len(parts[0].rows), dtype, torch.device("cpu"))


def _stays(
    offload: bool | None,
    spectra: dict[str, EigenPairs],
    memory_budget: int | None,
    device: torch.device,
) -> bool:
    """Whether eigenvectors stay in their files."""
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


def _signature(raw: dict[str, Any]) -> Signature:
    return Signature(
        None if raw["names"] is None else tuple(raw["names"]),
        tuple(raw["dtypes"]),
        tuple(None if shape is None else tuple(shape) for shape in raw["shapes"]),
    )


def _behaviour(raw: dict[str, Any] | None, outputs: Tensor | None) -> Behaviour | None:
    if raw is None or outputs is None:
        return None
    if outputs.ndim != 2 or outputs.dtype != torch.float64 or not bool(outputs.isfinite().all()):
        raise ValueError("behaviour cannot be so")
    return Behaviour(
        tuple((tuple(shape), low, high) for shape, low, high in raw["ranges"]),
        outputs,
        _DTYPES[raw["dtype"]],
        {name: tuple(found) for name, found in raw["tensors"].items()},
    )


def _settled(network: Network, signature: Signature, behaviour: Behaviour | None) -> Network:
    """The network, tried out on generated inputs where it takes any."""
    ranges = () if behaviour is None else behaviour.ranges
    if not ranges and None not in signature.shapes:
        ranges = tuple((shape or (), 0.0, 1.0) for shape in signature.shapes)
    try:
        inputs = generated(signature, ranges, network.device, network.dtype)
        return network.settled(inputs)
    except Exception as error:  # of the user's own: it does not take these inputs
        if ran_out(error) or isinstance(error, Warning):
            raise
        return replace(network, given=None)


def _check_behaviour(
    path: Any, network: Network, signature: Signature, behaviour: Behaviour | None
) -> None:
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
    if weights is not None and fingerprint(model) != weights:
        raise WeightsMismatchError(
            f"{path} was fitted to other weights than this model has. Load the weights of the "
            "fit, or pass check_weights=False to use its curvature with these."
        )
