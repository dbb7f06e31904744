"""The eight networks and three small ones, and the command that trains one and its replicas.

usage: python -m benchmarks.true_bars.subjects NAME --data FOLDER --out FOLDER [--count 16]
       [--scale 0.05] [--seed 0] [--device cuda]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import resnet
from benchmarks.true_bars import material, networks
from benchmarks.true_bars.material import Material
from benchmarks.true_bars.replicas import quality, train_all
from benchmarks.true_bars.sequential import SgdPlan, train_one_by_one
from benchmarks.true_bars.stacked import Plan, Say, State, train_stacked
from deltabars.recipes import digits, paper

Keep = Callable[[int, State], object]

_FEW = 3_000  # training images of the small networks
_WORDS = 500  # of the small text classifier
_CONVERGED = 800  # iterations of L-BFGS, at most


@dataclass(frozen=True, eq=False)
class Subject:
    """A network of the study.

    Attributes:
        name: on the command line.
        title: in print.
        l2: λ of its training as deltabars defines it; None where there is none.
        likelihood: as `deltabars.fit` takes it.
        epochs: passes over the training examples, at most.
        load: the data, from the folder that `prepare` makes.
        build: the network with its initial weights, from a seed.
    """

    name: str
    title: str
    l2: float | None
    likelihood: str | nn.Module
    epochs: float
    load: Callable[[Path], Material]
    build: Callable[[int], nn.Module]
    _train: Callable[..., list[State]]

    def make(self, seed: int = 0) -> nn.Module:
        """Make the network with its initial weights: always the same ones, of seed 0."""
        return self.build(seed)

    def train(
        self,
        material: Material,
        samples: Sequence[Tensor],
        device: torch.device | str,
        seeds: Sequence[int] | None = None,
        *,
        scale: float = 1.0,
        keep: Keep = lambda number, state: None,
        say: Say = lambda line: None,
    ) -> list[State]:
        """Train a network on each sample; return their state dicts on the CPU.

        Args:
            material: the data.
            samples: indices (N,) into the training examples, each.
            device: where to train.
            seeds: of initial weights, order and augmentation, one for each network; by default all
                have those of seed 0.
            scale: multiplies the epochs.
            keep: called with number and state dict of every network when it is trained.
            say: called with lines on how far it is.
        """
        start = [self.make(seed) for seed in seeds or [0] * len(samples)]
        return self._train(start, material, samples, torch.device(device), seeds, scale, keep, say)


def _stacked(
    plan: Plan,
    start: list[nn.Module],
    data: Material,
    samples: Sequence[Tensor],
    device: torch.device,
    seeds: Sequence[int] | None,
    scale: float,
    keep: Keep,
    say: Say,
) -> list[State]:
    states = train_stacked(
        start,
        (data.train_inputs, data.train_targets),
        samples,
        plan.scaled(scale),
        device=device,
        orders=seeds if seeds is not None else 0,
        validation=(data.validation_inputs, data.validation_targets),
        say=say,
    )
    for number, state in enumerate(states):
        keep(number, state)
    return states


def _one_by_one(
    plan: SgdPlan,
    start: list[nn.Module],
    data: Material,
    samples: Sequence[Tensor],
    device: torch.device,
    seeds: Sequence[int] | None,
    scale: float,
    keep: Keep,
    say: Say,
) -> list[State]:
    return train_one_by_one(
        start,
        (data.train_inputs, data.train_targets),
        samples,
        plan.scaled(scale),
        device=device,
        orders=seeds if seeds is not None else [0] * len(samples),
        keep=keep,
        say=say,
    )


def _to_optimum(
    start: list[nn.Module],
    data: Material,
    samples: Sequence[Tensor],
    device: torch.device,
    seeds: Sequence[int] | None,
    scale: float,
    keep: Keep,
    say: Say,
) -> list[State]:
    """Minimise the cost of every sample; there is no order of batches."""
    states = []
    for number, (network, sample) in enumerate(zip(start, samples, strict=True)):
        inputs, targets = data.train_inputs[sample], data.train_targets[sample]
        norm = digits.train_to_convergence(
            network.to(device), inputs.to(device), targets.to(device), digits.L2,
            steps=max(1, round(_CONVERGED * scale)),
        )  # fmt: skip
        states.append({name: value.cpu() for name, value in network.state_dict().items()})
        keep(number, states[-1])
        say(f"network {number + 1} of {len(start)}: norm of the gradient {norm:.1e}")
    return states


def _constant(rate: float, share: float) -> float:
    return rate


def _cosine(rate: float, rise: float, share: float) -> float:
    """Return a rate that rises until a share of the training and falls as a cosine to 0."""
    if share < rise:
        return rate * (share + 1e-3) / (rise + 1e-3)
    return rate * 0.5 * (1 + math.cos(math.pi * (share - rise) / (1 - rise)))


def _paper_rate(share: float) -> float:
    """Return the paper's rate at a share of its 90,000 steps."""
    size = paper.MNIST.size
    return [rate for first, rate in size.schedule if share >= first / size.steps][-1]


_cross_entropy = functional.cross_entropy
_smoothed = nn.CrossEntropyLoss(label_smoothing=0.1)
_PAPER_EPOCHS = paper.MNIST.size.steps * paper.BATCH / paper.MNIST.size.train_images


def _subject(
    name: str,
    title: str,
    plan: Plan | SgdPlan,
    load: Callable[[Path], Material],
    build: Callable[[int], nn.Module],
    *,
    likelihood: str | nn.Module = "categorical",
) -> Subject:
    """Return a subject that is trained by a plan."""
    l2: float | None = plan.decay
    if isinstance(plan, Plan) and (plan.decoupled or not plan.decay):
        l2 = None
    way: Any = _stacked if isinstance(plan, Plan) else _one_by_one
    return Subject(name, title, l2, likelihood, plan.epochs, load, build, partial(way, plan))


def _seeded(build: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    return partial(networks.seeded, build)


_ALL = (
    Subject(
        "digits-optimum",
        "CNN on digits, at the optimum",
        digits.L2,
        "categorical",
        _CONVERGED,
        material.digits,
        digits.digits_network,
        _to_optimum,
    ),
    _subject(
        "digits-adam",
        "CNN on digits, Adam without decay",
        Plan(loss=_cross_entropy, epochs=40, batch=64, rate=partial(_constant, 3e-3)),
        material.digits,
        digits.digits_network,
    ),
    _subject(
        "mnist-paper",
        "the paper's network on MNIST",
        Plan(
            loss=_cross_entropy,
            epochs=_PAPER_EPOCHS,
            batch=paper.BATCH,
            rate=_paper_rate,
            decay=paper.L2,
            shuffled=False,
            by_products=networks.paper_by_products,
        ),
        material.mnist,
        paper.paper_network,
    ),
    _subject(
        "cnn-adamw",
        "CNN on Fashion-MNIST, AdamW with label smoothing and early stopping",
        Plan(
            loss=_smoothed,
            epochs=20,
            batch=128,
            rate=partial(_constant, 1e-3),
            decay=0.05,
            decoupled=True,
            patience=3,
            by_products=networks.cnn_by_products,
        ),
        material.fashion,
        _seeded(networks.cnn),
        likelihood=_smoothed,
    ),
    _subject(
        "resnet18",
        "ResNet-18 on CIFAR-10, SGD with crops and flips",
        SgdPlan(epochs=15, batch=256, decay=resnet.L2),
        material.cifar10,
        _seeded(resnet.resnet),
    ),
    _subject(
        "vit",
        "vision transformer on MNIST, AdamW",
        Plan(
            loss=_cross_entropy,
            epochs=10,
            batch=200,
            rate=partial(_cosine, 1e-3, 0.1),
            decay=0.05,
            decoupled=True,
        ),
        partial(material.mnist, count=material.IMAGES),
        _seeded(networks.ViT),
    ),
    _subject(
        "mlp-regression",
        "MLP on the diabetes table, Adam",
        Plan(
            loss=functional.mse_loss,
            epochs=2_000,
            batch=None,
            rate=partial(_cosine, 1e-2, 0.0),
            decay=3e-2,
            shuffled=False,
        ),
        material.diabetes,
        _seeded(networks.mlp),
        likelihood=nn.MSELoss(),
    ),
    _subject(
        "text",
        "text classifier on R8, Adam with dropout",
        Plan(loss=_cross_entropy, epochs=15, batch=64, rate=partial(_constant, 1e-3)),
        material.r8,
        _seeded(networks.TextClassifier),
    ),
    # Small ones of the same kinds, for two cores, and for `benchmarks.true_bars.exact`.
    _subject(
        "small-cnn",
        "small CNN on 3,000 images of clothes, AdamW",
        Plan(
            loss=_cross_entropy,
            epochs=15,
            batch=64,
            rate=partial(_constant, 2e-3),
            decay=0.05,
            decoupled=True,
        ),
        partial(material.few, material.fashion, _FEW),
        _seeded(networks.small_cnn),
    ),
    _subject(
        "small-text",
        "small text classifier on R8, Adam with dropout",
        Plan(loss=_cross_entropy, epochs=15, batch=64, rate=partial(_constant, 3e-3)),
        partial(material.frequent, words=_WORDS),
        _seeded(partial(networks.TextClassifier, width=12, words=_WORDS)),
    ),
    _subject(
        "small-vit",
        "small vision transformer on 3,000 digits, AdamW",
        Plan(
            loss=_cross_entropy,
            epochs=60,
            batch=100,
            rate=partial(_cosine, 2e-3, 0.1),
            decay=0.05,
            decoupled=True,
        ),
        partial(material.few, material.mnist, _FEW),
        _seeded(partial(networks.ViT, width=16, depth=2, heads=2, inner=32)),
    ),
)
SUBJECTS = {subject.name: subject for subject in _ALL}


def main(arguments: list[str] | None = None) -> None:
    """Train a subject and its replicas, and print how good they are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.true_bars.subjects")
    parser.add_argument("name", choices=SUBJECTS)
    parser.add_argument("--data", type=Path, required=True, help="the folder of `prepare`")
    parser.add_argument("--out", type=Path, required=True, help="where state dicts go")
    parser.add_argument("--count", type=int, default=16, help="bootstrap replicas")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the epochs")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap samples")
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    given = parser.parse_args(arguments)
    if given.device == "cpu":
        torch.set_num_threads(1)
    subject = SUBJECTS[given.name]
    data = subject.load(given.data)
    started = time.perf_counter()

    def say(line: str) -> None:
        print(f"{time.perf_counter() - started:7.1f} s  {line}", flush=True)

    weights = sum(value.numel() for value in subject.make().parameters())
    say(f"{subject.name}: {subject.title}; P = {weights:,}, N = {len(data):,}")
    done = train_all(
        subject, data, given.count, given.seed, given.out, given.device, say, scale=given.scale
    )
    if done.trained:
        seen = done.trained * len(data) * subject.epochs * given.scale
        rate = f"{seen / done.seconds:,.0f} examples a second (if no early stop)"
        say(f"{done.trained} networks in {done.seconds:.1f} s, {rate}")
    for name, states in (("network", done.states[:1]), ("replicas", done.states[1:])):
        for part in ("train", "test"):
            found = [quality(subject, data, part, state, given.device) for state in states]
            if found:
                mean, spread = sum(found) / len(found), f"{min(found):.4f} to {max(found):.4f}"
                print(f"{name}, {part}: {mean:.4f} ({spread})")


if __name__ == "__main__":
    main()
