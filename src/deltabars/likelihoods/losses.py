"""Likelihoods by name, and as they are written to files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn

from deltabars.errors import BadValueError, LossWarning
from deltabars.likelihoods.base import Likelihood
from deltabars.likelihoods.bernoulli import Bernoulli
from deltabars.likelihoods.categorical import Categorical
from deltabars.likelihoods.gaussian import ESTIMATE, Gaussian

LIKELIHOODS: dict[str, Likelihood] = {
    likelihood.name: likelihood for likelihood in (Categorical(), Bernoulli(), Gaussian())
}


def get_likelihood(name: str | Likelihood) -> Likelihood:
    """The likelihood of that name; a Likelihood is returned as it is."""
    if isinstance(name, Likelihood):
        return name
    if not isinstance(name, str) or name not in LIKELIHOODS:
        raise BadValueError(f"likelihood: expected one of {sorted(LIKELIHOODS)}, got {name!r}.")
    return LIKELIHOODS[name]


def is_own(likelihood: Likelihood) -> bool:
    """Whether it is one of deltabars' own, and not a user's, which a file cannot hold."""
    return type(likelihood) is type(LIKELIHOODS.get(likelihood.name))


def described(likelihood: Likelihood) -> str | dict[str, Any]:
    """A likelihood in JSON: its name, with its attributes where they are not the usual ones.

    The name alone is what versions before weights and noise wrote and read; they refuse the rest.
    """
    if likelihood == LIKELIHOODS[likelihood.name]:
        return likelihood.name
    assert isinstance(likelihood, Categorical | Bernoulli | Gaussian)
    return {"name": likelihood.name, **asdict(likelihood)}


def told_apart(likelihood: Likelihood) -> Any:
    """What tells a likelihood from others: of the user's own its class and plain attributes."""
    if is_own(likelihood):
        return described(likelihood)
    kind = type(likelihood)
    plain = {
        name: value
        for name, value in sorted(getattr(likelihood, "__dict__", {}).items())
        if isinstance(value, bool | int | float | str)
    }
    return {"name": f"{kind.__module__}.{kind.__qualname__}", **plain}


def from_description(description: Any) -> Likelihood:
    """The likelihood that was described.

    Raises:
        KeyError, TypeError, BadValueError: it was not described by `described`.
    """
    if not isinstance(description, dict):
        return get_likelihood(description)
    attributes = dict(description)
    return type(get_likelihood(attributes.pop("name")))(**attributes)


Divisor = Literal["weights", "elements", "nothing"]

# By the short name of a loss: its likelihood, and what attributes of that the loss may be given.
LOSSES: Mapping[str, tuple[type[Any], Mapping[str, str]]] = {
    "ce": (Categorical, {"label_smoothing": "label_smoothing", "class_weights": "weight"}),
    "bce": (Bernoulli, {"pos_weight": "pos_weight"}),
    "mse": (Gaussian, {"noise": "noise"}),
}


@dataclass(frozen=True)
class Loss:
    """A loss over all data: `multiple`·Σₙ ℓₙ, divided by V (`"weights"`), by N·C, or by nothing.

    Attributes:
        likelihood: with its weights as they were given.
    """

    likelihood: Likelihood
    divided_by: Divisor = "weights"
    multiple: float = 1.0

    def l2_factor(self, num_examples: int, num_outputs: int, total_weight: float) -> float:
        """λ'/λ, for data of N examples, C outputs and weights that sum to V."""
        divisor = {
            "weights": total_weight,
            "elements": float(num_examples * num_outputs),
            "nothing": 1.0,
        }[self.divided_by]
        if self.divided_by == "nothing":
            warnings.warn(
                "l2: taken as that of the loss summed over all examples, N = "
                f"{num_examples:,}. If it is the weight_decay of a training with sums over "
                "minibatches of b examples, expected l2 = weight_decay·N/b.",
                LossWarning,
                stacklevel=4,
            )
        return divisor / (self.multiple * total_weight)


def named_loss(
    name: str,
    *,
    label_smoothing: float | None = None,
    class_weights: Sequence[float] | None = None,
    pos_weight: float | Sequence[float] | None = None,
    noise: float | str | None = None,
) -> Loss:
    """The loss of a training by its name, as `deltabars fit --loss` takes it.

    Args:
        name: `"ce"`, `"bce"` or `"mse"`: torch's `nn.CrossEntropyLoss`, `nn.BCEWithLogitsLoss` or
            `nn.MSELoss`, means; or `"categorical"`, `"bernoulli"` or `"gaussian"`, whose losses are
            summed over the outputs (and squares halved).
        label_smoothing, class_weights: of cross entropy.
        pos_weight: of binary cross entropy.
        noise: of a regression: σ, or `"estimate"` (the default).

    Raises:
        BadValueError: another name, or an argument of another loss.
    """
    given = {
        "label_smoothing": label_smoothing,
        "class_weights": class_weights,
        "pos_weight": pos_weight,
        "noise": noise,
    }
    known = {one: pair for short, pair in LOSSES.items() for one in (short, pair[0].name)}
    if name not in known:
        raise BadValueError(f"loss: expected one of {sorted(known)}, got {name!r}.")
    kind, taken = known[name]
    attributes: dict[str, Any] = {"noise": ESTIMATE} if kind is Gaussian else {}
    for argument, value in given.items():
        if value is None:
            continue
        if argument not in taken:
            right = [short for short, (_, own) in LOSSES.items() if argument in own]
            raise BadValueError(f"{argument}: expected the loss {right[0]} with it, got {name}.")
        attributes[taken[argument]] = value
    divisor: Divisor = "elements" if name in ("bce", "mse") else "weights"
    return Loss(kind(**attributes), divisor, 2.0 if name == "mse" else 1.0)


def read_loss(given: Any) -> Loss:
    """The loss that a name, a Likelihood or a loss module of torch stands for.

    Raises:
        BadValueError: it is none of them, with what to give instead.
    """
    if isinstance(given, Loss):
        return given
    if isinstance(given, str | Likelihood):
        return Loss(get_likelihood(given))
    read = _MODULES.get(type(given))
    if read is not None:
        return read(given)
    name = getattr(given, "__name__", type(given).__name__)
    raise BadValueError(
        f"likelihood: expected one of {sorted(LIKELIHOODS)}, a Likelihood, or a loss module "
        "(nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.MSELoss), got "
        f"{name if callable(given) else repr(given)}.{_advice(given, name)}"
    )


def _cross_entropy(module: nn.CrossEntropyLoss) -> Loss:
    likelihood = Categorical(module.weight, module.label_smoothing, module.ignore_index)  # type: ignore[arg-type]
    return Loss(likelihood, _divisor(module, "weights"))


def _binary_cross_entropy(module: nn.BCEWithLogitsLoss) -> Loss:
    if module.weight is not None:
        raise BadValueError(
            "likelihood: expected nn.BCEWithLogitsLoss without weight=, got one with it. Weights "
            "of outputs or of single examples are not supported; pos_weight= is."
        )
    return Loss(Bernoulli(module.pos_weight), _divisor(module, "elements"))  # type: ignore[arg-type]


def _squared_error(module: nn.MSELoss) -> Loss:
    return Loss(Gaussian(noise=None), _divisor(module, "elements"), multiple=2.0)


_MODULES: dict[type, Callable[[Any], Loss]] = {
    nn.CrossEntropyLoss: _cross_entropy,
    nn.BCEWithLogitsLoss: _binary_cross_entropy,
    nn.MSELoss: _squared_error,
}


def _divisor(module: Any, of_mean: Divisor) -> Divisor:
    if module.reduction == "mean":
        return of_mean
    if module.reduction == "sum":
        return "nothing"
    raise BadValueError(
        f"likelihood: expected a loss with reduction='mean' or 'sum', got {module.reduction!r}. "
        "Give the one that the training took in the end."
    )


def _advice(given: Any, name: str) -> str:
    """What to give instead of something that is not understood."""
    if isinstance(given, type) and given in _MODULES:
        return f" Make one of it: nn.{name}(), with the arguments of the training."
    same = {
        "cross_entropy": "nn.CrossEntropyLoss",
        "binary_cross_entropy_with_logits": "nn.BCEWithLogitsLoss",
        "mse_loss": "nn.MSELoss",
    }
    if name in same:
        return f" Give {same[name]}(), with the arguments of the training."
    if name in ("NLLLoss", "nll_loss"):
        return (
            " Leave the log-softmax out of the model and give nn.CrossEntropyLoss(); or leave it "
            "in: of log-probabilities that is the same loss."
        )
    if name in ("BCELoss", "binary_cross_entropy"):
        return " Leave the sigmoid out of the model and give nn.BCEWithLogitsLoss()."
    if callable(given):
        return " For another loss write a subclass of deltabars.likelihoods.Likelihood."
    return ""
