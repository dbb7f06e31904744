"""λ, one for all parameters or one for each, and the coordinates in which it is one number.

With λᵢ for parameter i and D = diag(λᵢ) the cost is mean loss + ½ ωᵀDω, and its curvature A + D.
In the coordinates ω' = S⁻¹ω, S = D^{-½}, that becomes S A S + I: the same form as with a single λ,
which is 1 there. Derivatives by ω' are those by ω times S, and everything else stays as it is.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from deltabars.errors import BadValueError, is_option
from deltabars.problem.parameters import ParameterSpace

L2Rates = float | Mapping[str, float]

_SAME = 1e-9  # relative: levels of parameters that are meant to be one


@dataclass(frozen=True)
class Prior:
    """The λ of a set of parameters.

    Attributes:
        given: what the user gave: a number, or numbers by name pattern.
        level: λ in the coordinates ω' = ω/scale.
        scales: by parameter, in which ω' is measured; empty where ω' is ω.
    """

    given: L2Rates
    level: float
    scales: Mapping[str, float]

    @classmethod
    def read(
        cls, l2: Any, space: ParameterSpace, scales: Mapping[str, float] | None = None
    ) -> Prior:
        """Check what was given, for the parameters of `space`.

        Args:
            l2: λ > 0, or a mapping from name patterns to such numbers. Where several patterns match
                a parameter the last one counts, so that `{"*": 0.01, "*.bias": 1e-4}` does what it
                says.
            scales: coordinates that are chosen already; λ must be one number in them.

        Raises:
            BadValueError: a number that is not finite and above zero, a parameter without a λ, a
                pattern without a parameter, or another ratio of λs than the scales have.
        """
        if not isinstance(l2, Mapping):
            number = check_number(l2)
            if scales:
                raise BadValueError(
                    f"l2: expected a mapping from name patterns to numbers, like that of the fit, "
                    f"got {number:g}. The λs of such a fit can change by a common factor alone; "
                    "fit again for others."
                )
            return cls(number, number, {})
        own = _by_parameter(l2, space)
        given = {pattern: float(value) for pattern, value in l2.items()}
        if scales is None:
            return cls(given, 1.0, {name: value**-0.5 for name, value in own.items()})
        levels = [value * scales.get(name, 1.0) ** 2 for name, value in own.items()]
        if max(levels) > min(levels) * (1 + _SAME):
            raise BadValueError(
                "l2: expected the λs of the fit times a common factor, got factors from "
                f"{min(levels):g} to {max(levels):g}. Fit again for other ratios."
            )
        return cls(given, levels[0], scales)

    def times(self, factor: float) -> Prior:
        """All λs times a number."""
        if factor == 1:
            return self
        return Prior(scaled(self.given, factor), factor * self.level, self.scales)


def scaled(l2: L2Rates, factor: float) -> L2Rates:
    """λ, or several, times a number."""
    if isinstance(l2, Mapping):
        return {pattern: factor * value for pattern, value in l2.items()}
    return factor * l2


def check_number(l2: Any) -> float:
    """λ as a float, refused unless it is finite and above zero."""
    if isinstance(l2, bool) or not isinstance(l2, Real) or not math.isfinite(l2) or l2 <= 0:
        number, several = (
            ("number", "PATTERN=NUMBER …")
            if is_option("l2")
            else ("Python number", "a mapping from name patterns to such numbers")
        )
        raise BadValueError(
            f"l2: expected a finite {number} above zero (the weight decay of the training cost), "
            f"or {several}, got {l2!r}."
        )
    return float(l2)


def _by_parameter(l2: Mapping[Any, Any], space: ParameterSpace) -> dict[str, float]:
    own: dict[str, float] = {}
    for pattern, value in l2.items():
        if isinstance(value, Real) and value == 0:
            raise BadValueError(
                f"l2: expected numbers above zero, got 0 for {pattern!r}. For parameters that were "
                "trained without decay give a small one, such as 1e-4 of the others': what the "
                "data say of them is then among the first eigenpairs."
            )
        number = check_number(value)
        matched = (
            [name for name in space.names if fnmatch.fnmatchcase(name, pattern)]
            if isinstance(pattern, str)
            else []
        )
        if not matched:
            raise BadValueError(
                f"l2: expected patterns that match a parameter, got {pattern!r}, which matches "
                f"none of {', '.join(space.names[:6])}{', …' if len(space.names) > 6 else ''}."
            )
        own.update(dict.fromkeys(matched, number))
    left = [name for name in space.names if name not in own]
    if left:
        raise BadValueError(
            f"l2: expected a λ for every parameter, got none for {', '.join(left[:6])}"
            f"{', …' if len(left) > 6 else ''}. Start with a pattern for all: {{'*': 0.01, …}}."
        )
    return {name: own[name] for name in space.names}
