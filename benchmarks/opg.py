"""opg: per-example gradients and the largest eigenpairs of G, against IncrementalPCA."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import deltabars
from benchmarks import plain
from benchmarks.context import Bench, release
from benchmarks.goals import goal
from benchmarks.peers import find_peers, incremental_pca
from benchmarks.results import Measure, Record
from benchmarks.timing import stopwatch
from deltabars.curvature.opg import OPGOperator
from deltabars.eigen.krylov import block_krylov
from deltabars.eigen.pairs import EigenPairs
from deltabars.recipes.paper import L2
from deltabars.runtime.precision import full_precision

_COLUMNS_AT_ONCE = 4096
_ROWS_AT_ONCE = 256


def run_opg(bench: Bench) -> Record:
    """Return the eigenpairs with and without the gradients, against the peer if there is one."""
    size = bench.size
    count, rank = size.opg_images, size.opg_rank
    model, data = bench.subject.model, bench.subject.train(count)

    def whole_fit(images: int = count, pairs: int = rank) -> deltabars.DeltaFit:
        some = (data[0][:images], data[1][:images])
        return deltabars.fit(model, some, l2=L2, rank=pairs, progress=False)

    whole_fit(min(64, count), 2)  # a warm-up
    seconds = []
    for _ in range(size.fit_repeats):
        release(bench.device)
        fit, taken = stopwatch(whole_fit, bench.device)
        seconds.append(taken)
    pairs = fit.spectra["opg"]
    bench.spectra.keep("opg", pairs, model, count)
    with full_precision(bench.device):
        products = plain.opg_products(model, data, pairs.vectors, L2)
    residual = float(plain.residuals(pairs.values, pairs.vectors, products).max())
    measure = Measure(
        f"fit with gradients, K={rank}",
        tuple(seconds),
        accuracy=residual,
        accuracy_of="residual",
        goal=None if size.peers else goal(size.name, "opg"),
        products=int(pairs.statistics["products"]),
    )
    raw = {"images": count, "rank": rank, "values": pairs.values.tolist(), "residual": residual}
    if not size.opg_exact:
        return Record("opg", (measure,), raw=raw)
    return _with_peer(bench, measure, raw)


def _with_peer(bench: Bench, whole: Measure, raw: dict[str, Any]) -> Record:
    size = bench.size
    model, data = bench.subject.model, bench.subject.train(size.opg_images)
    rows, plain_seconds = stopwatch(
        lambda: torch.cat(list(plain.gradient_rows(model, data))), bench.device
    )
    pairs, our_rows_seconds, our_seconds = _rows_then_pairs(bench)
    release(bench.device)
    peers = find_peers("sklearn.decomposition") if size.peers else None
    centred = None
    their_seconds = 0.0
    if peers is not None and peers.complete:
        centred, their_seconds = stopwatch(
            lambda: incremental_pca(peers, rows, size.opg_rank, size.opg_batch), bench.device
        )
    exact, exact_centred = exact_values(rows, size.opg_rank)
    error = float((pairs.values / (exact + L2) - 1).abs().max())
    measures = [
        Measure("gradients, plain vmap(grad)", (plain_seconds,)),
        Measure(
            "gradients, deltabars", (our_rows_seconds,), our_rows_seconds / plain_seconds, "plain"
        ),
        whole,
        Measure(
            f"on kept rows, {pairs.statistics['products']} products",
            (our_seconds,),
            accuracy=error,
            accuracy_of="values",
            products=int(pairs.statistics["products"]),
        ),
    ]
    raw |= {"exact": (exact + L2).tolist(), "exact_centred": (exact_centred + L2).tolist()}
    if centred is None:
        return Record("opg", tuple(measures), peers.absent if peers is not None else (), raw)
    theirs = float(((centred + L2) / (exact_centred + L2) - 1).abs().max())
    raw["their_values"] = (centred + L2).tolist()
    measures += [
        Measure(
            f"IncrementalPCA, batches of {size.opg_batch}",
            (their_seconds,),
            accuracy=theirs,
            accuracy_of="values",
        ),
        Measure(
            "deltabars is faster by",
            figure=their_seconds / our_seconds,
            accuracy=error,
            accuracy_of="values",
            goal=goal(size.name, "opg"),
        ),
    ]
    note = (
        "IncrementalPCA centres the rows: it is compared with exact centred values, so that "
        "only what it truncates counts"
    )
    return Record("opg", tuple(measures), (note,), raw)


def _rows_then_pairs(bench: Bench) -> tuple[EigenPairs, float, float]:
    """Return the pairs, the seconds of the gradients, and those of the pairs without them."""
    operator = OPGOperator(bench.problem(bench.size.opg_images))
    _, rows_seconds = stopwatch(lambda: _exhaust(operator.row_blocks()), bench.device)
    operator.matmat(torch.ones(1, operator.shape[0], device=operator.device))  # now it keeps them
    with full_precision(bench.device):
        pairs, seconds = stopwatch(
            lambda: block_krylov(operator, bench.size.opg_rank), bench.device
        )
    return pairs, rows_seconds, seconds


def exact_values(rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalues of (1/N)·RᵀR, also with R centred, by the N×N Gram matrix.

    In float64; only one half of the symmetric matrix is computed.
    """
    count = len(rows)
    gram = torch.zeros(count, count, dtype=torch.float64)
    for columns in rows.split(_COLUMNS_AT_ONCE, dim=1):
        part = columns.double()
        for start in range(0, count, _ROWS_AT_ONCE):
            end = start + _ROWS_AT_ONCE
            gram[start:end, :end] += part[start:end] @ part[:end].T
    gram = gram.tril()
    gram += gram.tril(-1).T
    means = gram.mean(0)
    centred = gram - means - means[:, None] + means.mean()
    both = (torch.linalg.eigvalsh(matrix / count).flip(0)[:rank] for matrix in (gram, centred))
    return next(both), next(both)


def _exhaust(blocks: Iterable[Tensor]) -> int:
    return sum(len(block) for block in blocks)
