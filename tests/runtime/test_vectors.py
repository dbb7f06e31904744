"""Eigenvectors that are not one tensor, against dense float64; and what rounding them can do."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
import torch

import deltabars
from deltabars.covariance.estimators import build_covariance
from deltabars.covariance.tail import Defects
from deltabars.errors import BadValueError
from deltabars.runtime import vectors
from deltabars.runtime.memory import read_bytes
from deltabars.runtime.vectors import Part, PartedVectors
from deltabars.storage import shards as rounding
from tests.conftest import cached_case
from tests.networks import train

CPU = torch.device("cpu")
ESTIMATORS = ("hessian", "opg", "sandwich", "ggn")


def rows_of(count, size, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, size, generator=generator, dtype=torch.float64).to(dtype)


def parted(rows, *ends, dtype=None):
    """Rows in parts that end at some columns."""
    borders = [0, *ends, rows.shape[1]]
    parts = tuple(Part(low, high, rows[:, low:high].clone()) for low, high in pairwise(borders))
    return PartedVectors(parts, len(rows), dtype or rows.dtype, CPU)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 512 columns, and layers in parts."""
    monkeypatch.setitem(vectors._AT_ONCE, "cpu", 1)


class TestParts:
    @pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16])
    def test_columns_are_those_of_the_whole(self, stored):
        rows = rows_of(3, 40).to(stored)
        held = parted(rows, 1, 7, 30, dtype=torch.float64)
        expected = rows.double()
        for places in (slice(0, 40), slice(6, 8), slice(1, 7), slice(29, 31), slice(5, 5)):
            found = held.columns(places)
            assert found.dtype == torch.float64
            assert torch.equal(found, expected[:, places])
        assert torch.equal(held.columns(slice(None)), expected)
        assert torch.equal(held.whole(), expected)
        assert torch.equal(held.first(2).whole(), expected[:2])
        assert held.first(2).shape == (2, 40)
        assert held.stored == stored

    def test_columns_are_not_views_of_what_is_stored(self):
        held = parted(rows_of(2, 10))
        held.columns(slice(0, 10)).zero_()
        assert bool(held.columns(slice(0, 10)).all())

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_products(self, dtype, small_blocks):
        a, b = rows_of(3, 1700, 1, dtype), rows_of(4, 1700, 2, dtype)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        exact = a.double() @ b.double().T
        for left, right in (
            (a, parted(b, 600)),
            (parted(a, 3, 1000), b),
            (parted(a, 9), parted(b, 513)),
        ):
            found = vectors.products(left, right)
            assert found.dtype == torch.float64
            torch.testing.assert_close(found, exact, rtol=0, atol=tolerance * 1700)
        there = parted(b, 512, 1024)
        torch.testing.assert_close(vectors.projected(a, there), a @ b.T, rtol=0, atol=1e-3)
        weights = rows_of(2, 4, 3, dtype)
        torch.testing.assert_close(vectors.combined(weights, there), weights @ b)

    def test_of_tensors_it_is_the_plain_product(self):
        a, b = rows_of(3, 1700, 1), rows_of(4, 1700, 2)
        assert torch.equal(vectors.projected(a, b), a @ b.T)
        assert torch.equal(vectors.products(a, b), a @ b.T)
        assert torch.equal(vectors.combined(a @ b.T, b), a @ b.T @ b)

    def test_chosen_columns(self, small_blocks):
        rows = rows_of(3, 2000)
        places = torch.cat([torch.arange(5, 1400), torch.arange(1800, 1990, 3)])
        found = vectors.chosen(parted(rows, 700), places)
        assert found.shape == (3, len(places))
        assert torch.equal(found.whole(), rows[:, places])
        assert torch.equal(found.first(1).columns(slice(3, 3)), rows[:1, :0])
        assert torch.equal(vectors.chosen(rows, places), rows[:, places])
        assert vectors.chosen(rows, None) is rows
        exact = rows[:, places] @ rows[:, places].T
        torch.testing.assert_close(vectors.products(found, rows[:, places]), exact)

    def test_blocks_cover_everything_once(self):
        for size in (1, 511, 512, 513, 100_000):
            seen = list(vectors.ranges(3, 3 + size, 8 << 12, CPU))
            assert seen[0].start == 3
            assert seen[-1].stop == 3 + size
            assert all(a.stop == b.start for a, b in pairwise(seen))

    def test_pickles(self):
        held = parted(rows_of(2, 9), 4)
        assert torch.equal(pickle.loads(pickle.dumps(held)).whole(), held.whole())


class TestOffloaded:
    """A fit whose eigenvectors are asked for by columns."""

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    @pytest.mark.parametrize("kind", ["dense", "convolutional"])
    def test_predictions_are_the_same(self, kind, estimator):
        case = cached_case(kind)
        fit = deltabars.fit(
            case.model, case.data, l2=0.05, estimator=estimator, rank=8, progress=False
        )
        away = fit.offloaded()
        assert isinstance(away.spectra[estimator if estimator != "sandwich" else "opg"].vectors,
                          PartedVectors)  # fmt: skip
        options = [{}, {"rank": 3}, {"full_rank": False}, {"space": "logit", "covariance": True},
                   {"bound": "paper"}, {"classes": "top2", "moderation": None},
                   {"moderation": None}, {"batch_size": 2}]  # fmt: skip
        for asked in options:
            there, here = away.predict(case.unseen, **asked), fit.predict(case.unseen, **asked)
            assert torch.equal(there.mean, here.mean)
            for name in ("std", "std_low", "std_high", "score", "score_error"):
                # The last bits of a product depend on how far apart the rows are in memory.
                pair = getattr(there, name), getattr(here, name)
                torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-14)

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_in_small_blocks(self, estimator, small_blocks):
        """A dense layer of 5 outputs and 300 inputs comes in parts of one output."""
        generator = torch.Generator().manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(300, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        model = model.double()
        inputs = torch.randn(20, 300, generator=generator, dtype=torch.float64)
        data = inputs, torch.randint(0, 3, (20,), generator=generator)
        train(model, *data, 0.1)
        fit = deltabars.fit(model, data, l2=0.1, estimator=estimator, rank=6, progress=False)
        away = fit.offloaded()
        torch.testing.assert_close(away.predict(inputs).std, fit.predict(inputs).std, rtol=1e-10,
                                   atol=0)  # fmt: skip
        torch.testing.assert_close(away.sample(2, seed=1), fit.sample(2, seed=1))
        moved = away.with_l2(0.2).predict(inputs).std
        torch.testing.assert_close(moved, fit.with_l2(0.2).predict(inputs).std)
        if estimator in ("opg", "ggn"):
            some = inputs[:3]
            there, here = away.certify(some, data), fit.certify(some, data)
            torch.testing.assert_close(there.std, here.std, rtol=2e-3, atol=0)
        if estimator == "sandwich":
            torch.testing.assert_close(away.state.overlap, fit.state.overlap)
        again = pickle.loads(pickle.dumps(away))
        assert torch.equal(again.predict(inputs).std, away.predict(inputs).std)


class TestLoss:
    def test_it_is_the_norm_of_the_difference(self):
        rows = torch.linalg.qr(rows_of(700, 5)).Q.T.contiguous()
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            gap = rows.to(dtype).double() - rows
            exact = float(torch.linalg.svdvals(gap)[0])
            for held in (rows, parted(rows, 300)):
                found = rounding.measured_loss(held, dtype)
                assert exact <= found["norm"] <= 1.002 * exact
            halves = [rounding.loss_sums(part, dtype) for part in rows.split([300, 400], 1)]
            assert rounding.loss_of(sum(halves)) == pytest.approx(found, rel=1e-6)
            gram = rows.to(dtype).double() @ rows.to(dtype).double().T - torch.eye(5)
            assert found["orthogonality"] == pytest.approx(float(gram.abs().max()), rel=1e-6)

    def test_nothing_is_lost_where_nothing_is_rounded(self):
        halves = rows_of(2, 9).sign() / 2
        assert rounding.measured_loss(halves, torch.bfloat16) == {}
        assert rounding.measured_loss(halves.float(), torch.float64) == {}

    @pytest.mark.parametrize("dtype", ["int8", torch.int32, torch.float8_e5m2, 16, "bf16"])
    def test_other_types_are_refused(self, dtype):
        with pytest.raises(BadValueError, match="dtype: expected None or one of float64, float32"):
            rounding.stored_dtype(dtype, rows_of(1, 2))

    def test_bytes(self):
        for given in (5, "5", "5B"):
            assert read_bytes(given, "x") == 5
        assert read_bytes("2GB", "x") == 2 * 10**9
        assert read_bytes("1.5 KiB", "x") == 1536
        for given in ("", "GB", 0, -1, True, 1.5, None, "5 apples"):
            with pytest.raises(BadValueError, match="x: expected bytes"):
                read_bytes(given, "x")


def spread_of(seed, estimator, rank, step):
    """Exact variances, and intervals by eigenvectors that were rounded to multiples of `step`.

    Some f are chosen to suffer most: the singular vectors of what rounding takes away.
    """
    size, level = 14, 0.05
    values = {}
    matrices, kept, lost, away = {}, {}, {}, []
    for number, name in enumerate(("hessian", "opg")):
        basis = torch.linalg.qr(rows_of(size, size, 7 * seed + number)).Q
        scales = level + 10 ** torch.linspace(1.5, -4, size, dtype=torch.float64)
        matrices[name] = basis @ torch.diag(scales) @ basis.T
        values[name], exact = scales, basis.T[:rank]
        kept[name] = (exact / step).round() * step, exact
        gap = kept[name][0] - exact
        lost[name] = float(torch.linalg.svdvals(gap)[0])
        away.append(torch.linalg.svd(gap, full_matrices=False)[2][:3])
    f = torch.cat([rows_of(4, size, seed + 100), *away, kept["hessian"][1][:2]])[:, None]
    inverse = torch.linalg.inv(matrices["hessian"])
    whole = inverse @ matrices["opg"] @ inverse if estimator == "sandwich" else inverse
    exact = torch.einsum("bcp,pq,bcq->bc", f, whole, f) / 20
    projections = {name: f @ q.T for name, (q, _) in kept.items()}

    def spread(roundings):
        defects = {name: Defects(rounding=r) for name, r in (roundings or {}).items()}
        covariance = build_covariance(
            estimator, values, rank=rank, l2=level, num_parameters=size, num_examples=20,
            overlap=kept["hessian"][1] @ kept["opg"][1].T, defects=defects,
        )  # fmt: skip
        return covariance.spread(f.square().sum(-1), projections)

    return exact, spread(lost), spread(None)


@pytest.mark.parametrize("estimator", ["hessian", "sandwich"])
def test_intervals_hold_whatever_rounding_does(estimator):
    """12 problems, 6 ranks, 3 coarsenesses, up to 12 f; without the widening many would not."""
    missed = 0
    for seed in range(12):
        for rank in (1, 3, 6, 10, 13, 14):
            for step in (0.3, 0.03, 0.003):
                exact, wide, narrow = spread_of(seed, estimator, rank, step)
                slack = 1e-9 * exact
                assert bool((wide.low <= exact + slack).all())
                assert bool((exact - slack <= wide.high).all())
                assert bool((wide.low <= narrow.low).all())
                assert bool((wide.high >= narrow.high).all())
                assert bool((wide.low >= 0).all())
                missed += int(((narrow.low > exact + slack) | (exact - slack > narrow.high)).sum())
    assert missed > 100


@pytest.mark.parametrize("estimator", ["hessian", "sandwich"])
def test_where_next_to_nothing_is_lost_next_to_nothing_is_added(estimator):
    for rank in (1, 6, 13):
        _, wide, narrow = spread_of(0, estimator, rank, 1e-13)
        # ‖ΠGu‖ is a root of a difference: what is lost of that is the root of 1e-13.
        room = {"rtol": 1e-6, "atol": 1e-5 * float(narrow.high.max())}
        torch.testing.assert_close(wide.high, narrow.high, **room)
        torch.testing.assert_close(wide.low, narrow.low, **room)
