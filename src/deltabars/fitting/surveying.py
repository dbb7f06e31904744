"""What a fit knows beyond its eigenpairs: moments of the tail, and the meat of the sampling spread.

A few random vectors outside the eigenvectors, multiplied with the matrices, give traces of their
products there (Hutchinson's estimator); one pass over the gradients gives the meat within.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from deltabars.covariance.sampling import (
    TAIL_PULL,
    TAIL_PULL_SQUARE,
    TAIL_SQUARE,
    TAIL_TRACE,
    Meat,
)
from deltabars.curvature.base import CurvatureOperator
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.eigen.pairs import EigenPairs
from deltabars.errors import ModelWarning
from deltabars.problem.problem import Problem
from deltabars.runtime.precision import full_precision
from deltabars.runtime.vectors import ShardedVectors, Space

_VECTORS = 16  # random ones
_ROUNDING = 16  # units in the last place
_FEW_OUTPUTS = 32  # above that a GGN costs more than a Hessian's pairs, and G weighs in its place
_SLOPES = 64  # that the bound on the meat can choose from


class TailProbe:
    """Rows outside the eigenvectors of a matrix, and their products with its data part.

    The rows are random; the last one is ω̂ without its part along the eigenvectors.
    """

    def __init__(self, operator: CurvatureOperator, pairs: EigenPairs, seed: int) -> None:
        self._space: Space = operator.spaces.whole
        vectors = pairs.vectors
        self._basis = vectors.part if isinstance(vectors, ShardedVectors) else vectors
        generator = torch.Generator().manual_seed(seed + 1)
        count = max(1, min(_VECTORS, self._space.size - len(pairs)))
        self.is_empty = self._space.size == len(pairs)
        drawn = self._space.random_rows(count, generator, operator.device, operator.dtype)
        self.rows = self._outside(drawn)
        network = operator.problem.network
        point = network.point if network.scale is None else network.point / network.scale
        self._point = self._outside(point[None, self._space.own])
        self.images: Tensor | None = None  # A z of each row z
        self._pull: Tensor | None = None  # A ω̂, likewise

    def beside(self, operator: CurvatureOperator, vectors: Tensor) -> Tensor:
        """Multiply vectors with the matrix, λ included, and the rows with its data part."""
        images = operator.data_matmat(torch.cat([vectors, self.rows, self._point]))
        self.images, self._pull = images[len(vectors) : -1], images[-1:]
        return images[: len(vectors)].add(vectors, alpha=operator.problem.l2)

    def trace_of(self, one: Tensor, other: Tensor | None = None) -> float:
        """Estimate the trace of X (or XY) outside the eigenvectors from images Xz (and Yz)."""
        if self.is_empty:
            return 0.0
        left = self.rows if other is None else self._outside(other)
        total = (left.double() * self._outside(one).double()).sum()
        return float(self._space.group.all_reduce_(total[None])) / len(self.rows)

    @property
    def pull(self) -> tuple[float, float]:
        """ωᵀAω and ‖Aω‖² outside the eigenvectors."""
        assert self._pull is not None
        image = self._outside(self._pull)
        found = self._space.inner(image, torch.cat([self._point, image]))[0]
        return float(found[0]), float(found[1])

    def _outside(self, rows: Tensor) -> Tensor:
        for _ in range(2):  # twice is enough
            inside = self._space.inner(rows, self._basis).to(rows.dtype)
            rows = rows - inside @ self._basis
        return rows


def tail_moments(probe: TailProbe, name: str) -> dict[str, float]:
    """Return the moments of the data part outside the eigenvectors, for the diagnostics."""
    assert probe.images is not None
    found = {TAIL_SQUARE: probe.trace_of(probe.images, probe.images)}
    found[TAIL_PULL], found[TAIL_PULL_SQUARE] = probe.pull
    if name == "hessian":  # whose trace is not the sum of squares of rows
        found[TAIL_TRACE] = probe.trace_of(probe.images)
    return found


def measure_meat(problem: Problem, name: str, pairs: EigenPairs, probe: TailProbe) -> Meat:
    """Measure G₀ beside the eigenvectors of a Hessian or a GGN.

    Cost: one pass of gradients and their projections, N·K·P operations, and products of a few
    vectors with the GGN (for a Hessian) and with G.
    """
    rows = OPGOperator(problem)
    with (
        problem.network.same_bits(),
        full_precision(problem.device),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", ModelWarning)  # which the eigenpairs have given already
        within, squares, inside, surprise, images = _pass(rows, pairs, probe.rows)
        assert probe.images is not None
        weigher = images if name == "hessian" else probe.images
        if name == "hessian" and problem.num_outputs <= _FEW_OUTPUTS:
            weigher = GGNOperator(problem).data_matmat(probe.rows)
    # A difference: projections are off by some units in the last place of the length.
    rounded = _ROUNDING * torch.finfo(rows.dtype).eps * squares
    beyond = (squares - inside).clamp(min=0) + rounded
    count = problem.num_examples
    if name == "hessian":  # which need not be above any multiple of G₀
        slopes = torch.zeros(1, dtype=torch.float64)
    else:
        finite = surprise[surprise.isfinite()].sort().values
        chosen = torch.linspace(0, max(len(finite) - 1, 0), _SLOPES).round().long()
        slopes = torch.cat([torch.zeros(1, dtype=torch.float64), finite[chosen[: len(finite)]]])
        slopes = slopes.unique()
    order = surprise.argsort()
    start = torch.searchsorted(surprise[order], slopes, right=True)  # of the examples above

    def above(squares: Tensor) -> Tensor:
        total = torch.cat([squares[order].flip(0).cumsum(0).flip(0), squares.new_zeros(1)])
        return total[start] / count

    total = probe.trace_of(weigher)
    share_of = 1.0 / total if total > 0 else 0.0
    return Meat(
        within=within / count,
        slopes=slopes,
        beyond=above(beyond),
        whole=above(squares),
        curvature=max(0.0, share_of * probe.trace_of(weigher, probe.images)),
        level=max(0.0, share_of * probe.trace_of(weigher, images)),
    ).to(problem.device)


def _pass(
    operator: OPGOperator, pairs: EigenPairs, probe: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Pass over the gradients once.

    Returns:
        Σ (Qg)(Qg)ᵀ (K, K); ‖g‖², ‖Qg‖² and χ of each example (N,), on the CPU in float64; and G₀z
        of the rows z of `probe`, their own columns.
    """
    spaces, group = operator.spaces, operator.problem.group
    vectors = pairs.vectors
    basis = spaces.select(vectors.part if isinstance(vectors, ShardedVectors) else vectors)
    space, rows = spaces.reached, spaces.select(probe)
    within = torch.zeros(len(pairs), len(pairs), dtype=torch.float64, device=operator.device)
    images = torch.zeros_like(rows)
    waiting: list[Tensor] = []

    def blocks() -> Iterator[Tensor]:
        for block, surprise in operator.rows_with_surprise():
            waiting.append(surprise.cpu())
            yield block

    parts: list[tuple[Tensor, ...]] = []
    for block in space.exchange(blocks(), operator.device, operator.dtype):
        along = space.inner(block, basis)
        within += along.T @ along
        images.addmm_(space.inner(rows, block).to(block.dtype), block)
        squares = group.all_reduce_(block.square().sum(1, dtype=torch.float64))
        own = waiting.pop() if waiting else torch.zeros(0, dtype=torch.float64)
        surprise = torch.cat(group.gather_objects(own))
        parts.append((squares.cpu(), along.square().sum(1).cpu(), surprise))
    squares, inside, surprise = (torch.cat(each) for each in zip(*parts, strict=True))
    images = spaces.expand(images.div_(operator.problem.num_examples))
    return within, squares, inside, surprise, images
