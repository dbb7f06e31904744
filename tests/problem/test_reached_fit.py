"""Fits of networks with silent units: the same as without any shortcut."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import deltabars
from tests.oracles import Oracle
from tests.silence import labels, randn, seeded

# The networks are not trained, and their silent units are far from where training takes them.
pytestmark = pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")

COUNT, STRONG = 20, 0.6  # an l2 that makes the Hessian positive definite
ESTIMATORS = ("opg", "hessian", "ggn", "sandwich")


def build():
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].bias[:4] = -6.0  # inputs up to 2 do not make up for it: weights are up to 0.41
        model[2].bias[5:] = -6.0
    return model


@cache
def setting():
    model, inputs = seeded(build), randn(COUNT, 6).clamp(-2, 2)
    inputs[:, 2] = 0.0
    return model, inputs, labels(COUNT)


@cache
def unseen():
    """Some inputs like those of training, and some that switch silent units on."""
    inputs = randn(6, 6, seed=1)
    inputs[3:] *= 20
    return inputs


@cache
def oracle(l2=STRONG):
    return Oracle(*setting(), l2)


def fitted(estimator, rank, l2=STRONG, **options):
    model, inputs, targets = setting()
    options = {"l2": l2, "progress": False, "solver": "krylov", **options}
    return deltabars.fit(model, (inputs, targets), estimator=estimator, rank=rank, **options)


def num_reached(l2=STRONG):
    model, inputs, targets = setting()
    return len(deltabars.Problem(model, (inputs, targets), l2=l2).reached)


def test_the_setting():
    model, inputs, _ = setting()
    before = model[0](inputs)
    assert bool((before[:, :4] < 0).all())
    assert bool((model[0](unseen()[3:])[:, :4] > 0).any())
    assert float(torch.linalg.eigvalsh(oracle().hessian())[0]) > 0


def check_pairs(pairs, matrix):
    """Orthonormal eigenvectors of the largest eigenvalues of a dense matrix."""
    exact = torch.linalg.eigvalsh(matrix).flip(0)[: len(pairs)]
    torch.testing.assert_close(pairs.values, exact, rtol=0, atol=1e-8)
    eye = torch.eye(len(pairs), dtype=torch.float64)
    torch.testing.assert_close(pairs.vectors @ pairs.vectors.T, eye, rtol=0, atol=1e-10)
    rest = pairs.vectors @ matrix - pairs.values[:, None] * pairs.vectors
    assert float(rest.norm(dim=1).max()) < 1e-8  # the solver's tolerance is 1e-10


# 9: fewer than are above λ. 50: more than those, so that unit vectors come in; fewer than P'.
# 100: more than P'.
@pytest.mark.parametrize("rank", [9, 50, 100])
@pytest.mark.parametrize("solver", ["krylov", "incremental"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_solvers_agree_with_the_dense_one(estimator, solver, rank):
    if solver == "incremental" and estimator == "hessian":
        pytest.skip("incremental SVD is for rows")
    assert 50 < num_reached() < 100
    fit, exact = fitted(estimator, rank, solver=solver), fitted(estimator, rank, solver="dense")
    for name, pairs in fit.spectra.items():
        check_pairs(pairs, oracle().matrix(name))
        above = int((pairs.values > STRONG + 1e-9).sum())
        assert (above < rank) == (rank > 9)
        a, b = pairs.vectors[:above], exact.spectra[name].vectors[:above]
        torch.testing.assert_close(a.T @ a, b.T @ b, rtol=0, atol=1e-6)  # residual over gap
    if rank == 9 or estimator in ("opg", "ggn"):  # else it depends on which vectors of λ there are
        out, expected = fit.predict(unseen()), exact.predict(unseen())
        torch.testing.assert_close(out.std, expected.std, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("l2", [0.05, STRONG])
@pytest.mark.parametrize("smallest", [1, 4, 40])
def test_the_lower_end_of_the_spectrum(smallest, l2):
    """Negative eigenvalues of a Hessian, those below λ, and λ itself of what is not reached."""
    fit = fitted("hessian", 9, l2=l2, smallest=smallest)
    pairs, exact = fit.spectra["hessian"], torch.linalg.eigvalsh(oracle(l2).hessian())
    check_pairs(pairs, oracle(l2).hessian())
    torch.testing.assert_close(pairs.smallest[:smallest], exact[:smallest], rtol=0, atol=1e-8)
    below = max(0.0, l2 - float(exact[0]))
    assert fit.diagnostics["hessian"]["tail_below_l2"] == pytest.approx(below, abs=1e-8)


@pytest.mark.parametrize("space", ["probability", "logit"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_error_bars_where_silent_units_are_switched_on(estimator, space):
    """Exact at full rank, and inside the bounds at any other."""
    exact = oracle().std(estimator, unseen(), space)
    whole = fitted(estimator, oracle().size)
    # Eigenvalues of the Hessian are below λ here, which its bounds do not count with; those of a
    # sandwich do, where the whole spectrum is known.
    ranks = () if estimator == "hessian" else (1, 9, 50, 100)
    for rank in (*ranks, oracle().size):
        fit = fitted(estimator, rank) if estimator in ("opg", "ggn") else whole
        out = fit.predict(unseen(), rank=rank, space=space)
        slack = 1e-8 * (1 + float(exact.max()))
        assert bool((out.std_low - slack <= exact).all())
        assert bool((exact <= out.std_high + slack).all())
        assert bool(((out.std - exact).abs() <= out.std_error + slack).all())
    torch.testing.assert_close(out.std, exact, rtol=1e-8, atol=1e-8)
    assert float(out.std_error.max()) < 1e-8


@pytest.mark.parametrize("estimator", ["opg", "sandwich"])
def test_saved_and_loaded(estimator, tmp_path):
    fit = fitted(estimator, 50)
    fit.save(tmp_path / "fit.deltabars")
    again = deltabars.load(tmp_path / "fit.deltabars", setting()[0])
    for name, pairs in fit.spectra.items():
        assert torch.equal(again.spectra[name].vectors, pairs.vectors)
    assert torch.equal(again.predict(unseen()).std, fit.predict(unseen()).std)


def test_float32_and_a_small_budget():
    exact = fitted("opg", 9)
    for options in ({"dtype": torch.float32}, {"memory_budget": 1}, {"batch_size": 3}):
        values = fitted("opg", 9, **options).spectra["opg"].values
        torch.testing.assert_close(values, exact.spectra["opg"].values, rtol=1e-5, atol=0)


def test_how_many_parameters_are_reached_is_told():
    model, inputs, targets = setting()
    first = model[:2](inputs).any(0).sum()
    second = model[:4](inputs).any(0).sum()
    expected = int(first * (5 + 1) + second * (first + 1) + 3 * (second + 1))  # five inputs count
    assert fitted("opg", 5).diagnostics["parameters_reached"] == num_reached() == expected
    smooth = nn.Sequential(model[0], nn.Tanh(), model[2])
    whole = deltabars.fit(smooth, (inputs + 3, targets), l2=STRONG, rank=5, progress=False)
    assert whole.diagnostics["parameters_reached"] == whole.num_parameters
