"""Predictions as an object: slices, copies, tables, some of many classes, rankings."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import deltabars
from deltabars import Prediction
from deltabars.errors import BadValueError
from deltabars.prediction.ranking import least_certain, most_certain, ranked
from tests.conftest import cached_case
from tests.prediction.test_averaging import fitted

BARS = ("mean", "std", "variance", "std_error", "std_low", "std_high")
ABSENT = ("noise", "total_std", "classes", "judgement")  # None, or no tensor
FIELDS = [f.name for f in dataclasses.fields(Prediction) if f.name not in ABSENT]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.fixture
def fit(dense_case):
    return fitted(dense_case)


@pytest.fixture
def out(fit, dense_case) -> Prediction:
    return fit.predict(dense_case.unseen, covariance=True)


def test_values_hang_together(fit, out, dense_case):
    logits = dense_case.model(dense_case.unseen).detach()
    close(out.mean, logits.softmax(1))
    assert torch.equal(out.label, logits.argmax(1))
    assert torch.equal(fit.predict(dense_case.unseen, space="logit").mean, logits)
    assert bool(((out.std_low <= out.std) & (out.std <= out.std_high)).all())
    # Probabilities sum to one whatever the weights: no part of the covariance is along (1, 1, 1).
    close(out.covariance.sum(-1), torch.zeros(7, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    "index", [slice(2, 5), [0, 6], torch.arange(7) > 3, np.array([2, 3])], ids=str
)
def test_slicing(out, index):
    part = out[index]
    for name in FIELDS:
        assert torch.equal(getattr(part, name), getattr(out, name)[index])


def test_one_input_keeps_its_batch(out):
    assert torch.equal(out[-1].mean, out.mean[6:])
    assert out[np.int64(2)].mean.shape == (1, 3)
    with pytest.raises(IndexError, match="out of range for 7"):
        out[7]


def test_arrays_and_tables(out):
    arrays = out.numpy()
    assert set(arrays) == set(FIELDS)
    assert np.array_equal(arrays.std, out.std.numpy())
    table = out.to_pandas()
    assert len(table) == 7
    for name in ("score", "mutual_information", "impossible"):
        assert np.array_equal(table[name], arrays[name])
    for name in ("mean", "std", "std_low", "std_high", "moderated"):
        assert np.array_equal(table[f"{name}_2"], arrays[name][:, 2])
    named = out.columns(["a", "b", "c"], interval_ends=False)
    assert np.array_equal(named["std_c"], arrays.std[:, 2])


def test_orders(out):
    targets = (out.label + torch.arange(7) % 2) % 3  # every other one is wrong
    for by, values in (
        ("score", -out.score), ("mutual_information", -out.mutual_information),
        ("probability", out.mean.amax(1)), ("target", out.mean[torch.arange(7), targets]),
    ):  # fmt: skip
        order = values.argsort()
        assert torch.equal(ranked(out, 7, by=by, targets=targets), order), by
        last = ranked(out, 3, by=by, targets=targets, most_certain=True)
        assert torch.equal(last, order.flip(0)[:3]), by
    assert torch.equal(least_certain(out, 7), ranked(out, 7))
    assert torch.equal(most_certain(out, 3), ranked(out, 3, most_certain=True))
    assert set(ranked(out, 99, targets=targets, wrong=True).tolist()) == {1, 3, 5}
    by_class = ranked(out, 1, by="entropy", per_class=True)
    for label, index in zip(out.label.unique(), by_class, strict=True):
        assert out.entropy[index] == out.entropy[out.label == label].max()


def test_orders_that_are_refused(out):
    numbers = dataclasses.replace(out, label=None, total_std=out.std)
    for prediction, options, said in (
        (out, {"by": "taste"}, "by: expected one of"),
        (out, {"by": "target"}, "class numbers as targets"),
        (out, {"wrong": True}, "data with targets"),
        (numbers, {"by": "probability"}, "expected 'score' for a regression"),
    ):
        with pytest.raises(BadValueError, match=said):
            ranked(prediction, 3, **options)
    with pytest.raises(BadValueError, match="count: expected 1 to 7"):
        least_certain(out, 8)


def test_targets_that_are_no_class_come_last_and_yes_or_no_is_an_answer(out):
    targets = torch.zeros(7, dtype=torch.int64)
    targets[[2, 5]] = torch.tensor([-100, 3])
    for turned in (False, True):
        order = ranked(out, 7, by="target", targets=targets, most_certain=turned)
        assert set(order[-2:].tolist()) == {2, 5}
    p, answers = out.mean[:, :1], torch.arange(7) % 2
    one = dataclasses.replace(out, mean=p, label=(p > 0.5).long())
    expected = torch.where(answers == 1, p[:, 0], 1 - p[:, 0]).argsort()
    assert torch.equal(ranked(one, 7, by="target", targets=answers[:, None].double()), expected)


@pytest.mark.parametrize(
    ("kind", "estimator", "likelihood", "space"),
    [
        ("dense", "sandwich", "bernoulli", "probability"),
        ("convolutional", "opg", "categorical", "logit"),
        ("shared", "sandwich", "categorical", "probability"),
        ("dense", "opg", "gaussian", "logit"),
    ],
)
@pytest.mark.parametrize("classes", ["top2", [2, 0], torch.tensor([1])])
def test_some_classes_are_those_of_all(kind, estimator, likelihood, space, classes):
    case = cached_case(kind, likelihood=likelihood)
    fit = fitted(case, estimator, likelihood=likelihood)
    options = {"space": space, "covariance": True}
    whole = fit.predict(case.unseen, **options)
    if likelihood == "gaussian" and isinstance(classes, str):
        with pytest.raises(BadValueError, match="got 'top"):
            fit.predict(case.unseen, classes=classes)
        return
    part = fit.predict(case.unseen, classes=classes, **options)
    if isinstance(classes, str):
        assert torch.equal(part.classes, whole.mean.topk(int(classes[3:])).indices)
    else:
        assert part.classes.tolist() == [list(classes)] * 7
    for name in BARS:
        close(getattr(part, name), getattr(whole, name).gather(1, part.classes))
    close(part.score.square(), part.variance.sum(1))
    assert whole.label is None or torch.equal(part.label, whole.label)  # of all classes
    rows = torch.arange(7)[:, None, None]
    expected = whole.covariance[rows, part.classes[:, :, None], part.classes[:, None, :]]
    close(part.covariance, expected)
    assert part.moderated is part.entropy is part.mutual_information is None
    assert np.array_equal(part.to_pandas()["class_0"], part.classes[:, 0].numpy())


def test_refused_classes(fit, dense_case):
    expected = "'top1' to 'top3', or a list of different whole numbers from 0 to 2, got"
    for classes in ("top0", "top7", "best", [0, 3], [-1], [0, 1, 0], [], [1.0], [True], 2):
        with pytest.raises(BadValueError, match=expected):
            fit.predict(dense_case.unseen, classes=classes)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numbers = max(self.numbers, leaf.numel())
        return result


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
def test_memory_stays_bounded_with_five_thousand_classes():
    """All classes at once would be C² = 25 million numbers an input in the head alone."""
    classes, rank, chosen, budget = 5000, 4, 5, 64 << 20
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, classes))
    inputs = torch.randn(40, 6)
    data = inputs, torch.arange(40) * (classes // 40)
    fit = deltabars.fit(model, data, l2=0.1, rank=rank, memory_budget=budget, progress=False)
    with Largest() as largest:
        fit.predict(inputs.repeat(20, 1), classes=f"top{chosen}")
    # A quarter of the budget is a chunk's, and no tensor is larger than the chunk.
    assert 4 * largest.numbers <= budget // 4
