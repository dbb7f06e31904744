"""What error bars can be read as, and that predictions say so."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict

import pytest
import torch
from torch import nn

import deltabars
from deltabars import Prediction
from deltabars.errors import IntervalWarning, OptimumWarning
from deltabars.prediction.prediction import LEVELS, Judgement, impossible, saturated
from tests.networks import make_case, minimise
from tests.pages import digits


@pytest.fixture(scope="module")
def made():
    return digits()


@pytest.mark.parametrize(
    ("mean", "std", "average", "is_saturated"),
    [
        (0.5, 0.12, 0.5, False),  # one logit: 0 ± 0.5
        (0.9975, 0.0037, 0.9937, False),  # 6 ± 1.5: an average that nobody can tell from the mean
        (0.9933, 0.0266, 0.8889, True),  # 5 ± 4
        (1.0, 0.0, 0.73, True),
    ],
)
def test_marks_say_where_the_softmax_is_not_straight(mean, std, average, is_saturated):
    mean, std, average = (torch.tensor([[value]]) for value in (mean, std, average))
    assert bool(saturated(mean, std[:, 0], average)) == is_saturated
    assert not bool(impossible(mean, std))


def test_a_bar_above_what_a_probability_can_have_is_marked():
    mean = torch.tensor([[0.5, 0.5], [0.9, 0.1], [1.0, 0.0]])
    for std, is_marked in (([0.499, 0.299, 0.009], False), ([0.51, 0.31, 0.02], True)):
        marks = impossible(mean, torch.tensor(std)[:, None].expand(3, 2))
        assert marks.tolist() == [is_marked] * 3


def test_levels_follow_the_scatter(made):
    """The same network with ever less prior: fewer and fewer of its bars can be true."""
    for l2, level in ((0.1, "bars"), (1e-5, "meaningless")):
        out = made.fit.with_l2(l2).predict(made.images)
        share = float((out.saturated | out.impossible).double().mean())
        assert (share > 0.5) == (level == "meaningless")
        assert LEVELS.index(out.judgement.level) >= LEVELS.index(level)
    assert "larger λ" in out.judgement.remedy


def test_a_judgement_goes_where_its_prediction_goes(made):
    out = made.fit.with_l2(1e-5).predict(made.images)
    said = out.judgement
    assert said.level == "meaningless"
    for part in (out[:3], out[1], out.to("cpu")):
        assert part.judgement == said
    assert Prediction.concatenate([out[:100], out[100:]]).judgement == said
    other = made.fit.predict(made.images, rank=3)
    assert Prediction.concatenate([out, other]).judgement is None
    plain = made.prediction
    assert plain.judgement.level == "ranking only"
    fine = plain[~(plain.saturated | plain.impossible)]
    assert fine.judgement == plain.judgement
    assert Prediction.concatenate([fine, fine]).judgement.level == "bars"  # judged anew
    assert "judgement" not in out.numpy()
    assert Judgement.read(json.loads(json.dumps(asdict(said)))) == said
    for text in ("meaningless", "impossible", said.reason, said.remedy):
        assert text in repr(out)
    logits = made.fit.predict(made.images[:5], space="logit")
    assert logits.saturated is logits.impossible is None
    assert made.fit.predict(made.images[:5], classes="top2").saturated is None


def trained(steps, l2):
    """Logistic regression, `steps` of Newton's method towards its optimum."""
    torch.manual_seed(0)
    inputs = torch.randn(600, 5, dtype=torch.float64)
    targets = (inputs @ torch.randn(5, 3, dtype=torch.float64)).softmax(1).multinomial(1)[:, 0]
    model = nn.Linear(5, 3).double()
    minimise(model, lambda: nn.functional.cross_entropy(model(inputs), targets), l2, steps)
    return model, (inputs, targets)


def test_the_distance_from_the_optimum_is_in_error_bars():
    """Of a nearly quadratic cost: the Newton step, in units of each eigenvector's bar."""
    options = {"estimator": "ggn", "rank": 18, "progress": False}
    model, data = trained(60, 1e-2)
    fit = deltabars.fit(model, data, l2=1e-2, **options)
    assert fit.diagnostics["distance_from_optimum"] < 1e-2
    values, vectors = fit.spectra["ggn"].values, fit.spectra["ggn"].vectors
    # One bar along the first eigenvector, which the data determine.
    step = (vectors[0] / (600 * values[0]) ** 0.5).split([15, 3])
    with torch.no_grad():
        model.weight += step[0].view(3, 5)
        model.bias += step[1]
    weights = (values - 1e-2) / values
    expected = float((weights[0] / weights.sum()).sqrt())
    moved = deltabars.fit(model, data, l2=1e-2, **options)
    assert moved.diagnostics["distance_from_optimum"] == pytest.approx(expected, rel=0.05)
    # A start that is no better than chance, and one that has learned something.
    for steps, level in ((1, "meaningless"), (3, "ranking only")):
        far, data = trained(steps, 1e-2)
        with pytest.warns(OptimumWarning, match=r"by about \d+\.\d of their error bars"):
            judged = deltabars.fit(far, data, l2=1e-2, **options).predict(data[0][:5]).judgement
        assert judged.level == level
        assert "optimum" in judged.reason


def test_the_verdict_of_a_fit_counts_convergence_tail_and_lambda():
    """The same network before and after its training, with few pairs and all, and other λs."""
    case = make_case("dense", l2=0.05, seed=4)
    size, options = case.oracle.size, {"progress": False}
    converged = deltabars.fit(case.model, case.data, rank=size, **options)
    assert converged.diagnostics["gradient_to_noise"] < 2
    said = converged.predict(case.unseen, spread="sampling").judgement
    assert "by the evidence" in said.facts
    assert "0% of the variance beyond" in said.facts
    assert said.facts in str(said)
    early, many = trained(60, 1e-2)  # of 600 examples
    with torch.no_grad():
        early.weight.mul_(0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimumWarning)
        away = deltabars.fit(early, many, rank=18, **options)
    judged = away.predict(many[0][:9], spread="sampling").judgement
    assert judged.level != "bars"
    assert "times its sampling noise" in judged.reason
    assert "polish" in judged.remedy
    level = converged.diagnostics["l2"]["evidence"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = deltabars.fit(case.model, case.data, l2=1000 * level, rank=size, **options)
    reason = given.predict(case.unseen).judgement.reason
    assert f"λ = {1000 * level:.3g} was given" in reason


@pytest.mark.filterwarnings("default::deltabars.errors.IntervalWarning")
def test_intervals_wider_than_their_bars_are_warned_of_once():
    case = make_case("dense", l2=0.05, seed=4)
    fit = deltabars.fit(case.model, case.data, rank=2, progress=False)
    with pytest.warns(IntervalWarning, match="eigenpairs, where the bars are estimates"):
        out = fit.predict(case.unseen, spread="sampling")
    share = out.tail_share
    assert bool(((share >= 0) & (share <= 1)).all())
    assert float(share.max()) > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", IntervalWarning)
        fit.predict(case.unseen, spread="sampling")  # once
        whole = deltabars.fit(case.model, case.data, rank=case.oracle.size, progress=False)
        assert float(whole.predict(case.unseen, spread="sampling").tail_share.max()) == 0
