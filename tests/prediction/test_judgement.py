"""What error bars can be read as, and that everything that shows a prediction says so."""

from __future__ import annotations

import json
import math
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import deltabars
from deltabars import Prediction
from deltabars.cli.entry import main
from deltabars.cli.runs import Kept, read_kept
from deltabars.cli.sources.data import NamedData
from deltabars.cli.tables import columns_of, plain_rows
from deltabars.errors import BadValueError, OptimumWarning, in_options, on_command_line, option
from deltabars.prediction.judgement import LEVELS, Evidence, impossible, judge
from deltabars.problem.parameters import last_layer
from tests.pages import digits

MODEL = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3))

def data():
    torch.manual_seed(1)
    return torch.randn(400, 4), torch.arange(400) % 3
"""


@pytest.fixture(scope="module")
def made():
    return digits()


def one_logit(logit, scatter):
    """A yes/no prediction whose logit has this mean and standard deviation, and the average p̄."""
    model = nn.Linear(1, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.0)
        model.bias.fill_(logit)
    # One example of vanishing weight: the bias has the variance 1/λ.
    inputs, targets = torch.zeros(1, 1).double(), torch.full((1, 1), float(logit > 0)).double()
    slope = math.exp(-abs(logit)) / (1 + math.exp(-abs(logit))) ** 2
    level = 1 / scatter**2 - (slope if slope < 1 / scatter**2 else 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimumWarning)
        fit = deltabars.fit(
            model, (inputs, targets), l2=level, estimator="ggn", likelihood="bernoulli",
            params=["bias"], rank=1, progress=False, allow_probabilities=True,
        )  # fmt: skip
    return fit.predict(inputs, samples=1 << 14)


@pytest.mark.parametrize(
    ("logit", "scatter", "marks"),
    [
        (0.0, 0.5, (False, False)),
        (0.0, 1.9, (False, False)),
        (6.0, 1.5, (False, False)),  # an average that nobody can tell from the mean
        (5.0, 4.0, (True, False)),  # 0.993 ± 0.03, and 0.89 on average
        (12.0, 20.0, (True, False)),
    ],
)
def test_marks_say_where_the_softmax_is_not_straight(logit, scatter, marks):
    out = one_logit(logit, scatter)
    p, std = float(out.mean), float(out.std)
    where = torch.linspace(-9, 9, 40_001, dtype=torch.float64)
    weight = torch.exp(-where.square() / 2)
    spread = (scatter**2 * where**2 * weight).sum() / weight.sum()  # of the quadrature: 1·scatter²
    assert float(spread) == pytest.approx(scatter**2, rel=1e-5)
    real = std / (p * (1 - p))  # the scatter of the logit, with the data's share
    average = float(((logit + real * where).sigmoid() * weight).sum() / weight.sum())
    assert float(out.moderated) == pytest.approx(average, abs=2e-3)
    expected = abs(average - p) > 3 * std and abs(average - p) > 0.01
    assert (bool(out.saturated), bool(out.impossible)) == marks
    assert bool(out.saturated) == expected


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


def test_a_judgement_goes_where_its_prediction_goes(made, tmp_path):
    out = made.fit.with_l2(1e-5).predict(made.images)
    said = out.judgement
    assert said.level == "meaningless"
    for part in (out[:3], out[1], out.to("cpu"), replace(out, noise=None)):
        assert part.judgement == said
    assert Prediction.concatenate([out[:100], out[100:]]).judgement == said
    plain = made.prediction
    assert plain.judgement.level == "ranking only"
    fine = plain[~(plain.saturated | plain.impossible)]
    assert fine.judgement == plain.judgement
    assert Prediction.concatenate([fine, fine]).judgement.level == "bars"  # judged anew
    assert "judgement" not in out.numpy()
    kept = Kept(out, tuple(made.names), None, NamedData("x"), {})
    arrays = kept.arrays()
    np.savez(tmp_path / "a.npz", **arrays)
    again = read_kept(tmp_path / "a.npz").prediction
    assert again.judgement == said
    assert torch.equal(again.saturated, out.saturated)
    old = {k: v for k, v in arrays.items() if k.split(".")[-1] not in ("saturated", "impossible")}
    old.pop("judgement")
    np.savez(tmp_path / "b.npz", **old)
    assert read_kept(tmp_path / "b.npz").prediction.judgement is None
    arrays["judgement"] = np.array(json.dumps({"level": "fine"}))
    np.savez(tmp_path / "c.npz", **arrays)
    with pytest.raises(deltabars.errors.CorruptFileError, match="altered"):
        read_kept(tmp_path / "c.npz")


def test_everything_that_shows_a_prediction_shows_it(made):
    out = made.fit.with_l2(1e-5).predict(made.images)
    said = out.judgement
    for text in (repr(out), str(out), out._repr_html_()):
        assert "meaningless" in text
        assert "impossible" in text
    assert said.reason in repr(out)
    assert said.remedy in repr(out)
    row = plain_rows(columns_of(out[:1], ["a"]))[0]
    assert row["saturated"] == bool(out.saturated[0])
    assert row["impossible"] == bool(out.impossible[0])
    assert {"saturated", "impossible"} <= set(out.to_pandas().columns)
    plain = made.prediction
    assert plain.judgement.lines[0] in repr(plain).splitlines()


def test_no_marks_where_the_mean_is_no_probability(made):
    logits = made.fit.predict(made.images[:5], space="logit")
    assert logits.saturated is None
    assert logits.impossible is None
    assert logits.judgement is not None
    some = made.fit.predict(made.images[:5], classes="top2")
    assert some.saturated is None
    assert some.impossible.shape == (5,)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    torch.manual_seed(0)
    torch.save(
        {
            "0.weight": torch.randn(8, 4),
            "0.bias": torch.zeros(8),
            "2.weight": torch.randn(3, 8),
            "2.bias": torch.zeros(3),
        },
        tmp_path / "w.pt",
    )

    def start(*arguments, code=0):
        with warnings.catch_warnings():
            warnings.simplefilter("always")  # as a process of its own has it
            assert main([str(argument) for argument in arguments]) == code
        return capsys.readouterr()

    return start


def fit_line(*more, out="run"):
    source = ("--model", "net.py:net", "--weights", "w.pt", "--data", "net.py:data")
    return ("fit", *source, "--out", out, "--quiet", *more)


def test_the_command_line_says_it_in_its_own_words(run):
    said = run(*fit_line("--l2", "1e-4", "--rank", "20")).err
    assert said.count("Expected weights near an optimum") == said.count("warning: ") == 1
    assert "--params last-layer" in said
    assert not re.search(r"params=|rank=|last_layer|\.py", said)
    last = ("--params", "last-layer", "--l2", "1e-4", "--rank", "9")
    assert "last-layer" not in run(*fit_line(*last, out="last")).err
    found = run("predict", "run", "--data", "net.py:data", "--quiet").out
    assert re.search("^(meaningless|ranking only): ", found, re.MULTILINE)
    listed = run("rank", "run", "--quiet").out
    assert re.search("^(meaningless|ranking only): ", listed, re.MULTILINE)
    assert "params=" not in found + listed
    told = json.loads(run("rank", "run", "--quiet", "--json").out)
    assert told["judgement"]["level"] in LEVELS[1:]
    assert {"saturated", "impossible"} <= set(told["rows"][0])
    summary = json.loads(run("predict", "run", "--data", "net.py:data", "--quiet", "--json").out)
    assert summary["judgement"]["level"] == told["judgement"]["level"]


def test_errors_name_options_as_the_command_line_has_them(run):
    said = run(*fit_line("--l2", "-1"), code=1).err
    assert "--l2: expected" in said
    said = run(*fit_line("--l2", "0.1", "--rank", "5", "--tolerance", "0.1"), code=1).err
    assert "--rank auto" in said
    assert "rank=" not in said


def test_the_language_is_that_of_the_caller_and_no_name_is_taken_for_an_option():
    assert option("rank", "auto") == "rank='auto'"
    assert option("params", last_layer()) == "params=last_layer()"
    with on_command_line({"rank", "params", "dtype", "memory_budget"}):
        assert option("rank", "auto") == "--rank auto"
        assert option("params", last_layer()) == "--params last-layer"
        assert option("dtype", torch.float64) == "--dtype float64"
        assert option("memory_budget=") == "--memory-budget"
        assert option("rank", None) == "no --rank"
        assert option("params", True) == "--params"
        assert option("moderation", "probit") == "moderation='probit'"  # it has no such option
        mine = "rank: expected a number, got 'rank=3: expected params=x'."
        assert in_options(mine) == f"--{mine}"
        assert in_options("rank/5.pt: expected a file") == "rank/5.pt: expected a file"
        with pytest.raises(BadValueError, match=r"got '--l2: params=x'"):
            raise BadValueError("l2: expected a number, got '--l2: params=x'.")
    assert option("rank", "auto") == "rank='auto'"


def test_foreign_warnings_are_plain_lines_that_come_once(run, tmp_path):
    text = MODEL.replace("def net():", "import warnings\ndef net():\n    warn()", 1)
    text += "\ndef warn():\n    for k in range(3):\n        warnings.warn('mind\\nthe gap')\n"
    (tmp_path / "net.py").write_text(text)
    said = run(*fit_line("--l2", "1", "--rank", "3")).err.splitlines()
    assert [line for line in said if "gap" in line] == ["deltabars: warning: mind the gap"]


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
        assert Evidence.of(fit, 3, "opg").last_layer != recommended
