"""Metrics of torchmetrics, with the real one: in batches, moved, pickled, on two processes."""

from __future__ import annotations

import pickle
from functools import lru_cache

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torchmetrics import MetricCollection

import deltabars
from deltabars.errors import BadValueError
from deltabars.integrations.torchmetrics import AreaUnderRiskCoverage, ErrorAUROC, ForeignAUROC
from tests.networks import make_case
from tests.processes import results

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
    """Arguments of update for ragged batches."""
    out, targets = predicted()
    second = targets if not isinstance(metric, ForeignAUROC) else targets == 0
    return [(out[s], second[s]) for s in (slice(0, 20), slice(20, 33), slice(33, 41))]


def expected(metric):
    out, targets = predicted()
    score, wrong = getattr(out, metric.number), out.label != targets
    if not isinstance(metric, AreaUnderRiskCoverage):
        truth = targets == 0 if isinstance(metric, ForeignAUROC) else wrong
        return pytest.approx(roc_auc_score(truth.numpy(), score.numpy()), abs=SINGLE)
    order = score.argsort()
    risks = [float(wrong[order[:k]].double().mean()) for k in range(1, len(order) + 1)]
    return pytest.approx(sum(risks) / len(risks), abs=SINGLE)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("number", ["score", "entropy"])
@pytest.mark.parametrize("kind", METRICS)
def test_in_batches_pickled_and_reset(kind, number):
    metric, alone = kind(number), kind(number)
    assert torch.isnan(metric.compute())
    metric.update(*batches(metric)[0])
    metric = pickle.loads(pickle.dumps(metric)).to("cpu")
    for part in batches(metric)[1:]:
        alone.reset()
        alone.update(*part)
        assert float(metric(*part)) == float(alone.compute())  # the batch's own
    assert float(metric.compute()) == expected(metric)


def test_plain_tensors_and_one_truth_for_a_batch():
    out, targets = predicted()
    plain = ErrorAUROC()
    plain.update(out.score, out.label != targets)
    assert float(plain.compute()) == expected(plain)
    foreign = ForeignAUROC()
    foreign.update(out[:20], False)
    foreign.update(out.score[20:] + 1, True)
    truth = torch.arange(41) >= 20
    score = torch.where(truth, out.score + 1, out.score)
    assert float(foreign.compute()) == pytest.approx(roc_auc_score(truth, score), abs=SINGLE)


def test_refused():
    out, targets = predicted()
    case = make_case("dense", likelihood="gaussian")
    real = deltabars.fit(
        case.model, case.data, l2=case.l2, rank=3, likelihood="gaussian", progress=False
    ).predict(case.unseen)
    for metric, given, said in (
        (ErrorAUROC(), (out.score, targets), "a truth value"),
        (ErrorAUROC(), (out, out.label == targets), "true classes, .* torch.bool"),
        (ErrorAUROC(), (out, targets[:5]), r"\(41,\) and targets of shape \(5,\)"),
        (ForeignAUROC("entropy"), (real, True), "expected a prediction with entropy"),
    ):
        with pytest.raises(BadValueError, match=said):
            metric.update(*given)


def share(rank):
    """What one of two processes finds with its share of the inputs, ragged."""
    out, targets = predicted()
    mine = slice(0, 15) if rank == 0 else slice(15, 41)
    together = MetricCollection({"error": ErrorAUROC(), "area": AreaUnderRiskCoverage()})
    foreign = ForeignAUROC()
    together.update(out[mine], targets[mine])
    foreign.update(out[mine], targets[mine] == 0)
    found = together.compute()
    return [float(value) for value in (found["error"], found["area"], foreign.compute())]


def test_two_processes_make_what_one_does(tmp_path):
    predicted()  # by one process, before there are two
    first, second = results(2, share, tmp_path / "ranks")
    assert list(first) == list(second) == [expected(kind()) for kind in METRICS]
