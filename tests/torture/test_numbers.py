"""Random problems, each solved by every solver and compared with dense float64."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

import torch

from deltabars.eigen import arpack, incremental_svd
from deltabars.eigen.krylov import block_krylov, lanczos
from deltabars.eigen.pairs import residual_scale
from deltabars.errors import ConvergenceWarning, DeltaBarsError
from tests.random_problems import Problem, Shape
from tests.spectra import matrix_with

ROUNDING = 1e-8  # relative: inverses of condition 1e6, in float64


def random_spectrum(draw: random.Random) -> torch.Tensor:
    """Some groups of eigenvalues: spread out, in decades, in clusters, or repeated; of any sign."""
    values: list[float] = []
    for _ in range(draw.randint(1, 5)):
        count, centre = draw.randint(1, 30), draw.choice([1, 1, 1, -1]) * 10 ** draw.uniform(-3, 2)
        width = draw.choice([0.0, 1e-12, 1e-7, 1e-3, 0.5])
        values += [centre * (1 + width * draw.random()) for _ in range(count)]
    return torch.tensor(values, dtype=torch.float64)


def solve_all(values, matrix, draw, seed):
    """Yield (solver, rank, pairs) of one matrix, with room for restarts or without."""
    size = len(values)
    rank, block = draw.randint(1, size), draw.randint(1, 6)
    room = draw.choice([None, rank + 2 * block, rank + 2 * block + draw.randint(0, 20)])
    options = {"seed": seed, "max_vectors": room}
    yield "lanczos", rank, lanczos(matrix, rank, **options)
    yield "block_krylov", rank, block_krylov(matrix, rank, block_size=block, **options)
    if rank < size:
        with suppress(DeltaBarsError):  # it fails on some, and says so
            yield "arpack", rank, arpack(matrix, rank, seed=seed)
    if float(values.min()) >= 0:
        yield "incremental", size, incremental_svd(matrix, size)


def test_prescribed_spectra(seeds):
    worst, wrong, count = Counter(), [], 0
    for seed in seeds:
        draw = random.Random(seed)
        values = random_spectrum(draw)
        dtype = draw.choice([torch.float64, torch.float64, torch.float32])
        rows = matrix_with(values, seed).to(dtype)
        matrix = SimpleNamespace(
            shape=tuple(rows.shape), dtype=dtype, device=rows.device, matmat=rows.__rmatmul__
        )
        exact = torch.linalg.eigvalsh(rows.double()).flip(0)
        eps, norm = torch.finfo(dtype).eps, float(exact.abs().max())
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always", ConvergenceWarning)
            for solver, rank, pairs in solve_all(values, matrix, draw, seed):
                is_warned = bool(given)  # of this solver, not of the one before
                given.clear()
                scale = residual_scale(exact[:rank])
                error = float(((pairs.values - exact[:rank]).abs() / scale).max())
                # A tolerance of 1e-10 (1e-5), and ten more where a copy was looked for; rounding.
                limit = 20 * (1e-10 if dtype == torch.float64 else 1e-5)
                limit += 100 * eps * norm / float(scale.min())
                count += 1
                if not is_warned:
                    worst[solver, dtype] = max(worst[solver, dtype], error)
                    vectors = pairs.vectors.double()
                    gram = vectors @ vectors.T - torch.eye(len(vectors)).double()
                    if not error <= limit or float(gram.abs().max()) > 1e-3:
                        wrong.append((seed, solver, dtype, rank, error, limit))
    print(f"\nspectra: {count}; worst error of an eigenvalue, relative to max(λ, 1): {dict(worst)}")
    assert not wrong, wrong[:3]


def test_random_networks(seeds):
    fits, wrong = 0, []
    for seed in seeds:
        draw, problem = random.Random(seed), Problem.of(Shape.drawn(seed))
        size, estimator = problem.oracle.size, draw.choice(["opg", "ggn", "sandwich", "hessian"])
        exact = problem.oracle.std(estimator, problem.unseen)
        slack = ROUNDING * exact + 1e-13
        for solver in ("dense", "krylov", "arpack", "incremental"):
            rank = draw.choice([size, draw.randint(1, size)])
            rank = min(rank, size - 1) if solver == "arpack" else rank
            if rank < 1 or (solver == "incremental" and estimator == "hessian"):
                continue
            fit = problem.fit(estimator, rank, solver=solver, seed=seed)
            out = fit.predict(problem.unseen, moderation=None)
            fits += 1
            if rank == size and bool(((out.std - exact).abs() > slack).any()):
                wrong.append((seed, estimator, solver, rank, "std"))
            # The premise of a Hessian's interval, no eigenvalue below λ, does not hold of these.
            known = all(pairs.exact_least is not None for pairs in fit.spectra.values())
            if estimator in ("opg", "ggn") or (estimator == "sandwich" and known):
                inside = (out.std_low - slack <= exact) & (exact <= out.std_high + slack)
                inside &= (out.std - exact).abs() <= out.std_error + slack
                if not bool(inside.all()):
                    wrong.append((seed, estimator, solver, rank, "interval"))
    print(f"\nnetworks: {fits} fits, {len(wrong)} wrong")
    assert not wrong, wrong[:3]
