"""How outputs z become a loss, a mean and their derivatives.

A likelihood knows, for a batch of outputs z (B, C):

* the loss of each example, −log p(target | z) up to a constant, times how much the example counts;
* the gradient of that loss by z;
* the mean map m(z), which `Prediction.mean` reports, and its Jacobian ∂m/∂z;
* the natural parameters η(z), of which the mean is a function as it is of z, m(η) = m(z), and the
  slope that makes the one Jacobian of the other: ∂m/∂z = diag(slope)·∂η/∂z;
* Rᵀ with R Rᵀ = ∂²loss/∂z²: the GGN is the sum of the outer products of the rows Rᵀ·∂z/∂ω.

All three derivatives are rows of cotangents of z, to be pulled back to the parameters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from deltabars.errors import BadValueError, DataError, LossWarning, warn

Divisor = Literal["weights", "elements", "nothing"]

_ROUNDED_UP = 1.001


class Likelihood(ABC):
    """What the network's outputs mean."""

    name: str
    discrete: bool  # whether targets are labels: a prediction of labels has an entropy

    def arranged(self, targets: Tensor, num_outputs: int) -> Tensor:
        """Return targets in the shape of C outputs, where they may have another."""
        return targets

    def counted(self, targets: Tensor) -> Tensor | None:
        """Return which examples have a target, (B,) bool; None where all do."""
        return None

    @abstractmethod
    def check_targets(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise DataError unless `targets` fit `outputs` (B, C)."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of each example, (B,)."""

    def loss_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute ∂loss/∂z, (B, C), by float64: p − y has few digits where p is near y."""
        at = outputs.detach().double().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self.loss(at, targets).sum(), at)
        return gradient.to(outputs.dtype)

    @abstractmethod
    def mean(self, outputs: Tensor, dim: int = -1) -> Tensor:
        """m(z), (B, C), for outputs along a dimension."""

    def mean_jacobian(self, outputs: Tensor) -> Tensor:
        """∂m/∂z, (B, C, C), a row for each component of the mean."""
        return self.slope(outputs).unsqueeze(-1) * self.natural_jacobian(outputs)

    def natural(self, outputs: Tensor) -> Tensor:
        """η(z), (B, C): the outputs themselves, unless they say one thing in several ways."""
        return outputs

    def natural_jacobian(self, outputs: Tensor, classes: Tensor | None = None) -> Tensor:
        """Compute the rows of ∂η/∂z for the classes (B, k), or for all: (B, k, C)."""
        return unit_rows(outputs, classes)

    @abstractmethod
    def slope(self, outputs: Tensor) -> Tensor:
        """Compute the factors of rows of ∂η/∂z that make rows of ∂m/∂z, (B, C)."""

    def entropy(self, mean: Tensor, dim: int = -1) -> Tensor:
        """Compute the entropy (…,) in nats of the labels that a mean (…, C) predicts."""
        raise NotImplementedError(f"the {self.name} likelihood has no labels")

    def are_probabilities(self, outputs: Tensor, targets: Tensor) -> bool:
        """Return whether outputs (B, C) are means already, and no logits."""
        return False

    def moments(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum over targets what `constant_answer` needs to know of them, (k, C)."""
        return outputs.new_zeros(0, outputs.shape[1], dtype=torch.float64)

    def constant_answer(self, moments: Tensor, count: int) -> tuple[float, float]:
        """Return the accuracy and mean loss of the best constant outputs; NaN where not known."""
        return math.nan, math.nan

    @abstractmethod
    def curvature_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Rᵀ, (B, C, C), with R Rᵀ = ∂²loss/∂z² (the targets decide how much an example counts)."""

    def pivots(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return d (B, C) with xᵀS⁺x = Σ x²/d for S = ∂²loss/∂z² and x = ∂loss/∂z; None if unknown.

        Of a likelihood without it the sampling spread has wider intervals.
        """
        return None

    def surprise(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute χ = ℓ'ᵀ(∂²loss/∂z²)⁺ℓ' of each example, (B,), in float64; infinite outside S.

        The gradient g of an example and its Jacobian J have ggᵀ ≤ χ·JᵀSJ.
        """
        outputs = outputs.detach().double()
        pivots, pull = self.pivots(outputs, targets), self.loss_gradient(outputs, targets)
        if pivots is None:
            return outputs.new_full((len(outputs),), torch.inf)
        return _ROUNDED_UP * torch.where(pull == 0, 0.0, pull.square() / pivots).sum(1)

    @abstractmethod
    def label(self, mean: Tensor) -> Tensor | None:
        """Return the predicted label, from the mean."""

    def weights(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return how much each example counts, (B,): 1, unless classes are weighted."""
        return outputs.new_ones(len(outputs))

    def divided(self, mean_weight: float) -> Likelihood:
        """Divide every weight; called where examples have weights, whose mean is to be one."""
        raise NotImplementedError(f"{type(self).__name__} has weights and does not scale them.")

    @property
    def target_noise(self) -> float | None:
        """The standard deviation of real targets around the mean; None for others."""
        return None


def unit_rows(outputs: Tensor, classes: Tensor | None = None) -> Tensor:
    """Return the rows e_c (B, k, C) of the identity for the classes (B, k), or for all."""
    return own_class(outputs, classes).to(outputs.dtype).expand(outputs.shape[0], -1, -1)


def own_class(outputs: Tensor, classes: Tensor | None) -> Tensor:
    """Return whether a column is a row's own class, (B, k, C) for the classes (B, k), or (C, C)."""
    every = torch.arange(outputs.shape[-1], device=outputs.device)
    return (every if classes is None else classes).unsqueeze(-1) == every


def numbers(name: str, given: Any) -> tuple[float, ...]:
    """Return weights as numbers; refuse them unless finite, not negative, and not all zero."""
    if isinstance(given, Tensor):
        given = given.detach().cpu().double().flatten().tolist()
    found = (given,) if isinstance(given, Real) else given
    plain = tuple(found) if isinstance(found, Iterable) else ()
    good = all(isinstance(x, Real) and 0 <= float(x) < math.inf for x in plain)
    if not good or not any(plain):
        raise BadValueError(
            f"{name}: expected finite numbers from 0 on, one of them above it, got {given!r}."
        )
    return tuple(float(x) for x in plain)


CLASSES = "For class numbers use likelihood='categorical'."


def check_same_shape(outputs: Tensor, targets: Tensor) -> None:
    """Refuse targets of another shape than the outputs."""
    if targets.shape != outputs.shape:
        advice = CLASSES if targets.ndim == 1 else "Give one target for each output."
        raise DataError(
            f"Targets: expected the shape {tuple(outputs.shape)} of the outputs, got "
            f"{tuple(targets.shape)}. {advice}"
        )


@dataclass(frozen=True)
class Loss:
    """A loss over all data: `multiple`·Σₙ ℓₙ, divided by V (`"weights"`), by N·C, or by nothing."""

    likelihood: Likelihood  # with its weights as they were given
    divided_by: Divisor = "weights"
    multiple: float = 1.0

    def l2_factor(self, num_examples: int, num_outputs: int, total_weight: float) -> float:
        """λ'/λ, for data of N examples, C outputs and weights that sum to V."""
        elements, weights = float(num_examples * num_outputs), total_weight
        divisor = {"weights": weights, "elements": elements, "nothing": 1.0}[self.divided_by]
        if self.divided_by == "nothing":
            warn(
                "l2: taken as that of the loss summed over all examples, N = "
                f"{num_examples:,}. If it is the weight_decay of a training with sums over "
                "minibatches of b examples, expected l2 = weight_decay·N/b.",
                LossWarning,
            )
        return divisor / (self.multiple * total_weight)


LIKELIHOODS: dict[str, Likelihood] = {}
LOSSES: dict[str, tuple[type[Any], Mapping[str, str]]] = {}
MODULES: dict[type, Callable[[Any], Loss]] = {}


def register(
    likelihood: Likelihood,
    loss: str,
    options: Mapping[str, str],
    module: type,
    read: Callable[[Any], Loss],
) -> None:
    """Add a likelihood, so that files, options and the command line know it.

    `loss` is the short name of its loss, whose `options` are attributes of the likelihood; `read`
    makes a `Loss` of torch's loss module.
    """
    LIKELIHOODS[likelihood.name] = likelihood
    LOSSES[loss] = type(likelihood), options
    MODULES[module] = read


def get_likelihood(name: str | Likelihood) -> Likelihood:
    """Return the likelihood of that name; a Likelihood as it is."""
    if isinstance(name, Likelihood):
        return name
    if not isinstance(name, str) or name not in LIKELIHOODS:
        raise BadValueError(f"likelihood: expected one of {sorted(LIKELIHOODS)}, got {name!r}.")
    return LIKELIHOODS[name]


def is_own(likelihood: Likelihood) -> bool:
    """Return whether it is one of deltabars' own; a file cannot hold a user's."""
    return type(likelihood) is type(LIKELIHOODS.get(likelihood.name))


def described(likelihood: Likelihood) -> str | dict[str, Any]:
    """Return a likelihood in JSON: its name, with attributes that are not the usual ones."""
    if likelihood == LIKELIHOODS[likelihood.name]:
        return likelihood.name
    attributes: Any = likelihood
    return {"name": likelihood.name, **asdict(attributes)}


def told_apart(likelihood: Likelihood) -> Any:
    """Return what identifies a likelihood: of a user's its class and plain attributes."""
    if is_own(likelihood):
        return described(likelihood)
    kind, found = type(likelihood), sorted(getattr(likelihood, "__dict__", {}).items())
    plain = {name: value for name, value in found if isinstance(value, int | float | str)}
    return {"name": f"{kind.__module__}.{kind.__qualname__}", **plain}


def from_description(description: Any) -> Likelihood:
    """Return the likelihood that was described; KeyError, TypeError or BadValueError if none."""
    if not isinstance(description, dict):
        return get_likelihood(description)
    attributes = dict(description)
    return type(get_likelihood(attributes.pop("name")))(**attributes)


def named_loss(name: str, **given: Any) -> Loss:
    """Return the loss of a training by its name, as `deltabars fit --loss` takes it.

    `"ce"`, `"bce"` and `"mse"` are torch's means; a likelihood's name is its loss, summed over the
    outputs (and squares halved). Options are those in `LOSSES`, or None.
    """
    known = {one: pair for short, pair in LOSSES.items() for one in (short, pair[0].name)}
    if name not in known:
        raise BadValueError(f"loss: expected one of {sorted(known)}, got {name!r}.")
    kind, taken = known[name]
    attributes: dict[str, Any] = {"noise": "estimate"} if kind.name == "gaussian" else {}
    for argument, value in given.items():
        if value is None:
            continue
        if argument not in taken:
            right = [short for short, (_, own) in LOSSES.items() if argument in own]
            expected = f"the loss {right[0]} with it" if right else "an option of a loss"
            raise BadValueError(f"{argument}: expected {expected}, got {name}.")
        attributes[taken[argument]] = value
    divisor: Divisor = "elements" if name in ("bce", "mse") else "weights"
    return Loss(kind(**attributes), divisor, 2.0 if name == "mse" else 1.0)


def read_loss(given: Any) -> Loss:
    """Return the loss that a name, a Likelihood or a loss module of torch stands for."""
    if isinstance(given, Loss):
        return given
    if isinstance(given, str | Likelihood):
        return Loss(get_likelihood(given))
    read = MODULES.get(type(given))
    if read is not None:
        return read(given)
    name = getattr(given, "__name__", type(given).__name__)
    advice = _INSTEAD.get(name, "")
    if isinstance(given, type) and given in MODULES:
        advice = f" Make one of it: nn.{name}(), with the arguments of the training."
    elif callable(given) and not advice:
        advice = " For another loss write a subclass of deltabars.likelihoods.Likelihood."
    raise BadValueError(
        f"likelihood: expected one of {sorted(LIKELIHOODS)}, a Likelihood, or a loss module "
        "(nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.MSELoss), got "
        f"{name if callable(given) else repr(given)}.{advice}"
    )


_ENTROPY = " Leave the log-softmax out of the model and give nn.CrossEntropyLoss()."
_BINARY = " Leave the sigmoid out of the model and give nn.BCEWithLogitsLoss()."
_INSTEAD = {
    "cross_entropy": " Give nn.CrossEntropyLoss(), with the arguments of the training.",
    "binary_cross_entropy_with_logits": " Give nn.BCEWithLogitsLoss(), with its arguments.",
    "mse_loss": " Give nn.MSELoss(), with the arguments of the training.",
    "NLLLoss": _ENTROPY,
    "nll_loss": _ENTROPY,
    "BCELoss": _BINARY,
    "binary_cross_entropy": _BINARY,
}


def divisor_of(module: Any, of_mean: Divisor) -> Divisor:
    """Return what a loss module divides by, which is `of_mean` where it is a mean."""
    if module.reduction in ("mean", "sum"):
        return of_mean if module.reduction == "mean" else "nothing"
    raise BadValueError(
        f"likelihood: expected a loss with reduction='mean' or 'sum', got {module.reduction!r}. "
        "Give the one that the training took in the end."
    )
