"""Metrics of torchmetrics, with the real one: in batches, moved, pickled, on two processes."""

from __future__ import annotations

import pickle
from functools import lru_cache

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassCalibrationError

import deltabars
from deltabars.errors import BadValueError
from deltabars.integrations.torchmetrics import AreaUnderRiskCoverage, ErrorAUROC, ForeignAUROC
from deltabars.prediction.metrics import expected_calibration_error, risk_coverage
from tests.networks import make_case
from tests.ranked import results

METRICS = [ErrorAUROC, AreaUnderRiskCoverage, ForeignAUROC]
SINGLE = 1e-7  # results are float32


@lru_cache
def predicted():
    """A Prediction of 41 inputs, and targets of which some are other than predicted."""
    case = make_case("dense")
    fit = deltabars.fit(case.model, case.data, l2=case.l2, rank=10, progress=False)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(41, 4, generator=generator, dtype=torch.float64)
    return fit.predict(inputs), torch.randint(0, 3, (41,), generator=generator)


def batches(metric):
    """Arguments of update for ragged batches, and for all inputs at once."""
    out, targets = predicted()
    second = targets if not isinstance(metric, ForeignAUROC) else targets == 0
    parts = [(out[s], second[s]) for s in (slice(0, 20), slice(20, 33), slice(33, 41))]
    return parts, (out, second)


def expected(metric) -> float:
    out, targets = predicted()
    score = getattr(out, metric.number)
    if isinstance(metric, ForeignAUROC):
        return roc_auc_score((targets == 0).numpy(), score.numpy())
    wrong = out.label != targets
    if isinstance(metric, ErrorAUROC):
        return roc_auc_score(wrong.numpy(), score.numpy())
    order = score.argsort()
    risks = [float(wrong[order[:k]].double().mean()) for k in range(1, len(order) + 1)]
    return sum(risks) / len(risks)


@pytest.mark.parametrize("number", ["score", "mutual_information", "entropy"])
@pytest.mark.parametrize("kind", METRICS)
def test_batches_make_what_all_at_once_does(kind, number):
    metric, whole = kind(number), kind(number)
    parts, everything = batches(metric)
    for part in parts:
        metric.update(*part)
    whole.update(*everything)
    assert float(metric.compute()) == float(whole.compute())
    assert float(whole.compute()) == pytest.approx(expected(metric), abs=SINGLE)


@pytest.mark.parametrize("kind", METRICS)
def test_forward_gives_the_batchs_own_and_reset_forgets(kind):
    metric, alone = kind(), kind()
    parts, _ = batches(metric)
    for part in parts:
        now = metric(*part)
        alone.reset()
        alone.update(*part)
        assert float(now) == float(alone.compute())
    assert float(metric.compute()) == pytest.approx(expected(metric), abs=SINGLE)
    metric.reset()
    metric.update(*parts[-1])
    assert float(metric.compute()) == float(alone.compute())


@pytest.mark.parametrize("kind", METRICS)
def test_pickled_and_moved(kind):
    metric = kind()
    parts, _ = batches(metric)
    metric.update(*parts[0])
    again = pickle.loads(pickle.dumps(metric)).to("cpu")
    for part in parts[1:]:
        again.update(*part)
    assert float(again.compute()) == pytest.approx(expected(metric), abs=SINGLE)


def test_another_device_holds_what_is_collected():
    """The meta device is all there is besides the CPU everywhere."""
    metric = ErrorAUROC().to("meta")
    metric.update(torch.rand(4), torch.rand(4) < 0.5)
    assert metric.number_[0].device.type == "meta"
    assert metric.positive_[0].device.type == "meta"


def test_a_collection_beside_torchmetrics_own_calibration_error():
    out, targets = predicted()
    together = MetricCollection({"error": ErrorAUROC(), "area": AreaUnderRiskCoverage()})
    calibration = MulticlassCalibrationError(num_classes=3, n_bins=15)
    for part in (slice(0, 7), slice(7, 41)):
        together.update(out[part], targets[part])
        calibration.update(out.mean[part], targets[part])
    values = together.compute()
    curve = risk_coverage(out.score, out.label != targets)
    assert float(values["area"]) == pytest.approx(curve.area, abs=SINGLE)
    assert float(values["error"]) == pytest.approx(expected(ErrorAUROC()), abs=SINGLE)
    ours = expected_calibration_error(out.mean, targets)
    assert float(calibration.compute()) == pytest.approx(ours, abs=1e-6)


def test_plain_tensors_and_one_truth_for_a_batch():
    out, targets = predicted()
    plain, metric = ErrorAUROC(), ErrorAUROC()
    plain.update(out.score, out.label != targets)
    metric.update(out, targets)
    assert float(plain.compute()) == float(metric.compute())
    foreign = ForeignAUROC()
    foreign.update(out[:20], False)
    foreign.update(out.score[20:] + 1, True)
    truth = torch.arange(41) >= 20
    score = torch.where(truth, out.score + 1, out.score)
    assert float(foreign.compute()) == pytest.approx(roc_auc_score(truth, score), abs=SINGLE)


def test_one_kind_alone_is_not_a_number():
    metric = ErrorAUROC()
    metric.update(torch.rand(3), torch.zeros(3, dtype=torch.bool))
    assert torch.isnan(metric.compute())
    assert torch.isnan(metric(torch.rand(2), torch.ones(2, dtype=torch.bool)))
    assert not torch.isnan(metric.compute())


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("kind", METRICS)
def test_nothing_collected_is_not_a_number(kind):
    assert torch.isnan(kind().compute())


def test_refused():
    out, targets = predicted()
    with pytest.raises(BadValueError, match="number: expected one of"):
        ErrorAUROC("margin")
    with pytest.raises(BadValueError, match="truth values"):
        ErrorAUROC().update(out.score, targets)
    with pytest.raises(BadValueError, match="the true classes of 41 inputs"):
        ErrorAUROC().update(out, out.label == targets)
    with pytest.raises(BadValueError, match="the true classes of 41 inputs"):
        ErrorAUROC().update(out, targets[:5])
    with pytest.raises(BadValueError, match=r"shapes \(41,\) and \(5,\)"):
        ForeignAUROC().update(out, targets[:5] == 0)
    case = make_case("dense", likelihood="gaussian")
    real = deltabars.fit(
        case.model, case.data, l2=case.l2, rank=3, likelihood="gaussian", progress=False
    ).predict(case.unseen)
    with pytest.raises(BadValueError, match="one class an input"):
        ErrorAUROC().update(real, targets[:7])
    with pytest.raises(BadValueError, match="expected a prediction with entropy"):
        ForeignAUROC("entropy").update(real, True)


def share(rank):
    """What one of two processes finds with its share of the inputs, ragged."""
    out, targets = predicted()
    mine = slice(0, 15) if rank == 0 else slice(15, 41)
    together = MetricCollection({"error": ErrorAUROC(), "area": AreaUnderRiskCoverage()})
    foreign = ForeignAUROC()
    together.update(out[mine], targets[mine])
    foreign.update(out[mine], targets[mine] == 0)
    return [*together.compute().values(), foreign.compute()]


def test_two_processes_make_what_one_does(tmp_path):
    predicted()  # by one process, before there are two
    first, second = results(2, share, tmp_path / "ranks")
    together = MetricCollection({"error": ErrorAUROC(), "area": AreaUnderRiskCoverage()})
    names = list(together.keys())
    answers = {"error": expected(ErrorAUROC()), "area": expected(AreaUnderRiskCoverage())}
    values = [answers[name] for name in names] + [expected(ForeignAUROC())]
    assert [float(x) for x in first] == [float(x) for x in second]
    assert [float(x) for x in first] == pytest.approx(values, abs=SINGLE)
