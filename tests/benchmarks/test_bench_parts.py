"""The parts of the bench: what it holds others to must itself be right."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from benchmarks import plain
from benchmarks.opg import exact_values
from benchmarks.resnet import accuracy, resnet, train
from benchmarks.results import Goal, Measure
from benchmarks.sources import Spectra
from benchmarks.subject import upscaled_digits, wide_network
from deltabars import Problem
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.eigen.pairs import EigenPairs
from tests.benchmarks.test_bench import LINUX


@pytest.mark.parametrize(
    ("operator", "products"),
    [(HessianOperator, plain.hessian_products), (OPGOperator, plain.opg_products)],
)
def test_independent_products_are_those_of_the_operators(operator, products):
    images, labels, *_ = upscaled_digits(20, 1)
    model, vectors = wide_network(3), torch.randn(2, 2395)
    ours = operator(Problem(model, (images, labels), l2=0.1)).matmat(vectors)
    theirs = products(model, (images, labels), vectors, 0.1)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)  # two in float32


def test_residuals_and_exact_values():
    products = torch.tensor([[10.0, 3.0], [0.0, 0.5]])
    found = plain.residuals(torch.tensor([10.0, 0.2]), torch.eye(2), products)
    torch.testing.assert_close(found, torch.tensor([0.3, 0.3], dtype=torch.float64))
    rows = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    for values, matrix in zip(exact_values(rows, 5), (rows, rows - rows.mean(0)), strict=True):
        expected = torch.linalg.svdvals(matrix.double())[:5] ** 2 / 300
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=0)  # means in float32


@LINUX
def test_process_meter_sees_a_peak_and_forgets_it():
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


@pytest.mark.parametrize(
    ("goal", "value", "accuracy", "verdict"),
    [
        (Goal(2.0, 1.0), 0.5, None, "aim"),
        (Goal(2.0, 1.0), 1.5, None, "must"),
        (Goal(2.0, 1.0), 2.5, None, "MISSED"),
        (Goal(3.0, 6.0, at_least=True), 2.0, None, "MISSED"),
        (Goal(2.0, accuracy=1e-5), 1.0, 1e-4, "MISSED"),
    ],
)
def test_verdicts(goal, value, accuracy, verdict):
    assert Measure("x", figure=value, accuracy=accuracy, goal=goal).verdict == verdict
    assert Measure("x", (value,), accuracy=accuracy, goal=goal).verdict == verdict


def test_pairs_are_kept_by_matrix_weights_and_images(tmp_path):
    model, other = wide_network(2), wide_network(2, seed=1)
    for count in (3, 2):  # fewer: the three stay
        pairs = EigenPairs(torch.ones(count), torch.ones(count, 7), torch.zeros(count))
        Spectra(tmp_path).keep("opg", pairs, model, 10)
    later = Spectra(tmp_path)
    assert len(later.find("opg", 2, model, 10)) == 3
    for others in (
        ("opg", 4, model, 10), ("opg", 2, model, 11), ("opg", 2, other, 10),
        ("hessian", 2, model, 10),
    ):  # fmt: skip
        assert later.find(*others) is None


def test_resnet_ends_near_an_optimum_in_eval_mode():
    """Batch norm's statistics are those of prediction in the last epochs."""
    generator = torch.Generator().manual_seed(0)
    labels, ratios = torch.arange(24) % 3, []
    images = 0.3 * torch.randn(24, 1, 8, 8, generator=generator)
    for label in range(3):
        images[labels == label, :, 2 * label : 2 * label + 3] += 1
    for closing in (0, 300):
        network = resnet(0, classes=3, channels=1, width=2, blocks=(1, 1))
        options = {"l2": 0.02, "epochs": 30, "closing": closing, "batch_size": 24, "rate": 0.5}
        done = train(network, images, labels, **options, progress=False)
        assert not network.training
        assert done.accuracy == accuracy(network, images, labels)
        ratios.append(Problem(network, (images, labels), l2=0.02).relative_gradient)
    assert done.accuracy == 1
    assert ratios[1] < 0.3  # of a few hundred steps at a rate that falls to zero
    assert ratios[1] < 0.5 * ratios[0]
    standard = resnet(classes=10, channels=3)
    assert sum(weight.numel() for weight in standard.parameters()) == 11_173_962
