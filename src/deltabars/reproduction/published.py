"""The numbers that the paper prints, and ours beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PAIRS = (("hessian", "opg"), ("hessian", "sandwich"), ("opg", "sandwich"))

Line = tuple[float, float, float]  # R², intercept, slope


@dataclass(frozen=True)
class Published:
    """What the paper prints of one experiment.

    Attributes:
        training: train and test accuracy, cost and gradient norm at the end.
        regressions: by part of the data, the line of each of PAIRS (its Table 1).
    """

    training: Mapping[str, float]
    regressions: Mapping[str, tuple[Line, Line, Line]]


PUBLISHED = {
    "mnist": Published(
        training={
            "train_accuracy": 0.979,
            "test_accuracy": 0.981,
            "cost": 0.257,
            "gradient_norm": 0.016,
        },
        regressions={
            "train": ((0.997, 0.0, 1.206), (0.998, 0.0, 0.923), (0.990, 0.0, 0.761)),
            "test": ((0.998, 0.0, 1.219), (0.999, 0.0, 0.915), (0.995, 0.0, 0.748)),
        },
    ),
    "cifar10": Published(
        training={
            "train_accuracy": 0.701,
            "test_accuracy": 0.687,
            "cost": 1.284,
            "gradient_norm": 0.030,
        },
        regressions={
            "train": ((0.999, 0.0, 1.062), (0.999, 0.0, 1.017), (0.997, 0.0, 0.956)),
            "test": ((1.000, 0.0, 1.066), (1.000, 0.0, 1.014), (0.998, 0.0, 0.950)),
        },
    ),
}


def beside_published(name: str, results: Mapping[str, Any]) -> str:
    """A table of our numbers beside the paper's."""
    return "\n".join(
        [f"{'':<38}{'ours':>8}{'paper':>10}{'difference':>12}", *_rows(PUBLISHED[name], results)]
    )


def _rows(published: Published, results: Mapping[str, Any]) -> Iterator[str]:
    for key, value in published.training.items():
        yield _row(key.replace("_", " "), results["training"][key], value)
    for part, lines in published.regressions.items():
        for (x, y), line in zip(PAIRS, lines, strict=True):
            ours = results["regressions"][part][f"{x}_{y}"]
            for key, value in zip(("r2", "intercept", "slope"), line, strict=True):
                yield _row(f"{part}: {x} → {y}, {key}", ours[key], value)


def _row(title: str, ours: float | None, paper: float) -> str:
    if ours is None:
        return f"{title:<38}{'–':>8}{paper:>10.3f}{'–':>12}"
    ours, difference = round(ours, 4) + 0.0, round(ours - paper, 4) + 0.0  # not −0.0000
    return f"{title:<38}{ours:>8.4f}{paper:>10.3f} {difference:>+11.4f}"
