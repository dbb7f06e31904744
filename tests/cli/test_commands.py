"""fit, predict, rank, spectrum and report beside the Python interface, to the last digit."""

from __future__ import annotations

import csv
import json
import shutil
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import deltabars
from deltabars.cli.entry import main
from deltabars.cli.runs import Run
from deltabars.fitting.checking import as_dict, compare_with_replicas
from deltabars.integrations.convergence import train_to_convergence
from deltabars.likelihoods.gaussian import Gaussian
from deltabars.prediction.ranking import ranked
from deltabars.report.page import save_report
from tests.scans import only_line
from tests.workshop import RANK, TEST, contents


@pytest.fixture
def run(workshop, tmp_path, monkeypatch):
    """A copy of the RUN, without predictions, in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(workshop.run, "run", ignore=shutil.ignore_patterns("predictions"))
    content = json.loads(Path("run/run.json").read_text())
    kept = {k: v for k, v in content.items() if k not in ("predictions", "latest")}
    Path("run/run.json").write_text(json.dumps(kept))
    return "run"


def ended(*arguments: object) -> int:
    """The exit code of a command, of wrong usage too."""
    try:
        return main([*map(str, arguments)])
    except SystemExit as end:
        return end.code


def result(capsys, *arguments: object) -> dict:
    """The JSON object that a command prints."""
    assert main([*map(str, arguments), "--json", "--quiet"]) == 0
    return json.loads(capsys.readouterr().out)


def said(capsys, *arguments: object) -> str:
    """What a command prints."""
    assert main([*map(str, arguments), "--quiet"]) == 0
    return capsys.readouterr().out


def execute(capsys, *arguments: object) -> None:
    """Run the Python that a command prints."""
    assert main([*map(str, arguments), "--print-python"]) == 0
    exec(compile(capsys.readouterr().out, "printed", "exec"), {"__name__": "__main__"})
    capsys.readouterr()


def same_pairs(ours, theirs) -> bool:
    return torch.equal(ours.values, theirs.values) and torch.equal(ours.vectors, theirs.vectors)


class TestFit:
    def test_the_run_has_the_fit_of_the_python_interface(self, workshop):
        found, expected = Run.open(workshop.run).load_fit(), workshop.fit()
        assert same_pairs(found.spectra["opg"], expected.spectra["opg"])
        about = json.loads((workshop.run / "run.json").read_text())
        assert about["classes"] == [f"digit {k}" for k in range(10)]
        assert about["manifest"] == found.diagnostics["manifest"]

    def test_options_and_a_config_file_reach_the_fit(self, workshop, tmp_path, capsys):
        config = tmp_path / "fit.toml"
        config.write_text(
            'rank = 7\nestimator = "ggn"\nmemory_budget = "2GB"\n[predict]\nestimator = "hessian"\n'
            '[fit]\nsolver = "dense"\nparams = ["3.*"]\n[fit.l2]\n"*" = 0.01\n"*.bias" = 0.001\n'
        )
        options = list(workshop.options)
        del options[options.index("--l2") : options.index("--device")]
        more = ("--config", config, "--rank", 5, "--dtype", "float64", "--out", tmp_path / "run")
        found = result(capsys, "fit", *options, *more)
        fit = workshop.fit(
            estimator="ggn", rank=5, params=["3.*"], solver="dense",
            dtype=torch.float64, memory_budget=2 * 10**9, l2={"*": 0.01, "*.bias": 0.001},
        )  # fmt: skip
        assert found["l2"] == {"*": 0.01, "*.bias": 0.001}
        assert found["parameters"] == fit.num_parameters == 70
        assert found["spectra"]["ggn"]["last"] == float(fit.spectra["ggn"].values[-1])
        assert found["effective_parameters"] == fit.effective_parameters

    def test_an_existing_run_is_replaced_only_when_asked(self, workshop, run, capsys):
        result(capsys, "predict", run, "--data", workshop.folder / "flat")
        again, before = ("fit", *workshop.options, "--out", run, "--rank", 3), contents(Path())
        assert ended(*again) == 1
        assert "--overwrite" in capsys.readouterr().err
        assert contents(Path()) == before
        assert result(capsys, *again, "--overwrite")["rank"] == 3
        assert contents(Path()) == {"run", "run/fit.deltabars", "run/run.json"}

    def test_the_printed_python_makes_the_same_run(self, workshop, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        execute(capsys, "fit", *workshop.options, "--loss", "ce", "--out", "run")
        found = Run.open("run").load_fit().spectra["opg"]
        assert same_pairs(found, Run.open(workshop.run).load_fit().spectra["opg"])
        ours, theirs = (
            json.loads((p / "run.json").read_text()) for p in (Path("run"), workshop.run)
        )
        assert ours.pop("loss") == {"name": "ce"}
        assert ours == {name: value for name, value in theirs.items() if name in ours}


class TestLevel:
    """λ that the evidence finds, and how it is said."""

    @pytest.fixture
    def options(self, workshop):
        given = list(workshop.options)
        del given[given.index("--l2") : given.index("--device")]
        return given

    @pytest.mark.parametrize("asked", [(), ("--l2", "auto")])
    def test_it_is_that_of_the_python_interface(self, workshop, options, asked, tmp_path, capsys):
        known = (*options, *asked, "--rank", 40, "--out", tmp_path / "run")
        found = result(capsys, "fit", *known)
        fit = deltabars.fit(workshop.model, workshop.train, rank=40, progress=False)
        assert (found["estimator"], found["l2"]) == ("ggn", fit.l2)
        assert found["l2_by_evidence"] == fit.diagnostics["l2"]
        assert found["l2_by_evidence"]["how"] == "auto"
        known = fit.diagnostics["l2"]
        ends = f"{known['evidence_low']:.2g} to {known['evidence_high']:.2g}"
        assert f"λ = {fit.l2:.2g} by the evidence ({ends})\n" in said(
            capsys, "spectrum", tmp_path / "run"
        )

    def test_a_given_one_is_said_beside_it(self, workshop, options, tmp_path, capsys):
        more = ("--l2", "*=0.02", "3.*=0.01", "--rank", 5, "--estimator", "auto")
        text = said(capsys, "fit", *options, *more, "--out", tmp_path / "run")
        assert "DeltaFit: opg" in text
        assert "\n  factor of the λs = 1, given; by the evidence " in text
        text = said(capsys, "spectrum", workshop.run)
        assert "λ = 0.01, given; by the evidence " in text

    def test_the_printed_python_has_it(self, options, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        execute(capsys, "fit", *options, "--rank", 5, "--out", "a")
        execute(capsys, "fit", *options, "--rank", 5, "--l2", "auto", "--out", "b")
        fits = [Run.open(name).load_fit() for name in "ab"]
        assert fits[0].l2 == fits[1].l2 == fits[0].diagnostics["l2"]["evidence"]


LINE = """\
import torch

x = torch.linspace(-1, 1, 80)[:, None]
y = 2 * x + 0.3 * torch.randn(80, 1, generator=torch.Generator().manual_seed(0))
numbers, answers, few = (x, y), (x, (y > 0).float()), (x, (y[:, 0] > 0).long())


def line(outputs=1):
    model = torch.nn.Linear(1, outputs)
    torch.nn.init.constant_(model.bias, 0.1)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(2, -2, outputs)[:, None])
    return model
"""


@pytest.fixture
def lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line.py").write_text(LINE)
    given: dict = {}
    exec(LINE, given)
    return given


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
class TestLosses:
    """The losses of a training by options, beside torch's modules in Python."""

    CASES = (
        ("few", 2, ("--loss", "ce", "--label-smoothing", 0.1, "--class-weights", 1, 3),
         nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]), label_smoothing=0.1)),
        ("answers", 1, ("--loss", "bce", "--pos-weight", 2),
         nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0]))),
        ("numbers", 1, ("--likelihood", "gaussian", "--noise", 0.7), Gaussian(0.7)),
    )  # fmt: skip

    @pytest.mark.parametrize(("data", "outputs", "options", "likelihood"), CASES)
    def test_it_is_the_fit_of_the_python_interface(
        self, lines, capsys, data, outputs, options, likelihood
    ):
        arguments = [
            "fit", "--model", "line.py:line", "--model-args", f'{{"outputs": {outputs}}}',
            "--untrained", "--data", f"line.py:{data}", "--l2", 0.01, "--device", "cpu", *options,
        ]  # fmt: skip
        found = result(capsys, *arguments, "--out", "run")
        fit = deltabars.fit(
            lines["line"](outputs), lines[data], l2=0.01, likelihood=likelihood, progress=False
        )
        run = Run.open("run")
        again = run.load_fit()
        assert (again.likelihood, again.l2) == (fit.likelihood, fit.l2)
        assert torch.equal(again.spectra["opg"].values, fit.spectra["opg"].values)
        assert run.about["loss"]["name"] == options[1]
        assert found["noise"] == fit.noise
        assert result(capsys, "predict", "run", "--data", f"line.py:{data}")["inputs"] == 80

    def test_refused(self, lines, capsys):
        given = ["--model", "line.py:line", "--untrained", "--l2", "0.1", "--device", "cpu"]
        given += ["--data", "line.py:numbers", "--out", "run", "--quiet"]
        for options, code, line in (
            ("--loss ce --noise 1", 1, "noise: expected the loss mse with it, got ce"),
            ("--label-smoothing 2", 1, "--label-smoothing: expected a number from 0 to 1"),
            ("--noise loud", 2, "--noise: expected a number or estimate, got 'loud'"),
            ("--loss mse --likelihood gaussian", 2, "expected no --loss with it"),
            ("", 1, "a regression? Then use --loss mse."),
        ):
            assert ended("fit", *given, *options.split()) == code
            assert line in only_line(capsys)


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
class TestWeights:
    """A fit of the initialisation happens only where that was said."""

    NET = """\
import deltabars, torch

plain = lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
marked = deltabars.trained(lambda: plain())
made = deltabars.trained(plain())
"""

    @pytest.fixture
    def options(self, workshop, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "own.py").write_text(self.NET)
        return [*workshop.options[4:], "--rank", "3", "--out", "run", "--quiet"]

    def test_without_weights_it_is_wrong_usage(self, options, workshop, capsys):
        assert ended("fit", "--model", "own.py:plain", *options) == 2
        line = only_line(capsys)
        assert "expected the trained weights of own.py:plain, got none" in line
        assert all(way in line for way in ("--weights FILE", "@deltabars.trained", "--untrained"))
        both = ("--weights", workshop.folder / "net.pt", "--untrained")
        assert ended("fit", "--model", "own.py:plain", *both, *options) == 2
        assert "--untrained: expected no --weights with it" in only_line(capsys)
        assert not Path("run").exists()

    def test_marked_and_untrained_weights_are_found_again(self, options, workshop):
        for name in ("marked", "made"):
            assert ended("fit", "--model", f"own.py:{name}", *options, "--overwrite") == 0
        assert ended("fit", "--model", "own.py:plain", "--untrained", *options, "--overwrite") == 0
        torch.rand(1)
        assert ended("predict", "run", "--data", workshop.folder / "test", "--quiet") == 0


class TestPredict:
    def test_the_table_is_that_of_the_python_interface(self, workshop, run, capsys):
        found = result(capsys, "predict", run, "--data", workshop.folder / "test", "--out", "t.csv")
        prediction = workshop.fit().predict(workshop.test[0])
        with open("t.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == TEST == found["inputs"]
        for column, values in (
            ("score", prediction.score),
            ("mutual_information", prediction.mutual_information),
            ("probability", prediction.mean.amax(1)),
            ("mean_digit 3", prediction.mean[:, 3]),
            ("std_error_digit 0", prediction.std_error[:, 0]),
        ):
            written = np.array([row[column] for row in rows], dtype=np.float32)
            assert np.array_equal(written, values.numpy()), column
        assert [int(row["label"]) for row in rows] == prediction.label.tolist()
        assert [int(row["target"]) for row in rows] == workshop.test[1].tolist()
        assert rows[0]["input"].startswith("digit 0/")
        assert rows[0]["target_name"] == "digit 0"
        right = prediction.label == workshop.test[1]
        assert found["accuracy"] == float(right.double().mean())
        mean = float(prediction.score[~right].double().mean())
        assert found["mean_score_wrong"] == pytest.approx(mean, rel=1e-6)

    def test_some_classes_and_pairs_and_the_printed_python(self, workshop, run, capsys):
        options = ("--classes", "top2", "--rank", 9, "--low-rank")
        arguments = ("predict", run, "--data", workshop.folder / "test", *options)
        result(capsys, *arguments, "--out", "top.jsonl")
        rows = [json.loads(line) for line in Path("top.jsonl").read_text().splitlines()]
        expected = workshop.fit().predict(workshop.test[0], classes="top2", rank=9, full_rank=False)
        assert [row["score"] for row in rows] == pytest.approx(expected.score.tolist(), rel=1e-7)
        assert rows[0]["class_1"] == f"digit {int(expected.classes[0, 1])}"
        assert "mean_2" not in rows[0]
        execute(capsys, *arguments, "--out", "printed.jsonl")
        assert Path("top.jsonl").read_text() == Path("printed.jsonl").read_text()

    @pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")  # it is not trained
    def test_many_classes_and_a_loader_of_ones_own(self, tmp_path, monkeypatch, capsys):
        """Of more than a hundred classes the five most probable ones."""
        monkeypatch.chdir(tmp_path)
        Path("many.py").write_text(
            "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n\n"
            "pair, make = (torch.rand(60, 4), torch.arange(60)), lambda: torch.nn.Linear(4, 120)\n"
            "part = TensorDataset(pair[0][:30], pair[1][:30])\n"
            "loader = lambda batch: DataLoader(part, batch_size=batch)\n"
        )
        options = ("--model", "many.py:make", "--untrained", "--data", "many.py:pair", "--l2", 1)
        result(capsys, "fit", *options, "--rank", 5, "--device", "cpu", "--out", "run")
        predict = ("predict", "run", "--data", "many.py:loader", "--data-args", '{"batch": 7}')
        result(capsys, *predict, "--out", "a.jsonl")
        rows = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
        assert [row["target"] for row in rows] == list(range(30))
        found = Run.open("run")
        expected = found.load_fit().predict(found.load_data().data[0], classes="top5")
        assert [int(row["class_4"]) for row in rows] == expected.classes[:30, 4].tolist()
        assert "mean_5" not in rows[0]


class TestSpread:
    def test_predictions_ranks_and_the_printed_python(self, workshop, run, capsys):
        fit, data = workshop.fit(), ("--data", workshop.folder / "test")
        expected = fit.predict(workshop.test[0], spread="sampling")
        asked = ("predict", run, *data, "--spread", "sampling")
        assert result(capsys, *asked, "--out", "a.jsonl")["spread"] == "sampling"
        rows = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
        assert [row["score"] for row in rows] == pytest.approx(expected.score.tolist(), rel=1e-7)
        execute(capsys, *asked, "--out", "b.jsonl")
        assert Path("a.jsonl").read_text() == Path("b.jsonl").read_text()
        assert result(capsys, *asked, "--out", "many/")["spread"] == "sampling"

        def first(*options):
            return result(capsys, "rank", run, "--count", 1, *options)["rows"][0]["score"]

        posterior = fit.predict(workshop.test[0])
        assert first() == pytest.approx(float(expected.score.max()))  # what was predicted last
        assert "with spread sampling" in said(capsys, "rank", run)
        for given in (("--spread", "posterior"), data):
            assert first(*given) == pytest.approx(float(posterior.score.max()))
        kept = [path.name for path in Path("run/predictions").iterdir()]
        assert len(kept) == 2  # posterior is what is meant without a word

    def test_a_folder_of_another_spread_is_refused(self, workshop, run, capsys):
        line = ("predict", run, "--data", workshop.folder / "test", "--out", "many/")
        assert result(capsys, *line)["spread"] == "posterior"
        assert ended(*line, "--spread", "sampling", "--quiet") == 1
        assert "of another asked" in only_line(capsys)


RETRAIN = """\
import torch
from torch.utils.data import DataLoader
from deltabars.recipes.digits import train_to_convergence
from net import make

def retrain(sample):
    model = make()  # first: a DataLoader draws a random number
    (inputs, targets), = DataLoader(sample, batch_size=len(sample))
    assert inputs.shape == (200, 1, 8, 8)
    train_to_convergence(model, inputs, targets, 0.01, steps=15)
    return model

left = [1, 1]

def stops(sample):
    if not left:
        raise KeyboardInterrupt
    left.pop()
    return retrain(sample).state_dict()
"""


class TestCheck:
    @pytest.fixture
    def check(self, workshop, run):
        """The words of a check of the RUN; the function that retrains is in train.py."""
        shutil.copy(workshop.folder / "net.py", "net.py")
        Path("train.py").write_text(RETRAIN)
        return ("check", run, "--inputs", workshop.folder / "test")

    @pytest.fixture
    def files(self, workshop):
        """Weights of three networks, two of them as a checkpoint has them."""
        generator = torch.Generator().manual_seed(1)
        states = []
        for number in range(3):
            state = {
                name: value + 0.05 * torch.randn(value.shape, generator=generator)
                for name, value in workshop.model.state_dict().items()
            }
            states.append(state)
            named = {f"module.{name}": value for name, value in state.items()}
            torch.save({"state_dict": named} if number else state, f"{number}.pt")
        return states

    def test_files_are_compared_as_in_python(self, workshop, check, files, capsys):
        names = ("--replicas", "0.pt", "1.pt", "2.pt")
        fit = workshop.fit()
        for spread in ("sampling", "posterior"):
            expected = compare_with_replicas(fit, files, workshop.test[0], spread=spread)
            found = result(capsys, *check, *names, "--spread", spread, "--out", "c.png")
            assert found == {**as_dict(expected), "inputs": TEST, "out": "c.png"}
            assert Path("c.png").read_bytes().startswith(b"\x89PNG")
        lines = said(capsys, *check, *names).splitlines()
        expected = compare_with_replicas(fit, files, workshop.test[0])
        assert lines[:2] == str(expected).splitlines()
        assert lines[2] == "  the scatter itself is known to about 50%"

    def test_it_retrains_and_is_resumed(self, workshop, check, capsys):
        """A run that is stopped and begun again ends with the bits of one that was not."""
        train = ("--train", "train.py:retrain", "--count", 3)
        whole = result(capsys, *check, *train, "--folder", "whole")
        assert ended(*check, *train[:1], "train.py:stops", *train[2:], "--quiet") == 1
        assert "interrupted" in only_line(capsys)
        kept = Path("run/check")
        assert {path.name for path in kept.iterdir()} == {
            "check.json", "replica-00.pt", "replica-01.pt"
        }  # fmt: skip
        assert main([*map(str, (*check, *train, "--json"))]) == 0
        out, err = capsys.readouterr()
        assert "3 networks in run/check, 2 of them from before" in err
        assert json.loads(out) == whole
        states = [torch.load(kept / f"replica-{number:02d}.pt") for number in range(3)]
        data = deltabars.resample(workshop.train, 2)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10))
        train_to_convergence(model, *data, 0.01, steps=15)
        for name, value in model.state_dict().items():
            assert torch.allclose(states[2][name], value, atol=1e-5), name
        expected = compare_with_replicas(workshop.fit(), states, workshop.test[0])
        assert whole["slope"] == pytest.approx(expected.agreement.slope, rel=1e-6)
        replicas = ("--replicas", *sorted(kept.glob("*.pt")))
        assert result(capsys, *check, *replicas) == whole
        assert ended(*check, *train, "--seed", 1, "--quiet") == 1
        assert "--folder: expected replicas of this network, data and seed" in only_line(capsys)

    def test_the_calibrated_run(self, workshop, run, check, files, capsys):
        said(capsys, "predict", run, "--data", workshop.folder / "test", "--out", "many/")
        names = ("--replicas", "0.pt", "1.pt", "2.pt")
        found = result(capsys, *check, *names, "--calibrate", "new")
        expected = workshop.fit().calibrate(files, workshop.test[0])
        assert found["calibration"]["sampling"] == vars(expected.calibration["sampling"])
        new = Run.open("new")
        assert (new.classes, new.data, new.model) == (
            (old := Run.open(run)).classes, old.data, old.model
        )  # fmt: skip
        assert new.load_fit().calibration == expected.calibration
        assert result(capsys, *check[:1], "new", *check[2:], *names)["slope"] == pytest.approx(1)
        summary = result(capsys, "spectrum", "new")
        assert summary["calibration"] == found["calibration"]
        test = ("--data", workshop.folder / "test")
        said(capsys, "predict", "new", *test, "--spread", "sampling", "--out", "a.jsonl")
        prediction = expected.predict(workshop.test[0], spread="sampling")
        rows = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
        scores = [row["score"] for row in rows]
        assert scores == pytest.approx(prediction.score.tolist(), rel=1e-6)
        # A folder that was begun with the fit as it was is not continued with the calibrated one.
        assert ended("predict", "new", *test, "--out", "many/", "--quiet") == 1
        assert "of another fit" in only_line(capsys)

    def test_tables_of_a_regression(self, lines, capsys):
        """Targets that are whole numbers reach the function as real ones."""
        Path("t.csv").write_text("x,y\n" + "".join(f"{k / 30},{k // 20}\n" for k in range(60)))
        Path("fit.py").write_text(
            "import torch\n\n"
            "def exact(sample):\n"
            "    inputs, targets = sample.tensors\n"
            "    assert targets.is_floating_point()\n"
            "    columns = torch.cat([inputs, torch.ones_like(inputs)], 1)\n"
            "    found = torch.linalg.lstsq(columns, targets[:, None]).solution[:, 0]\n"
            "    return {'weight': found[:1, None], 'bias': found[1:]}\n"
        )
        line = (
            "fit",
            "--model",
            "line.py:line",
            "--weights",
            "w.pt",
            "--loss",
            "mse",
            "--out",
            "r",
        )
        x, y = torch.arange(60)[:, None] / 30, (torch.arange(60) // 20).float()[:, None]
        columns = torch.cat([x, torch.ones_like(x)], 1)
        found = torch.linalg.lstsq(columns, y).solution[:, 0]
        torch.save({"weight": found[:1, None], "bias": found[1:]}, "w.pt")
        said(capsys, *line, "--data", "t.csv", "--target", "y", "--l2", 1e-4, "--device", "cpu")
        asked = ("check", "r", "--inputs", "t.csv", "--train", "fit.py:exact", "--count", 2)
        assert result(capsys, *asked)["inputs"] == 60


class TestRank:
    def test_rows_are_in_the_order_of_the_python_interface(self, workshop, run, capsys):
        test = ("rank", run, "--data", workshop.folder / "test", "--count", 4)
        prediction, targets = workshop.fit().predict(workshop.test[0]), workshop.test[1]
        for options, arguments, title in (
            ((), {}, "score"),
            (("--by", "target"), {"by": "target"}, "probability of target"),
            (("--by", "mutual_information"), {"by": "mutual_information"}, "mutual information"),
            (("--wrong", "--most-certain"), {"wrong": True, "most_certain": True}, "score"),
            (("--per-class", "--by", "entropy"), {"per_class": True, "by": "entropy"}, "entropy"),
        ):
            rows = result(capsys, *test, *options, "--out", "first.csv")["rows"]
            chosen = prediction[ranked(prediction, 4, targets=targets, **arguments)]
            assert [row["score"] for row in rows] == pytest.approx(chosen.score.tolist(), rel=1e-6)
            assert len(Path("first.csv").read_text().splitlines()) == len(rows) + 1
            lines = said(capsys, *test, *options).splitlines()
            assert f", by {arguments.get('by', 'score')}" in lines[0]
            assert title in lines[1]
            for line, score in zip(lines[2:], chosen.score.tolist(), strict=False):
                assert f" {score:.4f} (±" in line

    def test_a_look_at_other_data_does_not_change_what_reports_are_about(
        self, workshop, run, capsys
    ):
        def about(*arguments):
            return said(capsys, "report", run, "--out", "page.html", *arguments)

        test, train = (str(workshop.folder / name) for name in ("test", "train"))
        first = result(capsys, "rank", run, "--data", test)
        (kept,) = Path("run/predictions").iterdir()
        state = kept.stat().st_mtime_ns
        assert result(capsys, "rank", run, "--data", test) == first
        assert kept.stat().st_mtime_ns == state  # it was found again
        assert f"The page of 200 inputs of {train}, predicted {date.today()}" in about()
        result(capsys, "predict", run, "--data", test)
        result(capsys, "rank", run, "--data", train)
        assert f"The page of {TEST} inputs of {test}, predicted {date.today()}" in about()
        shown = said(capsys, "rank", run, "--rank", "7")
        assert f"{TEST} inputs of {test}, predicted {date.today()}" in shown
        assert " with rank 7, by score\n" in shown


class TestSpectrum:
    def test_values_figure_and_numbers(self, workshop, tmp_path, capsys):
        figure, values = tmp_path / "s.png", tmp_path / "v.csv"
        found = result(capsys, "spectrum", workshop.run, "--out", figure, "--values", values)
        fit = workshop.fit()
        pairs = fit.spectra["opg"]
        assert found["values"]["opg"] == pairs.values.tolist()
        rows = values.read_text().splitlines()
        assert rows[0] == "matrix,index,value,residual"
        assert [float(row.split(",")[2]) for row in rows[1:]] == pairs.values.tolist()
        assert figure.read_bytes().startswith(b"\x89PNG")
        text = said(capsys, "spectrum", workshop.run)
        assert f"eigenpairs K          {RANK}" in text
        assert "between {:.1f} and {:.1f}".format(*fit.effective_parameters_interval) in text


class TestReport:
    @pytest.fixture
    def run(self, run, workshop):
        shutil.copytree(workshop.folder / "test", "pictures")
        assert main(["predict", run, "--data", "pictures", "--quiet"]) == 0
        return run

    def test_it_is_the_page_of_the_python_interface(self, workshop, run, capsys):
        capsys.readouterr()
        asked = ("--out", "a.html", "--rows", 15, "--title", "Ours")
        assert result(capsys, "report", run, *asked) == {"out": "a.html", "inputs": TEST}
        found = Run.open(run)
        fit, (images, labels) = found.load_fit(progress=False), workshop.test
        files = sorted(Path("pictures").rglob("*.png"))
        names = [str(path.relative_to("pictures")) for path in files]
        save_report(
            "b.html", fit, images, targets=labels, prediction=fit.predict(images),
            classes=[f"digit {k}" for k in range(10)], names=names,
            pictures=lambda i: (images[i, 0] * 255).byte().numpy(), title="Ours", rows=15,
            data=found.latest().data.spec, progress=False,
        )  # fmt: skip
        assert Path("a.html").read_text() == Path("b.html").read_text()

    def test_a_kept_prediction_and_pictures_that_have_changed_since(self, run, capsys):
        said(capsys, "predict", run, "--data", "pictures", "--rank", 5)
        said(capsys, "report", run, "--out", "c.html")
        assert "K = 5" in Path("c.html").read_text()
        next(Path("pictures").rglob("*.png")).unlink()
        assert ended("report", run, "--out", "report.html", "--quiet") == 1
        assert "got it changed" in only_line(capsys)
