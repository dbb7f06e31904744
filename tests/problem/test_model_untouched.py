"""A fit and its predictions leave the user's model, and torch's global state, as they were."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import deltabars
from deltabars.errors import DataError, DeltaBarsError
from tests.networks import make_case

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_load_state_dict_pre_hooks",
)  # fmt: skip
CONTEXTS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
}
# The same operations on the same numbers; bfloat16, where autocast gets in, errs by 4e-3.
EXACTNESS = {torch.float64: 1e-12, torch.float32: 1e-5}


def model_state(model: nn.Module) -> dict:
    """All that a user can see of a model, in a form that `==` compares bit for bit."""
    return {
        "parameters": {name: _bits(value) for name, value in model.named_parameters()},
        "buffers": {name: _bits(value) for name, value in model.named_buffers()},
        "gradients": {
            name: value.grad if value.grad is None else _bits(value.grad)
            for name, value in model.named_parameters()
        },
        "requires_grad": {name: value.requires_grad for name, value in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: [list(getattr(module, kind).items()) for kind in HOOKS]
            for name, module in model.named_modules()
        },
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
    }


def torch_state() -> dict:
    """Torch's global switches and its random numbers."""
    return {
        "random numbers": torch.get_rng_state().numpy().tobytes(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


def _bits(tensor):
    return id(tensor), tensor.dtype, tuple(tensor.shape), tensor.detach().numpy().tobytes()


@pytest.fixture(scope="module")
def trained():
    return make_case("batch_norm", count=13)


@pytest.fixture
def case(trained):
    """The trained case with a model of its own, to set modes, hooks and gradients on."""
    own = copy.copy(trained)
    own.model = copy.deepcopy(trained.model)
    return own


def set_modes(model, modes):
    model.train(modes != "eval")
    if modes == "mixed":  # as in fine-tuning with frozen statistics
        model[1].eval()
        model[5].eval()


def fit(case, precision=torch.float64, **options):
    settings = {"l2": case.l2, "rank": 5, "estimator": "sandwich", "progress": False, **options}
    data = (case.inputs.to(precision), case.targets)
    return deltabars.fit(case.model.to(precision), data, **settings)


def assert_equal(found, expected):
    limit = EXACTNESS[expected.std.dtype]
    for name in ("mean", "std", "std_error", "score"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=limit, atol=limit
        )


@pytest.mark.parametrize("modes", ["train", "eval", "mixed"])
@pytest.mark.parametrize(
    "options",
    [
        {"estimator": "sandwich"},
        {"estimator": "hessian", "solver": "krylov", "params": "5.*"},
        {"estimator": "opg", "memory_budget": 5000},
        {"estimator": "opg", "dtype": torch.float32},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_everything_is_as_it_was(case, modes, options):
    model = case.model
    set_modes(model, modes)
    nn.functional.cross_entropy(model(case.inputs), case.targets).backward()
    model[5].bias.grad = None
    model[0].register_forward_hook(lambda module, args, output: None)
    model[5].register_forward_pre_hook(lambda module, args: None)
    before, switches = model_state(model), torch_state()
    done = fit(case, **options)
    done.predict(case.unseen, covariance=True)
    done.sample(2)
    assert model_state(model) == before
    assert torch_state() == switches


BAD = {
    "rank": lambda case: fit(case, rank=10**6),
    "target": lambda case: deltabars.fit(case.model, (case.inputs, case.targets + 7), l2=1.0),
    "prediction": lambda case: fit(case).predict(case.unseen * torch.nan),
}


@pytest.mark.parametrize("modes", ["train", "eval", "mixed"])
@pytest.mark.parametrize("attempt", BAD.values(), ids=BAD)
def test_everything_is_as_it_was_after_an_error(case, modes, attempt):
    set_modes(case.model, modes)
    before, switches = model_state(case.model), torch_state()
    with pytest.raises(DeltaBarsError):
        attempt(case)
    assert model_state(case.model) == before
    assert torch_state() == switches


@pytest.mark.parametrize("calls", [1, 3, 5, 7])
def test_everything_is_as_it_was_after_an_error_of_the_model_itself(case, calls):
    left = iter(range(calls - 1))

    def fail_at_last(module, args, output):
        if next(left, None) is None:
            raise KeyError("the model's own error")

    set_modes(case.model, "mixed")
    case.model[0].register_forward_hook(fail_at_last)
    before, switches = model_state(case.model), torch_state()
    with pytest.raises(KeyError, match="the model's own error"):
        fit(case).predict(case.unseen)
    assert next(left, None) is None
    assert model_state(case.model) == before
    assert torch_state() == switches


def test_forward_hooks_take_part_and_stay_registered_once(case):
    calls = []
    case.model[5].register_forward_hook(lambda module, args, output: output + 1.0)
    case.model[5].register_forward_hook(lambda module, args, output: calls.append(1))
    found = fit(case).predict(case.unseen, space="logit")
    calls.clear()
    outputs = case.model.eval()(case.unseen)
    assert len(calls) == 1
    torch.testing.assert_close(found.mean, outputs.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", ["opg", "hessian", "sandwich", "ggn"])
@pytest.mark.parametrize("modes", ["train", "mixed"])
def test_predictions_do_not_depend_on_the_mode(case, modes, estimator):
    expected = fit(case, estimator=estimator).predict(case.unseen)
    set_modes(case.model, modes)
    assert_equal(fit(case, estimator=estimator).predict(case.unseen), expected)


@pytest.mark.parametrize("precision", EXACTNESS, ids=str)
@pytest.mark.parametrize("solver", ["dense", "krylov"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_fit_within_a_context_is_the_same(case, context, solver, precision):
    unseen = case.unseen.to(precision)
    expected = fit(case, precision, solver=solver).predict(unseen)
    outside = fit(case, precision, solver=solver)  # has nothing cached yet
    with CONTEXTS[context]():
        found = fit(case, precision, solver=solver)
        assert_equal(found.predict(unseen), expected)
        assert_equal(outside.predict(unseen), expected)
    assert_equal(found.predict(unseen), expected)
    assert_equal(outside.predict(unseen), expected)


def test_tensors_of_inference_mode_serve_outside_of_it(case):
    expected = fit(case).predict(case.unseen)
    with torch.inference_mode():
        case.inputs, case.targets = case.inputs.clone(), case.targets.clone()
        unseen = case.unseen.clone()
    assert_equal(fit(case).predict(unseen), expected)


def test_buffers_may_be_infinite(case):
    expected = fit(case).predict(case.unseen)
    case.model.register_buffer("mask", torch.full((3,), -torch.inf))  # as attention masks are
    assert_equal(fit(case).predict(case.unseen), expected)


def test_results_carry_no_gradients(case):
    case.inputs = case.inputs.clone().requires_grad_()
    done = fit(case)
    found = done.predict(case.unseen.clone().requires_grad_(), covariance=True)
    tensors = [found.mean, found.std, found.score, found.covariance, done.sample(1)]
    assert not any(tensor.requires_grad for tensor in tensors)
    assert case.inputs.grad is None


def test_changing_the_data_or_the_weights_later_does_not_change_a_fit(case):
    case.inputs, case.targets = case.inputs.clone(), case.targets.clone()
    done = fit(case)
    expected, draws = done.predict(case.unseen), done.sample(2)
    case.inputs.zero_()
    case.targets.zero_()
    with torch.no_grad():
        for value in case.model.train().parameters():
            value.add_(0.3)
    assert_equal(done.predict(case.unseen), expected)
    assert torch.equal(done.sample(2), draws)
    with pytest.raises(DataError, match="expected finite values"):
        done.predict(case.unseen / 0.0)
