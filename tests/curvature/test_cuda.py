"""The same numbers on a GPU, in full precision. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

import deltabars
from deltabars import Problem
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.layers import patches
from deltabars.curvature.opg import OPGOperator
from deltabars.errors import CheckpointMismatchError, DataError
from tests.conftest import cached_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

OPERATORS = {"hessian": HessianOperator, "opg": OPGOperator, "ggn": GGNOperator}
KINDS = ["dense", "convolutional", "batch_norm", "shared"]


@pytest.mark.parametrize("name", list(OPERATORS))
@pytest.mark.parametrize("kind", KINDS)
def test_operators_equal_the_dense_matrix(kind, name):
    case = cached_case(kind)
    problem = Problem(case.model, case.data, l2=case.l2, device="cuda")
    dense = OPERATORS[name](problem).to_dense()
    assert dense.device.type == "cuda"
    torch.testing.assert_close(dense.cpu(), case.oracle.matrix(name), rtol=0, atol=1e-10)


@pytest.mark.parametrize("estimator", ["hessian", "opg", "sandwich", "ggn"])
@pytest.mark.parametrize("solver", ["krylov", "dense", "arpack"])
def test_error_bars_equal_those_of_the_cpu(estimator, solver):
    case = cached_case("convolutional")
    options = {"l2": case.l2, "estimator": estimator, "rank": 12, "solver": solver}
    there = deltabars.fit(case.model, case.data, device="cuda", progress=False, **options)
    here = deltabars.fit(case.model, case.data, progress=False, **options)
    out = there.predict(case.unseen)  # inputs on the CPU are moved
    assert out.std.device.type == "cuda"
    expected = here.predict(case.unseen)
    torch.testing.assert_close(out.to("cpu").std, expected.std, rtol=1e-7, atol=0)
    torch.testing.assert_close(out.to("cpu").std_error, expected.std_error, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize(
    "window",
    [((3, 2), (1, 1), (0, 0), (1, 1)), ((2, 3), (2, 1), (3, 1), (1, 2)),
     ((1, 1), (3, 2), (0, 1), (1, 1)), ((5, 5), (1, 1), (2, 2), (2, 1))],
)  # fmt: skip
def test_patches_are_cut_as_on_the_cpu(window):
    images = torch.randn(2, 3, 11, 10)
    assert torch.equal(patches(images.cuda(), *window).cpu(), patches(images, *window))


@pytest.mark.parametrize("name", list(OPERATORS))
def test_float32_means_float32_even_where_tf32_is_allowed(name):
    case = cached_case("convolutional")
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    matmul.fp32_precision, conv.fp32_precision = "tf32", "tf32"
    try:
        options = {"l2": case.l2, "device": "cuda", "dtype": torch.float32}
        dense = OPERATORS[name](Problem(case.model, case.data, **options)).to_dense()
        assert (matmul.fp32_precision, conv.fp32_precision) == ("tf32", "tf32")
    finally:
        matmul.fp32_precision, conv.fp32_precision = before
    error = (dense.cpu().double() - case.oracle.matrix(name)).abs().max()
    assert error < 1e-5  # float32; TF32 would leave 1e-3


def test_a_checkpoint_keeps_to_deterministic_and_may_change_the_device(tmp_path):
    case = cached_case("dense")
    options = {"l2": case.l2, "rank": 6, "checkpoint": tmp_path, "progress": False}
    deltabars.fit(case.model, case.data, device="cuda", **options)
    with pytest.raises(CheckpointMismatchError, match="deterministic was False and is True"):
        deltabars.fit(case.model, case.data, device="cuda", deterministic=True, **options)
    deltabars.fit(case.model, case.data, device="cpu", deterministic=True, **options)


def test_a_fit_moves_between_devices_through_a_file(tmp_path):
    case = cached_case("dense")
    fit = deltabars.fit(
        case.model, case.data, l2=case.l2, device="cuda", rank=9, estimator="ggn", progress=False
    )
    fit.save(tmp_path / "a")
    back = deltabars.load(tmp_path / "a", case.model)
    assert back.network.device.type == "cpu"
    torch.testing.assert_close(
        back.predict(case.unseen).std, fit.predict(case.unseen).std.cpu(), rtol=1e-10, atol=0
    )
    assert fit.sample(2).device.type == "cuda"


def test_inputs_on_another_device_are_refused():
    case = cached_case("dense")
    fit = deltabars.fit(case.model, case.data, l2=case.l2, rank=9, progress=False)
    with pytest.raises(DataError, match=r"expected tensors on the CPU.*got cuda:0"):
        fit.predict(case.unseen.cuda())


@pytest.mark.parametrize("estimator", ["opg", "sandwich", "ggn"])
def test_deterministic_fits_and_predictions_have_the_same_bits(estimator):
    case = cached_case("convolutional")
    options = {"l2": case.l2, "device": "cuda", "dtype": torch.float32, "memory_budget": 10**8}
    options |= {"estimator": estimator, "rank": 12, "solver": "krylov", "progress": False}
    fits = [deltabars.fit(case.model, case.data, deterministic=True, **options) for _ in range(3)]
    assert not torch.are_deterministic_algorithms_enabled()
    first = fits[0].predict(case.unseen)
    for fit in fits[1:]:
        for name, pairs in fits[0].spectra.items():
            assert torch.equal(pairs.vectors, fit.spectra[name].vectors)
        again = fit.predict(case.unseen)
        assert torch.equal(first.std, again.std)
        assert torch.equal(first.std_error, again.std_error)
    assert fits[0].diagnostics["manifest"]["device_name"] == torch.cuda.get_device_name()
