"""Large fits on disk: several files, 16 bits, eigenvectors that stay in the files."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import resource
import subprocess
import sys
from dataclasses import replace
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
from deltabars.runtime.vectors import PartedVectors
from deltabars.storage import format as shards
from deltabars.storage import format as storage
from tests.conftest import cached_case

ESTIMATORS = ("hessian", "opg", "sandwich", "ggn")
SHORT = {"float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11}  # half of an ulp, relative


def fitted(case, estimator="sandwich", rank=9, **options):
    given = {"l2": case.l2, "estimator": estimator, "rank": rank, "progress": False} | options
    return deltabars.fit(case.model, case.data, **given)


@pytest.fixture
def fit(dense_case):
    return fitted(dense_case)


@pytest.fixture
def folder(fit, tmp_path):
    """A fit of five files of columns: 43 columns of 2·9 numbers."""
    fit.save(tmp_path / "net.deltabars", max_file_size=9 * 18 * 8)
    return tmp_path / "net.deltabars"


def same(a, b, *names):
    return all(
        torch.equal(getattr(a, name), getattr(b, name))
        for name in names or ("mean", "std", "std_low", "std_high", "score", "score_error")
    )


class TestFolder:
    def test_what_is_in_it(self, folder):
        names = sorted(os.listdir(folder))
        assert names == [
            "fit.safetensors", "index.json",
            *(f"vectors-0000{k}-of-00005.safetensors" for k in range(1, 6)),
        ]  # fmt: skip
        index = json.loads((folder / "index.json").read_text())
        assert [(part["start"], part["stop"]) for part in index["parts"]] == [
            (0, 9), (9, 18), (18, 27), (27, 36), (36, 43)
        ]  # fmt: skip
        assert index["total_size"] == 43 * 18 * 8
        assert index["parts"][0]["matrices"] == ["hessian", "opg"]

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_everything_comes_back(self, dense_case, tmp_path, estimator):
        fit = fitted(dense_case, estimator, 7, params=["2.*"])
        fit.save(tmp_path / "a", max_file_size=500)
        back = deltabars.load(tmp_path / "a", dense_case.model)
        assert len(os.listdir(tmp_path / "a")) > 3
        for name, pairs in fit.spectra.items():
            for field in ("values", "vectors", "residuals", "smallest", "smallest_residuals"):
                assert torch.equal(getattr(back.spectra[name], field), getattr(pairs, field))
        assert same(back.predict(dense_case.unseen), fit.predict(dense_case.unseen))
        assert back.diagnostics["storage"][next(iter(fit.spectra))] == {"dtype": "float64"}

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

    def test_one_replaces_another(self, fit, folder, dense_case):
        fit.save(folder)
        assert len(os.listdir(folder)) == 3
        fit.save(folder, max_file_size=1000)
        assert same(
            deltabars.load(folder, dense_case.model).predict(dense_case.unseen),
            fit.predict(dense_case.unseen),
        )
        assert os.listdir(folder.parent) == [folder.name]

    def test_a_failed_write_leaves_what_was_there_and_nothing_else(self, fit, folder, dense_case):
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # the disk is full, in effect
        try:
            for path in (folder, folder.parent / "new"):
                with pytest.raises(StorageError, match="Cannot write"):
                    fit.save(path, max_file_size=1000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert os.listdir(folder.parent) == [folder.name]

    def test_parts_can_be_written_by_many(self, fit, tmp_path, dense_case):
        """As the processes of a distributed fit do, each with its own columns."""
        from deltabars.fitting.files import _head_of as head_of

        places = [(20, 43), (0, 20)]
        parts = [
            shards.write_part(
                tmp_path, number, 2,
                {name: pairs.vectors[:, slice(*place)] for name, pairs in fit.spectra.items()},
                *place,
            )
            for number, place in enumerate(places, 1)
        ]  # fmt: skip
        shards.write_index(tmp_path, *head_of(fit), pickle.loads(pickle.dumps(parts)))
        back = deltabars.load(tmp_path, dense_case.model)
        assert torch.equal(back.spectra["opg"].vectors, fit.spectra["opg"].vectors)


class TestOffload:
    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_it_predicts_as_from_the_memory_of_the_cpu(self, dense_case, tmp_path, estimator):
        fit = fitted(dense_case, estimator)
        unseen = dense_case.unseen
        for path, size in ((tmp_path / "one", "5GB"), (tmp_path / "many", 700)):
            fit.save(path, max_file_size=size)
            there = deltabars.load(path, dense_case.model, offload=True)
            here = fit.offloaded()
            for pairs in there.spectra.values():
                assert isinstance(pairs.vectors, PartedVectors)
            for asked in ({}, {"rank": 3}, {"full_rank": False}, {"bound": "paper"},
                          {"space": "logit", "covariance": True}, {"classes": [2, 0]}):  # fmt: skip
                assert same(there.predict(unseen, **asked), here.predict(unseen, **asked))
            both = ["opg", "hessian"] if estimator == "sandwich" else [estimator]
            found = there.predict(unseen, estimator=both)
            assert all(same(found[name], here.predict(unseen, estimator=name)) for name in both)
            moved = there.with_l2(0.1).predict(unseen)
            assert same(moved, here.with_l2(0.1).predict(unseen))
            assert torch.equal(there.sample(2, seed=3), here.sample(2, seed=3))
            if estimator in ("opg", "ggn"):
                args = unseen[:2], dense_case.data
                assert same(there.certify(*args), here.certify(*args))
            if estimator == "sandwich":
                torch.testing.assert_close(there.overlap, here.overlap)

    def test_by_default_where_memory_is_short(self, fit, folder, dense_case):
        def vectors(**options):
            loaded = deltabars.load(folder, dense_case.model, **options)
            return loaded.spectra["opg"].vectors

        assert isinstance(vectors(), torch.Tensor)
        assert isinstance(vectors(memory_budget=2 * 9 * 43 * 8), PartedVectors)
        assert isinstance(vectors(memory_budget=3 * 9 * 43 * 8), torch.Tensor)
        assert isinstance(vectors(memory_budget=10, offload=False), torch.Tensor)
        with pytest.raises(BadValueError, match="offload: expected None, True or False"):
            vectors(offload="cpu")

    def test_it_can_be_saved_again_over_its_own_files(self, fit, folder, dense_case):
        away = deltabars.load(folder, dense_case.model, offload=True)
        away.save(folder, max_file_size=4000)
        again = deltabars.load(folder, dense_case.model)
        assert torch.equal(again.spectra["opg"].vectors, fit.spectra["opg"].vectors)
        assert same(away.predict(dense_case.unseen), fit.offloaded().predict(dense_case.unseen))

    def test_a_pickle_has_the_names_of_the_files(self, folder, dense_case):
        away = deltabars.load(folder, dense_case.model, offload=True)
        vectors = away.spectra["opg"].vectors
        packed = pickle.dumps(vectors)
        assert torch.equal(pickle.loads(packed).whole(), vectors.whole())
        for part in vectors.parts:
            assert len(pickle.dumps(part)) < 500
        again = pickle.loads(pickle.dumps(away))
        assert same(again.predict(dense_case.unseen), away.predict(dense_case.unseen))
        first = folder / "vectors-00001-of-00005.safetensors"
        os.replace(folder / "vectors-00002-of-00005.safetensors", first)
        with pytest.raises(StorageError, match="expected the file that the fit was loaded from"):
            pickle.loads(packed)
        first.unlink()
        with pytest.raises(StorageError, match="Cannot read"):
            pickle.loads(packed)
        # What is mapped stays there.
        assert torch.equal(vectors.whole(), again.spectra["opg"].vectors.whole())

    def test_forked_workers(self, folder, dense_case):
        away = deltabars.load(folder, dense_case.model, offload=True)
        expected = away.predict(dense_case.unseen)
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        worker = context.Process(
            target=lambda: queue.put(away.predict(dense_case.unseen).std.tolist())
        )
        worker.start()
        found = torch.tensor(queue.get(), dtype=torch.float64)
        worker.join()
        assert torch.equal(found, expected.std)


class TestRounded:
    @pytest.mark.parametrize("dtype", SHORT)
    @pytest.mark.parametrize("size", ["5GB", 1000])
    def test_the_loss_is_told_and_stays_with_the_fit(self, fit, tmp_path, dense_case, dtype, size):
        fit.save(tmp_path / "a", dtype=dtype, max_file_size=size)
        back = deltabars.load(tmp_path / "a", dense_case.model, offload=True)
        for name, pairs in fit.spectra.items():
            told = back.diagnostics["storage"][name]
            there = back.spectra[name].vectors
            assert told["dtype"] == dtype == str(there.stored).removeprefix("torch.")
            exact = float(torch.linalg.svdvals(there.whole() - pairs.vectors)[0])
            assert exact <= told["norm"] <= 1.002 * exact
            assert exact < SHORT[dtype] * 2
            assert back.spectra[name].rounding == told["norm"]
            assert back.with_l2(0.1).spectra[name].rounding == told["norm"]
        assert "eigenvectors were rounded by up to " in repr(back)
        assert "rounded" not in repr(fit)
        # The overlap is that of the vectors before they were rounded.
        assert torch.equal(back.state.overlap, fit.state.overlap)
        assert torch.equal(back.with_progress(True).state.overlap, fit.state.overlap)
        assert torch.equal(pickle.loads(pickle.dumps(back)).state.overlap, fit.state.overlap)
        # As it is, and longer: nothing more is lost. Shorter: what was lost adds up.
        for asked in (None, "float64"):
            back.save(tmp_path / "b", dtype=asked)
            again = deltabars.load(tmp_path / "b", dense_case.model)
            in_memory = deltabars.load(tmp_path / "b", dense_case.model, offload=False)
            in_memory.save(tmp_path / "c")  # as one tensor, with what it has lost
            kept = deltabars.load(tmp_path / "c", dense_case.model)
            assert torch.equal(kept.state.overlap, fit.state.overlap)
            assert again.spectra["opg"].rounding == back.spectra["opg"].rounding
            assert torch.equal(again.spectra["opg"].vectors, back.spectra["opg"].vectors.whole())
        if dtype == "float32":
            back.save(tmp_path / "c", dtype=torch.bfloat16)
            again = deltabars.load(tmp_path / "c", dense_case.model)
            assert again.spectra["opg"].rounding > 1000 * back.spectra["opg"].rounding

    @pytest.mark.parametrize("kind", ["dense", "linear"])
    @pytest.mark.parametrize("dtype", SHORT)
    def test_the_exact_value_lies_in_the_interval(self, kind, dtype, tmp_path):
        """At every rank; and the interval holds that of the fit before it was rounded."""
        case = cached_case(kind)
        positive = float(torch.linalg.eigvalsh(case.oracle.hessian())[0]) > 0
        names = ["opg", "sandwich"] if positive else ["opg"]
        fit = fitted(case, names[-1], case.oracle.size)
        fit.save(tmp_path / "a", dtype=dtype)
        short = deltabars.load(tmp_path / "a", case.model)
        missed = 0
        for rank in range(1, case.oracle.size + 1):
            asked = {"rank": rank, "estimator": names, "moderation": None}
            after, before = short.predict(case.unseen, **asked), fit.predict(case.unseen, **asked)
            for name in names:
                out, narrow, exact = after[name], before[name], case.oracle.std(name, case.unseen)
                assert bool((out.std_low - 1e-9 <= exact).all())
                assert bool((exact <= out.std_high + 1e-9).all())
                assert bool(((out.std - exact).abs() <= out.std_error + 1e-9).all())
                assert bool((out.std_low <= narrow.std_low + 1e-9).all())
                assert bool((out.std_high >= narrow.std_high - 1e-9).all())
                off = (out.std - exact).abs() - narrow.std_error
                missed += int((off > 1e-6).sum())
        if dtype == "bfloat16":
            assert missed  # by the bound of exact vectors

    def test_16_bits_take_half_of_32(self, dense_case, tmp_path):
        fit = fitted(dense_case, dtype=torch.float32)
        for name in SHORT:
            fit.save(tmp_path / name, dtype=name, max_file_size=1)
        sizes = {
            name: json.loads((tmp_path / name / "index.json").read_text())["total_size"]
            for name in SHORT
        }
        assert sizes["bfloat16"] == sizes["float16"] == sizes["float32"] / 2 == 2 * 9 * 43 * 2
        plain = deltabars.load(tmp_path / "float32", dense_case.model)
        assert plain.spectra["opg"].rounding == 0
        assert plain.diagnostics["storage"]["opg"] == {"dtype": "float32"}

    def test_an_older_deltabars_refuses_it_as_newer(self, fit, tmp_path):
        for dtype, version in ((None, 2), ("float64", 2), ("bfloat16", 3)):
            fit.save(tmp_path / "a", dtype=dtype)
            assert storage.read_header(tmp_path / "a")["format"] == version


def alter(folder, change):
    """Change the index, with a digest that is right."""
    path = folder / "index.json"
    content = json.loads(path.read_text())
    del content["digest"]
    change(content)
    content["digest"] = shards._digest(content)
    path.write_text(json.dumps(content))


def draw_change(content, draw, junk):
    """Put something else in one place of an index, but for the sizes, which nothing relies on."""
    there = [(content, key) for key in content if key != "total_size"]
    for container, key in there:
        inner = container[key]
        if isinstance(inner, dict):
            there += [(inner, name) for name in inner if name != "bytes"]
        elif isinstance(inner, list):
            there += [(inner, number) for number in range(len(inner))]
    container, key = draw.choice(there)
    others = [value for value in junk if type(value) is not type(container[key])]
    container[key] = draw.choice(others)


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda c: c["parts"].pop(1), "expected columns from 9 on"),
            (lambda c: c["parts"].pop(), "its content is not that of a fit"),
            (lambda c: c["parts"].clear(), "expected files of columns"),
            (lambda c: c["parts"].append(c["parts"][0]), "expected columns from 43 on"),
            (lambda c: c["parts"][1].update(start=8), "expected columns from 9 on"),
            (lambda c: c["parts"][0].update(stop=2**70), "columns that cannot be"),
            (lambda c: c["parts"][0].update(start=-1), "columns that cannot be"),
            (lambda c: c["parts"][0].update(start=0.0), "cannot be read"),
            (lambda c: c["parts"][0].update(file="../elsewhere.safetensors"), "not beside it"),
            (lambda c: c["parts"][0].update(file="/etc/passwd"), "not beside it"),
            (lambda c: c["parts"][0].update(file=7), "not beside it"),
            (lambda c: c["parts"][0].update(file=c["parts"][1]["file"]), "each of them once"),
            (lambda c: c["parts"][0].update(digest="0" * 64), "not the one of the index"),
            (lambda c: c["parts"][0].update(matrices=["opg"]), "the same matrices"),
            (lambda c: [part.update(matrices=["opg"]) for part in c["parts"]], "not the one"),
            (lambda c: c["parts"][0].update(more=1), "cannot be read"),
            (lambda c: c["parts"].__setitem__(0, [1]), "cannot be read"),
            (lambda c: c["fit"].update(digest="0"), "not the one of the index"),
            (lambda c: c["fit"].update(file="../fit.safetensors"), "names another file"),
            (lambda c: c.update(parts=None), "cannot be read"),
            (lambda c: c.pop("format"), "cannot be read"),
        ],
    )
    def test_indexes(self, folder, dense_case, change, said):
        alter(folder, change)
        with pytest.raises(CorruptFileError) as error:
            deltabars.load(folder, dense_case.model)
        assert said in str(error.value)
        assert str(error.value).count("\n") == 0

    def test_random_indexes(self, folder, dense_case):
        """200 of them with the right digest, and 200 with random bytes."""
        draw = random.Random(0)
        path = folder / "index.json"
        whole = path.read_bytes()
        junk = [None, -1, 0, 1, 43, 2**63, 2**200, 1e999, "", "a", "../x", [], {}, [[]], True]
        for _ in range(200):
            path.write_bytes(whole)
            alter(folder, lambda content: draw_change(content, draw, junk))
            with pytest.raises(StorageError, match=r"^[^\n]+$"):
                deltabars.load(folder, dense_case.model)
        for _ in range(200):
            altered = bytearray(whole[: draw.randint(1, len(whole))])
            for _ in range(draw.randint(1, 4)):
                altered[draw.randrange(len(altered))] ^= draw.randrange(1, 256)
            path.write_bytes(altered)
            with pytest.raises(StorageError, match=r"^[^\n]+$"):
                deltabars.load(folder, dense_case.model)

    def test_newer_ones(self, folder, dense_case):
        alter(folder, lambda content: content.update(format=9))
        with pytest.raises(FormatVersionError, match="has format 9"):
            deltabars.load(folder, dense_case.model)

    def test_every_altered_byte_of_every_file(self, folder, dense_case):
        for path in folder.iterdir():
            whole = path.read_bytes()
            for place in range(0, len(whole), max(1, len(whole) // 12)):
                altered = bytearray(whole)
                altered[place] ^= 0x41
                path.write_bytes(altered)
                with pytest.raises(StorageError):
                    deltabars.load(folder, dense_case.model, offload=True)
            for short in (b"", whole[: len(whole) // 2], whole[:-3]):
                path.write_bytes(short)
                with pytest.raises(StorageError):
                    deltabars.load(folder, dense_case.model)
            path.unlink()
            with pytest.raises(StorageError, match="Cannot read"):
                deltabars.load(folder, dense_case.model)
            os.mkfifo(path)
            with pytest.raises(StorageError, match="pipe or device"):
                deltabars.load(folder, dense_case.model)
            path.unlink()
            path.write_bytes(whole)
        assert deltabars.load(folder, dense_case.model).rank == 9

    def test_files_of_another_fit(self, folder, dense_case, tmp_path):
        """Of the same shapes, each of them whole."""
        other = fitted(cached_case("dense", 29, 0.05, 1))
        other.save(tmp_path / "other", max_file_size=9 * 18 * 8)
        for path in (tmp_path / "other").iterdir():
            if path.name != "index.json":
                mine = (folder / path.name).read_bytes()
                (folder / path.name).write_bytes(path.read_bytes())
                with pytest.raises(CorruptFileError, match="not the one of the index"):
                    deltabars.load(folder, dense_case.model)
                (folder / path.name).write_bytes(mine)
        with pytest.raises(WeightsMismatchError):
            deltabars.load(tmp_path / "other", dense_case.model)

    @pytest.mark.parametrize(
        "change",
        [
            {"hessian.vectors": torch.zeros(9, 9), "opg.vectors": torch.zeros(9, 9)},
            {"opg.vectors": torch.zeros(8, 9, dtype=torch.float64)},
            {"opg.vectors": torch.zeros(9, 8, dtype=torch.float64)},
            {"opg.vectors": torch.zeros(9, 9, dtype=torch.int64)},
            {"opg.vectors": torch.zeros(9)},
            {"opg.vectors": torch.full((9, 9), float("nan"), dtype=torch.float64)},
        ],
    )
    def test_parts_that_do_not_fit_together(self, folder, dense_case, change):
        name = "vectors-00001-of-00005.safetensors"
        header, tensors = storage.read(folder / name)
        digest = storage.write(folder / name, header, tensors | change, 3)
        alter(folder, lambda content: content["parts"][0].update(digest=digest))
        with pytest.raises(CorruptFileError, match="is altered"):
            deltabars.load(folder, dense_case.model)

    def test_an_overlap_that_cannot_be(self, folder, dense_case):
        for wrong in (torch.zeros(3, 9), torch.full((9, 9), 5.0), torch.full((9, 9), torch.nan)):
            header, tensors = storage.read(folder / "fit.safetensors")
            changed = tensors | {"overlap": wrong.double()}
            digest = storage.write(folder / "fit.safetensors", header, changed, 3)
            alter(folder, lambda content, digest=digest: content["fit"].update(digest=digest))
            with pytest.raises(CorruptFileError, match="overlap cannot be so"):
                deltabars.load(folder, dense_case.model)

    @pytest.mark.parametrize("option", [{"dtype": "int8"}, {"max_file_size": "large"}])
    def test_options(self, fit, tmp_path, option):
        with pytest.raises(BadValueError, match=f"{next(iter(option))}: expected"):
            fit.save(tmp_path / "a", **option)
        assert not os.listdir(tmp_path)


class TestCommands:
    def test_fit_and_predict(self, workshop, tmp_path, capsys):
        run, again = tmp_path / "run", tmp_path / "again"
        options = ["fit", *workshop.options, "--rank", "6", "--store", "bfloat16"]
        options += ["--max-file-size", "2KB", "--quiet"]
        assert main([*options, "--out", str(run)]) == 0
        assert len(list((run / "fit.deltabars").glob("vectors-*"))) > 1
        capsys.readouterr()
        assert main([*options, "--out", str(again), "--print-python"]) == 0
        exec(compile(capsys.readouterr().out, "printed", "exec"), {"__name__": "__main__"})
        fits = [Run.open(path).load_fit(offload=True) for path in (run, again)]
        pairs = [fit.spectra["opg"] for fit in fits]
        assert pairs[0].vectors.stored == torch.bfloat16
        assert torch.equal(pairs[0].vectors.whole(), pairs[1].vectors.whole())
        capsys.readouterr()
        asked = ["predict", str(run), "--data", str(workshop.folder / "test"), "--quiet"]
        assert main([*asked, "--offload", "--json"]) == 0
        there = json.loads(capsys.readouterr().out)
        assert main([*asked, "--json"]) == 0
        here = json.loads(capsys.readouterr().out)
        assert there["mean_score"] == pytest.approx(here["mean_score"], rel=1e-5)
        assert main([*asked, "--offload", "--print-python"]) == 0
        assert "offload=True" in capsys.readouterr().out
        assert main([*options, "--out", str(run), "--overwrite"]) == 0


LARGE = """
import sys, threading, time, torch, deltabars
from tests.storage.test_stored_vectors import anonymous, large_model
model, inputs = large_model()
deltabars.load(sys.argv[2], model).predict(inputs)  # all that is imported and set up only once
before, most, done = anonymous(), 0, False

def watch():
    global most
    while not done:
        most = max(most, anonymous())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
started = time.perf_counter()
fit = deltabars.load(sys.argv[1], model, offload=True)
seconds = time.perf_counter() - started
out = fit.predict(inputs)
done = True
watcher.join()
torch.save((most - before, seconds, out.std, out.std_low), sys.argv[3])
"""


def anonymous():
    """The own memory of this process that is no file's, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def large_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(500, 4000), torch.nn.Tanh(), torch.nn.Linear(4000, 2)
    )
    return model, torch.randn(4, 500)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_memory_of_a_prediction_from_files(tmp_path):
    """P = 2 million, K = 50: 400 MB of eigenvectors, of which a tenth is in memory at a time."""
    model, inputs = large_model()
    with pytest.warns(deltabars.errors.OptimumWarning):
        small = deltabars.fit(
            model, (inputs, torch.tensor([0, 1, 0, 1])), l2=0.1, rank=2, progress=False
        )
    size, rank = small.num_parameters, 50
    vectors = torch.zeros(rank, size)
    vectors[torch.arange(size) % rank, torch.arange(size)] = torch.randn(size)
    vectors /= vectors.norm(dim=1, keepdim=True)
    values = torch.linspace(5, 1, rank, dtype=torch.float64)
    pairs = replace(
        small.spectra["opg"], values=values, vectors=vectors, residuals=torch.zeros_like(values)
    )
    fit = replace(small, spectra={"opg": pairs})
    assert size > 2_000_000
    small.save(tmp_path / "small")
    fit.save(tmp_path / "large", max_file_size="100MB")
    arguments = [str(tmp_path / name) for name in ("large", "small", "out.pt")]
    subprocess.run([sys.executable, "-c", LARGE, *arguments], check=True)
    most, seconds, std, low = torch.load(tmp_path / "out.pt", weights_only=True)
    print(f"{most / 1e6:.0f} MB for {vectors.nbytes / 1e6:.0f}; loaded in {seconds:.2f} s")
    assert most < 0.4 * vectors.nbytes
    assert seconds < 20  # 400 MB are read once
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
    assert here.spectra["opg"].vectors.is_cuda
    expected = here.predict(dense_case.unseen)
    for away in (there, here.offloaded()):
        found = away.predict(dense_case.unseen)
        assert found.std.is_cuda
        torch.testing.assert_close(found.std, expected.std, rtol=1e-5, atol=0)
        torch.testing.assert_close(found.std_high, expected.std_high, rtol=1e-4, atol=0)
