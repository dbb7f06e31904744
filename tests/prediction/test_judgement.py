"""What error bars can be read as, and that predictions say so."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

import deltabars
from deltabars import Prediction
from deltabars.errors import OptimumWarning
from deltabars.prediction.prediction import LEVELS, Judgement, impossible, judge, saturated
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
    mean = torch.tensor([[0.5, 0.5], [0.9, 0.1], [1.0, 0.0], [1.0, 1e-9]])
    below, above = torch.tensor([0.499, 0.299, 0.009, 0.009]), torch.tensor([0.51, 0.31, 0.02, 0.0])
    assert impossible(mean, below[:, None].expand(4, 2)).tolist() == [False] * 4
    assert impossible(mean, above[:, None].expand(4, 2)).tolist() == [True, True, True, False]


def test_levels_follow_the_scatter(made):
    """The same network with ever less prior: fewer and fewer of its bars can be true."""
    for l2, level in ((0.1, "bars"), (1e-5, "meaningless")):
        out = made.fit.with_l2(l2).predict(made.images)
        share = float((out.saturated | out.impossible).double().mean())
        assert (share > 0.5) == (level == "meaningless")
        assert LEVELS.index(out.judgement.level) >= LEVELS.index(level)
    assert "larger λ" in out.judgement.remedy
    # A score that is known to within itself at best says nothing.
    odd = replace(made.prediction, score_error=2 * made.prediction.score)
    judged = judge(odd.judgement.evidence, odd)
    assert judged.level == "meaningless"
    assert "K = 40" in judged.reason


def test_a_judgement_goes_where_its_prediction_goes(made):
    out = made.fit.with_l2(1e-5).predict(made.images)
    said = out.judgement
    assert said.level == "meaningless"
    for part in (out[:3], out[1], out.to("cpu"), replace(out, noise=None)):
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
    with pytest.raises((ValueError, KeyError)):
        Judgement.read({"level": "fine"})
    for text in (repr(out), out._repr_html_()):
        assert "meaningless" in text
        assert "impossible" in text
    assert said.reason in repr(out)
    assert said.remedy in repr(out)


def test_no_marks_where_the_mean_is_no_probability(made):
    logits = made.fit.predict(made.images[:5], space="logit")
    assert logits.saturated is logits.impossible is None
    assert made.fit.predict(made.images[:5], classes="top2").saturated is None


def trained(steps, l2):
    """Logistic regression, `steps` of Newton's method towards its optimum."""
    torch.manual_seed(0)
    inputs = torch.randn(600, 5, dtype=torch.float64)
    targets = (inputs @ torch.randn(5, 3, dtype=torch.float64)).softmax(1).multinomial(1)[:, 0]
    model = nn.Linear(5, 3).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=steps, tolerance_grad=1e-12)

    def cost():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss = loss + l2 / 2 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    optimizer.step(cost)
    return model, (inputs, targets)


def test_the_distance_from_the_optimum_is_in_error_bars():
    """Of a nearly quadratic cost: the Newton step, in units of each eigenvector's bar."""
    options = {"estimator": "ggn", "rank": 18, "progress": False}
    model, data = trained(60, 1e-2)
    fit = deltabars.fit(model, data, l2=1e-2, **options)
    assert fit.diagnostics["distance_from_optimum"] < 1e-2
    # Another λ moves nothing by a bar: there is no warning, though the gradient is all λω̂.
    assert deltabars.fit(model, data, l2=1e-3, **options).diagnostics["distance_from_optimum"] < 1
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


def test_the_last_layer_is_not_recommended_to_who_took_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    data = torch.randn(500, 4), torch.arange(500) % 3
    for params, recommended in ((None, True), (deltabars.last_layer(), False), ("2.bias", False)):
        with pytest.warns(OptimumWarning) as said:
            fit = deltabars.fit(model, data, l2=1e-5, rank=3, params=params, progress=False)
        assert ("params=last_layer()" in str(said[0].message)) == recommended
        remedy = fit.predict(data[0]).judgement.remedy
        assert ("those of the last layer" in remedy) == recommended
