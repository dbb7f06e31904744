"""λ by name pattern: a change of coordinates, against dense matrices with diag(λᵢ)."""

from __future__ import annotations

import pytest
import torch

import deltabars
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.errors import BadValueError
from tests.conftest import cached_case
from tests.oracles import Oracle

ESTIMATORS = ("hessian", "opg", "sandwich", "ggn")
OPERATORS = {"hessian": HessianOperator, "opg": OPGOperator, "ggn": GGNOperator}
NETWORKS = ("dense", "batch_norm", "shared", "rectified")
RATIOS = {"*": 1.0, "*bias": 0.6, "*weight": 1.3}


def decays(case):
    """λ by pattern, and the same one by one, in the order of the parameters."""
    l2 = {pattern: ratio * case.l2 for pattern, ratio in RATIOS.items()}
    own = {
        name: torch.full_like(value, l2["*bias"] if name.endswith("bias") else l2["*weight"])
        for name, value in case.model.named_parameters()
    }
    return l2, torch.cat([value.detach().flatten() for value in own.values()])


def fitted(case, estimator="opg", **options):
    given = {"l2": decays(case)[0], "rank": case.oracle.size, "progress": False, **options}
    return deltabars.fit(case.model, case.data, estimator=estimator, **given)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("matrix", list(OPERATORS))
def test_matrices_are_those_of_the_scaled_parameters(name, matrix):
    case = cached_case(name, l2=0.1)
    l2, own = decays(case)
    problem = deltabars.Problem(case.model, case.data, l2=l2)
    oracle = Oracle(case.model, case.inputs, case.targets, own)
    scale = own.rsqrt()
    expected = scale[:, None] * oracle.matrix(matrix) * scale
    found = OPERATORS[matrix](problem).to_dense()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))
    torch.testing.assert_close(problem.gradient, oracle.gradient(), rtol=1e-10, atol=1e-12)
    penalty = 0.5 * (own * oracle.point.square()).sum()
    assert problem.penalty == pytest.approx(float(penalty), rel=1e-12)


@pytest.mark.parametrize("name", ["dense", "convolutional", "shared"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("space", ["probability", "logit"])
def test_whole_rank_is_exact_inversion(name, estimator, space):
    case = cached_case(name, l2=0.1)
    exact = Oracle(case.model, case.inputs, case.targets, decays(case)[1])
    out = fitted(case, estimator).predict(case.unseen, space=space, covariance=True)
    expected = exact.covariance(estimator, case.unseen, space)
    torch.testing.assert_close(out.covariance, expected, rtol=1e-8, atol=1e-12)


def test_the_last_pattern_that_matches_counts():
    case = cached_case("dense", l2=0.1)
    first = fitted(case, l2={"*": 0.1, "0.*": 0.2, "*.bias": 0.3}, rank=3)
    scales = first.network.scales
    assert {name: round(scale**-2, 12) for name, scale in scales.items()} == {
        "0.weight": 0.2, "0.bias": 0.3, "2.weight": 0.1, "2.bias": 0.3,
    }  # fmt: skip


def test_a_common_factor_is_free(tmp_path):
    case = cached_case("dense", l2=0.1)
    l2, own = decays(case)
    twice = {pattern: 2 * value for pattern, value in l2.items()}
    moved = fitted(case).with_l2(twice)
    exact = Oracle(case.model, case.inputs, case.targets, 2 * own)
    torch.testing.assert_close(
        moved.predict(case.unseen).std, exact.std("opg", case.unseen), rtol=1e-8, atol=0
    )
    assert moved.l2 == twice
    moved.save(tmp_path / "a.deltabars")
    again = deltabars.load(tmp_path / "a.deltabars", case.model)
    assert again.l2 == moved.l2
    assert torch.equal(again.predict(case.unseen).std, moved.predict(case.unseen).std)
    assert moved.level == pytest.approx(2.0)
    with pytest.raises(BadValueError, match="common factor, got factors from"):
        moved.with_l2({**twice, "*bias": 1.0})
    with pytest.raises(BadValueError, match="mapping from name patterns"):
        moved.with_l2(0.2)


def test_samples_have_the_covariance():
    case = cached_case("linear", l2=0.1)
    exact = Oracle(case.model, case.inputs, case.targets, decays(case)[1])
    drawn = fitted(case).sample(40_000, seed=1)
    expected = exact.parameter_covariance("opg")
    spread = expected.diagonal().sqrt()
    gap = (drawn.T.cov() - expected) / torch.outer(spread, spread)
    assert float(gap.abs().max()) < 0.03  # 6 of the 1/√40,000 that chance gives an entry


@pytest.mark.parametrize(
    ("l2", "told"),
    [
        ({"*": 0.1, "*.bias": 0.0}, "got 0 for '\\*.bias'. For parameters that were trained"),
        ({"*": 0.1, "*.bias": -1.0}, "finite Python number above zero"),
        ({"*": float("nan")}, "finite Python number above zero"),
        ({"0.*": 0.1}, "a λ for every parameter, got none for 2.weight, 2.bias"),
        ({"*": 0.1, "norm*": 0.1}, "'norm\\*', which matches none"),
        ({"*": 0.1, 3: 0.1}, "patterns that match a parameter, got 3"),
        ({}, "a λ for every parameter"),
        ("0.1", "mapping from name patterns"),
    ],
)
def test_refused(l2, told):
    case = cached_case("dense", l2=0.1)
    with pytest.raises(BadValueError, match=told):
        fitted(case, l2=l2)
