"""Every architecture with every estimator, against dense matrices by plain autograd."""

from __future__ import annotations

import math
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import deltabars
from deltabars.curvature.hessian import HessianOperator
from deltabars.errors import ModelWarning, OptimumWarning
from tests.architectures import Wired
from tests.oracles import Oracle
from tests.problem.test_model_untouched import model_state, torch_state
from tests.zoo import COUNT, ZOO, specimen

# Rounding of sums of some hundred terms of O(1) to O(100); a wrong derivative is off by O(1).
PRECISION = {"rtol": 1e-9, "atol": 1e-9}


@contextmanager
def plain_attention():
    """The fused forms have no second derivatives."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.backends.mha.set_fastpath_enabled(before)


def definite(kind, estimator):
    """The network and its matrix, with an l2 that makes this positive definite."""
    case = specimen(kind)
    with plain_attention():
        matrix = case.oracle.matrix(estimator)
        least = float(torch.linalg.eigvalsh(matrix)[0])
        if least < 0.5:
            case = specimen(kind, 1.0 + math.ceil(0.5 - least))
            matrix = case.oracle.matrix(estimator)
    return case, matrix


@pytest.mark.parametrize("estimator", ["hessian", "opg", "ggn"])
@pytest.mark.parametrize("kind", list(ZOO))
def test_matrices_and_error_bars(kind, estimator):
    case, matrix = definite(kind, estimator)
    model, l2 = case.model.eval(), case.oracle.l2
    before, switches = model_state(model), torch_state()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit = deltabars.fit(
            model, case.data, l2=l2, estimator=estimator, rank=len(matrix),
            params=case.member.params, progress=False,
        )  # fmt: skip
        while_fitting = [w.category for w in said if w.category is not OptimumWarning]
        out = fit.predict(case.unseen)
        again = fit.predict(case.unseen)
    pairs = fit.spectra[estimator]  # all of them, so that they give the matrix itself
    found = (pairs.vectors.T * pairs.values) @ pairs.vectors
    torch.testing.assert_close(found, matrix, **PRECISION)
    with plain_attention():
        std = case.oracle.std(estimator, case.unseen)
    torch.testing.assert_close(out.std, std, rtol=1e-8, atol=1e-12)
    assert torch.equal(out.std, again.std)
    slow = estimator in case.member.slow
    assert while_fitting == [ModelWarning] * slow, [str(w.message) for w in said]
    assert sum(w.category is ModelWarning for w in said) == slow + ("ggn" in case.member.slow)
    assert model_state(model) == before
    assert torch_state() == switches


@pytest.mark.parametrize("kind", ["PReLU", "GRU cells", "embedding", "einsum", "GRU, packed"])
@pytest.mark.filterwarnings("ignore::deltabars.errors.ModelWarning")
def test_as_many_vectors_as_examples(kind):
    """An operation might mistake the one for the other."""
    case, matrix = definite(kind, "hessian")
    operator = HessianOperator(deltabars.Problem(case.model, case.data, l2=case.oracle.l2))
    some = torch.eye(len(matrix), dtype=matrix.dtype)[:COUNT]
    torch.testing.assert_close(operator.matmat(some), matrix[:COUNT], **PRECISION)


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
def test_as_many_classes_as_examples():
    """Two vmaps of a PReLU give wrong derivatives without a word where their sizes agree."""
    case = specimen("PReLU")
    inputs, targets = (part[:3] for part in case.data)
    fit = deltabars.fit(
        case.model, (inputs, targets), l2=1.0, estimator="ggn", rank=48, progress=False
    )
    exact = Oracle(case.model, inputs, targets, 1.0).std("ggn", case.unseen)
    torch.testing.assert_close(fit.predict(case.unseen).std, exact, rtol=1e-8, atol=1e-12)


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
def test_mappings_in_training_mode_and_the_fast_path_is_put_back():
    """Batches as Hugging Face has them, with labels or without; dropout is off while fitting."""

    def forward(net, input_ids):
        return SimpleNamespace(logits=net.head(net.layer(net.words(input_ids)).mean(1)))

    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, dropout=0.1)
    model = Wired(forward, words=nn.Embedding(9, 4), layer=layer, head=nn.Linear(4, 3)).double()
    tokens = torch.randint(0, 9, (20, 5), generator=torch.Generator().manual_seed(0))
    data = {"input_ids": tokens, "labels": torch.arange(20) % 3}
    fit = deltabars.fit(model.train(), data, l2=4.0, estimator="ggn", rank=20, progress=False)
    assert torch.equal(fit.predict(data).std, fit.predict({"input_ids": tokens}).std)
    assert model.training
    assert torch.backends.mha.get_fastpath_enabled()
