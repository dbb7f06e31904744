"""Stored fits: what they take on disk, how fast they predict, and what 16 bits do to scores."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import deltabars
from benchmarks.context import Bench
from benchmarks.networks import Setting
from benchmarks.peak import with_peak
from benchmarks.timing import stopwatch
from deltabars.fitting.fitted import DeltaFit
from deltabars.prediction.metrics import auroc
from deltabars.prediction.prediction import Prediction

_TYPES = ("float32", "bfloat16", "float16")
_IMAGES = 2000
_WARM_UP = 16  # images
_FILES = 8  # that the eigenvectors in float32 take
_FEW = 64  # images, where each few of them take a pass over the eigenvectors
_SMALL = {"cuda": 16 << 30}  # bytes of a small device
_SMALL_ELSEWHERE = 1 << 20


def measure_storage(
    bench: Bench, setting: Setting, fit: DeltaFit, keep: Callable[..., None]
) -> dict[str, Any]:
    """Save a fit in several files of each type, load it offloaded, and predict with it.

    Files are read right after they were written: out of the system's memory where that has room.
    Peaks are of a GPU, and count the eigenvectors where they are on it, not the images.
    """
    images, labels = (part[:_IMAGES] for part in setting.test)
    held = fit.spectra["opg"].vectors.nbytes
    before, found = _predicted(bench, setting, fit, images, held)
    keep("in memory", (found["seconds"],))
    _keep_memory(keep, "in memory", found)
    result: dict[str, Any] = {"images": len(images), "in memory": found}
    small = _SMALL.get(bench.device.type, _SMALL_ELSEWHERE)
    result["note"] = (
        f"{setting.name}: {len(images):,} images, eigenvectors in memory or mapped from files; "
        f"{min(_FEW, len(images))} within a budget of {small >> 20:,} MiB (small)"
    )
    found |= _telling(before, labels)
    with tempfile.TemporaryDirectory() as folder:
        for name in _TYPES:
            path = Path(folder) / name
            part: dict[str, Any] = {}
            result[name] = part
            _, part["save seconds"] = stopwatch(
                partial(fit.save, path, dtype=name, max_file_size=max(1, held // _FILES)),
                bench.device,
            )
            files = [file for file in path.iterdir() if file.suffix == ".safetensors"]
            part["files"], part["bytes"] = len(files), sum(f.stat().st_size for f in files)
            keep(f"{name} on disk", figure=part["bytes"] / 2**30, unit="GiB")
            keep(f"{name} save", (part["save seconds"],))
            for budget, some in ((small, images[:_FEW]), (None, images)):
                loaded, seconds = stopwatch(
                    partial(
                        deltabars.load,
                        path,
                        setting.model,
                        device=bench.device,
                        offload=True,
                        memory_budget=budget,
                        progress=False,
                    ),
                    bench.device,
                )
                out, found = _predicted(bench, setting, loaded, some, 0)
                what = f"{name} mapped" if budget is None else f"{name} small"
                keep(
                    what,
                    (found["seconds"],),
                    accuracy=_most(out, before),
                    accuracy_of="score",
                )
                _keep_memory(keep, what, found)
                found |= {"load seconds": seconds, "budget": budget, "images": len(some)}
                part["offloaded" if budget is None else "small device"] = found
            keep(f"{name} load", (part["offloaded"]["load seconds"],))
            part["loss"] = dict(loaded.diagnostics["storage"])
            part |= _change(before, out) | _telling(out, labels)
            bench.say(f"{setting.name}, {name}: {part}")
    return result


def _predicted(
    bench: Bench, setting: Setting, fit: DeltaFit, images: Tensor, held: int
) -> tuple[Prediction, dict[str, Any]]:
    """Return the predictions, their seconds, and on a GPU their peak with `held` bytes."""
    fit.predict(setting.inputs(images[:_WARM_UP]))
    out, seconds, peak = with_peak(bench.device, lambda: fit.predict(setting.inputs(images)))
    known = peak is not None and bench.device.type == "cuda"
    return out, {"seconds": seconds, "peak bytes": held + (peak or 0) if known else None}


def _keep_memory(keep: Callable[..., None], what: str, found: dict[str, Any]) -> None:
    if found["peak bytes"] is not None:
        keep(f"{what}, GiB", figure=found["peak bytes"] / 2**30, unit="GiB")


def _most(after: Prediction, before: Prediction) -> float:
    return float((after.score / before.score[: len(after)] - 1).abs().max())


def _change(before: Prediction, after: Prediction) -> dict[str, float]:
    """How scores and standard deviations differ, relative to what they were."""
    score = (after.score / before.score - 1).abs()
    std = (after.std / before.std - 1).abs()[before.std > 0]
    return {
        "largest change of score": float(score.max()),
        "median change of score": float(score.median()),
        "largest change of std": float(std.max()),
        "median change of std": float(std.median()),
        "Spearman of scores": _spearman(before.score, after.score),
        "largest score outside the interval": float(
            torch.maximum(after.score_low - before.score, before.score - after.score_high).max()
        ),
    }


def _telling(out: Prediction, labels: Tensor) -> dict[str, float | None]:
    """How well scores tell mistakes, and how wide their intervals are."""
    wrong = out.mean.argmax(1) != labels.to(out.mean.device)
    both = bool(wrong.any()) and not bool(wrong.all())
    return {
        "AUROC by score": auroc(out.score[wrong], out.score[~wrong]) if both else None,
        "median score_error / score": float((out.score_error / out.score).median()),
    }


def _spearman(a: Tensor, b: Tensor) -> float:
    """Return the correlation of ranks."""
    ranks = torch.stack([part.double().argsort().argsort().double() for part in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])
