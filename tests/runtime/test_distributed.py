"""The same fit on several processes: the numbers, whoever has which data, and how it fails."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.ranked import results, subject
from tests.ranked_cases import CASES, DATA, ESSENTIALS, SHORT, case, of_data

SAME_EIGENVALUES, SAME_PREDICTIONS = 1e-6, 1e-5  # relative
FOR_FOUR = ("distributed sampler", "shards")
ARPACKS_OWN = 4e-6  # likewise, in float32, which it computes eigenvalues in as well


def work(names: Any, kinds: Any, count: int) -> Any:
    """All of the cases and kinds of data on one rank."""
    return lambda rank: (
        {name: case(name, count) for name in names},
        {kind: of_data(kind, rank, count) for kind in kinds},
    )


def found_by(count, names, kinds, tmp_path_factory):
    """What so many ranks find."""
    for name in ESSENTIALS:
        alone(name)  # what torch loads for a first fit is loaded once, before they part
    return results(count, work(names, kinds, count), tmp_path_factory.mktemp("some") / "ranks")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two ranks find."""
    return found_by(2, SHORT, DATA, tmp_path_factory)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """What four ranks find, of some cases."""
    return found_by(4, ESSENTIALS, FOR_FOUR, tmp_path_factory)


@cache
def alone(name: str) -> dict[str, Any]:
    return case(name, 1)


def check_same(name, found):
    """Compare what ranks have found with one process: how far eigenvalues and bars are off."""
    one = alone(name)
    worst = [0.0, 0.0]
    single = "single" in name
    for other in found:
        for matrix, values in one["values"].items():
            ours = other["values"][matrix]
            assert ours.shape == values.shape
            scale = values.abs().max() if single else values.abs()
            most = ARPACKS_OWN if name == "hessian arpack, single" else SAME_EIGENVALUES
            off = float(((ours - values) / scale).abs().max())
            assert off < most, matrix
            worst[0] = max(worst[0], off)
            ends = other["smallest"][matrix], one["smallest"][matrix]
            if "smallest" in CASES[name]:
                few = CASES[name]["smallest"]
                torch.testing.assert_close(*(end[:few] for end in ends), rtol=1e-6, atol=1e-6)
        for part in ("std", "high", "score"):
            off = float((other[part] / one[part] - 1).abs().max())
            assert off < SAME_PREDICTIONS, part
            worst[1] = max(worst[1], off)
        for part in ("examples", "fingerprint", "reached"):
            assert other[part] == one[part]
        assert other["cost"] == pytest.approx(one["cost"], rel=1e-6 if single else 1e-12)
        assert other["noise"] == pytest.approx(one["noise"])
    return worst


def check_same_data(kind, found):
    one = of_data(kind, 0, 1)
    for other in found:
        assert other["examples"] == one["examples"] == sum(other["ranks"]["examples"])
        assert other["fingerprint"] == one["fingerprint"]
        assert other["cost"] == pytest.approx(one["cost"], rel=1e-12)
        torch.testing.assert_close(other["values"], one["values"], rtol=1e-6, atol=0)


class TestSameNumbers:
    @pytest.mark.parametrize("name", SHORT)
    def test_of_two_ranks(self, two, name):
        check_same(name, [cases[name] for cases, _ in two])

    @pytest.mark.parametrize("name", ESSENTIALS)
    def test_of_four_ranks(self, four, name):
        check_same(name, [cases[name] for cases, _ in four])

    def test_the_cases_are_what_they_are_called(self, two):
        found = two[0][0]
        size = sum(weight.numel() for weight in subject()[0].parameters())
        assert found["opg krylov"]["reached"] < size
        assert found["restarts"]["statistics"]["hessian"]["restarts"] > 0
        assert found["restarted blocks"]["statistics"]["opg"]["restarts"] > 0
        values = found["repeated eigenvalues"]["values"]["ggn"]
        assert float(values[0] - values[-1]) < 1e-9  # forty copies of one


class TestData:
    @pytest.mark.parametrize("kind", DATA)
    def test_of_two_ranks(self, two, kind):
        check_same_data(kind, [kinds[kind] for _, kinds in two])

    @pytest.mark.parametrize("kind", FOR_FOUR)
    def test_of_four_ranks(self, four, kind):
        check_same_data(kind, [kinds[kind] for _, kinds in four])

    def test_who_reads_what(self, two):
        sources = {kind: found["ranks"]["source"] for kind, found in two[0][1].items()}
        counts = {kind: found["ranks"]["examples"] for kind, found in two[0][1].items()}
        assert sources["tensors"] == sources["shuffled"] == sources["own sampler"] == "split"
        assert sources["distributed sampler"] == "sampler"
        assert sources["shards"] == sources["stream"] == sources["batches"] == "own"
        assert counts["tensors"] == counts["distributed sampler"] == [51, 50]
        assert counts["shards"] == [94, 7]
        assert counts["shards, some without a target"] != [94, 7]
        for kind in ("tensors", "dataset", "loader", "distributed sampler"):
            found = two[0][1][f"{kind}, some without a target"]
            assert found["ranks"]["examples"] == [51, 50]
            assert found["fingerprint"] == two[0][1]["tensors"]["fingerprint"]
