"""Descriptions of a fit: effective parameters, the optimum, text and plots, its manifest."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.covariance.sandwich import SandwichCovariance
from deltabars.covariance.tail import Tail
from deltabars.eigen.pairs import EigenPairs
from deltabars.fitting.state import FittedState
from deltabars.likelihoods.losses import described, is_own
from deltabars.prediction.display import axes_or_new, html_table, marker_for, paragraph
from deltabars.prediction.judgement import Evidence
from deltabars.problem.parameters import LastLayer
from deltabars.problem.prior import L2Rates
from deltabars.problem.problem import Problem, how_far, is_far
from deltabars.runtime import VERSION
from deltabars.runtime.vectors import Basis, ShardedVectors, products

SANDWICH, REACH = "sandwich", "interval_reach"
WORTH_READING = 0.5  # of a std: an interval that reaches further says little
_GAP = 0.12  # the drawn width of what was not computed, as a share of the rest


def effective_parameters(state: FittedState) -> float:
    """Compute Σₖ (λₖ − λ)/λₖ over the K pairs."""
    values = _positive(state.pairs_of(state.main_matrix))
    return float(((values - state.level) / values).sum())


def effective_parameters_interval(state: FittedState) -> tuple[float, float]:
    """Bound the sum over all eigenvalues, if the others lie between λ and λ_K."""
    pairs = state.pairs_of(state.main_matrix)
    values, slack = _positive(pairs), pairs.slack
    last = Tail.after(values, len(values), state.level, state.num_parameters).last
    rest = state.num_parameters - len(values)
    low = effective_parameters(state) + min(0.0, rest * (1 - state.level / last))
    most = float((1 - state.level / (values + slack)).sum())
    return low, most + max(0.0, rest * (1 - state.level / (last + slack)))


def distance_from_optimum(state: FittedState, gradient: Tensor) -> float | None:
    """Measure how far predictions at the optimum are from those at ω̂, in their error bars.

    The Newton step H⁻¹g moves a prediction along eigenvector k by N(qₖᵀg)²/λₖ of its variance. The
    mean of that over the K directions, each weighted by the share (λₖ − λ)/λₖ that the data
    determine of it; its square root. A gradient that is as large as chance makes it gives 1. None
    where the curvature is not positive, so that no minimum is known to be near.

    Args:
        state: of the fit.
        gradient: g of the cost at ω̂, (P,), in the coordinates of the eigenvectors.
    """
    pairs = state.pairs_of(state.main_matrix)
    along = _along(gradient[None].to(pairs.vectors.device), pairs.vectors)[0].cpu()
    values = pairs.values.double().cpu()
    if not bool((values > 0).all()):
        return None
    known = values > state.level
    weights = ((values - state.level) / values)[known]
    if not len(weights):
        return 0.0
    squares = state.informative_examples * along[known].square() / values[known]
    return float((weights @ squares / weights.sum()).sqrt())


def interval_reach(state: FittedState) -> dict[str, Any]:
    """Return how wide the intervals of a sandwich are, beside its bars; empty for others."""
    positive = all(bool(pairs.values[0] > 0) for pairs in state.spectra.values())
    if state.estimator != SANDWICH or not positive:
        return {}
    found = state.covariance_of(SANDWICH, state.rank)
    assert isinstance(found, SandwichCovariance)
    return {SANDWICH: {REACH: found.interval_reach}}


def evidence_of(state: FittedState, rank: int, estimator: str) -> Evidence:
    """Return what a fit knows of the quality of all its error bars. Cost: nothing."""
    known = state.diagnostics
    gradient, distance = map(known.get, ("relative_gradient", "distance_from_optimum"))
    # Diagnostics from a file may be anything: what is no number is no evidence.
    gradient = float(gradient) if isinstance(gradient, int | float) else 0.0
    distance = float(distance) if isinstance(distance, int | float) else None
    last = set(LastLayer().names(state.network.model))
    return Evidence(
        rank,
        estimator == "opg",
        set(state.network.parameters.names) <= last,
        how_far(gradient, distance) if is_far(gradient, distance) else "",
        known.get("at_chance") is True,
    )


def describe(state: FittedState) -> str:
    """Describe a fit, its spectra, and how many parameters they determine."""
    numbers = ", ".join(f"{name} = {value}" for name, value in _numbers(state).items())
    lines = [f"DeltaFit: {state.estimator}, {numbers}"]
    for name, pairs in state.spectra.items():
        lines.append(
            f"  {name}: eigenvalues {float(pairs.values[0]):.4g} … {float(pairs.values[-1]):.4g}, "
            f"largest residual {float(pairs.residuals.max()):.1g}"
        )
    return "\n".join([*lines, *(f"  {note}" for note in _notes(state))])


def describe_in_html(state: FittedState) -> str:
    """Describe a fit in tables."""
    numbers = _numbers(state)
    spectra = [
        [
            name,
            f"{float(pairs.values[0]):.4g}",
            f"{float(pairs.values[-1]):.4g}",
            f"{float(pairs.values[-1]) / state.level:.4g}",
            f"{float(pairs.residuals.max()):.1g}",
        ]
        for name, pairs in state.spectra.items()
    ]
    return (
        paragraph(f"DeltaFit: {state.estimator}")
        + html_table(list(numbers), [list(numbers.values())])
        + html_table(["matrix", "λ₁", "λ_K", "λ_K / λ", "largest residual"], spectra)
        + "".join(paragraph(note) for note in _notes(state))
    )


def draw_spectra(state: FittedState, ax: Any = None) -> Any:
    """Draw the magnitudes of the eigenvalues against their index, a line a matrix."""
    axes = axes_or_new(ax)
    beyond = 0.0
    for name, pairs in state.spectra.items():
        values = pairs.values.detach().cpu().double()
        count = len(values)
        index, magnitudes = torch.arange(1, count + 1).numpy(), values.abs().numpy()
        (line,) = axes.plot(index, magnitudes, label=name, marker=marker_for(count))
        color, negative = line.get_color(), (values < 0).numpy()
        if negative.any():
            axes.plot(
                index[negative], magnitudes[negative], linestyle="none", marker="x", color=color,
                label=f"{name}, negative",
            )  # fmt: skip
        left = state.num_parameters - count
        if left and float(values[-1]) > 0:
            start, end = count + 0.5, count * (1 + _GAP) + 1
            beyond = max(beyond, end)
            low, high = sorted((state.level, float(values[-1])))
            axes.fill_between(
                [start, end], low, high, color=color, alpha=0.25, linewidth=0,
                label=f"{name}: {left:,} not computed",
            )  # fmt: skip
    level = state.level
    axes.axhline(level, linestyle=":", linewidth=1, color="gray", label=f"λ = {level:g}")
    axes.set_yscale("log")
    axes.set_xlim(0.5, max(beyond, state.rank + 0.5))
    axes.set_xlabel(f"index k of P = {state.num_parameters:,}")
    axes.set_ylabel("magnitude of the eigenvalue")
    axes.legend()
    return axes


def _numbers(state: FittedState) -> dict[str, str]:
    numbers = {
        "N": f"{state.num_examples:,}",
        "P": f"{state.num_parameters:,}",
        "K": f"{state.rank:,}",
        "λ": _in_words(state.l2),
    }
    return numbers if state.noise is None else numbers | {"σ": f"{state.noise:g}"}


def _notes(state: FittedState) -> list[str]:
    notes = []
    hessian = state.spectra.get("hessian")
    if hessian is not None and hessian.least < state.level:
        notes.append(
            f"the hessian's spectrum reaches {state.level - hessian.least:.3g} below λ: its "
            "bounds are about the spectrum corrected to λ"
        )
    reach = state.diagnostics.get(SANDWICH, {}).get(REACH, 0.0)
    if reach > WORTH_READING:
        notes.append(
            f"the sandwich's intervals say little: up to ±{reach:.2g} times the std of what is "
            "outside the pairs; a larger rank narrows them"
        )
    lost = max(pairs.rounding for pairs in state.spectra.values())
    if lost:
        notes.append(f"eigenvectors were rounded by up to {lost:.2g}, which the bounds count")
    return [*notes, f"effective parameters: {effective_parameters(state):.1f} in the K pairs"]


def _in_words(l2: L2Rates) -> str:
    if not isinstance(l2, Mapping):
        return f"{l2:g}"
    return ", ".join(f"{value:g} ({pattern})" for pattern, value in l2.items())


def _along(gradient: Tensor, vectors: Basis) -> Tensor:
    """Project a gradient (1, P) on eigenvectors, (1, K), over the columns of all processes."""
    if not isinstance(vectors, ShardedVectors):
        return products(gradient, vectors)
    own = products(gradient[:, vectors.space.own], vectors.part)
    return vectors.space.group.all_reduce_(own)


def _positive(pairs: EigenPairs) -> Tensor:
    return pairs.values[pairs.values > 0]  # the others have no part in a covariance


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


def manifest(problem: Problem, options: Mapping[str, Any]) -> dict[str, Any]:
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
                **options,
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
