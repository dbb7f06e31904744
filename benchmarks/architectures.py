"""architectures: a vision transformer and a residual network, from training to error bars."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import deltabars
from benchmarks import plain, table
from benchmarks.context import Bench
from benchmarks.memory import UNKNOWN
from benchmarks.networks import Setting, resnet_setting, vit_setting
from benchmarks.peak import with_peak
from benchmarks.results import Measure, Record
from benchmarks.stored import measure_storage
from benchmarks.timing import stopwatch
from deltabars.errors import DeltaBarsError
from deltabars.prediction.metrics import auroc
from deltabars.prediction.prediction import Prediction

_CHECKED = 4  # images whose standard deviations are computed a second time
_WARM_UP = 16  # images


def run_architectures(bench: Bench) -> Record:
    """Measure both networks, the quicker one first, whose figures are shown at once."""
    bars = resnet_setting(bench)  # read before anything is trained: a wrong folder shows at once
    record = Record("architectures")
    for found in (vit_setting(bench), bars):
        if isinstance(found, str):
            bench.say(found)
            part = Record("architectures", notes=(found,))
        else:
            part = _measured(bench, found)
        record = Record(
            "architectures",
            record.measures + part.measures,
            record.notes + part.notes,
            {**record.raw, **part.raw},
        )
    return record


def _measured(bench: Bench, setting: Setting) -> Record:
    """Measure training, fit and predictions; every figure is shown as soon as it is found."""
    size, name = setting.size, setting.name
    measures: list[Measure] = []
    quality: dict[str, Any] = {}

    def keep(what: str, *figures: Any, **more: Any) -> None:
        measures.append(Measure(f"{name}: {what}", *figures, **more))
        bench.say(table.words(measures[-1]))

    def add(**found: float | None) -> None:
        quality.update({what.replace("_", " "): value for what, value in found.items()})
        bench.say(f"{name}: {_listed(quality)}")

    _, seconds = stopwatch(setting.train, bench.device)
    keep("training", (seconds,))
    add(training_accuracy=_training_accuracy(setting))
    _fit(setting, _WARM_UP, 2)
    fit, seconds, peak = with_peak(bench.device, lambda: _fit(setting, size.images, size.rank))
    pairs = fit.spectra["opg"]
    keep(
        f"fit, K={size.rank}",
        (seconds,),
        accuracy=fit.diagnostics["opg"]["largest_residual"],
        accuracy_of="residual",
        products=int(pairs.statistics["products"]),
    )
    add(P=fit.num_parameters, N=fit.num_examples, K=fit.rank)
    add(relative_gradient=fit.diagnostics["relative_gradient"])
    if peak is not None:
        vectors = pairs.vectors.numel() * pairs.vectors.element_size()
        keep("peak, fit", figure=peak / 2**30, unit="GiB")
        keep("peak, fit", figure=peak / vectors, unit="K·P")
    images = setting.test[0]
    fit.predict(setting.inputs(images[:_WARM_UP]))
    out, seconds, peak = with_peak(bench.device, lambda: fit.predict(setting.inputs(images)))
    bench.say(f"{name}: {len(images):,} images in {seconds:.3g} s")
    error = _std_error(setting, fit, out)
    keep(f"{len(images):,} images", (seconds,), accuracy=error, accuracy_of="std")
    if peak is not None:
        keep("peak, predicting", figure=peak / 2**30, unit="GiB")
    add(**_test_quality(out, setting.test[1]))
    notes = [f"{name}: {_listed(quality)}", *([] if peak is not None else [UNKNOWN])]
    try:
        storage = measure_storage(bench, setting, fit, keep)
        notes.append(storage["note"])
    except DeltaBarsError as error:  # a disk that is full: the rest was measured
        storage = {"error": str(error)}
        notes.append(f"{name}: stored fits were not measured: {error}")
    raw = {name: {**quality, "storage": storage}}
    return Record("architectures", tuple(measures), tuple(notes), raw)


def _fit(setting: Setting, images: int, rank: int) -> deltabars.DeltaFit:
    examples = setting.examples(*(part[:images] for part in setting.data))
    return deltabars.fit(
        setting.model, examples, l2=setting.l2, estimator="opg", rank=rank, progress=False
    )


def _std_error(setting: Setting, fit: deltabars.DeltaFit, out: Prediction) -> float:
    """Return the largest error of standard deviations against the same eigenpairs in float64."""
    pairs = fit.spectra["opg"]
    exact = plain.opg_std(
        setting.model,
        setting.logits,
        setting.test[0][:_CHECKED],
        (pairs.values, pairs.vectors),
        setting.l2,
        fit.num_examples,
    )
    return float((out.std[:_CHECKED].to(exact) / exact - 1).abs().max())


def _training_accuracy(setting: Setting) -> float:
    with torch.no_grad():
        right = [
            (setting.logits(setting.model, images).argmax(1) == labels).double()
            for images, labels in plain.chunks(setting.data)
        ]
    return float(torch.cat(right).mean())


def _test_quality(out: Prediction, labels: Tensor) -> dict[str, float | None]:
    """Return how many mistakes there are, and how well they are found; None without any."""
    wrong = out.mean.argmax(1) != labels.to(out.mean.device)
    doubts = {"score": out.score, "1 − maximum": 1 - out.mean.amax(1)}
    both = bool(wrong.any()) and not bool(wrong.all())
    return {
        "test accuracy": 1 - float(wrong.double().mean()),
        "mean std": float(out.std.mean()),
        **{
            f"AUROC by {name}": auroc(doubt[wrong], doubt[~wrong]) if both else None
            for name, doubt in doubts.items()
        },
    }


def _listed(quality: dict[str, Any]) -> str:
    return ", ".join(f"{what} {_text(value)}" for what, value in quality.items())


def _text(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
