"""What cannot be used is refused by name, with what to do; what is doubtful is warned of."""

from __future__ import annotations

import math
import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import deltabars
from deltabars import errors
from tests.networks import dense, make_case, minimise
from tests.oracles import Oracle
from tests.problem.test_data import Examples, loader
from tests.problem.test_model_untouched import model_state

RANK = 5


class Wrapped(nn.Module):
    """A model whose outputs are changed on the way out."""

    def __init__(self, core, change):
        super().__init__()
        self.core, self.change = core, change

    def forward(self, x):
        return self.change(self.core(x))


@pytest.fixture(scope="module")
def case():
    return make_case()


@pytest.fixture(scope="module")
def opg_fit(case):
    return fit(case)


def fit(case, model=None, data=None, **options):
    settings = {"l2": case.l2, "rank": RANK, "progress": False, **options}
    data = case.data if data is None else data
    return deltabars.fit(case.model if model is None else model, data, **settings)


def assert_refused(match, attempt, model):
    """`attempt` raises a bad value of deltabars' own, and leaves `model` as it was."""
    model.train()
    before = model_state(model)
    with pytest.raises(ValueError, match=match) as caught:
        attempt()
    assert isinstance(caught.value, errors.DeltaBarsError)
    assert model_state(model) == before


def with_warnings(attempt):
    """What `attempt` returns, and the text of the warnings of each kind that it gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=errors.DeltaBarsWarning)
        result = attempt()
    return result, {warning.category: str(warning.message) for warning in caught}


FIT_OPTIONS = {
    "l2": (0, -0.1, math.nan, math.inf, "0.01", None, True),
    "rank": (0, -1, 44, 2.5, True, "many"),
    "estimator": ("fisher", None, ["opg"]),
    "solver": ("qr", None),
    "likelihood": ("poisson", None),
    "memory_budget": (0, 1e9),
    "batch_size": (0, 2.5),
    "dtype": (torch.float16, torch.int64, "float32"),
    "device": ("nonsense",),
    "max_products": (0, 2.5),
    "max_seconds": (0, math.nan, "60", True),
    "residual_tolerance": (0.0, math.nan),
    "smallest": (-1, 2.5),
    "params": ([3],),
}
PREDICT_OPTIONS = {
    "rank": (0, 2.5, True, "auto", RANK + 1),
    "full_rank": ("no", None, 1),
    "space": ("odds", None),
    "bound": ("loose", None),
    "batch_size": (0, 2.5),
    "estimator": ("hessian", "sandwich", "fisher", ["opg", "ggn"]),
}


@pytest.mark.parametrize("method", ["fit", "predict"])
def test_options(case, opg_fit, method):
    attempt = partial(fit, case) if method == "fit" else partial(opg_fit.predict, case.unseen)
    for name, values in (FIT_OPTIONS if method == "fit" else PREDICT_OPTIONS).items():
        for value in values:
            culprit = "ggn" if value == ["opg", "ggn"] else value
            match = f"{name}: expected .*got {re.escape(repr(culprit))}"
            assert_refused(match, partial(attempt, **{name: value}), case.model)


def test_other_requests(case, opg_fit, tmp_path):
    likewise = "with rank='auto' only, got rank=5"
    requests = [
        (lambda: fit(case, "model.pt"), "expected a torch.nn.Module, got str"),
        (lambda: fit(case, dense().to("meta")), "tensors without values"),
        (lambda: fit(case, estimator="hessian", solver="incremental"), "got 'incremental', which"),
        (lambda: fit(case, solver="dense", max_seconds=60), "expected solver .* got 'dense'"),
        (lambda: fit(case, rank="auto", tolerance="5 %"), "tolerance: expected a number above"),
        (lambda: fit(case, rank=5, tolerance=0.1), likewise),
        (lambda: fit(case, rank=5, probe=case.unseen), likewise),
        (lambda: fit(case, rank="auto", solver="arpack"), "with rank='auto', got 'arpack'"),
        (lambda: fit(case, rank="auto", probe=case.unseen[:0]), "at least one"),
        (lambda: opg_fit.predict(case.unseen, bound="paper", full_rank=False), "full_rank=False"),
        (lambda: opg_fit.sample(0), "n: expected .*got 0"),
        (lambda: opg_fit.with_l2(-1), "l2: expected .*got -1"),
    ]
    for request, match in requests:
        assert_refused(match, request, case.model)
    with pytest.raises(errors.StorageError, match=r"absent\.deltabars: No such file"):
        deltabars.load(tmp_path / "absent.deltabars", case.model)


NOT_REPEATING = "same examples on every pass.*Turn off random augmentation"
DATA = {
    "no batches": (lambda x, y: [], "the data are empty"),
    "generator": (lambda x, y: (pair for pair in [(x, y)]), r"one-pass iterator \(generator\)"),
    "large target": (lambda x, y: (x, y + 1), "from 0 to 2 .*3 outputs.*got 3"),
    "float targets": (lambda x, y: (x, y.double()), r"got torch.float64.*\.long\(\)"),
    "fewer targets": (lambda x, y: (x, y[:-1]), r"\(29, 4\), \(28,\)"),
    "second batch of another type": (lambda x, y: [(x, y), (x.float(), y)], "torch.float32"),
    "inputs alone": (lambda x, y: x, r"\(inputs, targets\).*got Tensor"),
    "no labels": (lambda x, y: {"x": x, "y": y}, r"'labels', got \['x', 'y'\]"),
    "NaN": (lambda x, y: (x.index_fill(0, y[:1] * 0 + 3, torch.nan), y), "1 of the 29 examples"),
    "augmentation": (
        lambda x, y: Examples(len(y), lambda i: (x[i] + torch.randn_like(x[i]), y[i])),
        NOT_REPEATING,
    ),
    "dropped rest": (partial(loader, batch_size=20, shuffle=True, drop_last=True), NOT_REPEATING),
}


OUTPUTS = {
    "one column": (lambda z: z[:, 0], r"expected logits, .*\(B, C\), .*got \(29,\)"),
    "tuple": (lambda z: (z, z), "got tuple.*Wrap the model"),
    "overflow": (lambda z: z * 1e200 * 1e200, "29 NaN or infinite.*overflow"),
    "NaN gradient": (lambda z: z + (z - z).sqrt(), "Gradients: expected finite.*square roots"),
    "random": (lambda z: z + torch.randn_like(z), "same outputs.*Turn off what is random"),
}


def unused_layer_last():
    """The network with a layer behind it that the forward pass never calls."""
    model = Wrapped(dense(), lambda z: z)
    model.auxiliary = nn.Linear(5, 3)
    return model.double()


def frozen():
    model = dense().double()
    model[0].requires_grad_(False)
    return model


def unusable():
    model = dense().double()
    nn.init.constant_(model[2].bias, torch.nan)
    return model


MODELS = {
    "NaN weights": (unusable, None, r"finite weights, got NaN .*2\.bias"),
    "no parameters": (nn.Flatten, None, "model with parameters, got one without"),
    "frozen": (frozen, None, r"2 frozen.*0\.weight, 0\.bias.*requires_grad"),
    "no match": (dense, "fc*", r"'fc\*'.*The model has 0\.weight, 0\.bias, 2\.weight"),
    "no patterns": (dense, [], r"params: expected .*got \[\]"),
    "unused": (unused_layer_last, deltabars.last_layer(), "depends on the selected parameters"),
}


INPUTS = {
    "another type": (lambda u: u.float(), "expected torch.float64.*got torch.float32"),
    "another shape": (lambda u: u[:, :3], r"expected .*\(B, 4\).*got .*\(B, 3\)"),
    "NaN": (lambda u: u * torch.nan, "expected finite values, got NaN"),
    "nothing": (lambda u: u[:0], "expected at least one, got none"),
    "a mapping": (lambda u: {"x": u}, r"got x torch.float64 \(B, 4\)"),
    "batches without labels": (lambda u: [u[:3], u[3:6]], "one tensor of inputs more"),
}


CASES = [(table, kind) for table in (DATA, OUTPUTS, MODELS, INPUTS) for kind in table]


@pytest.mark.parametrize(("table", "kind"), CASES, ids=[kind for _, kind in CASES])
def test_data_outputs_models_and_inputs(case, opg_fit, table, kind):
    make, *params, match = table[kind]
    model = case.model
    if table is INPUTS:
        attempt = partial(opg_fit.predict, make(case.unseen))
    elif table is DATA:
        attempt = partial(fit, case, data=make(*case.data))
    else:
        model = make() if params else Wrapped(case.model, make)
        attempt = partial(fit, case, model, params=params[0] if params else None)
    assert_refused(match, attempt, model)


def test_probabilities_for_logits_are_refused_unless_that_is_said(case):
    """Whatever number of them is nearly 0 or 1."""
    for end in (lambda z: z.softmax(1), lambda z: (30 * z).softmax(1)):
        model = Wrapped(case.model, end)
        match = "sum to one. If the model ends in a softmax, leave it out.*torch.log"
        assert_refused(match, lambda model=model: fit(case, model), model)
    model = Wrapped(case.model, lambda z: z.softmax(1))
    with_warnings(lambda: fit(case, model, allow_probabilities=True))


@pytest.mark.parametrize("likelihood", ["bernoulli", nn.BCEWithLogitsLoss()])
def test_sigmoids_for_logits_likewise(likelihood):
    """Outputs from 0 to 1 are probabilities, unless the targets say that they are weak logits."""
    x = 2 * torch.randn(90, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def fitted(end, chances, **more):
        core = nn.Linear(1, 1).double()
        nn.init.eye_(core.weight)
        nn.init.zeros_(core.bias)
        y = chances.bernoulli(generator=torch.Generator().manual_seed(1))
        options = {"l2": 0.01, "rank": 2, "likelihood": likelihood, "progress": False, **more}
        with_warnings(lambda: deltabars.fit(Wrapped(core, end), (x, y), **options))

    with pytest.raises(errors.ModelError, match=r"in a sigmoid, leave it out.*torch\.logit"):
        fitted(torch.sigmoid, x.sigmoid())
    fitted(torch.sigmoid, x.sigmoid(), allow_probabilities=True)
    fitted(lambda z: 0.5 + 0.45 * z.tanh(), (0.5 + 0.45 * x.tanh()).sigmoid())


WEIGHTED = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1)


@pytest.mark.parametrize("likelihood", ["categorical", WEIGHTED, "bernoulli", "gaussian"])
def test_a_network_at_chance_is_warned_of(case, likelihood):
    torch.manual_seed(0)
    x, y = torch.randn(120, 4).double(), torch.arange(120) % 3
    if isinstance(likelihood, str) and likelihood != "categorical":
        y = x @ torch.tensor([[1.0], [2.0], [0.0], [-1.0]]).double()
        y = (y > 0).double() if likelihood == "bernoulli" else y
    model = nn.Linear(4, 3 if y.ndim == 1 else 1).double()
    options = {"l2": 1e-4, "rank": 3, "likelihood": likelihood, "progress": False}
    done, given = with_warnings(lambda: deltabars.fit(model, (x, y), **options))
    assert "which is that of chance" in given[errors.OptimumWarning]
    said = done.predict(x).judgement
    assert (said.level, "no better than chance" in said.reason) == ("meaningless", True)
    accuracy = done.diagnostics["train_accuracy"]
    if likelihood == "gaussian":
        assert accuracy is None
    else:
        label = model(x).argmax(1) if y.ndim == 1 else (model(x) > 0).double()
        assert accuracy == pytest.approx(float((label == y).double().mean()))
    # The best constant outputs, by fitting a bias alone.
    problem, _ = with_warnings(lambda: deltabars.Problem(model, (x, y), likelihood, l2=0.01))
    bias = nn.Parameter(torch.zeros(model.out_features, dtype=torch.float64))
    loss = lambda: problem.likelihood.loss(bias.expand(len(y), -1), y).mean()  # noqa: E731
    minimise(nn.ParameterList([bias]), loss, 0.0)
    assert problem.constant_answer[1] == pytest.approx(float(loss().detach()), rel=1e-9)
    assert not with_warnings(lambda: fit(case))[1]  # a useful one is not


def test_bytes_for_a_network_of_floats():
    """Of images that were trained on as x / 255."""
    x = torch.arange(60 * 16, dtype=torch.float32).remainder(251).view(60, 16).byte()
    model, y = nn.Linear(16, 3), torch.arange(60) % 3
    options = {"l2": 0.01, "rank": 3, "progress": False}
    advice = r"of torch.uint8: a network that was trained on floats.*x.float\(\) / 255"
    assert_refused(advice, lambda: deltabars.fit(model, (x, y), **options), model)
    fitted, _ = with_warnings(lambda: deltabars.fit(model, (x / 255, y), **options))
    assert_refused(r"by x.float\(\) / 255", lambda: fitted.predict(x), model)


@pytest.mark.parametrize("estimator", ["hessian", "sandwich"])
def test_an_untrained_network_is_warned_of_and_still_served(case, estimator):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = dense().double()
    oracle = Oracle(model, *case.data, l2=1e-3)
    bad = int((torch.linalg.eigvalsh(oracle.hessian()) <= 0).sum())
    options = {"l2": 1e-3, "rank": oracle.size, "estimator": estimator}
    done, given = with_warnings(lambda: fit(case, model, **options))
    assert "gradient of norm" in given[errors.OptimumWarning]
    assert f"got {bad} of {oracle.size} at or below zero" in given[errors.SpectrumWarning]
    found = done.predict(case.unseen)
    numbers = torch.cat([found.std, found.std_error, found.std_low, found.std_high])
    assert bool((numbers.isfinite() & (numbers >= 0)).all())
