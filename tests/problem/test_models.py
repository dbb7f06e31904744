"""Models that look sound and are not, and sound ones that look odd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deltabars
from deltabars.errors import ModelError
from tests.conftest import cached_case
from tests.networks import make_case


def refit(model, case, **options):
    options = {"l2": case.l2, "rank": 5, "progress": False, **options}
    return deltabars.fit(model, case.data, **options)


class Detached(nn.Module):
    def __init__(self, core):
        super().__init__()
        self.core = core

    def forward(self, x):
        return self.core(x).detach()


def test_outputs_that_do_not_depend_on_the_parameters_are_refused(dense_case):
    with pytest.raises(ModelError, match=r"derivatives that are all zero.*detach"):
        refit(Detached(dense_case.model), dense_case)


def test_batch_statistics_are_refused(dense_case):
    model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)).double()
    with pytest.raises(ModelError, match="not to depend on the rest of its batch"):
        refit(model, dense_case)


def test_a_head_before_a_log_softmax_is_a_last_layer(dense_case):
    """Log-probabilities are logits too: the fit is that of the logits themselves."""
    plain, ended = (
        refit(model, dense_case, params=deltabars.last_layer()).predict(dense_case.unseen)
        for model in (dense_case.model, nn.Sequential(*dense_case.model, nn.LogSoftmax(1)))
    )
    torch.testing.assert_close(ended.std, plain.std, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_hooks_on_gradients_neither_run_nor_get_lost(register):
    case = make_case("dense")
    ran = []
    getattr(case.model[0], register)(lambda *_: ran.append(1))
    out = refit(case.model, case, estimator="sandwich").predict(case.unseen)
    expected = refit(cached_case("dense").model, case, estimator="sandwich").predict(case.unseen)
    assert torch.equal(out.std, expected.std)
    assert not ran
    case.model(case.inputs.clone().requires_grad_()).sum().backward()
    assert ran == [1]


def test_the_effective_parameters_of_an_incremental_fit_bound_the_exact_ones():
    case = cached_case("linear", count=400, l2=0.001)
    fit = refit(case.model, case, solver="incremental", memory_budget=200_000)
    assert fit.spectra["opg"].slack > 1e-4
    values = torch.linalg.eigvalsh(case.oracle.opg())
    low, high = fit.effective_parameters_interval
    assert low <= float((1 - case.l2 / values).sum()) <= high
