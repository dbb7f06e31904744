"""What error bars can be read as, and that predictions say so."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

import deltabars
from deltabars import Prediction
from deltabars.errors import OptimumWarning
from deltabars.prediction.judgement import LEVELS, Judgement, impossible, judge, saturated
from tests.pages import digits


@pytest.fixture(scope="module")
def made():
    return digits()


def integral(center, deviation):
    """E[sigmoid(center + deviation·ε)], by 40,001 points."""
    where = torch.linspace(-9, 9, 40_001, dtype=torch.float64)
    weight = torch.exp(-where.square() / 2)
    return float(((center + deviation * where).sigmoid() * weight).sum() / weight.sum())


@pytest.mark.parametrize(
    ("logit", "scatter", "is_saturated"),
    [
        (0.0, 0.5, False),
        (0.0, 1.9, False),
        (6.0, 1.5, False),  # an average that nobody can tell from the mean
        (5.0, 4.0, True),  # 0.993 ± 0.03, and 0.89 on average
        (12.0, 20.0, True),
    ],
)
def test_marks_say_where_the_softmax_is_not_straight(logit, scatter, is_saturated):
    p = torch.tensor([[logit]], dtype=torch.float64).sigmoid()
    std, average = scatter * p * (1 - p), integral(logit, scatter)
    expected = abs(average - p) > 3 * std and abs(average - p) > 0.01
    found = saturated(p, std[:, 0], torch.full_like(p, average))
    assert bool(found) == bool(expected) == is_saturated
    assert not bool(impossible(p, std))


def test_a_bar_above_what_a_probability_can_have_is_marked():
    mean = torch.tensor([[0.5, 0.5], [0.9, 0.1], [1.0, 0.0], [1.0, 1e-9]])
    below, above = torch.tensor([0.499, 0.299, 0.009, 0.009]), torch.tensor([0.51, 0.31, 0.02, 0.0])
    assert impossible(mean, below[:, None].expand(4, 2)).tolist() == [False] * 4
    assert impossible(mean, above[:, None].expand(4, 2)).tolist() == [True, True, True, False]


def test_levels_follow_the_scatter(made):
    """The same network with ever less prior: fewer and fewer of its bars can be true."""
    found = []
    for l2 in (0.1, 1e-5):
        out = made.fit.with_l2(l2).predict(made.images)
        share = float((out.saturated | out.impossible).double().mean())
        expected = "meaningless" if share > 0.5 else "ranking only" if share > 0.05 else "bars"
        levels = LEVELS.index(out.judgement.level)
        assert levels >= LEVELS.index(expected)
        found.append((levels, share))
    (first, few), (last, many) = found
    assert few == 0
    assert many > 0.5
    assert first < last
    assert out.judgement.remedy
    assert "larger λ" in out.judgement.remedy
    # A score that is known to within itself at best says nothing.
    odd = replace(made.prediction, score_error=2 * made.prediction.score)
    assert judge(odd.judgement.evidence, odd).level == "meaningless"
    assert "K = 40" in judge(odd.judgement.evidence, odd).reason


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
    for text in (repr(out), str(out), out._repr_html_()):
        assert "meaningless" in text
        assert "impossible" in text
    assert said.reason in repr(out)
    assert said.remedy in repr(out)


def test_no_marks_where_the_mean_is_no_probability(made):
    logits = made.fit.predict(made.images[:5], space="logit")
    assert logits.saturated is None
    assert logits.impossible is None
    assert logits.judgement is not None
    some = made.fit.predict(made.images[:5], classes="top2")
    assert some.saturated is None
    assert some.impossible.shape == (5,)


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
    model, data = trained(60, 1e-2)
    fit = deltabars.fit(model, data, l2=1e-2, estimator="ggn", rank=18, progress=False)
    assert fit.diagnostics["distance_from_optimum"] < 1e-2
    values, vectors = fit.spectra["ggn"].values, fit.spectra["ggn"].vectors
    # One bar along the first eigenvector, which the data determine.
    step = (vectors[0] / (600 * values[0]) ** 0.5).split([15, 3])
    with torch.no_grad():
        model.weight += step[0].view(3, 5)
        model.bias += step[1]
    moved = deltabars.fit(model, data, l2=1e-2, estimator="ggn", rank=18, progress=False)
    weights = (values - 1e-2) / values
    expected = float((weights[0] / weights.sum()).sqrt())
    assert moved.diagnostics["distance_from_optimum"] == pytest.approx(expected, rel=0.05)


def test_the_optimum_is_warned_of_where_predictions_would_leave_their_bars():
    model, data = trained(60, 1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OptimumWarning)
        # Another λ than that of the training, which moves nothing by a bar: silent, though the
        # gradient of the cost is all λω̂.
        near = deltabars.fit(model, data, l2=1e-3, estimator="ggn", rank=18, progress=False)
        assert near.diagnostics["distance_from_optimum"] < 1
    # A start that is no better than chance, and one that has learned something.
    for steps, level in ((1, "meaningless"), (3, "ranking only")):
        far, data = trained(steps, 1e-2)
        with pytest.warns(OptimumWarning, match=r"by about \d+\.\d of their error bars") as said:
            fit = deltabars.fit(far, data, l2=1e-2, estimator="ggn", rank=18, progress=False)
        assert len(said) == 1
        out = fit.predict(data[0][:5])
        assert out.judgement.level == level
        assert "optimum" in out.judgement.reason


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
