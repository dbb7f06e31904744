"""The manifest of a fit: with what, on what, and of what it was computed."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from deltabars import __version__
from deltabars.likelihoods.named import described, is_own
from deltabars.problem import Problem


def environment(device: torch.device) -> dict[str, Any]:
    """The versions and the machine, as JSON values."""
    cuda = device.type == "cuda"
    return {
        "deltabars": __version__,
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
