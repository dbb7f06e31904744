"""Random problems, each solved by every solver and compared with dense float64."""

from __future__ import annotations

import random
import warnings
from collections import Counter

import torch

from deltabars.eigen import arpack, dense, incremental_svd
from deltabars.eigen.krylov import block_krylov, lanczos
from deltabars.eigen.pairs import audit, residual_scale
from deltabars.errors import ConvergenceWarning, DeltaBarsError
from deltabars.runtime.vectors import Space
from tests.covariance.test_small_l2 import FLOAT32, Case
from tests.properties import LAWS
from tests.random_problems import Problem, Shape
from tests.spectra import matrix_with

ROUNDING = 1e-8  # relative: inverses of condition 1e6, in float64


class Products:
    def __init__(self, matrix):
        self.matrix, self.shape = matrix, tuple(matrix.shape)
        self.dtype, self.device = matrix.dtype, matrix.device

    def matmat(self, rows):
        return rows @ self.matrix


def random_spectrum(draw: random.Random) -> torch.Tensor:
    """Some groups of eigenvalues: spread out, in decades, in clusters, or repeated; of any sign."""
    values: list[float] = []
    for _ in range(draw.randint(1, 5)):
        count, centre = draw.randint(1, 30), draw.choice([1, 1, 1, -1]) * 10 ** draw.uniform(-3, 2)
        width = draw.choice([0.0, 1e-12, 1e-7, 1e-3, 0.5])
        values += [centre * (1 + width * draw.random()) for _ in range(count)]
    return torch.tensor(values, dtype=torch.float64)


def solve_all(values, matrix, draw, seed):
    """(solver, rank, pairs) of one matrix, with room for restarts or without."""
    size = len(values)
    rank = draw.randint(1, size)
    block = draw.randint(1, 6)
    room = draw.choice([None, rank + 2 * block, rank + 2 * block + draw.randint(0, 20)])
    options = {"seed": seed, "max_vectors": room}
    yield "dense", rank, dense(matrix, rank)
    yield "lanczos", rank, lanczos(matrix, rank, **options)
    yield "block_krylov", rank, block_krylov(matrix, rank, block_size=block, **options)
    if rank < size:
        try:
            yield "arpack", rank, arpack(matrix, rank, seed=seed)
        except DeltaBarsError:  # it fails on some, and says so
            yield "arpack (refused)", 0, None
    if float(values.min()) >= 0:
        yield "incremental", size, incremental_svd(matrix, size)


def test_prescribed_spectra(seconds_left, first_seed, capsys):
    worst, count, wrong, warned = Counter(), Counter(), [], Counter()
    seed = first_seed
    while seconds_left() > 0:
        seed += 1
        draw = random.Random(seed)
        values = random_spectrum(draw)
        dtype = draw.choice([torch.float64, torch.float64, torch.float32])
        matrix = Products(matrix_with(values, seed).to(dtype))
        exact = torch.linalg.eigvalsh(matrix.matrix.double()).flip(0)
        eps, norm = torch.finfo(dtype).eps, float(exact.abs().max())
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always", ConvergenceWarning)
            for solver, rank, pairs in solve_all(values, matrix, draw, seed):
                told = bool(given)  # of this solver, not of the one before
                given.clear()
                if pairs is None:
                    count[solver] += 1
                    continue
                scale = residual_scale(exact[:rank])
                error = float(((pairs.values - exact[:rank]).abs() / scale).max())
                # A tolerance of 1e-10 (1e-5), and ten more where a copy was looked for; rounding.
                limit = 20 * (1e-10 if dtype == torch.float64 else 1e-5)
                limit += 100 * eps * norm / float(scale.min())
                found = audit(matrix.matmat, Space(len(values)), pairs, seed)
                good = (
                    error <= limit
                    and found["orthogonality"] <= found["orthogonality_limit"]
                    and found["residual_rms"] <= found["residual_limit"]
                )
                name = f"{solver} {str(dtype).removeprefix('torch.')}"
                count[name] += 1
                warned["warned"] += told
                if not told:
                    worst[name] = max(worst[name], error)
                if not good and not told:
                    wrong.append((seed, name, rank, error, limit, found))
    with capsys.disabled():
        figures = ", ".join(f"{name} {count[name]} ({worst[name]:.1e})" for name in sorted(count))
        print(
            f"\nspectra: {sum(count.values())} solved (worst error of an eigenvalue, relative to "
            f"max(λ, 1)): {figures}; {warned['warned']} warned of; wrong and silent: {len(wrong)}"
        )
    assert not wrong, wrong[:3]


def test_random_networks(seconds_left, first_seed, capsys):
    problems, fits, outside, wrong, worst = 0, 0, [], [], Counter()
    seed = first_seed
    while seconds_left() > 0:
        seed += 1
        draw = random.Random(seed)
        problem = Problem.of(Shape.drawn(seed))
        size = problem.oracle.size
        estimator = draw.choice(["opg", "ggn", "sandwich", "hessian"])
        exact = problem.oracle.std(estimator, problem.unseen)
        problems += 1
        for solver in ("dense", "krylov", "arpack", "incremental"):
            if solver == "incremental" and estimator == "hessian":
                continue
            rank = draw.choice([size, draw.randint(1, size)])
            rank = min(rank, size - 1) if solver == "arpack" else rank
            if rank < 1:
                continue
            fit = problem.fit(estimator, rank, solver=solver, seed=seed)
            out = fit.predict(problem.unseen, moderation=None)
            fits += 1
            for name, pairs in fit.spectra.items():
                known = torch.linalg.eigvalsh(problem.oracle.matrix(name)).flip(0)[:rank]
                error = float(((pairs.values - known).abs() / residual_scale(known)).max())
                if pairs.slack == 0:
                    worst["eigenvalue"] = max(worst["eigenvalue"], error)
                    if error > 1e-8:
                        wrong.append((seed, estimator, solver, rank, name, error))
            slack = ROUNDING * exact + 1e-13
            if rank == size:
                error = float(((out.std - exact).abs() / (exact + 1e-12)).max())
                worst["std"] = max(worst["std"], error)
                if bool(((out.std - exact).abs() > slack).any()):
                    wrong.append((seed, estimator, solver, rank, "std", error))
            # The premise of a Hessian's interval, no eigenvalue below λ, does not hold of these.
            known = all(pairs.exact_least is not None for pairs in fit.spectra.values())
            if estimator in ("opg", "ggn") or (estimator == "sandwich" and known):
                inside = (out.std_low - slack <= exact) & (exact <= out.std_high + slack)
                inside &= (out.std - exact).abs() <= out.std_error + slack
                if not bool(inside.all()):
                    outside.append((seed, estimator, solver, rank))
    with capsys.disabled():
        print(
            f"\nnetworks: {problems} problems, {fits} fits; worst relative error of an eigenvalue "
            f"{worst['eigenvalue']:.1e}, of a std at full rank {worst['std']:.1e}; wrong "
            f"{len(wrong)}; intervals without the exact value {len(outside)}"
        )
    assert not wrong, wrong[:3]
    assert not outside, outside[:3]


def test_laws(seconds_left, first_seed, capsys):
    count, broken = Counter(), []
    seed = first_seed
    while seconds_left() > 0:
        seed += 1
        law = random.Random(seed).choice(LAWS)
        count[law.__name__] += 1
        try:
            law(Problem.of(Shape.drawn(seed)))
        except Exception as error:
            broken.append((seed, law.__name__, repr(error)[:300]))
    with capsys.disabled():
        print(
            f"\nlaws: {sum(count.values())} random networks against {len(count)} laws; broken: "
            f"{len(broken)}"
        )
    assert not broken, broken[:3]


def test_small_l2_in_float32(seconds_left, first_seed, capsys):
    """No interval misses, at λ₁/λ from 10 to 10⁷."""
    seed, count, worst, missed = first_seed, 0, -1.0, []
    while seconds_left() > 0:
        seed += 1
        case = Case(seed)
        found = case.outside(case.predict(case.fit()))
        count, worst = count + 1, max(worst, found)
        if not found <= FLOAT32:
            missed.append((seed, case.estimator, case.solver, found))
    with capsys.disabled():
        print(f"\nsmall l2: {count} fits, {len(missed)} missed; the worst by {worst:.1e} of itself")
    assert count
    assert not missed, missed[:3]
