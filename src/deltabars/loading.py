"""DeltaFit from a file: what is checked on the way back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from deltabars import storage
from deltabars.covariance import ESTIMATORS
from deltabars.decay import Decay
from deltabars.eigen import EigenPairs
from deltabars.errors import CorruptFileError, ModelError, WeightsMismatchError
from deltabars.fitted import DeltaFit
from deltabars.inputs import Signature
from deltabars.likelihoods.named import from_description
from deltabars.network import Network, fingerprint
from deltabars.parameters import ParameterSpace
from deltabars.saving import TENSORS

_DTYPES = {"torch.float32": torch.float32, "torch.float64": torch.float64}


def load(
    path: Any,
    model: torch.nn.Module,
    *,
    check_weights: bool = True,
    device: torch.device | str | None = None,
    memory_budget: int | None = None,
    progress: bool = True,
) -> DeltaFit:
    """Read a fit that `DeltaFit.save` wrote, for the model it was fitted to.

    Args:
        path: the file.
        model: the network, with the same weights.
        check_weights: refuse a model whose weights differ from the fitted ones. With False only
            the names and shapes of the parameters must agree, and the error bars are those of
            the *given* weights under the fitted curvature.
        device: where to compute; the model's own by default.
        memory_budget, progress: as for `fit`.

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
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    header, tensors = storage.read(path)
    try:
        space = ParameterSpace(
            tuple(entry["name"] for entry in header["parameters"]),
            tuple(tuple(entry["shape"]) for entry in header["parameters"]),
        )
        spectra = {
            name: EigenPairs(
                **{field: tensors[f"{name}.{field}"] for field in TENSORS},
                statistics=header["statistics"][name],
            )
            for name in ESTIMATORS[header["estimator"]]
        }
        signature = _signature(header["inputs"])
        dtype = _DTYPES[header["dtype"]]
        likelihood = from_description(header["likelihood"])
    except (KeyError, TypeError) as error:
        raise CorruptFileError(f"{path} is altered: its header lacks {error}.") from error
    _check_model(path, model, space, header["weights"] if check_weights else None)
    network = Network.capture(model, space, device, dtype, header.get("deterministic", False))
    scales = header.get("scales", {})
    return DeltaFit(
        estimator=header["estimator"],
        decay=Decay(header["l2"], header.get("level", header["l2"]), scales),
        num_examples=header["num_examples"],
        num_outputs=header["num_outputs"],
        spectra={name: pairs.to(network.device) for name, pairs in spectra.items()},
        diagnostics=header["diagnostics"],
        likelihood=likelihood,
        network=replace(network, scales=scales),
        signature=signature,
        weights=header["weights"],
        memory_budget=memory_budget,
        progress=progress,
    )


def _signature(raw: dict[str, Any]) -> Signature:
    return Signature(
        None if raw["names"] is None else tuple(raw["names"]),
        tuple(raw["dtypes"]),
        tuple(None if shape is None else tuple(shape) for shape in raw["shapes"]),
    )


def _check_model(
    path: Any, model: torch.nn.Module, space: ParameterSpace, weights: str | None
) -> None:
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    for name, shape in zip(space.names, space.shapes, strict=True):
        if shapes.get(name) != shape:
            raise WeightsMismatchError(
                f"{path} was fitted to another model: expected a parameter {name} of shape "
                f"{shape}, got {shapes.get(name, 'none of that name')}."
            )
    if weights is not None and fingerprint(model) != weights:
        raise WeightsMismatchError(
            f"{path} was fitted to other weights than this model has. Load the weights of the "
            "fit, or pass check_weights=False to use its curvature with these."
        )
