"""The benchmark: every work at a tiny size, and the command as a developer runs it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import __main__ as bench
from benchmarks.peak import ProcessMeter
from benchmarks.runner import WORKS, run_bench
from benchmarks.sizes import GPU, SMALL, Network
from benchmarks.sources import Sources
from deltabars.errors import BadValueError

VIT = ("hidden_size", "num_attention_heads", "intermediate_size")
TINY = {
    "device": "cpu", "repeats": 1, "fit_repeats": 1, "train_images": 48, "test_images": 4,
    "training_steps": 3, "images": 16, "product_check": 8, "hessian_images": 4, "checked_pairs": 2,
    "opg_images": 24, "opg_rank": 4, "opg_batch": 8,
    "predict_images": 4, "predict_rank": 3, "predict_fit_images": 4,
    "growth_images": 12, "growth_width": 2, "growth_rank": 2,
    "memory_images": 16, "memory_width": 4, "memory_rank": 2,
    "resnet": Network({"width": 2, "blocks": (1, 1)}, 24, 4, 1, 1, 8, rank=3),
    "vit": Network(dict.fromkeys(VIT, 4) | {"num_hidden_layers": 1}, 24, 4, 2, 0, 8, rank=3),
}  # fmt: skip
TINY_SMALL = dataclasses.replace(
    SMALL, **TINY, hessian_ranks=(2,), digits_images=4, digits_fit_images=16, digits_steps=2,
    digits_ranks=(5,),
)  # fmt: skip
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


def test_small_size():
    report, shown = run(TINY_SMALL, WITH_PEERS)
    assert [found["work"] for found in report["records"]] == WITH_PEERS
    for found in report["records"]:
        for measure in found["measures"]:
            assert measure["what"] in shown
            assert measure["seconds"] or measure["figure"] is not None
    assert all(len(line) <= 100 for line in shown.splitlines())
    errors = {
        measure["accuracy_of"]: measure["accuracy"]
        for found in report["records"]
        if found["work"] in ("product", "opg")
        for measure in found["measures"]
        if measure["accuracy"] is not None and "Incremental" not in measure["what"]
    }
    assert errors["error"] < 1e-5  # of a float32 product
    assert errors["values"] < 1e-4  # residuals of 1e-5, values from 0.01 on
    predicted = record(report, "predict")["raw"]["paper"]["errors"]
    assert predicted.keys() == {"hessian", "opg", "sandwich"}
    assert max(predicted.values()) < 1e-3  # float32 standard deviations of the same eigenpairs


def test_gpu_size_on_a_cpu(tmp_path):
    works = ["hessian", "hessian1500", "opg", "predict"]
    report, shown = run(TINY_GPU, works, Sources(cache=tmp_path))
    assert [len(found["measures"]) for found in report["records"]] == [1, 1, 1, 4]
    assert "speed only" not in shown  # the Hessian's pairs were there
    assert "speed only" in run(TINY_GPU, ["predict"])[1]


@LINUX
def test_memory():
    report, _ = run(TINY_GPU, ["memory"])
    assert [measure["unit"] for measure in record(report, "memory")["measures"]] == ["K·P"] * 2


def test_architectures(tmp_path, monkeypatch):
    """The networks that can be had; predictions of kept fits are those of the fits."""
    for seed, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        records = np.random.default_rng(seed).integers(0, 256, (8, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (tmp_path / f"{name}.bin").write_bytes(records.tobytes())
    monkeypatch.setitem(sys.modules, "transformers", None)
    report, shown = run(TINY_SMALL, ["architectures"], Sources(cifar10=tmp_path))
    assert "ViT left out: transformers is absent" in " ".join(shown.split())
    found = record(report, "architectures")
    storage = found["raw"]["narrow ResNet"]["storage"]
    for name, loss in (("float32", 1e-6), ("bfloat16", 2**-8), ("float16", 2**-11)):
        assert storage[name]["largest change of score"] <= loss
        assert storage[name]["largest score outside the interval"] <= 0
    measures = {measure["what"].partition(": ")[2]: measure for measure in found["measures"]}
    assert measures["fit, K=3"]["accuracy"] < 1e-4
    assert measures["4 images"]["accuracy"] < 1e-3  # float32 against float64
    left_out = run(TINY_GPU, ["architectures"])[1]
    assert "ResNet-18 left out: needs --cifar10" in " ".join(left_out.split())


def test_vit():
    pytest.importorskip("transformers", reason="transformers cannot be imported here")
    report, _ = run(TINY_SMALL, ["architectures"])
    assert list(record(report, "architectures")["raw"]) == ["ViT", "narrow ResNet"]


def test_an_absent_peer_is_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "curvlinops", None)
    shown = " ".join(run(TINY_SMALL, ["hessian"])[1].split())
    assert shown.count("(curvlinops is absent") == 1
    assert "pip install --no-deps -r peers.txt" in shown


class TestCommand:
    def test_floor_end_to_end(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(bench, "SMALL", TINY_SMALL)
        path = tmp_path / "bench.json"
        bench.main(["--only", "floor", "hessian1500", "--json", str(path)])
        shown = capsys.readouterr().out
        assert "gradient at once, N = 16" in shown
        assert "gpu size only" in shown
        report = json.loads(path.read_text())
        assert report["records"][0]["work"] == "floor"
        assert len(report["records"][0]["measures"][0]["seconds"]) == TINY_SMALL.repeats

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--mnist", "no/such"), "expected train-images-idx3-ubyte or"),
            (("--weights", "x.npz"), "expected together with --mnist"),
            (("--cache", "no/such"), "--cache: expected a folder that exists"),
        ],
    )
    def test_failure_is_one_line(self, arguments, message):
        with pytest.raises(SystemExit, match=message):
            bench.main(["--only", "floor", "--quiet", *arguments])

    def test_usage(self):
        command = [sys.executable, "-m", "benchmarks", "--help"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert all(work in shown for work in WORKS)
        with pytest.raises(BadValueError, match="expected some of"):
            run(TINY_SMALL, ["nonsense"])
