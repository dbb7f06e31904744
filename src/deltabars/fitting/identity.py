"""The manifest of a fit: with what, on what, and of what it was computed."""

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
from deltabars.fitting.growth import Probe
from deltabars.likelihoods.losses import described, is_own, told_apart
from deltabars.problem.problem import Problem
from deltabars.runtime import VERSION


def environment(device: torch.device) -> dict[str, Any]:
    """The versions and the machine, as JSON values."""
    cuda = device.type == "cuda"
    return {
        "deltabars": VERSION,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if cuda else _processor(),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "threads": torch.get_num_threads(),
    }


def manifest(problem: Problem, weights: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be the same for a fit to be the same, as JSON values.

    Args:
        problem: of the fit.
        weights: the fingerprint of the model's state.
        options: of the fit, as they were given.

    Returns:
        What `environment` tells; `dtype`; `weights`; `data`: their fingerprint (of all examples, in
        any order), their number and the form of the inputs; and `options`, the seed among them.
    """
    own = is_own(problem.likelihood)
    read = {
        "l2": problem.given_l2,
        "params": list(problem.parameters.names),
        "likelihood": described(problem.likelihood) if own else type(problem.likelihood).__name__,
        "deterministic": problem.network.deterministic,
    }
    signature = asdict(problem.data.signature)
    return {
        **environment(problem.device),
        "dtype": str(problem.dtype),
        "weights": weights,
        "data": {
            "fingerprint": f"{problem.data.fingerprint:016x}",
            "num_examples": problem.num_examples,
            "inputs": _plain(signature),
        },
        "options": _plain({**options, **read}),
    }


def _plain(value: Any) -> Any:
    """JSON's own kinds: NumPy has numbers of its own."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else str(value)


def _processor() -> str:
    """The CPU's name, where the system tells it: kernels are chosen by it."""
    return (
        f"{platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    )


_FORMAT = 2  # of the states that solvers save: 3 would refuse those of 2
_SAME_LOSS = 1e-3  # relative: the same network on another device
_SAME_GRADIENT = 0.05  # likewise, of a sum in which much cancels
_DIGESTS = ("probe", "params", "reached", "data", "weights")
_MOST_NAMED = 4


def identity_of(
    problem: Problem,
    weights: str,
    estimator: str,
    options: Mapping[str, Any],
    probe: Probe | None,
    memory_budget: int | None,
) -> dict[str, Any]:
    """A fit in JSON, by the names of `fit`'s arguments.

    The device, the batch size and the number of threads change last bits alone and are left out.
    The memory budget decides how far a Krylov basis grows, and so where `rank="auto"` may end.
    `deterministic` counts on a GPU, where the promise of the same bits would not hold of what was
    found without it; on a CPU it changes nothing, and is None.

    Args:
        weights: the fingerprint of the model.
        options: of the solver.
        probe: of `rank="auto"`.
        memory_budget: as it was given.
    """
    space, given = problem.parameters, problem.given_l2
    return {
        "format": _FORMAT,
        "estimator": estimator,
        **options,
        "rank": options["rank"] if probe is None else "auto",
        "tolerance": None if probe is None else probe.tolerance,
        "probe": None if probe is None else f"{probe.fingerprint:016x}",
        "l2": dict(given) if isinstance(given, Mapping) else given,
        "likelihood": told_apart(problem.likelihood),
        "params": _digest(list(zip(space.names, space.shapes, strict=True))),
        "dtype": str(problem.dtype),
        "memory_budget": memory_budget,
        "deterministic": problem.network.deterministic if problem.device.type == "cuda" else None,
        "examples": problem.num_examples,
        "data": f"{problem.data.fingerprint:016x}",
        "weights": weights,
        # With other code than before, the same weights may be another network.
        "mean_loss": problem.mean_loss,
        "gradient": _seen(problem.gradient),
        "level": problem.l2,
        "reached": _digest(None if problem.reached is None else problem.reached.tolist()),
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
        said = [_said(name, there, present) for name in different[:_MOST_NAMED]]
        more = len(different) - len(said)
        raise CheckpointMismatchError(
            f"checkpoint: expected one of this fit, got one of another: {'; '.join(said)}"
            f"{f'; and {more} more' if more else ''}. Give what that fit was begun with, or "
            "another folder."
        )


def _same(name: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    if name == "gradient" and name not in there:
        return True  # of a version up to 0.5
    if name not in there or name not in here:
        return False
    if name == "gradient" and isinstance(there[name], list):
        norms = [math.hypot(*pair) for pair in (there[name], here[name])]
        gap = math.dist(there[name], here[name])
        return gap <= _SAME_GRADIENT * max(*norms, 1e-4)
    if name == "mean_loss" and isinstance(there[name], float):
        return math.isclose(there[name], here[name], rel_tol=_SAME_LOSS, abs_tol=1e-6)
    if name == "deterministic" and None in (there[name], here[name]):
        return True  # from one device to another, which costs last bits in any case
    return bool(there[name] == here[name])


def _said(name: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    if name in _DIGESTS and there.get(name) and here.get(name):
        return f"other {name}"
    return f"{name} was {there.get(name)!r} and is {here.get(name)!r}"


def _seen(gradient: Tensor) -> list[float]:
    """The norm of a gradient, and its product with a fixed vector of random signs."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, gradient.shape, generator=generator) * 2.0 - 1.0
    plain = gradient.double().cpu()
    return [float(plain.norm()), float(plain @ signs.double())]


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
