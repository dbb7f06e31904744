"""architectures: a vision transformer and a residual network, from training to error bars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import deltabars
from deltabars.bench import plain, table
from deltabars.bench.context import Bench, release
from deltabars.bench.memory import UNKNOWN
from deltabars.bench.peak import find_meter
from deltabars.bench.peers import find_peers
from deltabars.bench.plain import Data
from deltabars.bench.results import Measure, Record
from deltabars.bench.sizes import Network
from deltabars.bench.timing import stopwatch
from deltabars.metrics import auroc
from deltabars.prediction import Prediction
from deltabars.recipes import resnet
from deltabars.recipes.images import read_cifar10

_CHECKED = 4  # images whose standard deviations are computed a second time
_WARM_UP = 16  # images
_VIT_L2 = 1e-4
_VIT_RATE = 1e-3
_CLASSES = 10
_NO_CIFAR10 = "ResNet-18 left out: needs --cifar10"

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Setting:
    """A network, how it is trained and called, and its images, on the device.

    Attributes:
        name: as the table has it.
        size: of its training and of its fit.
        train: trains the model in place.
        logits: those of images (B, …) by a model of this kind.
        inputs: images as `predict` takes them.
        examples: the same with their labels, as `fit` takes them.
    """

    name: str
    size: Network
    l2: float
    model: nn.Module
    data: Data
    test: Data
    train: Callable[[], object]
    logits: Callable[[nn.Module, Tensor], Tensor]
    inputs: Callable[[Tensor], Any]
    examples: Callable[[Tensor, Tensor], Any]


def run_architectures(bench: Bench) -> Record:
    """Both networks, the quicker one first: of a run that is cut short its figures are told."""
    bars = _resnet(bench)  # read before anything is trained: a wrong folder shows at once
    record = Record("architectures")
    for found in (_vit(bench), bars):
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


def _resnet(bench: Bench) -> Setting | str:
    """ResNet-18 on CIFAR-10; at the small size a narrow one, on other images if need be."""
    size, folder = bench.size.resnet, bench.sources.cifar10
    if folder is not None:
        parts = (("train", size.images), ("test", size.test_images))
        data, test = (read_cifar10(folder, part, count) for part, count in parts)
    elif bench.size.name == "gpu":
        return _NO_CIFAR10
    else:
        data, test = bench.subject.train(size.images), bench.subject.test(size.test_images)
    data, test = _on(bench.device, data), _on(bench.device, test)
    network = resnet.resnet(classes=_CLASSES, channels=data[0].shape[1], **size.shape)
    network = network.to(bench.device)
    return Setting(
        name="narrow ResNet" if size.shape else "ResNet-18",
        size=size,
        l2=resnet.L2,
        model=network,
        data=data,
        test=test,
        train=lambda: resnet.train(
            network,
            *data,
            epochs=size.epochs,
            closing=size.closing,
            batch_size=size.batch,
            progress=False,
        ),
        logits=lambda model, images: model(images),
        inputs=lambda images: images,
        examples=lambda images, labels: (images, labels),
    )


def _vit(bench: Bench) -> Setting | str:
    """A vision transformer of Hugging Face on the images of the other works."""
    peers = find_peers("transformers")
    if not peers.complete:
        return f"ViT left out: {peers.absent[0]}"
    size, subject = bench.size.vit, bench.subject
    transformers = peers.modules["transformers"]
    config = transformers.ViTConfig(
        image_size=28,
        patch_size=7,
        num_channels=1,
        num_labels=_CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
        **size.shape,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.ViTForImageClassification(config).eval()
    model = model.to(bench.device)
    data, test = subject.train(size.images), subject.test(size.test_images)

    def logits(model: nn.Module, images: Tensor) -> Tensor:
        found: Tensor = model(pixel_values=images).logits
        return found

    return Setting(
        name="ViT",
        size=size,
        l2=_VIT_L2,
        model=model,
        data=data,
        test=test,
        train=lambda: _train_vit(model, logits, data, size),
        logits=logits,
        inputs=lambda images: {"pixel_values": images},
        examples=lambda images, labels: {"pixel_values": images, "labels": labels},
    )


def _train_vit(
    model: nn.Module, logits: Callable[[nn.Module, Tensor], Tensor], data: Data, size: Network
) -> None:
    """Adam with λ in the gradient, at a rate that falls to 0, without dropout."""
    images, labels = data
    optimiser = torch.optim.Adam(model.parameters(), lr=_VIT_RATE, weight_decay=_VIT_L2)
    steps = size.epochs * -(-len(labels) // size.batch)
    falling = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(size.epochs):
        order = torch.randperm(len(labels), generator=generator).to(labels.device)
        for chosen in order.split(size.batch):
            optimiser.zero_grad()
            found = logits(model, images[chosen])
            nn.functional.cross_entropy(found, labels[chosen]).backward()
            optimiser.step()
            falling.step()
    optimiser.zero_grad()


def _measured(bench: Bench, setting: Setting) -> Record:
    """Training, fit and predictions; every figure is told as soon as it is found."""
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
    fit, seconds, peak = _with_peak(bench, lambda: _fit(setting, size.images, size.rank))
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
    out, seconds, peak = _with_peak(bench, lambda: fit.predict(setting.inputs(images)))
    bench.say(f"{name}: {len(images):,} images in {seconds:.3g} s")
    error = _std_error(setting, fit, out)
    keep(f"{len(images):,} images", (seconds,), accuracy=error, accuracy_of="std")
    if peak is not None:
        keep("peak, predicting", figure=peak / 2**30, unit="GiB")
    add(**_test_quality(out, setting.test[1]))
    notes = (f"{name}: {_listed(quality)}", *(() if peak is not None else (UNKNOWN,)))
    return Record("architectures", tuple(measures), notes, {name: quality})


def _fit(setting: Setting, images: int, rank: int) -> deltabars.DeltaFit:
    examples = setting.examples(*(part[:images] for part in setting.data))
    return deltabars.fit(
        setting.model, examples, l2=setting.l2, estimator="opg", rank=rank, progress=False
    )


def _with_peak(bench: Bench, function: Callable[[], T]) -> tuple[T, float, int | None]:
    """What a function returns, its seconds, and its peak in bytes beyond what was held before."""
    release(bench.device)
    meter = find_meter(bench.device)
    if meter is None:
        return *stopwatch(function, bench.device), None
    meter.reset()
    before = meter.held()
    result, seconds = stopwatch(function, bench.device)
    return result, seconds, meter.peak() - before


def _std_error(setting: Setting, fit: deltabars.DeltaFit, out: Prediction) -> float:
    """How far standard deviations are from those of the same eigenpairs in float64, at the most."""
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
    """How many mistakes there are, and how well they are told; None without any of a kind."""
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


def _on(device: torch.device, data: Data) -> Data:
    return data[0].to(device), data[1].to(device)
