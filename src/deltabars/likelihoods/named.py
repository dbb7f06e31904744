"""Likelihoods by name, and as they are written to files."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from deltabars.errors import BadValueError
from deltabars.likelihoods.base import Likelihood
from deltabars.likelihoods.bernoulli import Bernoulli
from deltabars.likelihoods.categorical import Categorical
from deltabars.likelihoods.gaussian import Gaussian

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
