"""A transformer with mapping batches, as Hugging Face has them: all estimators, exactly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import deltabars
from deltabars.errors import OptimumWarning, SpectrumWarning


class Classifier(nn.Module):
    """Embedding, one transformer layer, one head; outputs with .logits."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, dropout=0.1)
        self.head = nn.Linear(4, 3)

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.head(self.layer(self.embedding(input_ids)).mean(1)))


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Classifier().double()


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(0, 9, (20, 5), generator=generator),
        "labels": torch.randint(0, 3, (20,), generator=generator),
    }


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
@pytest.mark.parametrize("name", ["hessian", "opg", "ggn"])
def test_operators_equal_plain_autograd(model, data, name):
    problem = deltabars.Problem(model, data, l2=0.1)
    operators = {
        "hessian": deltabars.curvature.HessianOperator,
        "opg": deltabars.curvature.OPGOperator,
        "ggn": deltabars.curvature.GGNOperator,
    }
    vector = torch.randn(1, problem.num_parameters, dtype=torch.float64)
    product = operators[name](problem).matmat(vector)[0]
    weights = list(model.eval().parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the fused forms have no second derivatives
        logits = model(data["input_ids"]).logits
    losses = nn.functional.cross_entropy(logits, data["labels"], reduction="none")

    def flat(parts):
        return torch.cat([part.reshape(-1) for part in parts])

    if name == "hessian":
        gradient = flat(torch.autograd.grad(losses.mean(), weights, create_graph=True))
        exact = flat(torch.autograd.grad(gradient @ vector[0], weights))
    elif name == "opg":
        rows = [flat(torch.autograd.grad(x, weights, retain_graph=True)) for x in losses]
        exact = sum((row @ vector[0]) * row for row in rows) / len(rows)
    else:
        exact = torch.zeros_like(vector[0])
        for z in logits:
            rows = [flat(torch.autograd.grad(x, weights, retain_graph=True)) for x in z]
            jacobian, p = torch.stack(rows), z.detach().softmax(0)
            middle = (p.diag() - torch.outer(p, p)) @ (jacobian @ vector[0])
            exact += jacobian.T @ middle / len(logits)
    torch.testing.assert_close(product, exact.detach() + 0.1 * vector[0], rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
@pytest.mark.filterwarnings("ignore::deltabars.errors.SpectrumWarning")
def test_fits_and_predicts_in_either_mode_and_puts_the_fast_path_back(model, data):
    model.train()
    fit = deltabars.fit(model, data, l2=0.1, estimator="sandwich", rank=20, progress=False)
    labelled, bare = fit.predict(data), fit.predict({"input_ids": data["input_ids"]})
    assert torch.equal(labelled.std, bare.std)
    assert model.training
    assert torch.backends.mha.get_fastpath_enabled()
    small = deltabars.fit(
        model, data, l2=0.1, params=deltabars.last_layer(), progress=False, estimator="ggn"
    )
    assert small.rank == small.num_parameters == 15  # the default of 100 is more than there are


def test_the_optimum_warning_names_what_makes_eval_mode_another_cost(model, data):
    with pytest.warns(OptimumWarning, match=r"The model has Dropout.*eval mode"):
        deltabars.fit(model, data, l2=0.1, rank=3, progress=False)


def test_indefinite_spectra_are_warned_of(model, data):
    size = sum(p.numel() for p in model.parameters())
    with (
        pytest.warns(SpectrumWarning, match="at or below zero"),
        pytest.warns(OptimumWarning),
    ):
        deltabars.fit(model, data, l2=1e-4, estimator="hessian", rank=size, progress=False)
