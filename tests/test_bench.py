"""The benchmark: every work at a tiny size, and the command as a user runs it."""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from deltabars import Problem
from deltabars.bench import plain
from deltabars.bench.opg import exact_values
from deltabars.bench.peak import Case, ProcessMeter, measure_peaks, read_status
from deltabars.bench.results import Goal, Measure, Record
from deltabars.bench.runner import WORKS, run_bench, write_json
from deltabars.bench.sizes import GPU, SMALL
from deltabars.bench.sources import Sources, Spectra
from deltabars.bench.subject import upscaled_digits, wide_network
from deltabars.bench.table import head, section
from deltabars.bench.timing import growth_exponent, interleaved
from deltabars.cli import main
from deltabars.commands import bench
from deltabars.curvature import HessianOperator, OPGOperator
from deltabars.eigen import EigenPairs
from deltabars.errors import BadValueError, DataError
from deltabars.recipes.paper import paper_network
from tests.test_recipes_paper import idx_bytes

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


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    """The works collect garbage often, and each time walk through all that was imported."""
    gc.freeze()
    yield
    gc.unfreeze()


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
        folder / "weights.npz", **{n: v.numpy() for n, v in paper_network().state_dict().items()}
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
        assert errors["value error"] < 1e-4  # residuals of 1e-5, values from 0.01 on

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
    def test_growth_and_memory(self):
        report, _ = run(TINY_GPU, ["growth", "memory"])
        growth = record(report, "growth")
        assert len(growth["measures"]) == 10
        points = growth["raw"]["fit time of opg in K"]
        assert [point["rank"] for point in points] == [2, 4, 8]
        assert [point["products"] for point in points] == [4, 8, 16]
        assert [measure["unit"] for measure in record(report, "memory")["measures"]] == ["K·P"] * 2

    def test_published(self, reference_files):
        sources = Sources(
            reference_files, reference_files / "weights.npz", reference_files / "published.npz"
        )
        report, _ = run(dataclasses.replace(TINY_GPU, opg_images=4), ["opg", "published"], sources)
        published = record(report, "published")
        assert [measure["verdict"] for measure in published["measures"]] == ["MISSED"] * 3
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

    def test_help(self):
        done = subprocess.run(
            [sys.executable, "-m", "deltabars", "bench", "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0
        assert "deltabars bench --json bench.json" in done.stdout
        for work in WORKS:
            assert work in done.stdout

    def test_absent_peers_are_lines(self):
        blocked = {"curvlinops": "hessian", "sklearn.decomposition": "opg", "laplace": "predict"}
        program = (
            "import sys\n"
            f"sys.modules.update(dict.fromkeys({list(blocked)!r}))\n"
            "from tests.test_bench import TINY_SMALL, Sources, run_bench\n"
            f"run_bench(TINY_SMALL, Sources(), {list(blocked.values())!r})\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        for peer in blocked:
            assert done.stdout.count(f"({peer} is absent") == 1
        assert "pip install --no-deps -r peers.txt" in " ".join(done.stdout.split())


class TestPlain:
    """The independent products are those of the operators."""

    @pytest.fixture
    def setting(self):
        images, labels, _ = upscaled_digits(20, 1)
        model = wide_network(3)
        vectors = torch.randn(2, 2395, generator=torch.Generator().manual_seed(0))
        return model, (images, labels), vectors, Problem(model, (images, labels), l2=0.1)

    def test_hessian(self, setting):
        model, data, vectors, problem = setting
        ours = HessianOperator(problem).matmat(vectors)
        theirs = plain.hessian_products(model, data, vectors, 0.1)
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)  # two in float32

    def test_opg(self, setting):
        model, data, vectors, problem = setting
        ours = OPGOperator(problem).matmat(vectors)
        theirs = plain.opg_products(model, data, vectors, 0.1)
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)

    def test_residuals(self):
        vectors = torch.eye(2)
        products = torch.tensor([[10.0, 3.0], [0.0, 0.5]])
        found = plain.residuals(torch.tensor([10.0, 0.2]), vectors, products)
        torch.testing.assert_close(found, torch.tensor([0.3, 0.3], dtype=torch.float64))

    def test_exact_values(self):
        rows = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
        plain_values, centred_values = exact_values(rows, 5)
        for values, matrix in ((plain_values, rows), (centred_values, rows - rows.mean(0))):
            expected = torch.linalg.svdvals(matrix.double())[:5] ** 2 / 300
            torch.testing.assert_close(values, expected, rtol=1e-6, atol=0)  # means in float32


class TestMeasuring:
    @pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
    def test_exponents_of_exact_power_laws(self, power):
        sizes = [3.0, 6.0, 12.0]
        costs = [0.2 * size**power for size in sizes]
        assert growth_exponent(sizes, costs) == pytest.approx(power, abs=1e-12)

    def test_functions_take_turns_after_a_warm_up(self):
        calls = []
        tasks = {name: lambda name=name: calls.append(name) for name in "ab"}
        seconds = interleaved(tasks, torch.device("cpu"), 2)
        assert calls == ["a", "b"] * 3
        assert {name: len(found) for name, found in seconds.items()} == {"a": 2, "b": 2}

    @LINUX
    def test_process_meter_sees_a_peak_and_forgets_it(self):
        meter = ProcessMeter()
        meter.reset()
        before = meter.held()
        block = torch.ones(16 << 20)  # 64 MiB, touched
        del block
        assert meter.peak() - before > 60 << 20
        meter.reset()
        assert read_status("VmHWM") - meter.held() < 8 << 20

    @LINUX
    def test_peak_holds_the_jacobian_and_the_vectors(self):
        images, labels, _ = upscaled_digits(200, 1)
        (peak,) = measure_peaks([Case("opg", 32, 200, 20, max_products=40)], (images, labels))
        assert peak.parameters == 795 * 32 + 10
        assert peak.jacobian == 200 * peak.parameters * 4
        assert peak.peak > peak.jacobian + peak.vectors
        assert peak.cached == pytest.approx(peak.jacobian, rel=0.2)  # pages, and what torch keeps


class TestGoals:
    @pytest.mark.parametrize(
        ("goal", "value", "accuracy", "verdict"),
        [
            (Goal(2.0, 1.0), 0.5, None, "aim"),
            (Goal(2.0, 1.0), 1.5, None, "must"),
            (Goal(2.0, 1.0), 2.5, None, "MISSED"),
            (Goal(3.0, 6.0, at_least=True), 7.0, None, "aim"),
            (Goal(3.0, 6.0, at_least=True), 2.0, None, "MISSED"),
            (Goal(2.0, accuracy=1e-5), 1.0, 1e-6, "must"),
            (Goal(2.0, accuracy=1e-5), 1.0, 1e-4, "MISSED"),
            (Goal(2.0, accuracy=1e-5), 1.0, None, "MISSED"),
        ],
    )
    def test_verdicts(self, goal, value, accuracy, verdict):
        assert Measure("x", figure=value, accuracy=accuracy, goal=goal).verdict == verdict
        assert Measure("x", (value,), accuracy=accuracy, goal=goal).verdict == verdict

    def test_lines_are_aligned(self):
        measure = Measure("product", (0.5, 0.1, 0.2), 0.71, "grad.", 3e-7, "error", Goal(1.0, 0.7))
        lines = section(Record("product", (measure, measure), ("a note",))).splitlines()
        assert lines[0].split() == [
            "product", "product", "200", "ms", "0.71", "grad.", "error", "3e-07", "≤", "1", "(0.7)",
            "must",
        ]  # fmt: skip
        for title, cell in (("time", "200 ms"), ("accuracy", "error"), ("must (aim)", "≤ 1")):
            assert head().index(title) == lines[1].index(cell)
        assert lines[2].strip() == "(a note)"


class TestSources:
    def pairs(self, count):
        return EigenPairs(torch.ones(count), torch.ones(count, 7), torch.zeros(count))

    def test_pairs_are_kept_by_matrix_weights_and_images(self, tmp_path):
        model, other = wide_network(2), wide_network(2, seed=1)
        Spectra(tmp_path).keep("opg", self.pairs(3), model, 10)
        later = Spectra(tmp_path)
        later.keep("opg", self.pairs(2), model, 10)  # fewer: the three stay
        assert len(later.find("opg", 2, model, 10)) == 3
        assert later.find("opg", 4, model, 10) is None
        assert later.find("opg", 2, model, 11) is None
        assert later.find("opg", 2, other, 10) is None
        assert later.find("hessian", 2, model, 10) is None

    def test_broken_file(self, tmp_path):
        model = wide_network(2)
        Spectra(tmp_path).keep("opg", self.pairs(3), model, 10)
        (path,) = tmp_path.iterdir()
        path.write_bytes(path.read_bytes()[:50])
        with pytest.raises(DataError, match="broken file"):
            Spectra(tmp_path).find("opg", 1, model, 10)

    def test_json_that_cannot_be_written(self, tmp_path):
        with pytest.raises(BadValueError, match="--json"):
            write_json(tmp_path, {})

    def test_digits_are_28_wide_and_all_different(self):
        images, labels, test_images = upscaled_digits(1400, 3)
        assert images.shape == (1400, 1, 28, 28)
        assert labels.shape == (1400,)
        assert test_images.shape == (3, 1, 28, 28)
        assert torch.equal(labels[1297:], labels[:103])
        assert not torch.equal(images[1297], images[0])
        with pytest.raises(DataError, match="Name a folder with MNIST"):
            upscaled_digits(10**6, 1)
