"""The sampling spread B⁻¹G₀B⁻¹/N from explicit matrices: its values, roots, and intervals."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
from torch import Tensor

from deltabars.covariance.base import EXACT, Defects, Tail
from deltabars.covariance.sampling import Meat, SamplingCovariance
from tests.silence import randn

N = 20
BREADS = ("hessian", "ggn", "opg")
EPS = torch.finfo(torch.float64).eps
# Of variances 1e-12 times the largest, float64 has 1e-4 of the digits that are left (see `exact`).
SLACK, TINY = 1e-5, 1e-9


@dataclass(frozen=True)
class Explicit:
    """A bread B = A + λI and a meat G₀ of a few parameters, with eigenpairs as a solver gives them.

    Each of N examples has a few rows Rₙ with A = (1/N) Σ RₙᵀRₙ, and a gradient gₙ = Rₙᵀvₙ, so that
    gₙgₙᵀ ≤ ‖vₙ‖²·RₙᵀRₙ. The gradients beside a Hessian have nothing to do with it.
    """

    name: str
    data: Tensor  # A, (P, P)
    gradients: Tensor  # (N, P)
    surprise: Tensor  # ‖vₙ‖², (N,)
    l2: float

    @classmethod
    def drawn(cls, seed: int, name: str | None = None) -> Explicit:
        """Of 4 to 18 parameters, with λ₁/λ from 1 to 1e5, and gradients of which some are huge."""
        draw = random.Random(seed)
        name, size, outputs = name or draw.choice(BREADS), draw.randint(4, 18), draw.randint(1, 3)
        decay = 10 ** torch.linspace(0, -draw.uniform(0, 3), size, dtype=torch.float64)
        basis = torch.linalg.qr(randn(size, size, seed=seed)).Q
        rows = randn(N, outputs, size, seed=seed + 1) * decay @ basis
        pulls = randn(N, outputs, seed=seed + 2)
        pulls = pulls * 10 ** (draw.choice([0.0, 1.5]) * randn(N, 1, seed=seed + 3))
        gradients = torch.einsum("nc,ncp->np", pulls, rows)
        data = torch.einsum("ncp,ncq->pq", rows, rows) / N
        if name == "opg":
            data = gradients.T @ gradients / N
        if name == "hessian":
            gradients = randn(N, size, seed=seed + 4) * decay.flip(0) ** 0.3 @ basis
        largest = float(torch.linalg.eigvalsh(data)[-1])
        level = largest * 10 ** -draw.uniform(0, 5)
        return cls(name, data, gradients, pulls.square().sum(1), level)

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def meat_matrix(self) -> Tensor:
        return self.gradients.T @ self.gradients / N

    @cached_property
    def bread(self) -> Tensor:
        return self.data + self.l2 * torch.eye(self.size, dtype=torch.float64)

    @property
    def whole(self) -> Tensor:
        """Σ."""
        inverse = torch.linalg.inv(self.bread)
        return inverse @ self.meat_matrix @ inverse / N

    def exact(self, rows: Tensor) -> Tensor:
        """The variance of each row (B, 1, P), as a sum of squared influences, (B, 1)."""
        rows = rows[:, 0]
        u = torch.linalg.solve(self.bread, rows.T).T
        u = u + torch.linalg.solve(self.bread, (rows - u @ self.bread).T).T  # refined
        return (u @ self.gradients.T).square().sum(1, keepdim=True) / N**2

    def pairs(self, rank: int, off: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """Eigenvalues of B (K,), eigenvectors as rows, and residuals (K,).

        Off: Ritz pairs of a space that is turned by so much away from that of the eigenvectors.
        """
        values, vectors = torch.linalg.eigh(self.data)
        some, found = vectors.flip(1)[:, :rank], values.flip(0)[:rank].clamp(min=0) + self.l2
        if off:
            turned = some + off * randn(self.size, rank, seed=rank) / self.size**0.5
            some = torch.linalg.qr(turned).Q
            values, vectors = torch.linalg.eigh(some.T @ self.bread @ some)
            some, found = some @ vectors.flip(1), values.flip(0)
        return found, some.T, (self.bread @ some - some * found).norm(dim=0)

    def meat(self, values: Tensor, vectors: Tensor) -> Meat:
        """What a fit measures of G₀ beside those eigenvectors."""
        outside = self.gradients - self.gradients @ vectors.T @ vectors
        left = max(1, self.size - len(values))
        curvature = max(0.0, float(self.data.trace() - (values - self.l2).sum())) / left
        if self.name == "opg":
            return Meat.of_itself(values - self.l2, curvature)
        slopes, above = torch.zeros(1).double(), torch.ones(1, N).double()
        if self.name == "ggn":
            found = self.surprise.quantile(torch.linspace(0, 1, 7).double()) * (1 + 1e-12)
            slopes = torch.cat([slopes, found]).unique()
            above = (self.surprise[None] > slopes[:, None]).double()
        along = self.gradients @ vectors.T
        return Meat(
            within=along.T @ along / N,
            slopes=slopes,
            beyond=above @ outside.square().sum(1) / N,
            whole=above @ self.gradients.square().sum(1) / N,
            curvature=curvature,
            level=float(outside.square().sum()) / N / left,
        )

    def covariance(
        self,
        rank: int | None = None,
        used: int | None = None,
        *,
        off: float = 0.0,
        defects: Defects = EXACT,
        full_rank: bool = True,
    ) -> tuple[SamplingCovariance, Tensor]:
        """The covariance by `used` of `rank` pairs, and all of their vectors."""
        values, vectors, residuals = self.pairs(rank or self.size, off)
        # Of float64, as a fit counts it: eigenvalues are right to some eps·λ₁.
        defects = replace(
            defects, residuals=residuals, products=16 * EPS * float(values[0]), shift=8 * EPS,
            rounding=defects.rounding + 2 * EPS, skew=8 * EPS, result=4 * EPS,
        )  # fmt: skip
        tail = Tail.after(values, used or len(values), self.l2, self.size, None, defects)
        rest = float(self.data.trace() - (values - self.l2).sum())
        meat = self.meat(values, vectors).first(tail.rank, values - self.l2, rest)
        kept = values[: tail.rank]
        return SamplingCovariance(self.name, kept, tail, meat, N, full_rank), vectors

    def rows(self, vectors: Tensor, seed: int) -> Tensor:
        """Rows f (B, 1, P): random, within the eigenvectors and beyond, gradients, flat."""
        f = randn(3, self.size, seed=seed)
        inside = f @ vectors.T @ vectors
        beyond = f - inside if len(vectors) < self.size else f[:0]
        flat = torch.linalg.eigh(self.data).eigenvectors.T[:1]
        return torch.cat([f, inside[:1], beyond[:1], self.gradients[:2], flat])[:, None]


def spread_of(covariance, vectors, rows, gram=None):
    return covariance.spread(rows.square().sum(-1), {covariance.name: rows @ vectors.T}, gram)


def missed(spread, exact) -> float:
    """How far the exact variance is beyond the interval at the worst, relative to itself."""
    far = torch.maximum(spread.low - exact, exact - spread.high)
    assert bool(((spread.low <= spread.variance) & (spread.variance <= spread.high)).all())
    return float((far / exact.clamp(min=TINY * float(exact.max()))).max())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", BREADS)
def test_all_pairs_give_the_matrix_and_its_root(name, seed):
    problem = Explicit.drawn(seed, name)
    covariance, vectors = problem.covariance()
    whole = problem.whole
    rows = randn(2, 5, problem.size, seed=seed)  # two inputs of five outputs
    found = spread_of(covariance, vectors, rows, rows @ rows.mT)
    expected = rows @ whole @ rows.mT
    # Condition numbers are up to 1e5, and are there twice.
    near = {"rtol": 1e-8, "atol": 1e-9 * float(expected.abs().max())}
    torch.testing.assert_close(found.covariance, expected, **near)
    torch.testing.assert_close(found.variance, expected.diagonal(dim1=1, dim2=2), **near)
    width = (found.high.sqrt() - found.low.sqrt()) / found.variance.max().sqrt()
    assert float(width.max()) < 1e-8
    eye = torch.eye(problem.size, dtype=torch.float64)
    root = covariance.root({name: vectors}, eye)  # row k is R eₖ
    atol = 1e-9 * float(whole.abs().max())
    torch.testing.assert_close(root.T @ root, whole, rtol=1e-8, atol=atol)
    torch.testing.assert_close(spread_of(covariance, vectors, rows).variance, found.variance)


@pytest.mark.parametrize("name", BREADS)
def test_few_pairs_give_the_head_and_one_number_for_the_tail(name):
    """With and without the tail; its root has the covariance of the predictions."""
    for seed in range(8):
        problem = Explicit.drawn(seed, name)
        rank = 1 + seed % problem.size
        eye, rows = torch.eye(problem.size, dtype=torch.float64), randn(4, 2, problem.size)
        for full in (True, False):
            covariance, q = problem.covariance(rank, full_rank=full)
            root = covariance.root({name: q}, eye)
            within = (
                q.T / covariance.values @ (q @ problem.meat_matrix @ q.T) / covariance.values @ q
            )
            rest = N * (root.T @ root) - within
            closing = rest.trace() / max(1, problem.size - rank)
            atol = 1e-9 * float(within.abs().max())
            expected = closing * (eye - q.T @ q) * (full and rank < problem.size)
            torch.testing.assert_close(rest, expected, rtol=1e-7, atol=atol)
            found = spread_of(covariance, q, rows, rows @ rows.mT)
            near = {"rtol": 1e-7, "atol": atol / N}
            torch.testing.assert_close(found.covariance, rows @ root.T @ root @ rows.mT, **near)
            torch.testing.assert_close(
                found.variance, found.covariance.diagonal(dim1=1, dim2=2), **near
            )


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_the_exact_value_lies_in_the_interval(start):
    """400 problems of four ranks with 8 rows or more: random, rounded and turned eigenvectors."""
    cases = 0
    for seed in range(start, start + 100):
        problem, draw = Explicit.drawn(seed), random.Random(seed)
        for _ in range(4):
            rank = draw.randint(1, problem.size)
            used = draw.choice([rank, draw.randint(1, rank)])
            off = draw.choice([0, 0, 1e-6, 1e-3, 0.03, 0.3])
            step = draw.choice([0, 0, 0.3, 0.03, 0.003])
            _, vectors = problem.covariance(rank, used, off=off)
            kept = (vectors / step).round() * step if step else vectors
            lost = float(torch.linalg.svdvals(kept - vectors)[0])
            covariance, _ = problem.covariance(rank, used, off=off, defects=Defects(rounding=lost))
            away = torch.linalg.svd(kept - vectors, full_matrices=False)[2][: 2 * bool(step)]
            rows = torch.cat([problem.rows(vectors, seed), away[:, None]])
            found = missed(spread_of(covariance, kept, rows), problem.exact(rows))
            assert found < SLACK, (seed, rank, used, off, step)
            cases += len(rows)
    assert cases > 2500


def test_an_interval_narrows_with_the_rank_and_says_something():
    """Beyond most of the spectrum it is a few per cent; with all pairs nothing is left."""
    for name in BREADS:
        problem = Explicit.drawn(3, name)
        rows = randn(20, 1, problem.size)
        widths = []
        for rank in range(1, problem.size + 1):
            found = spread_of(*problem.covariance(rank), rows)
            width = (found.high.sqrt() - found.low.sqrt()) / found.variance.sqrt()
            widths.append(float(width.median()))
        assert widths[0] > 0.01
        assert widths[-1] < 1e-9
        assert min(widths[:-1]) < 0.5 * widths[0]


@pytest.mark.parametrize("name", ["ggn", "hessian"])
def test_what_is_left_out_of_a_meat_is_bounded(name):
    """The first of K pairs: what G₀ is beyond them is below the bound that `first` leaves."""
    for seed in range(20):
        problem = Explicit.drawn(seed, name)
        values, vectors, _ = problem.pairs(problem.size - 1)
        meat = problem.meat(values, vectors)
        for count in range(1, problem.size - 1):
            few = meat.first(count, values - problem.l2, 0.1)
            assert len(few.within) == count
            outside = torch.eye(problem.size).double() - vectors[:count].T @ vectors[:count]
            for slope, flat in zip(few.slopes, few.beyond, strict=True):
                gap = slope * problem.data + flat * torch.eye(problem.size).double()
                gap = outside @ (gap - problem.meat_matrix) @ outside
                assert float(torch.linalg.eigvalsh(gap)[0]) > -1e-9 * float(gap.abs().max())
            assert few.norm >= float(torch.linalg.eigvalsh(problem.meat_matrix)[-1]) * (1 - 1e-12)


def test_a_multiple_of_the_meat_is_a_multiple_of_everything():
    for name in ("hessian", "ggn"):  # that of G follows from its own eigenvalues
        problem = Explicit.drawn(5, name)
        covariance, vectors = problem.covariance(4)
        rows = problem.rows(vectors, 0)
        one = spread_of(covariance, vectors, rows)
        other = replace(covariance, meat=covariance.meat.scaled(9.0))
        nine = spread_of(other, vectors, rows)
        for part in ("variance", "low", "high"):
            torch.testing.assert_close(getattr(nine, part), 9 * getattr(one, part))
