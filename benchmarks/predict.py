"""predict: error bars of unseen images, against laplace-torch and in units of a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

import deltabars
from benchmarks import plain
from benchmarks.context import Bench, release
from benchmarks.goals import goal
from benchmarks.peers import find_peers, laplace_logit_std, laplace_posterior
from benchmarks.results import Measure, Record
from benchmarks.sources import first_pairs
from benchmarks.timing import interleaved
from deltabars.eigen.pairs import EigenPairs
from deltabars.recipes.digits import digits_network, load_digits, train_to_convergence
from deltabars.recipes.paper import L2
from deltabars.runtime.precision import full_precision

_PEER_BATCHES = (250, 500)  # images at a time; the fastest counts
_REPEATS = 3  # on the digits, whose tasks are many
_EXACT = 1e-3  # of a standard deviation
_CHECKED = 8  # images on the paper's network
_THREE = ["hessian", "opg", "sandwich"]


def run_predict(bench: Bench) -> Record:
    """Both networks: the one that laplace-torch can hold, and the paper's."""
    paper = _on_paper_network(bench)
    if not bench.size.digits_ranks:
        return paper
    digits = _on_digits(bench)
    return Record(
        "predict",
        digits.measures + paper.measures,
        digits.notes + paper.notes,
        {**digits.raw, **paper.raw},
    )


def _on_digits(bench: Bench) -> Record:
    """Per image against laplace-torch's linearised predictive of all weights; logit space."""
    size = bench.size
    digits, model = load_digits(), digits_network()
    count = size.digits_fit_images
    data = (digits.train_images[:count], digits.train_labels[:count])
    train_to_convergence(model, *data, L2, steps=size.digits_steps)
    images = digits.test_images[: size.digits_images]
    fit = deltabars.fit(
        model, data, l2=L2, estimator="ggn", rank=max(size.digits_ranks), progress=False
    )
    tasks: dict[str, Callable[[], Tensor]] = {
        f"deltabars {rank}": partial(_logit_std, fit, images, rank) for rank in size.digits_ranks
    }
    peers = find_peers("laplace", "laplace.curvature.backpack") if size.peers else None
    theirs = []
    if peers is not None and peers.complete:
        posterior = laplace_posterior(peers, model, data, L2)
        for batch in sorted({min(batch, len(images)) for batch in _PEER_BATCHES}):
            theirs.append(f"laplace {batch}")
            tasks[theirs[-1]] = partial(laplace_logit_std, posterior, images, batch)
    seconds = interleaved(tasks, torch.device("cpu"), min(_REPEATS, size.repeats))
    exact = plain.exact_logit_std(model, data, images, L2)
    errors = {name: _mean_difference(task(), exact) for name, task in tasks.items()}
    measures = [
        Measure(
            f"digits, rank {rank}, per image",
            tuple(each / len(images) for each in seconds[f"deltabars {rank}"]),
            accuracy=errors[f"deltabars {rank}"],
            accuracy_of="std",
        )
        for rank in size.digits_ranks
    ]
    raw = {"digits": {"images": len(images), "seconds": seconds, "errors": errors}}
    if not theirs:
        return Record("predict", tuple(measures), peers.absent if peers is not None else (), raw)
    medians = {name: median(found) for name, found in seconds.items()}
    best = min(theirs, key=lambda name: medians[name])
    measures.append(
        Measure(
            "digits, laplace-torch, per image",
            tuple(each / len(images) for each in seconds[best]),
            accuracy=errors[best],
            accuracy_of="std",
        )
    )
    # A truncation that anyone would notice buys no goal, and more digits are nobody's aim.
    exact_enough = [r for r in size.digits_ranks if errors[f"deltabars {r}"] <= _EXACT]
    measures += [
        Measure(
            f"faster at rank {rank} by",
            figure=medians[best] / medians[f"deltabars {rank}"],
            accuracy=errors[f"deltabars {rank}"],
            accuracy_of="std",
            goal=goal(size.name, "predict") if rank in exact_enough[:1] else None,
        )
        for rank in size.digits_ranks
    ]
    note = (
        f"digits: P = {fit.num_parameters:,}; error of the logits' std against the whole GGN in "
        f"float64, mean; laplace-torch at its best, by BackPACK in batches of "
        f"{best.partition(' ')[2]}"
    )
    return Record("predict", tuple(measures), (note,), raw)


def _on_paper_network(bench: Bench) -> Record:
    """One estimator and three at once, and a forward pass over the same images."""
    size, subject = bench.size, bench.subject
    images = subject.test_images[: size.predict_images]
    fit, notes = _sandwich(bench)
    with full_precision(bench.device):
        seconds = interleaved(
            {
                "forward": lambda: plain.forward(subject.model, images),
                "one": lambda: fit.predict(images, estimator="opg"),
                "three": lambda: fit.predict(images, estimator=_THREE),
            },
            bench.device,
            size.repeats,
        )
    errors = _errors_of(bench, fit, images[:_CHECKED])
    accuracy = {"one": errors["opg"], "three": max(errors.values())}
    base = median(seconds["forward"])
    texts = {"one": "opg alone", "three": "all three"}
    measures = [
        Measure(
            f"{len(images):,} images, K={size.predict_rank}, {text}",
            seconds[name],
            accuracy=accuracy[name],
            accuracy_of="std",
            goal=goal(size.name, f"predict {name}"),
        )
        for name, text in texts.items()
    ] + [
        Measure(
            f"{text} / forward pass",
            figure=median(seconds[name]) / base,
        )
        for name, text in texts.items()
    ]
    raw = {
        "paper": {
            "images": len(images), "rank": size.predict_rank, "seconds": seconds, "errors": errors,
        }
    }  # fmt: skip
    return Record("predict", tuple(measures), notes, raw)


def _errors_of(bench: Bench, fit: deltabars.DeltaFit, images: Tensor) -> dict[str, float]:
    """How far standard deviations are from those of the same eigenpairs in float64, mean."""
    pairs = {name: (found.values, found.vectors) for name, found in fit.spectra.items()}
    exact = plain.low_rank_stds(bench.subject.model, images, pairs, L2, fit.num_examples)
    ours = fit.predict(images, estimator=_THREE)
    return {name: _mean_difference(ours[name].std, exact[name]) for name in _THREE}


def _sandwich(bench: Bench) -> tuple[deltabars.DeltaFit, tuple[str, ...]]:
    """Return a sandwich fit of computed OPG pairs, and of kept or else made-up Hessian pairs."""
    size, subject = bench.size, bench.subject
    rank, count = size.predict_rank, size.predict_fit_images
    data = subject.train(count)
    fit = deltabars.fit(subject.model, data, l2=L2, rank=rank, progress=False)
    release(bench.device)
    hessian = bench.spectra.find("hessian", rank, subject.model, count)
    notes: tuple[str, ...] = ()
    if hessian is None:
        hessian = _made_up_pairs(rank, fit.num_parameters, bench.device)
        notes = ("the Hessian's pairs of three at once are random: speed only",)
    spectra = {"hessian": first_pairs(hessian, rank), "opg": fit.spectra["opg"]}
    return fit.moved(estimator="sandwich", spectra=spectra), notes


def _made_up_pairs(rank: int, size: int, device: torch.device) -> EigenPairs:
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(size, rank, generator=generator).to(device)
    vectors = torch.linalg.qr(columns).Q.T.contiguous()
    values = torch.logspace(1.5, -1.9, rank, dtype=torch.float64, device=device)  # 32 to 0.0126
    return EigenPairs(values, vectors, torch.zeros_like(values))


def _logit_std(fit: deltabars.DeltaFit, images: Tensor, rank: int) -> Tensor:
    # What laplace-torch computes and no more: averages over the parameters are left out.
    std: Tensor = fit.predict(images, rank=rank, space="logit", moderation=None).std
    return std


def _mean_difference(std: Tensor, exact: Tensor) -> float:
    return float((std.double() / exact - 1).abs().mean())
