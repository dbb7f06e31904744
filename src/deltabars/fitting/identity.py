"""The manifest of a fit, and the identity by which a checkpoint recognises it."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.errors import CheckpointMismatchError
from deltabars.fitting.state import FitOptions
from deltabars.likelihoods.losses import described, is_own, told_apart
from deltabars.problem.problem import Problem
from deltabars.runtime import VERSION

_FORMAT = 3  # of the states that solvers save
# They change last bits alone, or how far a fit comes in one call.
_MAY_CHANGE = {"batch_size", "max_seconds"}
_DIGESTS = ("probe", "params", "reached", "data", "weights")
_MOST_NAMED = 4
_SAME_LOSS = 1e-3  # relative: the same network on another device
_SAME_GRADIENT = 0.05  # likewise, of a sum in which much cancels


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions and the machine, as JSON values."""
    cuda = device.type == "cuda"
    name = platform.processor() or platform.machine()
    processor = f"{name}, {torch.backends.cpu.get_cpu_capability()}"  # kernels are chosen by it
    return {
        "deltabars": VERSION,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if cuda else processor,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "threads": torch.get_num_threads(),
    }


def manifest(problem: Problem, options: FitOptions) -> dict[str, Any]:
    """Return everything that has to be the same for a fit to be the same, as JSON values.

    Returns:
        The environment; `dtype`; `weights`, their fingerprint; `data`: their fingerprint (in any
        order), their number and the form of the inputs; and `options`.
    """
    likelihood = problem.likelihood
    own = is_own(likelihood)
    return {
        **environment(problem.device),
        "dtype": str(problem.dtype),
        "weights": problem.network.weights,
        "data": {
            "fingerprint": f"{problem.data.fingerprint:016x}",
            "num_examples": problem.num_examples,
            "inputs": _plain(asdict(problem.data.signature)),
        },
        "options": _plain(
            {
                **options.as_json(),
                "l2": problem.given_l2,
                "params": list(problem.parameters.names),
                "likelihood": described(likelihood) if own else type(likelihood).__name__,
            }
        ),
    }


def _plain(value: Any) -> Any:
    """Convert to the kinds of JSON: NumPy has numbers of another type."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else str(value)


def identity_of(record: Mapping[str, Any], problem: Problem, probe: int | None) -> dict[str, Any]:
    """Return what a checkpoint has to share with a fit, by the names of `fit`'s arguments.

    The device, the batch size and the number of threads change last bits alone and are left out.
    The memory budget decides how far a Krylov basis grows, and so where `rank="auto"` may end.

    Args:
        record: the manifest of the fit.
        probe: the fingerprint of the probe of `rank="auto"`.
    """
    options = {k: v for k, v in record["options"].items() if k not in _MAY_CHANGE}
    space, on_gpu = problem.parameters, problem.device.type == "cuda"
    return {
        "format": _FORMAT,
        **options,
        "probe": None if probe is None else f"{probe:016x}",
        "likelihood": told_apart(problem.likelihood),
        "params": _digest(repr((space.names, space.shapes)).encode()),
        "dtype": record["dtype"],
        # On a CPU it changes nothing.
        "deterministic": options["deterministic"] if on_gpu else None,
        "examples": problem.num_examples,
        "data": record["data"]["fingerprint"],
        "weights": record["weights"],
        # With other code than before, the same weights may be another network.
        "mean_loss": problem.mean_loss,
        "gradient": _summary(problem.gradient),
        "level": problem.l2,
        "reached": None
        if problem.reached is None
        else _digest(problem.reached.cpu().numpy().tobytes()),
    }


def check_same(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse the identity of another fit.

    Raises:
        CheckpointMismatchError: with the names of what differs.
    """
    present = json.loads(json.dumps(here))  # as it would be read: lists for tuples
    different = [
        name for name in dict.fromkeys([*present, *there]) if not _same(name, there, present)
    ]
    if different:
        listed = [_difference(name, there, present) for name in different[:_MOST_NAMED]]
        more = len(different) - len(listed)
        raise CheckpointMismatchError(
            f"checkpoint: expected one of this fit, got one of another: {'; '.join(listed)}"
            f"{f'; and {more} more' if more else ''}. Give the options that fit was started with, "
            "or another folder."
        )


def _same(name: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    if name not in there or name not in here:
        return False
    if name == "gradient" and isinstance(there[name], list):
        norms = [math.hypot(*pair) for pair in (there[name], here[name])]
        return math.dist(there[name], here[name]) <= _SAME_GRADIENT * max(*norms, 1e-4)
    if name == "mean_loss" and isinstance(there[name], float):
        return math.isclose(there[name], here[name], rel_tol=_SAME_LOSS, abs_tol=1e-6)
    if name == "deterministic" and None in (there[name], here[name]):
        return True  # from one device to another, which costs last bits in any case
    return bool(there[name] == here[name])


def _difference(name: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    if name in _DIGESTS and there.get(name) and here.get(name):
        return f"other {name}"
    return f"{name} was {there.get(name)!r} and is {here.get(name)!r}"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _summary(gradient: Tensor) -> list[float]:
    """Return the norm of a gradient, and its product with a fixed vector of random signs."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, gradient.shape, generator=generator) * 2.0 - 1.0
    plain = gradient.double().cpu()
    return [float(plain.norm()), float(plain @ signs.double())]
