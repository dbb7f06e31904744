"""The same bits from the same seed: torch's switches, and the one place that does without them."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional

from deltabars.curvature.rewriting import unpool
from deltabars.runtime.precision import same_bits

WANTED = (True, False, False, False)


def switches():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
    )


def switch(algorithms, warn_only, fill, benchmark):
    torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.backends.cudnn.benchmark = benchmark


@pytest.fixture(autouse=True)
def _put_back(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = switches()
    yield
    switch(*before)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.fixture(
    params=[
        (False, False, True, True),
        (True, True, False, False),
        (True, False, True, True),
    ],
    ids=["off", "warnings alone", "on"],
)
def before(request):
    switch(*request.param)
    assert switches() == request.param
    return request.param


def test_switches_are_set_and_put_back(before):
    with same_bits(True):
        assert switches() == WANTED
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert switches() == before


def test_switches_are_put_back_after_an_error(before):
    def fail():
        assert switches() == WANTED
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"), same_bits(True):
        fail()
    assert switches() == before


def test_nothing_is_touched_where_it_is_not_wanted(before):
    with same_bits(False):
        assert switches() == before
    assert switches() == before
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_a_setting_of_cublas_by_the_user_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with same_bits(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


class TestUnpool:
    @pytest.fixture
    def pooled(self):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(3, 2, 7, 9, generator=generator, dtype=torch.float64)
        values, indices = functional.max_pool2d(images, 2, return_indices=True)
        exact = torch.zeros_like(images)
        for image in range(3):
            for channel in range(2):
                for value, place in zip(
                    values[image, channel].flatten(), indices[image, channel].flatten(), strict=True
                ):
                    exact[image, channel, int(place) // 9, int(place) % 9] = value
        return values, indices, exact

    def test_values_are_where_they_were(self, pooled):
        values, indices, exact = pooled
        assert torch.equal(unpool(values, indices, (7, 9)), exact)

    @pytest.mark.parametrize("warn_only", [False, True])
    def test_also_where_deterministic_algorithms_are_asked_for(self, pooled, warn_only):
        values, indices, exact = pooled
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        assert torch.equal(unpool(values, indices, (7, 9)), exact)
        assert switches()[:2] == (True, warn_only)
        each = torch.func.vmap(lambda v, i: unpool(v, i, (7, 9)))
        assert torch.equal(each(values, indices), exact)
        assert switches()[:2] == (True, warn_only)

    def test_the_setting_is_on_after_an_error(self, pooled):
        values, indices, _ = pooled
        torch.use_deterministic_algorithms(True)
        with pytest.raises(RuntimeError):
            unpool(values, indices + 63, (7, 9))  # places that are not there
        assert switches()[:2] == (True, False)
