"""Fits on disk: in one file or several, rounded or not, in memory or mapped; whole, or refused."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import deltabars
from deltabars.cli.entry import main
from deltabars.cli.runs import Run
from deltabars.errors import (
    BadValueError,
    CorruptFileError,
    FormatVersionError,
    StorageError,
    WeightsMismatchError,
)
from deltabars.fitting.state import Calibration
from deltabars.likelihoods.categorical import Categorical
from deltabars.runtime.distributed import Group
from deltabars.runtime.vectors import PartedVectors
from deltabars.storage import format as storage
from deltabars.storage.writing import write_text, write_whole, write_whole_folder
from tests.conftest import cached_case
from tests.networks import make_case
from tests.stopping import end, full_disk, start
from tests.workshop import contents

ESTIMATORS = ("hessian", "opg", "sandwich", "ggn")
FIELDS = ("values", "vectors", "residuals", "smallest", "smallest_residuals")
SHORT = {"float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11}  # half of an ulp, relative
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
TOGETHER = {"group": Group(), "replace": True}
SEVERAL = 9 * 18 * 8  # bytes of nine of the 43 columns of `fit`: five files


def fitted(case, estimator="sandwich", rank=9, **options):
    given = {"l2": case.l2, "estimator": estimator, "rank": rank, "progress": False} | options
    return deltabars.fit(case.model, case.data, **given)


@pytest.fixture(scope="module")
def fit():
    return fitted(cached_case("dense"))


@pytest.fixture(params=["5GB", SEVERAL], ids=["file", "folder"])
def path(request, fit, tmp_path):
    fit.save(tmp_path / "net.deltabars", max_file_size=request.param)
    return tmp_path / "net.deltabars"


@pytest.fixture
def folder(fit, tmp_path):
    fit.save(tmp_path / "net.deltabars", max_file_size=SEVERAL)
    return tmp_path / "net.deltabars"


def same(a, b):
    names = ("mean", "std", "std_low", "std_high", "score", "score_error")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


class TestRoundTrip:
    @pytest.mark.parametrize("size", ["5GB", 500])
    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_everything_comes_back(self, dense_case, tmp_path, estimator, size):
        fit = fitted(dense_case, estimator, 7, params=["2.*"])
        fit.save(tmp_path / "a", max_file_size=size)
        back = deltabars.load(tmp_path / "a", dense_case.model)
        for name in ("estimator", "l2", "num_examples", "num_parameters", "rank", "signature"):
            assert getattr(back, name) == getattr(fit, name)
        stored = {name: {"dtype": "float64"} for name in fit.spectra}
        extra = {} if size == "5GB" else {"storage": stored}
        assert dict(back.diagnostics) == dict(fit.diagnostics) | extra
        for name, pairs in fit.spectra.items():
            for field in FIELDS:
                assert torch.equal(getattr(back.spectra[name], field), getattr(pairs, field))
        assert same(back.predict(dense_case.unseen), fit.predict(dense_case.unseen))
        assert torch.equal(back.sample(2, seed=1), fit.sample(2, seed=1))

    @pytest.mark.parametrize("dtype", [None, "bfloat16"])
    @pytest.mark.parametrize("size", ["5GB", 500])
    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_so_does_the_sampling_spread(self, dense_case, tmp_path, estimator, size, dtype):
        """The meats, the calibration, the temperature, and what is averaged over."""
        fit = fitted(dense_case, estimator, 7, l2="auto").moved(
            calibration={
                "sampling": Calibration(1.25, 0.1, 0.9, 4),
                "posterior": Calibration(0.5, 0.05, 0.8, 4),
            },
            temperature=1.4,
        )
        assert fit.averages == "sampling"
        fit.save(tmp_path / "a", max_file_size=size, dtype=dtype)
        for offload in (False, True):
            back = deltabars.load(tmp_path / "a", dense_case.model, offload=offload)
            assert (back.temperature, back.averages, back.l2) == (1.4, "sampling", fit.l2)
            assert dict(back.calibration) == dict(fit.calibration)
            assert back.diagnostics["l2"] == fit.diagnostics["l2"]
            beside = {"opg": set(), "ggn": {"ggn"}}.get(estimator, {"hessian"})
            assert set(back.meats) == set(fit.meats) == beside
            for name, meat in fit.meats.items():
                for field in ("within", "slopes", "beyond", "whole"):
                    assert torch.equal(getattr(back.meats[name], field), getattr(meat, field))
                assert back.meats[name].level == meat.level
                assert back.meats[name].curvature == meat.curvature
            ours, theirs = (
                each.predict(dense_case.unseen, spread="sampling") for each in (back, fit)
            )
            if dtype is None:
                exact = fit.offloaded() if offload else fit
                assert same(ours, exact.predict(dense_case.unseen, spread="sampling"))
                drawn = (each.sample(2, seed=1, spread="sampling") for each in (back, exact))
                assert torch.equal(*drawn)
            else:  # which widens the interval around the same value
                assert bool((ours.std_low <= theirs.std_low).all())
                assert bool((ours.std_high >= theirs.std_high).all())
                torch.testing.assert_close(ours.std, theirs.std, rtol=0.05, atol=0)

    @pytest.mark.parametrize(
        ("name", "expected"),
        [("sandwich-0.5.0.deltabars", 0.9651571855333534), ("sandwich-0.5.0", 2.70720178937517)],
    )
    def test_files_of_version_0_5(self, name, expected):
        """One with λs of their own for biases, and one of several files in float16."""
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
        ).double()
        with torch.no_grad():
            for number, own in enumerate(model.parameters()):
                own.copy_(torch.arange(own.numel()).reshape(own.shape).add(number).cos())
        found = deltabars.load(Path(__file__).parent / name, model)
        out = found.predict(torch.arange(36, dtype=torch.float64).reshape(9, 4).sin())
        assert found.l2 == {"*": 0.05, "*.bias": 0.3}
        score = out.score_high if name.endswith("0.5.0") else out.score
        assert float(score[0]) == pytest.approx(expected, rel=1e-13)
        assert (found.temperature, found.averages, dict(found.calibration)) == (1, "posterior", {})
        with pytest.raises(BadValueError, match=r"saved by an earlier version.* Fit again"):
            found.predict(torch.zeros(1, 4).double(), spread="sampling")

    def test_what_is_in_a_folder(self, folder):
        index = json.loads((folder / "index.json").read_text())
        names = [f"vectors-0000{k}-of-00005.safetensors" for k in range(1, 6)]
        assert sorted(os.listdir(folder)) == ["fit.safetensors", "index.json", *names]
        assert [part["file"] for part in index["parts"]] == names
        assert [part["start"] for part in index["parts"]] == [0, 9, 18, 27, 36]
        assert index["total_size"] == 43 * 18 * 8

    def test_a_path_that_is_a_folder_or_ends_like_one(self, fit, tmp_path, dense_case):
        (tmp_path / "empty").mkdir()
        for path in (tmp_path / "empty", f"{tmp_path}/new/"):
            fit.save(path)
            assert (Path(path) / "vectors-00001-of-00001.safetensors").is_file()
            assert deltabars.load(path, dense_case.model).rank == 9
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "notes.txt").write_text("mine")
        with pytest.raises(StorageError, match="expected a new or empty folder, or that of a fit"):
            fit.save(tmp_path / "mine")
        assert os.listdir(tmp_path / "mine") == ["notes.txt"]

    def test_the_command_line(self, workshop, tmp_path, capsys):
        run = tmp_path / "run"
        options = ["fit", *workshop.options, "--rank", "6", "--store", "bfloat16", "--quiet"]
        assert main([*options, "--max-file-size", "2KB", "--out", str(run)]) == 0
        assert len(list((run / "fit.deltabars").glob("vectors-*"))) > 1
        vectors = Run.open(run).load_fit(offload=True).spectra["opg"].vectors
        assert vectors.stored == torch.bfloat16
        asked = ["predict", str(run), "--data", str(workshop.folder / "test"), "--quiet", "--json"]
        scores = []
        for more in ([], ["--offload"]):
            capsys.readouterr()
            assert main([*asked, *more]) == 0
            scores.append(json.loads(capsys.readouterr().out)["mean_score"])
        assert scores[0] == pytest.approx(scores[1], rel=1e-5)


class TestOffload:
    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_it_predicts_as_from_the_memory_of_the_cpu(self, dense_case, tmp_path, estimator):
        fit, unseen = fitted(dense_case, estimator), dense_case.unseen
        here = fit.offloaded()
        for size in ("5GB", 700):
            fit.save(tmp_path / str(size), max_file_size=size)
            there = deltabars.load(tmp_path / str(size), dense_case.model, offload=True)
            assert all(isinstance(pairs.vectors, PartedVectors) for pairs in there.spectra.values())
            for asked in ({}, {"rank": 3}, {"full_rank": False}, {"bound": "paper"},
                          {"space": "logit", "covariance": True}, {"classes": [2, 0]}):  # fmt: skip
                assert same(there.predict(unseen, **asked), here.predict(unseen, **asked))
            assert same(there.with_l2(0.1).predict(unseen), here.with_l2(0.1).predict(unseen))
            assert torch.equal(there.sample(2, seed=3), here.sample(2, seed=3))
            if estimator in ("opg", "ggn"):
                args = unseen[:2], dense_case.data
                assert same(there.certify(*args), here.certify(*args))

    def test_by_default_where_memory_is_short(self, folder, dense_case):
        for options, expected in (
            ({}, torch.Tensor),
            ({"memory_budget": 2 * 9 * 43 * 8}, PartedVectors),
            ({"memory_budget": 3 * 9 * 43 * 8}, torch.Tensor),
            ({"memory_budget": 10, "offload": False}, torch.Tensor),
        ):
            loaded = deltabars.load(folder, dense_case.model, **options)
            assert isinstance(loaded.spectra["opg"].vectors, expected)
        with pytest.raises(BadValueError, match="offload: expected None, True or False"):
            deltabars.load(folder, dense_case.model, offload="cpu")

    def test_saved_over_its_own_files_and_pickled(self, fit, folder, dense_case):
        away = deltabars.load(folder, dense_case.model, offload=True)
        again = pickle.loads(pickle.dumps(away))
        away.save(folder, max_file_size=4000)
        back = deltabars.load(folder, dense_case.model)
        assert torch.equal(back.spectra["opg"].vectors, fit.spectra["opg"].vectors)
        expected = fit.offloaded().predict(dense_case.unseen)
        assert same(away.predict(dense_case.unseen), expected)
        assert same(again.predict(dense_case.unseen), expected)


class TestRounded:
    @pytest.mark.parametrize("dtype", SHORT)
    @pytest.mark.parametrize("size", ["5GB", 1000])
    def test_the_loss_is_measured_and_stays_with_the_fit(
        self, fit, tmp_path, dense_case, dtype, size
    ):
        fit.save(tmp_path / "a", dtype=dtype, max_file_size=size)
        back = deltabars.load(tmp_path / "a", dense_case.model, offload=True)
        one = tmp_path / ("a" if size == "5GB" else "a/fit.safetensors")
        assert storage.read_header(one)["format"] == 3
        for name, pairs in fit.spectra.items():
            found, there = back.diagnostics["storage"][name], back.spectra[name].vectors
            assert found["dtype"] == dtype == str(there.stored).removeprefix("torch.")
            exact = float(torch.linalg.svdvals(there.whole() - pairs.vectors)[0])
            assert exact <= found["norm"] <= 1.002 * exact
            assert exact < SHORT[dtype] * 2
            assert back.spectra[name].rounding == found["norm"]
        assert torch.equal(back.overlap, fit.overlap)  # that of the vectors before
        # As it is, and longer: nothing more is lost. Shorter: it adds up.
        for asked in (None, "float64"):
            back.save(tmp_path / "b", dtype=asked)
            again = deltabars.load(tmp_path / "b", dense_case.model)
            assert torch.equal(again.overlap, fit.overlap)
            assert again.spectra["opg"].rounding == back.spectra["opg"].rounding
            assert torch.equal(again.spectra["opg"].vectors, back.spectra["opg"].vectors.whole())
        if dtype == "float32":
            back.save(tmp_path / "c", dtype=torch.bfloat16)
            again = deltabars.load(tmp_path / "c", dense_case.model)
            assert again.spectra["opg"].rounding > 1000 * back.spectra["opg"].rounding

    @pytest.mark.parametrize("dtype", SHORT)
    def test_the_exact_value_lies_in_the_interval(self, dtype, tmp_path):
        """At every rank; and the interval holds that of the fit before it was rounded."""
        case = cached_case("linear")
        fit = fitted(case, rank=case.oracle.size)
        fit.save(tmp_path / "a", dtype=dtype)
        short, missed = deltabars.load(tmp_path / "a", case.model), 0
        for rank in range(1, case.oracle.size + 1, 2):
            asked = {"rank": rank, "estimator": ["opg", "sandwich"], "moderation": None}
            after, before = short.predict(case.unseen, **asked), fit.predict(case.unseen, **asked)
            for name, out in after.items():
                narrow, exact = before[name], case.oracle.std(name, case.unseen)
                assert bool((out.std_low - 1e-9 <= torch.minimum(exact, narrow.std_low)).all())
                assert bool((torch.maximum(exact, narrow.std_high) <= out.std_high + 1e-9).all())
                off = (out.std - exact).abs()
                assert bool((off <= out.std_error + 1e-9).all())
                missed += int((off - narrow.std_error > 1e-6).sum())
        if dtype == "bfloat16":
            assert missed  # by the bound of exact vectors


class TestAnotherModel:
    def test_other_weights_are_refused_unless_allowed(self, path, fit, dense_case):
        other = make_case("dense", seed=5).model
        with pytest.raises(WeightsMismatchError, match=r"other weights.*check_weights=False"):
            deltabars.load(path, other)
        allowed = deltabars.load(path, other, check_weights=False)
        assert torch.equal(allowed.spectra["opg"].values, fit.spectra["opg"].values)
        unseen = dense_case.unseen
        assert not torch.equal(allowed.predict(unseen).mean, fit.predict(unseen).mean)

    def test_other_parameters_and_buffers_are_refused(self, path, tmp_path):
        with pytest.raises(WeightsMismatchError, match=r"a parameter 0\.weight of shape \(5, 4\)"):
            deltabars.load(path, cached_case("convolutional").model, check_weights=False)
        case = make_case("batch_norm")
        fitted(case, "opg", 5).save(tmp_path / "a")
        case.model[1].running_mean += 0.1
        with pytest.raises(WeightsMismatchError, match="other weights"):
            deltabars.load(tmp_path / "a", case.model)


def forge(path, name="", **changes):
    """Change the header or the tensors of a file, with a digest that is right, also in an index."""
    header, tensors = storage.read(path / name)
    tensors |= {name: value for name, value in changes.items() if "." in name or name == "overlap"}
    header |= {name: value for name, value in changes.items() if name not in tensors}
    kept = {name: value for name, value in tensors.items() if value is not None}
    digest = storage.write(path / name, header, kept, header.pop("format"))
    if name:
        content = json.loads((path / "index.json").read_text())
        for entry in [content["fit"], *content["parts"]]:
            entry["digest"] = digest if entry["file"] == name else entry["digest"]
        seal(path / "index.json", content)


def seal(path, content):
    content = {name: value for name, value in content.items() if name != "digest"}
    path.write_text(json.dumps(content | {"digest": storage._digest(content)}))


CALIBRATION = {"factor": 1.2, "standard_error": 0.1, "r_squared": 0.9, "replicas": 4}
VALUES = {
    "unsorted": {"opg.values": torch.arange(9.0)},
    "a value that is NaN": {"opg.values": torch.full((9,), torch.nan)},
    "one value": {"opg.values": torch.tensor(1.0)},
    "a negative residual": {"opg.residuals": torch.full((9,), -1e-9)},
    "too many at the lower end": {"opg.smallest": torch.zeros(10_000)},
    "complex ones": {"opg.smallest": torch.zeros(2, 2, dtype=torch.complex64)},
    "an overlap of no unit vectors": {"overlap": torch.full((9, 9), 5.0).double()},
    "no λ": {"l2": -1.0},
    "bars of no width": {"calibration": {"sampling": CALIBRATION | {"factor": 0}}},
    "a spread of another name": {"calibration": {"other": CALIBRATION}},
    "half a replica": {"calibration": {"sampling": CALIBRATION | {"replicas": 2.5}}},
    "a temperature below zero": {"temperature": -1},
    "no temperature": {"temperature": None},
    "other averages": {"averages": "x"},
    "a meat of another shape": {"hessian.meat.within": torch.zeros(8, 8).double()},
    "a meat beside no pairs": {"meats": {"ggn": {"curvature": 1.0, "level": 1.0}}},
    "a meat that is NaN": {"hessian.meat.within": torch.full((9, 9), torch.nan).double()},
    "as many slopes as none": {"hessian.meat.slopes": torch.zeros(0).double()},
    "less than nothing of a meat": {"hessian.meat.beyond": -torch.ones(1).double()},
    "half of a meat": {"meats": {"hessian": {"curvature": 1.0}}},
    "a module of torch": {"inputs": {"names": None, "dtypes": ["torch.onnx"], "shapes": [None]}},
}
VECTORS = {
    "longer": lambda rows: rows * 1.1,
    "zeros": torch.zeros_like,
    "NaN": lambda rows: rows * torch.nan,
    "one vector twice": lambda rows: rows[[0, 0, 2, 3, 4, 5, 6, 7, 8]],
    "too narrow": lambda rows: rows[:, 1:],
    "one number": lambda rows: rows[0],
    "whole numbers": lambda rows: rows.long(),
    "none": lambda rows: None,
}


class TestRefused:
    @pytest.mark.parametrize("change", [*VALUES, *VECTORS])
    def test_numbers_of_no_fit_under_a_right_digest(self, path, dense_case, change):
        if change in VALUES:
            forge(path, "fit.safetensors" if path.is_dir() else "", **VALUES[change])
        else:
            name = "vectors-00002-of-00005.safetensors" if path.is_dir() else ""
            rows = storage.read(path / name)[1]["opg.vectors"]
            forge(path, name, **{"opg.vectors": VECTORS[change](rows)})
        with pytest.raises(CorruptFileError, match="is altered"):
            deltabars.load(path, dense_case.model)

    def test_every_altered_byte_and_truncation(self, path, dense_case):
        for file in path.iterdir() if path.is_dir() else [path]:
            whole = file.read_bytes()
            step = max(1, len(whole) // 40)
            altered = [bytearray(whole) for _ in range(0, len(whole), step)]
            for number, each in enumerate(altered):
                each[number * step] ^= 0x41
            cut = [whole[:length] for length in (0, 4, 8, 50, *range(100, len(whole), 4 * step))]
            for content in [*altered, *cut, whole[:-2]]:
                file.write_bytes(content)
                with pytest.raises(StorageError, match=r"^[^\n]+$"):
                    deltabars.load(path, dense_case.model, offload=True)
            file.unlink()
            with pytest.raises(StorageError, match="Cannot read"):
                deltabars.load(path, dense_case.model)
            file.write_bytes(whole)
        assert deltabars.load(path, dense_case.model).rank == 9

    @pytest.mark.parametrize(
        ("version", "kind", "message"),
        [
            (4, FormatVersionError, "has format 4; this version of deltabars reads up to 3"),
            ("x", CorruptFileError, "no format version"),
        ],
    )
    def test_versions(self, path, dense_case, version, kind, message):
        forge(path, "fit.safetensors" if path.is_dir() else "", format=version)
        with pytest.raises(kind, match=message):
            deltabars.load(path, dense_case.model)

    @pytest.mark.parametrize(
        "change",
        [
            lambda c: c["parts"].pop(1),
            lambda c: c["parts"].clear(),
            lambda c: c["parts"].reverse(),
            lambda c: c["parts"][0].update(file="../elsewhere.safetensors"),
            lambda c: c["parts"][0].update(file=c["parts"][1]["file"]),
            lambda c: c["parts"].__setitem__(0, [1]),
            lambda c: c["fit"].update(digest="0"),
            lambda c: c.update(parts=None, format=[]),
            lambda c: c.pop("format"),
        ],
    )
    def test_indexes(self, folder, dense_case, change):
        content = json.loads((folder / "index.json").read_text())
        change(content)
        seal(folder / "index.json", content)
        with pytest.raises(CorruptFileError, match=r"^[^\n]+ is altered[^\n]+$"):
            deltabars.load(folder, dense_case.model)

    @pytest.mark.parametrize("option", [{"dtype": "int8"}, {"max_file_size": "large"}])
    def test_options(self, fit, tmp_path, option):
        with pytest.raises(BadValueError, match=f"{next(iter(option))}: expected"):
            fit.save(tmp_path / "a", **option)
        assert not os.listdir(tmp_path)

    def test_a_likelihood_of_ones_own(self, dense_case, tmp_path):
        class Own(Categorical):
            name = "own"

        with pytest.raises(StorageError, match=r"likelihoods.*got one of your own"):
            fitted(dense_case, "opg", 5, likelihood=Own()).save(tmp_path / "a")
        assert not list(tmp_path.iterdir())

    def test_paths_that_cannot_be_written_or_read(self, fit, tmp_path, dense_case):
        with pytest.raises(StorageError, match="Cannot write"):
            fit.save(tmp_path / "no" / "such" / "folder")
        for path in (tmp_path / "missing", tmp_path):
            with pytest.raises(StorageError, match=r"Cannot read .*No such file"):
                deltabars.load(path, dense_case.model)


class TestWholeOrNotAtAll:
    def test_a_failed_write_leaves_what_was_there_and_nothing_else(self, fit, path, dense_case):
        before = {file: file.read_bytes() for file in path.parent.rglob("*") if file.is_file()}
        with full_disk():
            for target in (path, path.parent / "new"):
                for size in ("5GB", 1000):
                    with pytest.raises(StorageError, match="Cannot write"):
                        fit.save(target, max_file_size=size)
        assert before == {f: f.read_bytes() for f in path.parent.rglob("*") if f.is_file()}

    def test_the_umask_says_who_may_read_files(self, fit, tmp_path):
        before = os.umask(0o027)
        try:
            fit.save(tmp_path / "file")
            fit.save(tmp_path / "folder", max_file_size=2000)
        finally:
            os.umask(before)
        for path in tmp_path.rglob("*"):
            assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~0o027

    @pytest.mark.parametrize("write", [write_whole, partial(write_whole_folder, **TOGETHER)])
    def test_what_a_killed_writer_left_is_removed_by_a_later_one(self, tmp_path, write):
        (tmp_path / ".a.draft").mkdir()  # of somebody else
        reader, writer = os.pipe()

        def half(draft):
            (draft / "part" if draft.is_dir() else draft).write_bytes(b"half")
            os.write(writer, b"x")
            time.sleep(60)

        def whole(draft):
            assert len(contents(tmp_path)) > 1  # its own draft stays, whoever is at work
            (draft / "part" if draft.is_dir() else draft).write_bytes(b"whole")
            write_text(tmp_path / "b", "b")

        pid = start(lambda: write(tmp_path / "a", half))
        os.read(reader, 1)
        os.kill(pid, signal.SIGKILL)
        end(pid)
        age(tmp_path)
        write(tmp_path / "a", whole)
        assert contents(tmp_path) - {"a/part"} == {".a.draft", "a", "b"}

    def test_a_folder_that_was_being_replaced_comes_back(self, tmp_path, monkeypatch):
        """Its writer was killed when the old one was away and the new one was not there yet."""
        path = tmp_path / "a"

        def fill(draft):
            draft.joinpath("part").write_text("whole")

        def replace_it():
            move = os.replace
            monkeypatch.setattr(
                os, "replace", lambda a, b: (move(a, b), os.kill(os.getpid(), signal.SIGKILL))
            )
            write_whole_folder(path, fill, **TOGETHER)

        write_whole_folder(path, fill, **TOGETHER)
        assert end(start(replace_it)) == -signal.SIGKILL
        assert not path.exists()
        age(tmp_path)
        write_text(tmp_path / "b", "b")
        assert (path / "part").read_text() == "whole"
        assert contents(tmp_path) == {"a", "a/part", "b"}


def age(folder):
    """Make drafts older than a minute: younger ones may not be locked yet by their owner."""
    for path in folder.iterdir():
        os.utime(path, (time.time() - 100,) * 2)


LARGE = """
import sys, threading, time, torch, deltabars
from tests.storage.test_storage import anonymous, cached_case, fitted, large_model
model, inputs = large_model()
fitted(cached_case("dense"), "opg", 5).predict(cached_case("dense").unseen)  # what is set up once
before, most, done = anonymous(), 0, False

def watch():
    global most
    while not done:
        most = max(most, anonymous())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
out = deltabars.load(sys.argv[1], model, offload=True).predict(inputs)
done = True
watcher.join()
torch.save((most - before, out.std, out.std_low), sys.argv[2])
"""


def anonymous():
    """The own memory of this process that is no file's, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def large_model():
    torch.manual_seed(0)
    layers = torch.nn.Linear(500, 4000), torch.nn.Tanh(), torch.nn.Linear(4000, 2)
    return torch.nn.Sequential(*layers), torch.randn(4, 500)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_memory_of_a_prediction_from_files(tmp_path):
    """P = 2 million, K = 50: 400 MB of eigenvectors, of which a part is in memory at a time."""
    model, inputs = large_model()
    data = inputs, torch.tensor([0, 1, 0, 1])
    with pytest.warns(deltabars.errors.OptimumWarning):
        small = deltabars.fit(model, data, l2=0.1, rank=2, progress=False)
    size, rank = small.num_parameters, 50
    vectors = torch.zeros(rank, size)
    vectors[torch.arange(size) % rank, torch.arange(size)] = torch.randn(size)
    vectors /= vectors.norm(dim=1, keepdim=True)
    values = torch.linspace(5, 1, rank, dtype=torch.float64)
    pairs = replace(
        small.spectra["opg"], values=values, vectors=vectors, residuals=torch.zeros_like(values)
    )
    fit = replace(small, spectra={"opg": pairs})
    fit.save(tmp_path / "large", max_file_size="100MB")
    arguments = [str(tmp_path / name) for name in ("large", "out.pt")]
    found = []
    for _ in range(3):  # of which one may meet a moment that the others miss
        subprocess.run([sys.executable, "-c", LARGE, *arguments], check=True, env=ENVIRONMENT)
        most, std, low = torch.load(tmp_path / "out.pt", weights_only=True)
        found.append(most)
    assert sorted(found)[1] < 100e6  # as docs/scale.md says
    out = fit.predict(inputs)
    torch.testing.assert_close(std, out.std, rtol=1e-5, atol=0)
    torch.testing.assert_close(low, out.std_low, rtol=1e-5, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu(dense_case, tmp_path, dtype):
    """From files and from the CPU's memory, as from the GPU's own."""
    fit = fitted(dense_case, device="cuda", dtype=torch.float32)
    fit.save(tmp_path / "a", dtype=dtype, max_file_size=500)
    here = deltabars.load(tmp_path / "a", dense_case.model, device="cuda", offload=False)
    there = deltabars.load(tmp_path / "a", dense_case.model, device="cuda", offload=True)
    expected = here.predict(dense_case.unseen)
    for away in (there, here.offloaded()):
        found = away.predict(dense_case.unseen)
        torch.testing.assert_close(found.std, expected.std, rtol=1e-5, atol=0)
        torch.testing.assert_close(found.std_high, expected.std_high, rtol=1e-4, atol=0)
