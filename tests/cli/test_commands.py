"""fit, predict, rank and spectrum beside the Python interface, to the last digit."""

from __future__ import annotations

import csv
import json
import re
import shutil
from contextlib import redirect_stdout
from datetime import date
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import deltabars
from deltabars.cli.entry import main
from deltabars.cli.runs import Run
from deltabars.errors import DataError, DataWarning, MissingDependencyError, StorageError, printable
from deltabars.likelihoods.gaussian import Gaussian
from deltabars.prediction.prediction import LEVELS
from deltabars.prediction.ranking import ranked
from tests.scans import only_line
from tests.workshop import L2, RANK, TEST, contents

MANY = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

pair = torch.rand(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60)


def make():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 120)


def loader(batch):
    return DataLoader(TensorDataset(pair[0][:30], pair[1][:30]), batch_size=batch)
"""


@pytest.fixture
def own_run(workshop, tmp_path):
    """A copy of the RUN, without predictions."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("fit.deltabars", "run.json"):
        shutil.copy(workshop.run / name, run)
    return run


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


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """A function: what the printed Python of a command prints when it is run in `tmp_path`."""

    def execute(*arguments: object) -> str:
        monkeypatch.chdir(tmp_path)
        python, printed = StringIO(), StringIO()
        with redirect_stdout(python):
            assert main([*map(str, arguments), "--print-python"]) == 0
        with redirect_stdout(printed):
            exec(compile(python.getvalue(), "printed", "exec"), {"__name__": "__main__"})
        return printed.getvalue()

    return execute


class TestFit:
    def test_the_fit_is_that_of_the_python_interface(self, workshop):
        found = Run.open(workshop.run).load_fit()
        expected = workshop.fit()
        assert torch.equal(found.spectra["opg"].values, expected.spectra["opg"].values)
        assert torch.equal(found.spectra["opg"].vectors, expected.spectra["opg"].vectors)
        assert found.num_examples == len(workshop.train[0])

    def test_run_json_says_how_everything_is_named(self, workshop):
        about = json.loads((workshop.run / "run.json").read_text())
        assert about["model"]["weights"] == str(workshop.folder / "net.safetensors")
        assert about["data"]["gray"] is True
        assert about["classes"] == [f"digit {k}" for k in range(10)]
        assert about["manifest"] == Run.open(workshop.run).load_fit().diagnostics["manifest"]

    def test_options_reach_the_fit(self, workshop, tmp_path, capsys):
        options = [*workshop.options, "--estimator", "ggn", "--rank", "5", "--params", "last-layer"]
        options += ["--solver", "dense", "--dtype", "float64", "--memory-budget", "2GB"]
        options += ["--l2", "*=0.01", "*.bias=0.001"]
        found = result(capsys, "fit", *options, "--out", tmp_path / "run")
        fit = workshop.fit(
            estimator="ggn", rank=5, params=deltabars.last_layer(), solver="dense",
            dtype=torch.float64, memory_budget=2 * 10**9, l2={"*": 0.01, "*.bias": 0.001},
        )  # fmt: skip
        assert found["l2"] == {"*": 0.01, "*.bias": 0.001}
        assert found["parameters"] == fit.num_parameters == 70
        assert found["spectra"]["ggn"]["last"] == float(fit.spectra["ggn"].values[-1])
        assert found["effective_parameters"] == fit.effective_parameters

    def test_a_config_file_and_the_command_line_which_wins(self, workshop, tmp_path, capsys):
        folder = workshop.folder
        config = tmp_path / "fit.toml"
        config.write_text(
            f'model = "{folder / "net.py"}:Net"\nweights = "{folder / "net.pt"}"\ngray = true\n'
            f'data = "{folder / "train"}"\nrank = 7\nl2 = {L2}\nmemory_budget = "1GB"\n'
            '[predict]\nestimator = "hessian"\n[fit]\nquiet = true\n'
        )
        found = result(capsys, "fit", "--config", config, "--rank", 4, "--out", tmp_path / "run")
        assert found["rank"] == 4
        expected = workshop.fit(rank=4).spectra["opg"].values
        assert found["spectra"]["opg"]["largest"] == float(expected[0])

    @pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")  # of other pixels
    def test_tables_lists_and_negative_numbers_in_a_config_file(self, workshop, tmp_path, capsys):
        config = tmp_path / "fit.toml"
        config.write_text(
            'mean = [-0.5]\nstd = 2.0\nparams = ["3.*"]\nmodel_args = {width = 6}\n'
            'overwrite = false\n[l2]\n"*" = 0.01\n"*.bias" = 0.02\n'
        )
        options = workshop.options
        arguments = ("--config", config, "--device", "cpu", "--rank", 5, "--out", tmp_path / "run")
        at = options.index("--l2")
        found = result(capsys, "fit", *options[:at], *arguments)
        assert found["l2"] == {"*": 0.01, "*.bias": 0.02}
        assert found["parameters"] == 70
        images = (workshop.train[0] + 0.5) / 2
        fit = deltabars.fit(
            workshop.model, (images, workshop.train[1]), l2={"*": 0.01, "*.bias": 0.02}, rank=5,
            params=["3.*"], progress=False,
        )  # fmt: skip
        assert found["spectra"]["opg"]["last"] == float(fit.spectra["opg"].values[-1])

    def test_an_existing_run_is_replaced_only_when_asked(self, workshop, own_run, capsys):
        (own_run / "predictions").mkdir()
        (own_run / "predictions" / "old.npz").write_text("old")
        again = ("fit", *workshop.options, "--out", own_run, "--rank", 3)
        before = contents(own_run.parent)
        assert main([*map(str, again)]) == 1
        assert "--overwrite" in capsys.readouterr().err
        assert contents(own_run.parent) == before
        assert result(capsys, *again, "--overwrite")["rank"] == 3
        assert contents(own_run.parent) == {"run", "run/fit.deltabars", "run/run.json"}

    def test_the_printed_python_makes_the_same_run(self, workshop, tmp_path, executed):
        executed("fit", *workshop.options, "--out", "run")
        spectra = [
            Run.open(run).load_fit().spectra["opg"] for run in (tmp_path / "run", workshop.run)
        ]
        assert torch.equal(spectra[0].values, spectra[1].values)
        assert torch.equal(spectra[0].vectors, spectra[1].vectors)
        assert json.loads((tmp_path / "run/run.json").read_text()) == json.loads(
            (workshop.run / "run.json").read_text()
        )


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


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
class TestLosses:
    """The losses of a training by options, beside torch's modules in Python."""

    @pytest.fixture
    def lines(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "line.py").write_text(LINE)
        given: dict = {}
        exec(LINE, given)
        return given

    CASES = (
        ("few", 2, ("--loss", "ce", "--label-smoothing", 0.1, "--class-weights", 1, 3),
         nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]), label_smoothing=0.1)),
        ("few", 2, ("--label-smoothing", 0.2), nn.CrossEntropyLoss(label_smoothing=0.2)),
        ("few", 2, ("--likelihood", "categorical"), "categorical"),
        ("answers", 1, ("--loss", "bce", "--pos-weight", 2),
         nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0]))),
        ("answers", 1, ("--likelihood", "bernoulli"), "bernoulli"),
        ("few", 1, ("--loss", "bce"), nn.BCEWithLogitsLoss()),
        ("numbers", 1, ("--loss", "mse"), nn.MSELoss()),
        ("numbers", 1, ("--loss", "mse", "--noise", "estimate"), nn.MSELoss()),
        ("numbers", 1, ("--likelihood", "gaussian"), Gaussian("estimate")),
        ("numbers", 1, ("--likelihood", "gaussian", "--noise", 0.7), Gaussian(0.7)),
    )  # fmt: skip

    @pytest.mark.parametrize(("data", "outputs", "options", "likelihood"), CASES)
    def test_it_is_the_fit_of_the_python_interface(
        self, lines, capsys, executed, data, outputs, options, likelihood
    ):
        arguments = [
            "fit", "--model", "line.py:line", "--model-args", f'{{"outputs": {outputs}}}',
            "--untrained", "--data", f"line.py:{data}", "--l2", 0.01, "--device", "cpu", *options,
        ]  # fmt: skip
        found = result(capsys, *arguments, "--out", "run")
        fit = deltabars.fit(
            lines["line"](outputs), lines[data], l2=0.01, likelihood=likelihood, progress=False
        )
        executed(*arguments, "--out", "printed")
        for run in map(Run.open, ("run", "printed")):
            again = run.load_fit()
            assert again.likelihood == fit.likelihood
            assert again.l2 == fit.l2
            assert torch.equal(again.spectra["opg"].values, fit.spectra["opg"].values)
            expected = dict(zip(options[::2], options[1::2], strict=False))
            assert run.about["loss"]["name"] in ("ce", *map(str, expected.values()))
        assert found["noise"] == fit.noise
        assert result(capsys, "predict", "run", "--data", f"line.py:{data}")["inputs"] == 80

    def test_the_noise_is_printed_and_bars_do_not_fix_it_at_one(self, lines, capsys):
        options = ["--model", "line.py:line", "--untrained", "--l2", "1e-6", "--device", "cpu"]
        options += ["--data", "line.py:numbers", "--likelihood", "gaussian", "--quiet"]
        assert main(["fit", *options, "--out", "run"]) == 0
        residual = float((lines["line"]()(lines["x"]) - lines["y"]).detach().std())
        shown = re.search(r"σ = ([\d.]+), estimated from the residuals", capsys.readouterr().out)
        assert float(shown[1]) == pytest.approx(residual, rel=0.1)
        assert main(["fit", *options, "--noise", "1", "--out", "run", "--overwrite"]) == 0
        assert "σ = 1, given" in capsys.readouterr().out
        assert main(["spectrum", "run"]) == 0
        assert "noise σ               1\n" in capsys.readouterr().out

    def test_a_config_file_has_them(self, lines, capsys):
        Path("c.toml").write_text(
            'loss = "ce"\nlabel-smoothing = 0.1\nclass_weights = [1, 2.5]\nuntrained = true\n'
            'model = "line.py:line"\ndata = "line.py:few"\nl2 = 0.1\nmodel_args = {outputs = 2}\n'
        )
        result(capsys, "fit", "--config", "c.toml", "--out", "run", "--device", "cpu")
        assert Run.open("run").about["loss"] == {
            "name": "ce", "label_smoothing": 0.1, "class_weights": [1.0, 2.5]
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("options", "code", "said"),
        [
            (("--loss", "ce", "--noise", "1"), 1, "noise: expected the loss mse with it, got ce"),
            (("--pos-weight", "1"), 1, "--pos-weight: expected the loss bce with it, got ce"),
            (("--loss", "mse", "--label-smoothing", "0"), 1, "the loss ce with it, got mse"),
            (("--label-smoothing", "2"), 1, "--label-smoothing: expected a number from 0 to 1"),
            (("--class-weights", "-1", "2"), 1, "expected finite numbers from 0 on"),
            (("--loss", "mse", "--noise", "0"), 1, "noise: expected a finite number above zero"),
            (("--noise", "loud"), 2, "--noise: expected a number or estimate, got 'loud'"),
            (("--loss", "mse", "--likelihood", "gaussian"), 2, "expected no --loss with it"),
            (("--loss", "nll"), 2, "invalid choice: 'nll'"),
            ((), 1, "a regression? Then use --loss mse."),
            ((), 1, "A yes/no question? Then use --loss bce and"),
        ],
    )
    def test_refused(self, lines, capsys, options, code, said):
        given = ["--model", "line.py:line", "--untrained", "--l2", "0.1", "--device", "cpu"]
        given += ["--data", "line.py:numbers", "--out", "run", "--quiet", *options]
        assert ended("fit", *given) == code
        assert said in only_line(capsys)


class TestWeights:
    """A fit of the initialisation happens only where that was said."""

    NET = """\
import deltabars, torch

@deltabars.trained
def marked():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    return model

def plain():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

def random():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

@deltabars.trained
class Marked(torch.nn.Sequential):
    def __init__(self):
        super().__init__(*marked())

ready, made = plain(), deltabars.trained(plain())
"""

    @pytest.fixture
    def options(self, workshop, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "own.py").write_text(self.NET)
        return [*workshop.options[4:], "--rank", "3", "--out", "run", "--quiet", "--device", "cpu"]

    @pytest.mark.parametrize("factory", ["plain", "random", "ready"])
    def test_without_weights_it_is_wrong_usage(self, options, capsys, factory):
        before = contents(Path())
        assert ended("fit", "--model", f"own.py:{factory}", *options) == 2
        line = only_line(capsys)
        assert f"expected the trained weights of own.py:{factory}, got none" in line
        assert all(way in line for way in ("--weights FILE", "@deltabars.trained", "--untrained"))
        assert contents(Path()) == before

    @pytest.mark.parametrize("factory", ["marked", "Marked", "made"])
    @pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
    def test_a_marked_factory_has_its_own(self, options, capsys, factory):
        assert ended("fit", "--model", f"own.py:{factory}", *options) == 0

    @pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
    def test_untrained_weights_are_found_again(self, options, capsys, workshop):
        state = torch.get_rng_state()
        assert ended("fit", "--model", "own.py:random", "--untrained", *options) == 0
        torch.rand(1)
        test = str(workshop.folder / "test")
        assert ended("predict", "run", "--data", test, "--quiet", "--device", "cpu") == 0
        torch.set_rng_state(state)

    def test_weights_and_untrained_exclude_each_other(self, options, workshop, capsys):
        weights = ("--weights", str(workshop.folder / "net.pt"), "--untrained")
        assert ended("fit", "--model", "own.py:plain", *weights, *options) == 2
        assert "--untrained: expected no --weights with it" in only_line(capsys)


class TestPredict:
    def test_the_table_is_that_of_the_python_interface(self, workshop, own_run, tmp_path, capsys):
        out = tmp_path / "test.csv"
        found = result(capsys, "predict", own_run, "--data", workshop.folder / "test", "--out", out)
        prediction = workshop.fit().predict(workshop.test[0])
        with out.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == TEST == found["inputs"]
        for column, values in (
            ("score", prediction.score),
            ("score_error", prediction.score_error),
            ("mutual_information", prediction.mutual_information),
            ("entropy", prediction.entropy),
            ("probability", prediction.mean.amax(1)),
            ("mean_digit 3", prediction.mean[:, 3]),
            ("std_digit 7", prediction.std[:, 7]),
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
        assert found["mean_score_wrong"] == float(prediction.score[~right].mean())
        assert not list(tmp_path.rglob("*draft*"))

    def test_data_without_classes_and_arrays_give_the_same_scores(self, workshop, own_run, capsys):
        sources = [workshop.folder / name for name in ("test", "flat", "test.npz")]
        found = [
            result(capsys, "predict", own_run, "--data", source)["mean_score"] for source in sources
        ]
        assert found[1:] == pytest.approx(found[:1] * 2, rel=1e-6)  # other orders of sums

    def test_some_classes_only(self, workshop, own_run, tmp_path, capsys):
        out = tmp_path / "top.jsonl"
        test = workshop.folder / "test"
        options = ("--classes", "top2", "--rank", 9, "--low-rank", "--out", out)
        result(capsys, "predict", own_run, "--data", test, *options)
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        expected = workshop.fit().predict(workshop.test[0], classes="top2", rank=9, full_rank=False)
        assert [row["score"] for row in rows] == pytest.approx(expected.score.tolist(), rel=1e-7)
        assert rows[0]["class_1"] == f"digit {int(expected.classes[0, 1])}"
        assert "mean_2" not in rows[0]

    def test_the_printed_python_writes_the_same_table(self, workshop, own_run, tmp_path, executed):
        arguments = ("predict", own_run, "--data", workshop.folder / "test", "--rank", 12)
        assert main([*map(str, arguments), "--out", str(tmp_path / "a.csv"), "--quiet"]) == 0
        executed(*arguments, "--out", "b.csv")
        assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")  # it is not trained
def test_many_classes_and_a_loader_of_ones_own(tmp_path, capsys, executed):
    """Of more than a hundred classes the five most probable ones, unless others are asked for."""
    file = tmp_path / "many.py"
    file.write_text(MANY)
    run, out = tmp_path / "run", tmp_path / "a.csv"
    options = ("--model", f"{file}:make", "--untrained", "--data", f"{file}:pair", "--l2", 1)
    result(capsys, "fit", *options, "--rank", 5, "--device", "cpu", "--out", run)
    predict = ("predict", run, "--data", f"{file}:loader", "--data-args", '{"batch": 7}')
    result(capsys, *predict, "--device", "cpu", "--out", out)
    with out.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert [row["target"] for row in rows] == [str(k) for k in range(30)]
    expected = Run.open(run).load_fit().predict(Run.open(run).load_data().data[0], classes="top5")
    assert [int(row["class_4"]) for row in rows] == expected.classes[:30, 4].tolist()
    assert "mean_5" not in rows[0]
    executed(*predict, "--device", "cpu", "--out", "b.csv")
    assert out.read_text() == (tmp_path / "b.csv").read_text()
    assert main(["rank", str(run), "--by", "target", "--quiet"]) == 1
    assert "the probabilities of all classes" in capsys.readouterr().err


class TestRank:
    def test_rows_are_in_the_order_of_the_python_interface(self, workshop, own_run, capsys):
        data = ("--data", workshop.folder / "test")
        prediction, targets = workshop.fit().predict(workshop.test[0]), workshop.test[1]
        for options, arguments in (
            ((), {}),
            (("--by", "target"), {"by": "target"}),
            (("--wrong", "--most-certain"), {"wrong": True, "most_certain": True}),
            (("--per-class", "--by", "entropy"), {"per_class": True, "by": "entropy"}),
        ):
            found = result(capsys, "rank", own_run, *data, *options, "--count", 4)
            places = ranked(prediction, 4, targets=targets, **arguments)
            scores = [row["score"] for row in found["rows"]]
            assert scores == pytest.approx(prediction.score[places].tolist(), rel=1e-6), options
        assert len(found["rows"]) > 4

    def test_without_data_it_is_what_was_predicted_last(self, workshop, own_run, capsys):
        assert result(capsys, "rank", own_run)["data"] == str(workshop.folder / "train")
        result(capsys, "predict", own_run, "--data", workshop.folder / "test")
        assert result(capsys, "rank", own_run)["inputs"] == TEST

    def test_kept_predictions_are_used_until_the_data_change(
        self, workshop, own_run, capsys, tmp_path
    ):
        data = tmp_path / "pictures"
        shutil.copytree(workshop.folder / "flat", data)
        first = result(capsys, "rank", own_run, "--data", data, "--count", 1)
        kept = next((own_run / "predictions").iterdir())
        state = kept.stat().st_mtime_ns
        assert result(capsys, "rank", own_run, "--data", data, "--count", 1) == first
        assert kept.stat().st_mtime_ns == state
        (data / first["rows"][0]["input"]).unlink()
        assert result(capsys, "rank", own_run, "--data", data)["inputs"] == TEST - 1

    @pytest.mark.parametrize(
        ("by", "title"),
        [
            ("target", "probability of target"),
            ("entropy", "entropy"),
            ("mutual_information", "mutual information"),
        ],
    )
    def test_what_the_order_is_by_is_shown(self, workshop, own_run, tmp_path, capsys, by, title):
        arguments = ["rank", str(own_run), "--data", str(workshop.folder / "test"), "--by", by]
        out = tmp_path / "first.csv"
        rows = result(capsys, *arguments, "--count", 4, "--out", out)["rows"]
        prediction, targets = workshop.fit().predict(workshop.test[0]), workshop.test[1]
        places = ranked(prediction, 4, by=by, targets=targets)
        chosen = prediction[places]
        values = (
            chosen.mean.gather(1, targets[places, None])[:, 0]
            if by == "target"
            else getattr(chosen, by)
        )
        column = "target_probability" if by == "target" else by
        assert [row[column] for row in rows] == pytest.approx(values.tolist(), rel=1e-5)
        assert column in out.read_text().splitlines()[0].split(",")
        assert main([*arguments, "--count", "4", "--quiet"]) == 0
        heading, titles, *lines = capsys.readouterr().out.splitlines()
        assert f", by {by}" in heading
        assert title in titles
        for line, value in zip(lines, values.tolist(), strict=False):
            assert f" {value:.4f} " in line

    def test_a_look_at_other_data_does_not_change_what_reports_are_about(
        self, workshop, own_run, tmp_path, capsys
    ):
        def about(*arguments):
            page = str(tmp_path / "page.html")
            assert main(["report", str(own_run), "--quiet", "--out", page, *arguments]) == 0
            return capsys.readouterr().out

        test, train = (str(workshop.folder / name) for name in ("test", "train"))
        today = date.today().isoformat()
        result(capsys, "rank", own_run, "--data", test)
        assert f"The page of 200 inputs of {train}, predicted {today}" in about()
        result(capsys, "predict", own_run, "--data", test)
        for command in (("rank", "--data", train), ("rank", "--rank", 7), ("rank",)):
            result(capsys, command[0], own_run, *command[1:])
        assert f"The page of {TEST} inputs of {test}, predicted {today}" in about()
        assert main(["rank", str(own_run), "--rank", "7", "--quiet"]) == 0
        assert f"{TEST} inputs of {test}, predicted {today}" in (said := capsys.readouterr().out)
        assert " with rank 7, by score\n" in said
        assert f"of {train}" in about("--data", train)
        assert f"of {test}" in about()
        result(capsys, "predict", own_run, "--data", train)
        assert f"of {train}" in about()

    def test_a_table_to_read(self, workshop, own_run, capsys):
        data = ("--data", str(workshop.folder / "test"))
        assert main(["rank", str(own_run), *data, "--count", "3", "--quiet"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[5].split(":")[0] in LEVELS
        assert "probability ± std" in lines[1]
        assert all(".png" in line and "±" in line for line in lines[2:5])

    def test_the_printed_python_prints_the_same_names(self, workshop, own_run, capsys, executed):
        arguments = ("rank", own_run, "--data", workshop.folder / "test", "--count", 5)
        names = [row["input"] for row in result(capsys, *arguments)["rows"]]
        printed = executed(*arguments)
        assert [line.rsplit(" ", 1)[0] for line in printed.splitlines()] == names


class TestNamesOnATerminal:
    """What other people called things is shown, and does not act."""

    BAD = "\x1b[2Jgone\nforged\r\u202eexe\x9b1m\x07"
    SHOWN = r"\u001b[2Jgone\nforged\r\u202eexe\u009b1m\u0007"

    @pytest.fixture
    def odd(self, workshop, tmp_path, monkeypatch):
        """A RUN whose classes, data and pictures have such names."""
        monkeypatch.chdir(tmp_path)
        names = [f"{number} {self.BAD}" for number in range(10)]
        images = (workshop.train[0][:, 0] * 255).round().to(torch.uint8).numpy()
        np.savez(f"train{self.BAD}.npz", x=images, y=workshop.train[1], classes=names)
        shutil.copytree(workshop.folder / "flat", "flat")
        picture = next(Path("flat").iterdir())
        picture.rename(Path("flat") / (self.BAD + ".png"))
        options = [*workshop.options]
        options[options.index("--data") + 1] = f"train{self.BAD}.npz"
        options.remove("--gray")
        assert main(["fit", *options, "--out", "run"]) == 0
        return tmp_path

    def said(self, capsys):
        out, err = capsys.readouterr()
        for text in (out, err):
            assert text.replace("\n", "").isprintable(), text
            assert not any(line.startswith("forged") for line in text.splitlines())
        return out + err

    def test_all_that_commands_print(self, odd, capsys):
        for arguments in (
            ("predict", "run", "--data", "flat", "--gray", "--out", "a.csv"),
            ("rank", "run"),
            ("report", "run", "--out", "a.html"),
            ("rank", "run", "--data", f"train{self.BAD}.npz", "--by", "target"),
            ("rank", "run", "--json", "--quiet"),
        ):
            assert main([*arguments, "--device", "cpu"]) == 0
            said = self.said(capsys)
            assert self.SHOWN in said or arguments[0] in ("predict", "report")
        row = json.loads(said)["rows"][0]
        assert row["label_name"].endswith(self.BAD)  # JSON reads the escapes

    def test_errors_and_warnings(self, odd, capsys):
        assert main(["rank", f"no{self.BAD}"]) == 1
        assert self.SHOWN in self.said(capsys)
        assert main(["predict", "run", "--data", f"no{self.BAD}", "--debug"]) == 1
        assert self.SHOWN in self.said(capsys)
        Path(f"broken{self.BAD}.npz").write_text("no")
        assert main(["predict", "run", "--data", f"broken{self.BAD}.npz"]) == 1
        assert self.SHOWN in self.said(capsys)
        Path(f"own{self.BAD}.py").write_text("def make():\n    raise OSError('\\x1b[2J')\n")
        assert main(["predict", "run", "--data", f"own{self.BAD}.py:make"]) == 1
        said = self.said(capsys)
        assert self.SHOWN in said
        assert r"\u001b[2J" in said.splitlines()[-1]

    def test_in_python(self):
        for kind in (DataError, MissingDependencyError, DataWarning, StorageError):
            assert str(kind(self.BAD)) == self.SHOWN
        assert printable("größe ✓ 画像 \\ 'a'") == "größe ✓ 画像 \\ 'a'"
        assert json.loads(f'"{printable(chr(0xE0001))}"') == chr(0xE0001)


class TestSpectrum:
    def test_values_figure_and_numbers(self, workshop, tmp_path, capsys):
        figure, values = tmp_path / "s.png", tmp_path / "v.csv"
        found = result(capsys, "spectrum", workshop.run, "--out", figure, "--values", values)
        pairs = workshop.fit().spectra["opg"]
        assert found["values"]["opg"] == pairs.values.tolist()
        rows = values.read_text().splitlines()
        assert rows[0] == "matrix,index,value,residual"
        assert [float(row.split(",")[2]) for row in rows[1:]] == pairs.values.tolist()
        assert figure.read_bytes().startswith(b"\x89PNG")
        assert contents(tmp_path) == {"s.png", "v.csv"}

    def test_text(self, workshop, capsys):
        assert main(["spectrum", str(workshop.run)]) == 0
        text = capsys.readouterr().out
        low, high = workshop.fit().effective_parameters_interval
        assert f"eigenpairs K          {RANK}" in text
        assert f"between {low:.1f} and {high:.1f}" in text
