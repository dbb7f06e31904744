"""Error bars of some of many classes: only their rows are computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import deltabars
from deltabars.errors import BadValueError
from tests.conftest import cached_case

BARS = ("mean", "std", "variance", "std_error", "std_low", "std_high")


def fitted(case, estimator="opg", rank=9, **options):
    options = {"l2": case.l2, "progress": False, **options}
    return deltabars.fit(case.model, case.data, estimator=estimator, rank=rank, **options)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("space", ["probability", "logit"])
@pytest.mark.parametrize("estimator", ["opg", "sandwich"])
@pytest.mark.parametrize("kind", ["dense", "convolutional", "shared"])
@pytest.mark.parametrize("classes", ["top1", "top2", "top3", [2], [2, 0], (1,), range(3)])
def test_some_classes_are_those_of_all(kind, estimator, space, classes):
    case = cached_case(kind)
    fit = fitted(case, estimator)
    whole = fit.predict(case.unseen, space=space, covariance=True)
    part = fit.predict(case.unseen, space=space, covariance=True, classes=classes)
    if isinstance(classes, str):
        count = int(classes[3:])
        assert torch.equal(part.classes, whole.mean.topk(count).indices)
        assert torch.equal(part.classes[:, 0], part.label)
    else:
        assert part.classes.tolist() == [list(classes)] * 7
    for name in BARS:
        close(getattr(part, name), getattr(whole, name).gather(1, part.classes))
    close(part.score.square(), part.variance.sum(1))
    assert torch.equal(part.label, whole.label)  # of all classes
    rows = torch.arange(7)[:, None, None]
    expected = whole.covariance[rows, part.classes[:, :, None], part.classes[:, None, :]]
    close(part.covariance, expected)
    assert part.moderated is part.entropy is part.mutual_information is None


def test_the_score_and_its_interval_are_those_of_the_classes(dense_case):
    fit = fitted(dense_case, "sandwich", dense_case.oracle.size)
    exact = dense_case.oracle.std("sandwich", dense_case.unseen)[:, [0, 2]]
    part = fitted(dense_case, "sandwich").predict(dense_case.unseen, classes=[0, 2])
    score = exact.square().sum(1).sqrt()
    assert bool((part.score_low <= score).all())
    assert bool((score <= part.score_high).all())
    close(fit.predict(dense_case.unseen, classes=[0, 2]).std, exact)


@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_other_likelihoods(likelihood):
    case = cached_case("dense", likelihood=likelihood)
    fit = fitted(case, likelihood=likelihood)
    whole, part = fit.predict(case.unseen), fit.predict(case.unseen, classes=[2, 1])
    for name in BARS:
        close(getattr(part, name), getattr(whole, name)[:, [2, 1]])
    if likelihood == "bernoulli":
        assert torch.equal(part.label, whole.label)
        top = fit.predict(case.unseen, classes="top2")
        close(top.mean, whole.mean.topk(2).values)
    else:
        with pytest.raises(BadValueError, match=r"classes: expected a list .*no probabilities"):
            fit.predict(case.unseen, classes="top2")


def test_numbers_come_from_numpy_and_torch_too(dense_case):
    fit = fitted(dense_case)
    expected = fit.predict(dense_case.unseen, classes=[2, 0])
    for classes in (np.array([2, 0]), torch.tensor([2, 0]), [np.int64(2), 0]):
        assert torch.equal(fit.predict(dense_case.unseen, classes=classes).std, expected.std)


def test_chunks_slices_and_tables(dense_case):
    fit = fitted(dense_case)
    whole = fit.predict(dense_case.unseen, classes="top2")
    parts = fit.predict(dense_case.unseen, classes="top2", batch_size=3)
    assert torch.equal(parts.classes, whole.classes)
    close(parts.std, whole.std)
    assert torch.equal(whole[2:4].classes, whole.classes[2:4])
    assert repr(whole).startswith("Prediction of 7 inputs, 2 outputs")
    for line, number in zip(repr(whole).splitlines()[2:7], whole.label, strict=False):
        assert line.split()[1] == str(int(number))
    table = whole.to_pandas()
    assert np.array_equal(table["class_1"], whole.classes[:, 1].numpy())
    assert np.array_equal(table["std_1"], whole.std[:, 1].numpy())


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ("top0", "from 1 on, such as 'top5', got 'top0'. A list"),
        ("topx", "from 1 on, such as 'top5', got 'topx'"),
        ("top", "got 'top'"),
        ("top-1", "got 'top-1'"),
        ("best", "got 'best'"),
        ("top7", "at most 'top3', for the network has 3 outputs, got 'top7'. classes=None"),
        ([0, 3], "numbers from 0 to 2, for the network has 3 outputs, got 3. Classes count from 0"),
        ([-1], "numbers from 0 to 2, for the network has 3 outputs, got -1"),
        ([0, 1, 0], "each class once, got 0 more than once"),
        ([], "at least one class number, got none. classes=None"),
        ([1.0], "whole numbers, got 1.0"),
        ([True], "whole numbers, got True"),
        (["1"], "whole numbers, got '1'"),
        (torch.tensor([[0, 1]]), r"whole numbers, got \[0, 1\]"),
        (2, r"got 2. One class goes in a list too"),
        (torch.tensor(2), r"One class goes in a list too"),
        ({0: 1}, "or a list of class numbers"),
    ],
)  # fmt: skip
def test_refusals_say_what_to_use(dense_case, classes, message):
    with pytest.raises(BadValueError, match=message):
        fitted(dense_case).predict(dense_case.unseen, classes=classes)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numbers = max(self.numbers, leaf.numel())
        return result


def many_classes(count=5000, width=8):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, count))
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(40, 6, generator=generator), torch.arange(40) * (count // 40)
    return model, data


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
def test_memory_stays_bounded_with_five_thousand_classes():
    """All classes at once would be C² = 25 million numbers an input in the head alone."""
    classes, rank, chosen = 5000, 4, 5
    model, data = many_classes(classes)
    budget = 64 << 20
    fit = deltabars.fit(model, data, l2=0.1, rank=rank, memory_budget=budget, progress=False)
    with Largest() as largest:
        out = fit.predict(data[0].repeat(20, 1), classes=f"top{chosen}")
    assert out.std.shape == out.classes.shape == (800, chosen)
    assert out.moderated is None
    # A quarter of the budget is a chunk's, and no tensor is larger than the chunk.
    assert 4 * largest.numbers <= budget // 4
    # One input at a time: k rows of outputs, and the eigenvectors as they are (K·P).
    with Largest() as largest:
        single = fit.predict(data[0][:3], classes=f"top{chosen}", batch_size=1)
    assert largest.numbers <= max(8 * chosen * classes, rank * fit.num_parameters)
    torch.testing.assert_close(single.std, out.std[:3], rtol=1e-4, atol=0)


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
def test_a_few_of_many_classes_are_exact():
    model, data = many_classes(200)
    fit = deltabars.fit(model.double(), (data[0].double(), data[1]), l2=0.1, rank=6, progress=False)
    whole = fit.predict(data[0].double()[:4])
    part = fit.predict(data[0].double()[:4], classes="top5")
    assert torch.equal(part.classes, whole.mean.topk(5).indices)
    close(part.std, whole.std.gather(1, part.classes))
    assert whole.moderated is None  # more than 100 classes: when asked for
    asked = fit.predict(data[0].double()[:4], moderation="sampling")
    torch.testing.assert_close(asked.moderated.sum(1), torch.ones(4, dtype=torch.float64))
