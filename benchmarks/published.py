"""published: the spectra of the reference weights, against the published eigenvalues."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.context import Bench
from benchmarks.goals import PUBLISHED_HESSIAN, PUBLISHED_OPG, PUBLISHED_OPG_BELOW, RESIDUAL
from benchmarks.hessian import solve_hessian
from benchmarks.results import Goal, Measure, Record
from deltabars.curvature.opg import OPGOperator
from deltabars.eigen.krylov import block_krylov
from deltabars.errors import DataError
from deltabars.runtime.precision import full_precision
from deltabars.runtime.vectors import inner
from deltabars.storage.reading import read_arrays

_EQUAL_UNTIL = 50  # published OPG values are truncated, and exact only so far


def run_published(bench: Bench) -> Record:
    """Relative differences to the published eigenvalues; pairs of earlier works serve."""
    size, sources = bench.size, bench.sources
    if sources.published is None or sources.weights is None:
        return _skipped("needs --mnist, --weights and --published")
    if size.published_images is None or size.published_rank is None:
        return _skipped("60,000 images are out of reach at the small size")
    published = _read(sources.published, size.published_rank)
    hessian = _relative(_hessian_values(bench, len(published["hessian"])), published["hessian"])
    plain, centred = (
        _relative(values, published["opg"]) for values in _opg_values(bench, len(published["opg"]))
    )
    until = min(_EQUAL_UNTIL, len(plain))
    lowest = f"opg, k ≤ {len(plain)}, lowest"
    measures = (
        _measure(f"hessian, k ≤ {len(hessian)}, largest", hessian.abs().max(), PUBLISHED_HESSIAN),
        _measure(lowest, plain.min(), PUBLISHED_OPG_BELOW),
        _measure(f"opg, k ≤ {until}, largest", plain[:until].abs().max(), PUBLISHED_OPG),
        _measure(f"opg centred, k ≤ {until}, largest", centred[:until].abs().max(), PUBLISHED_OPG),
    )
    far = [k + 1 for k, gap in enumerate(plain[:until].abs().tolist()) if gap > PUBLISHED_OPG.must]
    note = (
        "the published opg values are of centred rows and truncated; of the exact uncentred ones "
        f"up to k = {until}, those off by over {PUBLISHED_OPG.must:g} are k = {far}"
    )
    raw = {"hessian": hessian.tolist(), "opg": plain.tolist(), "opg centred": centred.tolist()}
    return Record("published", measures, (note,), raw)


def _read(path: Path, rank: int) -> dict[str, Tensor]:
    arrays = read_arrays(path, "--published")
    names = ("hessian", "opg")
    if not all(name in arrays for name in names):
        raise DataError(
            f"--published: expected arrays 'hessian' and 'opg', got {sorted(arrays)} in {path}."
        )
    return {name: torch.from_numpy(arrays[name]).double()[:rank] for name in names}


def _skipped(reason: str) -> Record:
    return Record("published", notes=(f"left out: {reason}",))


def _relative(ours: Tensor, published: Tensor) -> Tensor:
    return ours.cpu()[: len(published)] / published - 1


def _measure(what: str, figure: Tensor, goal: Goal) -> Measure:
    return Measure(what, figure=float(figure), unit="rel.", goal=goal)


def _hessian_values(bench: Bench, rank: int) -> Tensor:
    count = bench.size.published_images or 0
    kept = bench.spectra.find("hessian", rank, bench.subject.model, count)
    pairs = kept if kept is not None else solve_hessian(bench, count, rank)
    return pairs.values


def _opg_values(bench: Bench, rank: int) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of G, and of the same with centred gradients, G − ḡḡᵀ."""
    operator = OPGOperator(bench.problem(bench.size.published_images or 0))
    with full_precision(bench.device):
        plain = block_krylov(operator, rank, tolerance=RESIDUAL)
        centred = block_krylov(_Centred(operator), rank, tolerance=RESIDUAL)
    return plain.values, centred.values


class _Centred:
    """G − ḡḡᵀ with ḡ the mean gradient of the data loss: the published values are of this."""

    def __init__(self, operator: OPGOperator) -> None:
        self.shape, self.device, self.dtype = operator.shape, operator.device, operator.dtype
        self._operator = operator
        problem = operator.problem
        self._mean = problem.gradient - problem.l2 * problem.network.point

    def matmat(self, vectors: Tensor) -> Tensor:
        """Products with the rows of `vectors`."""
        along = inner(vectors, self._mean[None]).to(vectors.dtype)  # (b, 1)
        return self._operator.matmat(vectors) - along * self._mean
