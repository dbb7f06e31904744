"""What cannot be used is refused by name, with what to do; what is doubtful is warned of."""

from __future__ import annotations

import math
import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import RandomSampler

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


@pytest.mark.parametrize("name", FIT_OPTIONS)
def test_options_of_fit(case, name):
    for value in FIT_OPTIONS[name]:
        match = f"{name}: expected .*got {re.escape(repr(value))}"
        assert_refused(match, lambda value=value: fit(case, **{name: value}), case.model)


@pytest.mark.parametrize("name", PREDICT_OPTIONS)
def test_options_of_predict(case, opg_fit, name):
    for value in PREDICT_OPTIONS[name]:
        given, culprit = {name: value}, value[-1] if isinstance(value, list) else value
        match = f"{name}: expected .*got {re.escape(repr(culprit))}"
        assert_refused(match, lambda given=given: opg_fit.predict(case.unseen, **given), case.model)


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


def augmented(x, y):
    return Examples(len(y), lambda i: (x[i] + 0.01 * torch.randn_like(x[i]), y[i]))


def with_replacement(x, y):
    return loader(x, y, batch_size=7, sampler=RandomSampler(x, replacement=True))


NOT_REPEATING = "same examples on every pass.*Turn off random augmentation"
DATA = {
    "no batches": (lambda x, y: [], "the data are empty"),
    "generator": (lambda x, y: (pair for pair in [(x, y)]), r"one-pass iterator \(generator\)"),
    "large target": (lambda x, y: (x, y + 1), "from 0 to 2 .*3 outputs.*got 3"),
    "float targets": (lambda x, y: (x, y.double()), r"got torch.float64.*\.long\(\)"),
    "target column": (lambda x, y: (x, y[:, None]), r"expected shape \(29,\).*got \(29, 1\)"),
    "fewer targets": (lambda x, y: (x, y[:-1]), r"\(29, 4\), \(28,\)"),
    "second batch of another type": (lambda x, y: [(x, y), (x.float(), y)], "torch.float32"),
    "inputs alone": (lambda x, y: x, r"\(inputs, targets\).*got Tensor"),
    "no labels": (lambda x, y: {"x": x, "y": y}, r"'labels', got \['x', 'y'\]"),
    "a path": (lambda x, y: "train.pt", "expected a DataLoader.*got str"),
    "NaN": (lambda x, y: (x.index_fill(0, y[:1] * 0 + 3, torch.nan), y), "1 of the 29 examples"),
    "augmentation": (augmented, NOT_REPEATING),
    "replacement": (with_replacement, NOT_REPEATING),
    "dropped rest": (partial(loader, batch_size=20, shuffle=True, drop_last=True), NOT_REPEATING),
}


@pytest.mark.parametrize("kind", DATA)
def test_data(case, kind):
    make, match = DATA[kind]
    assert_refused(match, lambda: fit(case, data=make(*case.data)), case.model)


def zero_root(z):
    return z + (z - z).square().sum(1, keepdim=True).sqrt()


OUTPUTS = {
    "one column": (lambda z: z[:, 0], r"expected logits, .*\(B, C\), .*got \(29,\)"),
    "tuple": (lambda z: (z, z), "got tuple.*Wrap the model"),
    "fewer rows": (lambda z: z[1:], r"one row for each of 29 examples, got \(28, 3\)"),
    "overflow": (lambda z: z * 1e200 * 1e200, "29 NaN or infinite.*overflow"),
    "NaN gradient": (zero_root, "Gradients: expected finite.*square roots"),
    "random": (lambda z: z + torch.randn_like(z), "same outputs.*Turn off what is random"),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs(case, kind):
    change, match = OUTPUTS[kind]
    model = Wrapped(case.model, change)
    assert_refused(match, lambda: fit(case, model), model)


def unused_layer_last():
    """The network with a layer behind it that the forward pass never calls."""
    model = Wrapped(dense(), lambda z: z)
    model.auxiliary = nn.Linear(5, 3)
    return model.double()


def frozen():
    model = dense().double()
    model[0].requires_grad_(False)
    return model


def not_a_number():
    model = dense().double()
    nn.init.constant_(model[2].bias, torch.nan)
    return model


MODELS = {
    "NaN weights": (not_a_number, None, r"finite weights, got NaN .*2\.bias"),
    "no parameters": (nn.Flatten, None, "model with parameters, got one without"),
    "frozen": (frozen, None, r"2 frozen.*0\.weight, 0\.bias.*requires_grad"),
    "no match": (dense, "fc*", r"'fc\*'.*The model has 0\.weight, 0\.bias, 2\.weight"),
    "one of two matches": (dense, ["2*", "2.wieght"], r"'2\.wieght'.*2\.weight"),
    "no patterns": (dense, [], r"params: expected .*got \[\]"),
    "unused": (unused_layer_last, deltabars.last_layer(), "depends on the selected parameters"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_and_selections(case, kind):
    make, params, match = MODELS[kind]
    model = make()
    assert_refused(match, lambda: fit(case, model, params=params), model)


INPUTS = {
    "another type": (lambda u: u.float(), "expected torch.float64.*got torch.float32"),
    "another shape": (lambda u: u[:, :3], r"expected .*\(B, 4\).*got .*\(B, 3\)"),
    "NaN": (lambda u: u * torch.nan, "expected finite values, got NaN"),
    "nothing": (lambda u: u[:0], "expected at least one, got none"),
    "a mapping": (lambda u: {"x": u}, r"got x torch.float64 \(B, 4\)"),
    "batches without labels": (lambda u: [u[:3], u[3:6]], "one tensor of inputs more"),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_to_predict(case, opg_fit, kind):
    change, match = INPUTS[kind]
    assert_refused(match, lambda: opg_fit.predict(change(case.unseen)), case.model)


def test_probabilities_for_logits_are_refused_unless_that_is_said(case):
    """Whatever number of them is nearly 0 or 1."""
    for end in (lambda z: z.softmax(1), lambda z: (30 * z).softmax(1)):
        model = Wrapped(case.model, end)
        match = "sum to one. If the model ends in a softmax, leave it out.*torch.log"
        assert_refused(match, lambda model=model: fit(case, model), model)
    model = Wrapped(case.model, lambda z: z.softmax(1))
    done, _ = with_warnings(lambda: fit(case, model, allow_probabilities=True))
    loss = torch.nn.functional.cross_entropy(model(case.inputs), case.targets).detach()
    assert done.diagnostics["mean_loss"] == pytest.approx(float(loss), rel=1e-9)


@pytest.mark.parametrize("likelihood", ["bernoulli", nn.BCEWithLogitsLoss()])
@pytest.mark.parametrize("outputs", [1, 2])
def test_sigmoids_for_logits_likewise(outputs, likelihood):
    """Outputs from 0 to 1 are probabilities, unless the targets say that they are weak logits."""
    draw = torch.Generator().manual_seed(0)
    core = nn.Linear(outputs, outputs).double()
    nn.init.eye_(core.weight)
    nn.init.zeros_(core.bias)
    x = 2 * torch.randn(90, outputs, generator=draw, dtype=torch.float64)

    def fitted(end, **more):
        chances = core(x).sigmoid() if end is torch.sigmoid else end(core(x)).sigmoid()
        y = (torch.rand(90, outputs, generator=draw) < chances).double()
        options = {"l2": 0.01, "rank": 2, "likelihood": likelihood, "progress": False, **more}
        with_warnings(lambda: deltabars.fit(Wrapped(core, end), (x, y), **options))

    with pytest.raises(errors.ModelError, match=r"in a sigmoid, leave it out.*torch\.logit"):
        fitted(torch.sigmoid)
    fitted(torch.sigmoid, allow_probabilities=True)
    fitted(lambda z: 0.5 + 0.45 * z.tanh())


def network_at_chance(kind):
    """A network that was not trained, with its data and likelihood."""
    torch.manual_seed(0)
    x, y = torch.randn(120, 4).double(), torch.arange(120) % 3
    numbers = x @ torch.tensor([[1.0], [2.0], [0.0], [-1.0]]).double()
    if kind == "numbers":
        return nn.Linear(4, 1).double(), (x, numbers), "gaussian"
    if kind == "answers":
        return nn.Linear(4, 2).double(), (x, (numbers.expand(-1, 2) > 0).long()), "bernoulli"
    weight = torch.tensor([1.0, 2.0, 3.0])
    weighted = nn.CrossEntropyLoss(weight, label_smoothing=0.1)
    return nn.Linear(4, 3).double(), (x, y), weighted if kind == "weighted" else "categorical"


@pytest.mark.parametrize("kind", ["classes", "weighted", "answers", "numbers"])
def test_a_network_at_chance_is_warned_of(kind):
    model, (x, y), likelihood = network_at_chance(kind)
    options = {"l2": 1e-4, "rank": 3, "likelihood": likelihood, "progress": False}
    done, given = with_warnings(lambda: deltabars.fit(model, (x, y), **options))
    assert "which is that of chance" in given[errors.OptimumWarning]
    said = done.predict(x).judgement
    assert (said.level, "no better than chance" in said.reason) == ("meaningless", True)
    outputs, accuracy = model(x).detach(), done.diagnostics["train_accuracy"]
    if kind == "numbers":
        assert accuracy is None
    else:
        label = (outputs > 0).long() if kind == "answers" else outputs.argmax(1)
        assert accuracy == pytest.approx(float((label == y).double().mean()))
        assert f"a training accuracy of {accuracy:.1%}" in given[errors.OptimumWarning]
    # The best constant outputs, by fitting a bias alone.
    problem, _ = with_warnings(lambda: deltabars.Problem(model, (x, y), likelihood, l2=0.01))
    bias = nn.Parameter(torch.zeros(outputs.shape[1], dtype=torch.float64))
    loss = lambda: problem.likelihood.loss(bias.expand(len(y), -1), y).mean()  # noqa: E731
    minimise(nn.ParameterList([bias]), loss, 0.0)
    assert problem.constant_answer[1] == pytest.approx(float(loss().detach()), rel=1e-9)


def test_a_useful_network_is_not_at_chance(case):
    """Of unequal classes it may always predict the largest one, with probabilities that differ."""
    done, given = with_warnings(lambda: fit(case))
    assert not given
    expected = (case.model(case.inputs).argmax(1) == case.targets).double().mean()
    assert done.diagnostics["train_accuracy"] == pytest.approx(float(expected))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 1, generator=draw).double()
    y = (torch.rand(2000, 1, generator=draw) < (x - 3).sigmoid()).long()[:, 0]
    line = nn.Linear(1, 2).double()
    with torch.no_grad():
        line.weight.copy_(torch.tensor([[0.0], [1.0]]))
        line.bias.copy_(torch.tensor([0.0, -3.0]))
    done, given = with_warnings(lambda: deltabars.fit(line, (x, y), l2=1.0, rank=2, progress=False))
    assert done.diagnostics["train_accuracy"] <= float(1 - y.double().mean()) + 0.005
    assert "chance" not in given.get(errors.OptimumWarning, "")


def test_bytes_for_a_network_of_floats():
    """Of images that were trained on as x / 255."""
    x = torch.arange(60 * 16, dtype=torch.float32).remainder(251).view(60, 16).byte()
    model, y = nn.Linear(16, 3), torch.arange(60) % 3
    options = {"l2": 0.01, "rank": 3, "progress": False}
    advice = r"of torch.uint8: a network that was trained on floats.*x.float\(\) / 255"
    assert_refused(advice, lambda: deltabars.fit(model, (x, y), **options), model)
    fitted, _ = with_warnings(lambda: deltabars.fit(model, (x / 255, y), **options))
    assert_refused(r"by x.float\(\) / 255", lambda: fitted.predict(x), model)


@pytest.mark.parametrize("estimator", ["opg", "hessian"])
def test_unconverged_pairs_are_counted(case, estimator):
    options = {"solver": "krylov", "max_products": 8, "estimator": estimator}
    done, given = with_warnings(lambda: fit(case, **options))
    left = int((done.spectra[estimator].residuals > 1e-10).sum())
    assert f"got {left} that have not converged" in given[errors.ConvergenceWarning]


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
