"""The benchmark: every work at a tiny size, and the command as a user runs it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks.peak import ProcessMeter
from benchmarks.results import Measure
from benchmarks.runner import WORKS, run_bench
from benchmarks.sizes import GPU, SMALL, Network
from benchmarks.sources import Sources
from benchmarks.subject import fresh_network
from deltabars.cli.entry import main
from deltabars.errors import BadValueError
from tests.scans import idx_bytes
from tests.stopping import end, start

VIT = ("hidden_size", "num_attention_heads", "intermediate_size")
TINY = {
    "device": "cpu",
    "repeats": 1,
    "fit_repeats": 1,
    "train_images": 48,
    "test_images": 4,
    "training_steps": 3,
    "images": 16,
    "product_check": 8,
    "hessian_images": 4,
    "checked_pairs": 2,
    "opg_images": 24,
    "opg_rank": 4,
    "opg_batch": 8,
    "predict_images": 4,
    "predict_rank": 3,
    "predict_fit_images": 4,
    "growth_images": 12,
    "growth_width": 2,
    "growth_rank": 2,
    "memory_images": 16,
    "memory_width": 4,
    "memory_rank": 2,
    "resnet": Network({"width": 2, "blocks": (1, 1)}, 24, 4, 1, 1, 8, rank=3),
    "vit": Network(dict.fromkeys(VIT, 4) | {"num_hidden_layers": 1}, 24, 4, 2, 0, 8, rank=3),
}
TINY_SMALL = dataclasses.replace(
    SMALL,
    **TINY,
    hessian_ranks=(2,),
    digits_images=4,
    digits_fit_images=16,
    digits_steps=2,
    digits_ranks=(5,),
)
TINY_GPU = dataclasses.replace(
    GPU, **TINY, hessian_ranks=(2, 3), published_images=4, published_rank=2
)
WITH_PEERS = ["product", "hessian", "opg", "predict"]
LINUX = pytest.mark.skipif(not ProcessMeter.works(), reason="peak memory cannot be read here")


def run(size, works=None, sources=None):
    shown = []
    report = run_bench(size, sources or Sources(), works, show=shown.append)
    return report, "\n".join(shown)


def record(report, work):
    return next(found for found in report["records"] if found["work"] == work)


@pytest.fixture(scope="module")
def reference_files(tmp_path_factory):
    """MNIST of noise, untrained weights, and published values that are far off."""
    folder = tmp_path_factory.mktemp("reference")
    for part, count in (("train", SMALL.train_images), ("t10k", SMALL.test_images)):
        images = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(images[:, 0, 0] % 10))
    np.savez(
        folder / "weights.npz", **{n: v.numpy() for n, v in fresh_network().state_dict().items()}
    )
    np.savez(folder / "published.npz", hessian=np.array([2.0, 1.0]), opg=np.array([2.0, 1.0]))
    return folder


@pytest.fixture(scope="module")
def small():
    return run(TINY_SMALL, WITH_PEERS)


class TestRuns:
    def test_small_size(self, small):
        report, shown = small
        assert [found["work"] for found in report["records"]] == WITH_PEERS
        for found in report["records"]:
            assert found["work"] in shown
            assert found["elapsed"] > 0
            for measure in found["measures"]:
                assert measure["what"] in shown
                assert measure["seconds"] or measure["figure"] is not None
                assert measure["verdict"] in ("", "aim", "must", "MISSED")
        assert all(len(line) <= 100 for line in shown.splitlines())
        assert {"device", "threads", "torch", "P", "N", "K"} <= set(report["environment"])

    def test_small_size_is_accurate(self, small):
        report, _ = small
        errors = {
            measure["accuracy_of"]: measure["accuracy"]
            for found in report["records"]
            if found["work"] in ("product", "opg")
            for measure in found["measures"]
            if measure["accuracy"] is not None and "Incremental" not in measure["what"]
        }
        assert errors["error"] < 1e-5  # of a float32 product
        assert errors["values"] < 1e-4  # residuals of 1e-5, values from 0.01 on

    def test_predictions_are_checked_in_float64(self, small):
        found = record(small[0], "predict")["raw"]["paper"]["errors"]
        assert found.keys() == {"hessian", "opg", "sandwich"}
        assert max(found.values()) < 1e-3  # float32 standard deviations of the same eigenpairs
        timed = [m for m in record(small[0], "predict")["measures"] if "images" in m["what"]]
        assert [m["accuracy"] for m in timed] == [found["opg"], max(found.values())]

    def test_gpu_size_on_a_cpu(self, tmp_path):
        works = ["hessian", "hessian1500", "opg", "predict"]
        report, shown = run(TINY_GPU, works, Sources(cache=tmp_path))
        assert [len(found["measures"]) for found in report["records"]] == [1, 1, 1, 4]
        assert "speed only" not in shown  # the Hessian's pairs were there
        assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["hessian", "opg"]
        later, _ = run(TINY_GPU, ["predict"], Sources(cache=tmp_path))
        assert not record(later, "predict")["notes"]

    def test_predict_without_pairs_says_that_they_are_made_up(self):
        _, shown = run(TINY_GPU, ["predict"])
        assert "speed only" in shown

    @LINUX
    def test_memory(self):
        report, _ = run(TINY_GPU, ["memory"])
        assert [measure["unit"] for measure in record(report, "memory")["measures"]] == ["K·P"] * 2

    def test_published(self, reference_files):
        sources = Sources(
            reference_files, reference_files / "weights.npz", reference_files / "published.npz"
        )
        report, _ = run(dataclasses.replace(TINY_GPU, opg_images=4), ["opg", "published"], sources)
        published = record(report, "published")
        verdicts = [measure["verdict"] for measure in published["measures"]]
        assert verdicts == ["MISSED"] * 4
        values = np.array(record(report, "opg")["raw"]["values"][:2])
        assert published["raw"]["opg"] == pytest.approx(values / [2.0, 1.0] - 1)
        assert len(published["raw"]["hessian"]) == 2

    @pytest.mark.parametrize("size", [TINY_GPU, TINY_SMALL], ids=["no weights", "small"])
    def test_published_is_left_out(self, reference_files, size):
        weights = reference_files / "weights.npz" if size.name == "small" else None
        sources = Sources(reference_files, weights, reference_files / "published.npz")
        assert "left out" in run(size, ["published"], sources)[1]

    def test_hessian1500_of_the_small_size(self):
        assert "gpu size only" in run(TINY_SMALL, ["hessian1500"])[1]

    def test_unknown_work(self):
        with pytest.raises(BadValueError, match="expected some of"):
            run(TINY_SMALL, ["nonsense"])

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_no_gpu(self):
        with pytest.raises(BadValueError, match="expected a CUDA device"):
            run(GPU, ["floor"])


class TestCommand:
    def test_floor_end_to_end(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(bench, "SMALL", TINY_SMALL)
        path = tmp_path / "bench.json"
        assert main(["bench", "--only", "floor", "--quiet", "--json", str(path)]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        assert "gradient at once, N = 16" in shown.out
        report = json.loads(path.read_text())
        assert set(report) == {"environment", "size", "records"}
        assert report["environment"]["P"] == 93_322
        assert report["size"]["name"] == "small"
        (floor,) = report["records"]
        assert set(floor) == {"work", "measures", "notes", "raw", "elapsed"}
        fields = {field.name for field in dataclasses.fields(Measure)}
        assert set(floor["measures"][0]) == fields | {"median", "verdict"}
        assert len(floor["measures"][0]["seconds"]) == TINY_SMALL.repeats

    @pytest.mark.parametrize("arguments", [("--only", "nonsense"), ("--only",), ("--nonsense",)])
    def test_wrong_usage(self, arguments, capsys):
        with pytest.raises(SystemExit) as exit_:
            main(["bench", *arguments])
        assert exit_.value.code == 2
        assert "usage: deltabars" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--json", "no/such/x.json"), "expected a folder that exists"),
            (("--mnist", "no/such"), "expected train-images-idx3-ubyte or"),
            (("--weights", "x.npz"), "expected together with --mnist"),
            (("--cifar10", "no/such"), "--cifar10: expected a folder that exists"),
            (("--cache", "no/such"), "--cache: expected a folder that exists"),
        ],
    )
    def test_failure_is_one_line(self, arguments, message, capsys):
        assert main(["bench", "--only", "floor", "--quiet", *arguments]) == 1
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1
        assert message in shown

    def test_progress_goes_to_stderr(self, monkeypatch, capsys):
        monkeypatch.setattr(bench, "SMALL", TINY_SMALL)
        assert main(["bench", "--only", "hessian1500"]) == 0
        assert "… hessian1500\n" in capsys.readouterr().err

    def test_help(self, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["bench", "--help"])
        assert caught.value.code == 0
        shown = capsys.readouterr().out
        assert "deltabars bench --json bench.json" in shown
        for work in WORKS:
            assert work in shown

    def test_absent_peers_are_lines(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        blocked = {"curvlinops": "hessian", "sklearn.decomposition": "opg", "laplace": "predict"}

        def work():
            with open("said", "w") as sys.stdout, open("wrong", "w") as sys.stderr:
                sys.modules.update(dict.fromkeys(blocked))
                run_bench(TINY_SMALL, Sources(), list(blocked.values()))

        assert end(start(work)) == 0
        assert Path("wrong").read_text() == ""
        said = Path("said").read_text()
        for peer in blocked:
            assert said.count(f"({peer} is absent") == 1
        assert "pip install --no-deps -r peers.txt" in " ".join(said.split())
