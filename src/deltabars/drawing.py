"""A fit's spectrum and a prediction's error bars in a notebook, in the look that is set there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deltabars.errors import BadValueError, MissingDependencyError

if TYPE_CHECKING:
    from deltabars.fitted import DeltaFit
    from deltabars.prediction import Prediction

_FEW = 6  # inputs whose error bars have room side by side
_MOST_DOTS = 20_000
_GAP = 0.12  # the drawn width of what was not computed, as a share of the rest


def draw_fit(fit: DeltaFit, ax: Any = None) -> Any:
    """The magnitudes of the computed eigenvalues against their index, a line a matrix."""
    axes = _axes(ax)
    beyond = 0.0
    for name, pairs in fit.spectra.items():
        values = pairs.values.detach().cpu().double()
        count = len(values)
        index = torch.arange(1, count + 1)
        (line,) = axes.plot(index.numpy(), values.abs().numpy(), label=name, marker=_marker(count))
        negative = values < 0
        if bool(negative.any()):
            axes.plot(
                index[negative].numpy(),
                values[negative].abs().numpy(),
                linestyle="none",
                marker="x",
                color=line.get_color(),
                label=f"{name}, negative",
            )
        left = fit.num_parameters - count
        if left and float(values[-1]) > 0:
            start, end = count + 0.5, count * (1 + _GAP) + 1
            beyond = max(beyond, end)
            low, high = sorted((fit.level, float(values[-1])))
            axes.fill_between(
                [start, end],
                low,
                high,
                color=line.get_color(),
                alpha=0.25,
                linewidth=0,
                label=f"{name}: {left:,} not computed",
            )
    axes.axhline(fit.level, linestyle=":", linewidth=1, color="gray", label=f"λ = {fit.level:g}")
    axes.set_yscale("log")
    axes.set_xlim(0.5, max(beyond, fit.rank + 0.5))
    axes.set_xlabel(f"index k of P = {fit.num_parameters:,}")
    axes.set_ylabel("magnitude of the eigenvalue")
    axes.legend()
    return axes


def draw_prediction(
    prediction: Prediction,
    ax: Any = None,
    targets: Tensor | None = None,
    names: Sequence[str] | None = None,
) -> Any:
    """Error bars of all outputs of a few inputs; of many inputs std against mean.

    Raises:
        BadValueError: there is no input, targets do not fit, or there are not C names.
    """
    shown = prediction.to("cpu")
    count, outputs = shown.mean.shape
    if not count:
        raise BadValueError("plot: expected a prediction of one input or more, got none.")
    if names is not None and (shown.classes is not None or len(names) != outputs):
        raise BadValueError(
            f"names: expected one for each of all {outputs} outputs, got {len(names)} of them"
            f"{' for chosen classes' if shown.classes is not None else ''}."
        )
    wrong = _wrong(shown, targets)
    axes = _axes(ax)
    if count <= _FEW:
        _draw_bars(axes, shown, wrong, names)
    else:
        _draw_dots(axes, shown, wrong)
    return axes


def _draw_bars(
    axes: Any, shown: Prediction, wrong: Tensor | None, names: Sequence[str] | None
) -> None:
    count, outputs = shown.mean.shape
    places = torch.arange(outputs, dtype=torch.float64)
    for i in range(count):
        said = f"input {i}" + ("" if wrong is None else ", wrong" if wrong[i] else ", right")
        where = places if shown.classes is None else shown.classes[i].double()
        axes.errorbar(
            (where + 0.6 * ((i + 0.5) / count - 0.5)).numpy(),
            shown.mean[i].numpy(),
            yerr=shown.std[i].numpy(),
            linestyle="none",
            marker="o",
            markersize=4,
            capsize=3,
            label=said,
        )
    if shown.classes is None and (names is not None or outputs <= 20):
        axes.set_xticks(
            range(outputs), [str(k) for k in range(outputs)] if names is None else names
        )
    axes.set_xlabel("class" if shown.label is not None else "output")
    axes.set_ylabel(f"{_meaning(shown)} ± std")
    axes.legend()


def _draw_dots(axes: Any, shown: Prediction, wrong: Tensor | None) -> None:
    label = shown.label
    of_class = label is not None and label.ndim == 1 and shown.classes is None
    mean, std = shown.mean.flatten(), shown.std.flatten()
    if len(mean) > _MOST_DOTS:
        chosen = torch.randperm(len(mean), generator=torch.Generator().manual_seed(0))
        mean, std = mean[chosen[:_MOST_DOTS]], std[chosen[:_MOST_DOTS]]
    said = "all classes" if label is not None else "all outputs"
    axes.scatter(mean.numpy(), std.numpy(), s=4, color="gray", alpha=0.4, linewidths=0, label=said)
    if of_class:
        assert label is not None
        groups = {"predicted class": torch.ones(len(label), dtype=torch.bool)}
        if wrong is not None:
            groups = {"predicted, right": ~wrong, "predicted, wrong": wrong}
        top = shown.mean.gather(1, label[:, None])[:, 0], shown.std.gather(1, label[:, None])[:, 0]
        for (name, these), color in zip(groups.items(), ("#0072B2", "#E69F00"), strict=False):
            x, y = (values[these].numpy() for values in top)
            axes.scatter(
                x, y, s=12, color=color, linewidths=0, label=f"{name} ({int(these.sum()):,})"
            )
    axes.set_xlabel(_meaning(shown))
    axes.set_ylabel("std")
    axes.legend()


def _meaning(shown: Prediction) -> str:
    inside = bool(((shown.mean >= 0) & (shown.mean <= 1)).all())
    return "probability" if shown.label is not None and inside else "mean"


def _wrong(shown: Prediction, targets: Tensor | None) -> Tensor | None:
    if targets is None:
        return None
    if shown.label is None or shown.label.ndim > 1 or targets.shape != shown.label.shape:
        raise BadValueError(
            f"targets: expected the true class of each of {len(shown)} inputs, for a prediction of "
            f"one class an input, got the shape {tuple(targets.shape)}."
        )
    return shown.label != targets.cpu()


def _marker(count: int) -> str | None:
    return "o" if count == 1 else None  # a line needs two


def _axes(ax: Any) -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingDependencyError(
            "Pictures need matplotlib: pip install 'deltabars[figures]'."
        ) from error
    return pyplot.subplots(layout="constrained")[1] if ax is None else ax
