"""torch's loss modules as likelihoods, against dense derivatives of the modules themselves."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import deltabars
from deltabars import Problem
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.errors import BadValueError, DataWarning, LossWarning
from deltabars.likelihoods.bernoulli import Bernoulli
from deltabars.likelihoods.categorical import Categorical
from deltabars.likelihoods.gaussian import Gaussian
from tests.networks import make_targets, minimise
from tests.oracles import Oracle

ESTIMATORS = ("hessian", "opg", "sandwich", "ggn")
OPERATORS = {"hessian": HessianOperator, "opg": OPGOperator, "ggn": GGNOperator}
COUNT, CLASSES = 23, 3
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 3.5], dtype=torch.float64)
POS_WEIGHTS = torch.tensor([4.0, 0.5, 1.5], dtype=torch.float64)


def class_weight(z, y):
    return CLASS_WEIGHTS[y].sum()


def target_weight(z, y):
    return (1 + (POS_WEIGHTS - 1) * y).sum() / CLASSES


def count(z, y):
    return torch.tensor(float(COUNT))


# The module, what its examples weigh in all, and a: the module over the mean of proper losses.
MODULES = {
    "CE": (nn.CrossEntropyLoss(), count, lambda v: 1),
    "CE sum": (nn.CrossEntropyLoss(reduction="sum"), count, lambda v: COUNT),
    "CE weighted": (nn.CrossEntropyLoss(CLASS_WEIGHTS), class_weight, lambda v: 1),
    "CE smoothed": (nn.CrossEntropyLoss(label_smoothing=0.2), count, lambda v: 1),
    "CE weighted, smoothed": (
        nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.2), class_weight, lambda v: 1
    ),
    "BCE": (nn.BCEWithLogitsLoss(), count, lambda v: 1 / CLASSES),
    "BCE sum": (nn.BCEWithLogitsLoss(reduction="sum"), count, lambda v: COUNT),
    "BCE weighted": (
        nn.BCEWithLogitsLoss(pos_weight=POS_WEIGHTS), target_weight,
        lambda v: v / (COUNT * CLASSES),
    ),
    "MSE": (nn.MSELoss(), count, lambda v: 2 / CLASSES),
    "MSE sum": (nn.MSELoss(reduction="sum"), count, lambda v: 2 * COUNT),
}  # fmt: skip


@dataclass
class Trained:
    """A network at an optimum of a module's value + (l2/2)·‖w‖²; and what follows from that."""

    module: nn.Module
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    unseen: Tensor
    l2: float  # of the module
    factor: float  # a
    oracle: Oracle  # of the mean of proper losses

    @property
    def data(self):
        return self.inputs, self.targets

    def problem(self):
        with self.announced():
            return Problem(self.model, self.data, self.module, l2=self.l2)

    def fit(self, estimator):
        with self.announced():
            return deltabars.fit(
                self.model, self.data, l2=self.l2, likelihood=self.module, estimator=estimator,
                rank=self.oracle.size, progress=False,
            )  # fmt: skip

    def announced(self):
        if self.module.reduction == "sum":
            return pytest.warns(LossWarning, match="l2: taken as that of the loss summed")
        return nullcontext()


@cache
def trained(kind: str, seed: int = 0) -> Trained:
    module, weigh, over = MODULES[kind]
    name = {"CE": "categorical", "BC": "bernoulli", "MS": "gaussian"}[kind[:2]]
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    new = {"generator": generator, "dtype": torch.float64}
    inputs, unseen = torch.randn(COUNT, 4, **new), torch.randn(6, 4, **new)
    targets = make_targets(name, COUNT, generator)
    targets = targets if name == "categorical" else targets.double()
    weight = float(weigh(None, targets))
    factor = float(over(weight))
    strength = 0.15  # of the mean of proper losses: its Hessian is positive definite then
    minimise(model, lambda: module(model(inputs), targets), strength * factor)
    each = copy.deepcopy(module)
    each.reduction = "none"

    def proper(z, y):
        values = each(z, y) * COUNT / weight / (2 if name == "gaussian" else 1)
        return values if name == "categorical" else values.sum(1)

    oracle = Oracle(model, inputs, targets, strength, likelihood=name, loss=proper)
    return Trained(module, model, inputs, targets, unseen, strength * factor, factor, oracle)


@pytest.fixture(params=MODULES)
def case(request) -> Trained:
    return trained(request.param)


def test_the_hessian_is_that_of_the_module_but_for_the_known_factor(case):
    def cost(vector):
        value = case.module(case.oracle.outputs(vector, case.inputs), case.targets)
        return value + 0.5 * case.l2 * vector.square().sum()

    whole = torch.autograd.functional.hessian(cost, case.oracle.point)
    problem = case.problem()
    ours = HessianOperator(problem).to_dense()
    torch.testing.assert_close(ours, whole / case.factor, rtol=0, atol=1e-10)
    assert problem.l2 == pytest.approx(case.l2 / case.factor, rel=1e-12)
    assert problem.given_l2 == case.l2
    assert problem.relative_gradient < 1e-6
    loss = float(case.module(case.model(case.inputs), case.targets).detach())
    assert problem.mean_loss == pytest.approx(loss / case.factor, rel=1e-12)


@pytest.mark.parametrize("matrix", OPERATORS)
def test_every_matrix_is_that_of_the_weighted_likelihood(case, matrix):
    ours = OPERATORS[matrix](case.problem()).to_dense()
    # Float64 sums of 23 terms of the order of one.
    torch.testing.assert_close(ours, case.oracle.matrix(matrix), rtol=0, atol=1e-10)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_error_bars(case, estimator):
    assert float(torch.linalg.eigvalsh(case.oracle.hessian())[0]) > 0
    fit = case.fit(estimator)
    if isinstance(case.module, nn.MSELoss):
        assert fit.noise != 1
        fit = fit.with_noise(1)
    exact = case.oracle.std(estimator, case.unseen)
    torch.testing.assert_close(fit.predict(case.unseen).std, exact, rtol=0, atol=1e-8)
    assert fit.l2 == pytest.approx(case.oracle.l2, rel=1e-12)


@pytest.mark.parametrize(
    ("plain", "likelihood"),
    [
        ("CE weighted, smoothed", Categorical(tuple((7 * CLASS_WEIGHTS).tolist()), 0.2)),
        ("BCE weighted", Bernoulli(tuple(POS_WEIGHTS.tolist()))),
        ("MSE", Gaussian("estimate")),
    ],
)
def test_a_likelihood_has_the_l2_of_the_mean_loss_and_weights_are_proportions(plain, likelihood):
    case = trained(plain)
    fit = deltabars.fit(
        case.model, case.data, l2=case.oracle.l2, likelihood=likelihood, estimator="ggn",
        rank=case.oracle.size, progress=False,
    )  # fmt: skip
    expected = case.fit("ggn").predict(case.unseen).std
    torch.testing.assert_close(fit.predict(case.unseen).std, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_yes_or_no(estimator):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(25, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 2, (25, 1), generator=generator)
    model = nn.Linear(4, 1).double()
    minimise(model, lambda: nn.BCEWithLogitsLoss()(model(inputs), targets.double()), 0.1)
    oracle = Oracle(model, inputs, targets, 0.1, likelihood="bernoulli")
    out = deltabars.fit(
        model, (inputs, targets[:, 0]), l2=0.1, likelihood="bernoulli", estimator=estimator,
        rank=oracle.size, progress=False,
    ).predict(inputs)  # fmt: skip
    torch.testing.assert_close(out.std, oracle.std(estimator, inputs), rtol=0, atol=1e-8)
    torch.testing.assert_close(out.mean, model(inputs).detach().sigmoid())
    assert torch.equal(out.label, (model(inputs) > 0).long())
    torch.testing.assert_close(out.score, out.std[:, 0])


@pytest.mark.parametrize("kind", ["CE weighted, smoothed", "BCE weighted", "MSE", "CE"])
def test_files_hold_what_the_likelihood_is(kind, tmp_path):
    case = trained(kind)
    fit = case.fit("ggn")
    fit.save(tmp_path / "a")
    back = deltabars.load(tmp_path / "a", case.model)
    assert back.likelihood == fit.likelihood
    for name in ("mean", "std", "total_std"):
        now, then = (getattr(f.predict(case.unseen), name) for f in (back, fit))
        assert now is then is None or torch.equal(now, then)
    stored = deltabars.storage.format.read_header(tmp_path / "a")["likelihood"]
    assert (stored == "categorical") == (kind == "CE")  # as older versions write and read it


WITHOUT_TARGET = {
    "the usual": nn.CrossEntropyLoss(),
    "a class": nn.CrossEntropyLoss(ignore_index=2),
    "weighted, smoothed, a class": nn.CrossEntropyLoss(
        CLASS_WEIGHTS, ignore_index=1, label_smoothing=0.2
    ),
}  # fmt: skip


def partly_labelled(module, batch=5):
    """A network at the optimum of a module, and data of which some have no target, far away."""
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    inputs = torch.randn(31, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, CLASSES, (31,), generator=generator)
    none = (torch.arange(31) < batch) | (torch.arange(31) % 3 == 0)
    targets[none] = module.ignore_index
    none = targets == module.ignore_index
    inputs[none] *= 20
    minimise(model, lambda: module(model(inputs), targets), 0.15)
    return model, inputs, targets, ~none, 0.15


@pytest.mark.parametrize("kind", WITHOUT_TARGET)
@pytest.mark.parametrize("estimator", ["opg", "hessian"])
def test_examples_without_a_target_count_nothing(kind, estimator):
    module = WITHOUT_TARGET[kind]
    model, inputs, targets, some, l2 = partly_labelled(module)
    size = sum(weight.numel() for weight in model.parameters())

    def fitted(data, **options):
        return deltabars.fit(
            model, data, l2=l2, likelihood=module, estimator=estimator, rank=size, progress=False,
            **options,
        )  # fmt: skip

    said = pytest.warns(DataWarning, match=f"got {int((~some).sum())} that are -100")
    usual = module.ignore_index == -100
    clean = fitted((inputs[some], targets[some]))
    theirs = clean.predict(inputs)
    for data, budget in (
        ((inputs, targets), None),
        ({"input": inputs, "labels": targets}, None),
        (DataLoader(TensorDataset(inputs, targets), batch_size=5), 20_000),  # read again each time
    ):
        with said if usual else nullcontext():
            fit = fitted(data, **({} if budget is None else {"memory_budget": budget}))
        assert fit.num_examples == clean.num_examples == int(some.sum())
        assert fit.diagnostics["examples_left_out"] == int((~some).sum())
        for name in ("data_fingerprint", "train_accuracy", "parameters_reached"):
            assert fit.diagnostics[name] == clean.diagnostics[name]
        ours = fit.predict({"input": inputs} if isinstance(data, dict) else inputs)
        assert budget or torch.equal(ours.std, theirs.std)
        torch.testing.assert_close(ours.std, theirs.std, rtol=1e-10, atol=0)
    problem = Problem(model, (inputs, targets), module, l2=l2)
    loss = float(module(model(inputs), targets).detach())
    assert problem.mean_loss == pytest.approx(loss, rel=1e-12)
    assert problem.relative_gradient < 1e-6


def test_what_reads_data_again_leaves_out_the_same_examples():
    module = nn.CrossEntropyLoss(ignore_index=9)
    model, inputs, targets, some, l2 = partly_labelled(module)
    data = (inputs, targets), (inputs[some], targets[some])
    fit = deltabars.fit(model, data[0], l2=l2, likelihood=module, rank=6, progress=False)
    certified = [fit.certify(inputs, each, tolerance=0.01).std for each in data]
    assert torch.equal(*certified)
    tuned = [fit.tune_l2(each, "validation").values for each in data]
    torch.testing.assert_close(*tuned, rtol=1e-9, atol=0)


def refused(match, likelihood, targets=None, outputs=CLASSES):
    case = trained("CE")
    model = nn.Linear(4, outputs).double()
    targets = case.targets if targets is None else targets
    with pytest.raises(BadValueError, match=match):
        Problem(model, (case.inputs, targets), likelihood, l2=0.1)


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (nn.NLLLoss(), "got NLLLoss.*Leave the log-softmax out of the model and give nn.CrossEnt"),
        (nn.L1Loss(), "got L1Loss.*For another loss write a subclass of deltabars.likelihoods"),
        (nn.CrossEntropyLoss, r"Make one of it: nn.CrossEntropyLoss\(\)"),
        (functional.cross_entropy, r"Give nn.CrossEntropyLoss\(\)"),
        (3, r"expected one of \['bernoulli', 'categorical', 'gaussian'\], a Likeli.*got 3\.$"),
        (nn.CrossEntropyLoss(reduction="none"), "reduction='mean' or 'sum', got 'none'. Give the"),
        (nn.BCEWithLogitsLoss(weight=torch.ones(3)), "without weight=.*pos_weight= is"),
        (nn.CrossEntropyLoss(torch.ones(4)), "weight: expected one number for each of 3 .*got 4"),
    ],
)
def test_other_losses_are_refused_with_what_to_give(loss, match):
    refused(match, loss)


FLOAT = torch.linspace(-1, 1, COUNT * CLASSES, dtype=torch.float64).view(COUNT, CLASSES)
CATEGORICAL, BERNOULLI, GAUSSIAN = "categorical", "bernoulli", "gaussian"


@pytest.mark.parametrize(
    ("likelihood", "make", "outputs", "match"),
    [
        (CATEGORICAL, lambda y: FLOAT.softmax(1), 3, r"probabilities are not taken.*argmax\(1\)"),
        (CATEGORICAL, lambda y: y.double(), 3, r"\.long\(\).*'bernoulli' .*or 'gaussian'"),
        (CATEGORICAL, lambda y: functional.one_hot(y, 3), 3, r"argmax\(1\); for several labels"),
        (CATEGORICAL, lambda y: y % 2, 1, r"likelihood='bernoulli' and targets of shape \(N, 1\)"),
        (CATEGORICAL, lambda y: y * 0 - 100, 3, "got none: all 23 have no target"),
        (nn.CrossEntropyLoss(ignore_index=7), lambda y: y.where(y > 0, -100), 3, "got -100. Class"),
        (Categorical((0, 0, 1)), lambda y: y * 0, 3, "got weight 0 for every class in the data"),
        (BERNOULLI, lambda y: y, 3, r"\(23, 3\).*got \(23,\). For class numbers use .*categorical"),
        (BERNOULLI, lambda y: FLOAT, 3, "For class numbers use .* For real numbers use 'gaussian'"),
        (Bernoulli((1, 2)), lambda y: FLOAT > 0, 3, "one for each of 3 outputs, got 2"),
        (GAUSSIAN, lambda y: y, 3, r"got \(23,\). For class numbers use likelihood='categorical'"),
        (GAUSSIAN, lambda y: FLOAT.long(), 3, r"\.float\(\). For class .* For 0 or 1 use 'bern"),
        (GAUSSIAN, lambda y: FLOAT / 0, 3, "expected finite values, got NaN"),
    ],
)
def test_targets_that_do_not_fit_are_refused_with_what_to_use(likelihood, make, outputs, match):
    refused(match, likelihood, make(trained("CE").targets), outputs)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Categorical(label_smoothing=1.5), "label_smoothing: expected .*got 1.5"),
        (lambda: Categorical(weight="abc"), "weight: expected .*got 'abc'"),
        (lambda: Bernoulli(pos_weight=-1.0), "pos_weight: expected .*got -1.0"),
        (lambda: Gaussian(noise="loud"), "noise: expected .*'estimate'.*got 'loud'"),
    ],
)
def test_attributes_that_cannot_be(make, match):
    with pytest.raises(BadValueError, match=match):
        make()
