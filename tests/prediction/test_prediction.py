"""Predictions as an object: slices, copies, tables."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import deltabars
from deltabars import Prediction
from deltabars.errors import BadValueError
from deltabars.prediction.metrics import regression
from deltabars.prediction.ranking import least_certain, most_certain


@pytest.fixture
def fit(dense_case):
    return deltabars.fit(
        dense_case.model, dense_case.data, l2=0.05, estimator="opg", rank=9, progress=False
    )


@pytest.fixture
def out(fit, dense_case) -> Prediction:
    return fit.predict(dense_case.unseen, covariance=True)


ABSENT = ("noise", "total_std", "classes")  # None for all classes; see test_regression.py
FIELDS = [f.name for f in dataclasses.fields(Prediction) if f.name not in ABSENT]


def test_shapes_and_types(out):
    assert out.covariance.shape == (7, 3, 3)
    for name in ("mean", "std", "variance", "std_error", "std_low", "std_high"):
        assert getattr(out, name).shape == (7, 3)
        assert getattr(out, name).dtype == torch.float64
    assert out.moderated.shape == (7, 3)
    assert out.classes is None
    for name in ("score", "score_error", "score_low", "score_high", "label"):
        assert getattr(out, name).shape == (7,)
    for name in ("mutual_information", "entropy"):
        assert getattr(out, name).shape == (7,)
        assert getattr(out, name).dtype == torch.float64
    assert len(out) == 7


def test_mean_and_label_are_the_networks(out, dense_case):
    logits = dense_case.model(dense_case.unseen).detach()
    torch.testing.assert_close(out.mean, logits.softmax(1))
    assert torch.equal(out.label, logits.argmax(1))


def test_in_logit_space_the_mean_is_the_logits(fit, dense_case):
    logits = dense_case.model(dense_case.unseen).detach()
    out = fit.predict(dense_case.unseen, space="logit")
    torch.testing.assert_close(out.mean, logits)
    assert torch.equal(out.label, logits.argmax(1))


def test_values_hang_together(out):
    torch.testing.assert_close(out.std.square(), out.variance)
    torch.testing.assert_close(out.score.square(), out.variance.sum(1))
    assert bool((out.std_low <= out.std).all())
    assert bool((out.std <= out.std_high).all())


def test_probabilities_vary_on_the_simplex(out):
    """They sum to one whatever the weights, so the covariance has no part along (1, 1, 1)."""
    torch.testing.assert_close(out.covariance.sum(-1), torch.zeros(7, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    "index",
    [slice(2, 5), [0, 6], torch.tensor([1, 1]), torch.arange(7) > 3, np.array([2, 3])],
    ids=["slice", "list", "tensor", "mask", "array"],
)
def test_slicing(out, index):
    part = out[index]
    for name in FIELDS:
        assert torch.equal(getattr(part, name), getattr(out, name)[index])


def test_one_input_keeps_its_batch(out):
    assert out[3].mean.shape == (1, 3)
    assert torch.equal(out[-1].mean, out.mean[6:])
    assert out[out.score.argmax()].score == out.score.max()
    assert out[np.int64(2)].mean.shape == (1, 3)
    with pytest.raises(IndexError, match="out of range for 7"):
        out[7]


def test_to_and_numpy(out):
    assert out.to("cpu").mean.device.type == "cpu"
    arrays = out.numpy()
    assert set(arrays) == set(FIELDS)
    assert isinstance(arrays["std"], np.ndarray)
    assert np.array_equal(arrays.std, out.std.numpy())
    with pytest.raises(AttributeError):
        _ = arrays.nothing


def test_to_pandas(out):
    pytest.importorskip("pandas")
    table = out.to_pandas()
    assert len(table) == 7
    assert np.array_equal(table["score"], out.score.numpy())
    assert np.array_equal(table["std_2"], out.std[:, 2].numpy())
    assert np.array_equal(table["mutual_information"], out.mutual_information.numpy())
    assert np.array_equal(table["moderated_1"], out.moderated[:, 1].numpy())
    assert list(table.columns[:3]) == ["label", "score", "score_error"]
    assert "class_0" not in table


def test_text_and_html(out):
    assert repr(out).startswith("Prediction of 7 inputs, 3 outputs")
    assert "… and 2 more" in repr(out)
    assert f"{float(out.mean[0].max()):.4f} ± " in repr(out)
    assert out._repr_html_().count("<tr>") == 8


def test_ranking_is_by_score(out):
    order = least_certain(out, 7)
    assert bool((out.score[order].diff() <= 0).all())
    assert torch.equal(most_certain(out, 3), order.flip(0)[:3])
    with pytest.raises(BadValueError, match="count: expected 1 to 7"):
        least_certain(out, 8)


def test_regression_is_least_squares():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 4, generator=generator)
    y = 0.3 + 2.0 * x + 0.1 * torch.randn(50, 4, generator=generator)
    line = regression(x, y)
    slope, intercept = np.polyfit(x.flatten().double().numpy(), y.flatten().double().numpy(), 1)
    assert line.slope == pytest.approx(slope)
    assert line.intercept == pytest.approx(intercept)
    r = np.corrcoef(x.flatten().numpy(), y.flatten().numpy())[0, 1]
    assert line.r2 == pytest.approx(r**2)
