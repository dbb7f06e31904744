"""The parts of the bench: what it holds others to must itself be right."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from benchmarks import plain
from benchmarks.opg import exact_values
from benchmarks.peak import Case, ProcessMeter, measure_peaks
from benchmarks.results import Goal, Measure, Record
from benchmarks.runner import write_json
from benchmarks.sources import Spectra
from benchmarks.subject import upscaled_digits, wide_network
from benchmarks.table import head, section
from benchmarks.timing import growth_exponent, interleaved
from deltabars import Problem
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.eigen.pairs import EigenPairs
from deltabars.errors import BadValueError, DataError

LINUX = pytest.mark.skipif(not ProcessMeter.works(), reason="peak memory cannot be read here")


class TestPlain:
    """The independent products are those of the operators."""

    @pytest.fixture
    def setting(self):
        images, labels, *_ = upscaled_digits(20, 1)
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
        """In a process of its own: here, memory that was freed before would serve."""
        program = textwrap.dedent("""
            import torch
            from benchmarks.peak import ProcessMeter, read_status
            meter = ProcessMeter()
            meter.reset()
            before = meter.held()
            block = torch.ones(64 << 20)  # 256 MiB, touched
            del block
            assert meter.peak() - before > 250 << 20
            meter.reset()
            assert read_status("VmHWM") - meter.held() < 8 << 20
        """)
        subprocess.run([sys.executable, "-c", program], check=True)

    @LINUX
    def test_peak_holds_the_jacobian_and_the_vectors(self):
        images, labels, *_ = upscaled_digits(200, 1)
        (peak,) = measure_peaks([Case("opg", 32, 200, 20, max_products=40)], (images, labels))
        assert peak.parameters == 795 * 32 + 10
        assert peak.jacobian == 200 * peak.parameters * 4
        model = wide_network(32)
        columns = len(Problem(model, (images, labels), l2=0.01).reached)  # of pixels ever lit
        assert columns < peak.parameters
        kept = 200 * columns * 4
        assert peak.peak > kept + peak.vectors
        assert peak.cached == pytest.approx(kept, rel=0.2)  # pages, and what torch keeps


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
        measure = Measure("product", (0.5, 0.1, 0.2), 0.71, "grad", 3e-7, "error", Goal(1.0, 0.7))
        lines = section(Record("product", (measure, measure), ("a note",))).splitlines()
        assert lines[0].split() == [
            "product", "product", "200", "ms", "0.71", "grad", "error", "3.0e-07",
            "≤", "1", "(0.7)", "must",
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
        images, labels, test_images, test_labels = upscaled_digits(1400, 3)
        assert images.shape == (1400, 1, 28, 28)
        assert labels.shape == (1400,)
        assert test_images.shape == (3, 1, 28, 28)
        assert test_labels.shape == (3,)
        assert torch.equal(labels[1297:], labels[:103])
        assert not torch.equal(images[1297], images[0])
        with pytest.raises(DataError, match="Name a folder with MNIST"):
            upscaled_digits(10**6, 1)
