"""hessian: the largest eigenpairs of the Hessian, against curvlinops and SciPy's eigsh."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import deltabars
from benchmarks import plain
from benchmarks.context import Bench, release
from benchmarks.goals import RESIDUAL, goal
from benchmarks.peers import Solved, curvlinops_eigsh, find_peers
from benchmarks.results import Measure, Record
from benchmarks.timing import stopwatch
from deltabars.eigen.pairs import EigenPairs
from deltabars.recipes.paper import L2
from deltabars.runtime.precision import full_precision


def run_hessian(bench: Bench) -> Record:
    """Return the smaller rank, with the peer where the size has one."""
    return _run(bench, "hessian", bench.size.hessian_ranks[0], bench.size.peers)


def run_hessian1500(bench: Bench) -> Record:
    """Return the larger rank, alone."""
    if len(bench.size.hessian_ranks) < 2:
        return Record("hessian1500", notes=("at the gpu size only",))
    return _run(bench, "hessian1500", bench.size.hessian_ranks[1], False)


def solve_hessian(bench: Bench, count: int, rank: int) -> EigenPairs:
    """Return the pairs, from the model and its images on: everything a user waits for."""
    fit = deltabars.fit(
        bench.subject.model,
        bench.subject.train(count),
        l2=L2,
        estimator="hessian",
        rank=rank,
        solver="krylov",
        residual_tolerance=RESIDUAL,
        progress=False,
    )
    return fit.spectra["hessian"]


def _run(bench: Bench, work: str, rank: int, with_peer: bool) -> Record:
    size = bench.size
    count = size.hessian_images
    solve_hessian(bench, min(64, count), 1)  # a warm-up
    release(bench.device)
    pairs, seconds = stopwatch(lambda: solve_hessian(bench, count, rank), bench.device)
    release(bench.device)
    bench.spectra.keep("hessian", pairs, bench.subject.model, count)
    products = int(pairs.statistics["products"])
    largest = measured_residual(bench, pairs.values, pairs.vectors)
    measures = [
        Measure(
            f"deltabars, K={rank}, {products} products",
            (seconds,),
            accuracy=largest,
            accuracy_of="residual",
            goal=None if with_peer else goal(size.name, work),
            products=products,
        )
    ]
    raw: dict[str, Any] = {
        "images": count,
        "rank": rank,
        "tolerance": RESIDUAL,
        "values": pairs.values.tolist(),
        "residuals": pairs.residuals.tolist(),
        "checked_pairs": min(size.checked_pairs, rank),
    }
    if not with_peer:
        return Record(work, tuple(measures), raw=raw)
    peers = find_peers("curvlinops", "scipy.sparse.linalg")
    if not peers.complete:
        return Record(work, tuple(measures), peers.absent, raw)
    model, data = bench.subject.model, bench.subject.train(count)
    theirs, their_seconds = stopwatch(
        lambda: curvlinops_eigsh(peers, model, data, rank, L2, RESIDUAL), bench.device
    )
    measures += _against(bench, theirs, their_seconds, seconds, largest)
    difference = (theirs.values / pairs.values.cpu() - 1).abs().max()
    raw["their_values"] = theirs.values.tolist()
    raw["values_differ_by"] = float(difference)
    note = f"eigenvalues of the two differ by {float(difference):.0e} at most, relative"
    return Record(work, tuple(measures), (note,), raw)


def _against(
    bench: Bench, theirs: Solved, their_seconds: float, seconds: float, largest: float
) -> list[Measure]:
    residual = measured_residual(bench, theirs.values, theirs.vectors)
    return [
        Measure(
            f"curvlinops + eigsh, {theirs.products} products",
            (their_seconds,),
            accuracy=residual,
            accuracy_of="residual",
            products=theirs.products,
        ),
        Measure(
            "deltabars is faster by",
            figure=their_seconds / seconds,
            accuracy=largest,
            accuracy_of="residual",
            goal=goal(bench.size.name, "hessian"),
        ),
    ]


def measured_residual(bench: Bench, values: Tensor, vectors: Tensor) -> float:
    """Return the largest ‖Aq − λq‖ / max(1, λ) of some pairs, by plain autograd."""
    model, data = bench.subject.model, bench.subject.train(bench.size.hessian_images)
    chosen = torch.linspace(0, len(values) - 1, min(bench.size.checked_pairs, len(values)))
    places = chosen.round().long()
    some = vectors.cpu()[places].to(bench.device)
    with full_precision(bench.device):
        products = plain.hessian_products(model, data, some, L2)
    return float(plain.residuals(values.cpu()[places].to(bench.device), some, products).max())
