"""How predictions change with the parameters: F = ∂(prediction)/∂ω, and its projections F·Q."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deltabars.curvature.layers import Factors
from deltabars.curvature.pullback import Pullback
from deltabars.errors import BadValueError, ModelError
from deltabars.likelihoods.base import Likelihood, unit_rows
from deltabars.problem.data import Inputs
from deltabars.runtime.distributed import same_everywhere
from deltabars.runtime.vectors import Basis, ShardedVectors, add_inner, columns, ranges

Classes = Callable[[Tensor], Tensor] | None  # outputs (B, C) -> some classes (B, k); or all
SPACES = ("probability", "logit")

_COLUMNS = 512  # that a product is worth its sums from


@dataclass(frozen=True)
class Sensitivity:
    """What a batch's error bars need of F (B, C, P), in float64.

    F = diag(slope)·L, where no row of L is small only because its class is improbable: the rows of
    L are ∂(log p)/∂ω for probabilities. What is quadratic in F follows from L by the slope.
    """

    value: Tensor  # the prediction itself, in the space that F belongs to, (B, C)
    slope: Tensor  # what the rows of L are multiplied by, (B, C)
    squares: Tensor  # ‖l‖² of each row l of L, (B, C)
    gram: Tensor | None  # L Lᵀ for each input, (B, C, C), where it was asked for
    projections: Mapping[str, Tensor]  # L Qᵀ for each basis Q (K, P), (B, C, K)


def sensitivities(
    pullback: Pullback,
    likelihood: Likelihood,
    inputs: Inputs,
    bases: Mapping[str, Basis],
    space: str = "probability",
    *,
    classes: Classes = None,
    with_gram: bool = False,
) -> tuple[Tensor, Sensitivity]:
    """Return the outputs z (B, C), and F of the mean (or of z itself) reduced to its projections.

    F is never held whole: it is reduced layer by layer. Where a layer has fewer than half as many
    positions as there are classes (a dense layer has one), its activations are multiplied with
    the basis first, for all classes together.

    Args:
        bases: named orthonormal bases, rows (K, P). Of those that are not tensors the columns of
            one layer are asked for at a time, or of a part of it where it is large.
        space: `"probability"` for F = (∂m/∂z)·∂z/∂ω, `"logit"` for F = ∂z/∂ω.
        classes: which k classes (B, k) to compute the rows of, given the outputs; all if None.
        with_gram: whether to compute L Lᵀ whole, and not its diagonal alone.

    Cost: C (or k) backward passes an input, then at most C·P·K operations a basis; memory B·C
    numbers for each parameter of the largest layer and for each activation.
    """
    check_space(space)
    pulled = pullback.pull(inputs, partial(cotangents, likelihood, space, classes))
    outputs = pulled.outputs
    places = pullback.network.parameters.slices
    shared = [basis for basis in bases.values() if isinstance(basis, ShardedVectors)]
    if shared and not same_everywhere(shared[0].space.group, [*pulled.layers, *pulled.loose]):
        raise ModelError(  # they would ask for columns in different orders
            "predict: expected a model that uses its parameters in one way, got different ones for "
            "the inputs of different processes. Save the fit, and load it in each."
        )
    sums = _Sums(outputs.new_zeros(len(outputs), len(pulled.back)).double(), bases, with_gram)
    for name, factors in pulled.layers.items():
        for part, place in _parts_of_layer(factors, places[name], bases):
            sums.add_layer(part, {matrix: columns(q, place) for matrix, q in bases.items()})
    for name, rows in pulled.loose.items():
        first = places[name].start
        for place in _blocks(places[name], bases):
            here = rows[..., place.start - first : place.stop - first]
            sums.add_rows(here, {matrix: columns(q, place) for matrix, q in bases.items()})
    sums.finish()
    mean = space == "probability"
    value = likelihood.mean(outputs) if mean else outputs
    slope = likelihood.slope(outputs.double()) if mean else torch.ones_like(outputs.double())
    if classes is not None:
        chosen = classes(outputs)
        value, slope = value.gather(1, chosen), slope.gather(1, chosen)
    return outputs, Sensitivity(value, slope, sums.squares, sums.gram, sums.projections)


def cotangents(likelihood: Likelihood, space: str, classes: Classes, outputs: Tensor) -> Tensor:
    """Return what the rows of L are pulled back from, (B, C, C), or (B, k, C) for some classes."""
    rows = likelihood.natural_jacobian if space == "probability" else unit_rows
    found = rows(outputs.double(), None if classes is None else classes(outputs))
    return found.to(outputs.dtype)


def _blocks(place: slice, bases: Mapping[str, Basis]) -> Iterator[slice]:
    """Yield a parameter's columns, some at a time where bases are not on the device whole."""
    away = [q for q in bases.values() if not isinstance(q, Tensor)]
    if away:
        width = sum(q.shape[0] * q.dtype.itemsize for q in away)
        yield from ranges(place.start, place.stop, width, away[0].device)
    else:
        yield place


def _parts_of_layer(
    factors: Factors, place: slice, bases: Mapping[str, Basis]
) -> Iterator[tuple[Factors, slice]]:
    """Yield a layer, or some of its outputs at a time, with the columns of its weight."""
    outputs, inputs = factors.signals.shape[2], factors.activations.shape[2]
    together = next(_blocks(place, bases), place)
    step = max(1, (together.stop - together.start) // max(1, inputs))
    for low in range(0, outputs, step):
        high = min(low + step, outputs)
        part = Factors(factors.activations, factors.signals[:, :, low:high])
        yield part, slice(place.start + low * inputs, place.start + high * inputs)


def check_space(space: str) -> None:
    """Refuse a space that does not exist."""
    if space not in SPACES:
        raise BadValueError(f"space: expected 'probability' or 'logit', got {space!r}.")


class _Sums:
    """Sums over the parameters, in float64: their squares are subtracted later on."""

    def __init__(self, squares: Tensor, bases: Mapping[str, Basis], with_gram: bool) -> None:
        size = squares.shape  # (B, R)
        self.squares = squares
        self.gram = self.squares.new_zeros(*size, size[1]) if with_gram else None
        self.projections = {
            name: self.squares.new_zeros(*size, basis.shape[0]) for name, basis in bases.items()
        }
        self._waiting: list[tuple[Tensor, Mapping[str, Tensor]]] = []

    def add_rows(self, rows: Tensor, bases: Mapping[str, Tensor]) -> None:
        """Add rows (B, C, p) and their products with bases (K, p); few columns wait for others."""
        if rows.shape[2] >= _COLUMNS:
            self._add(rows, bases)
            return
        self._waiting.append((rows, bases))
        if sum(rows.shape[2] for rows, _ in self._waiting) >= _COLUMNS:
            self.finish()

    def finish(self) -> None:
        """Add what is waiting."""
        if self._waiting:
            parts, self._waiting = self._waiting, []
            together = {
                name: torch.cat([bases[name] for _, bases in parts], dim=1)
                for name in self.projections
            }
            self._add(torch.cat([rows for rows, _ in parts], dim=2), together)

    def _add(self, rows: Tensor, bases: Mapping[str, Tensor]) -> None:
        self.squares.add_(rows.square().sum(-1))  # torch sums in a tree, which keeps the digits
        if self.gram is not None:
            add_inner(self.gram, rows, rows)
        for name, basis in bases.items():
            add_inner(self.projections[name].flatten(0, 1), rows.flatten(0, 1), basis)

    def add_layer(self, factors: Factors, bases: Mapping[str, Tensor]) -> None:
        """Add the rows by a layer's weight (O·I), in the cheaper order, without what is zero."""
        sizes = (factors.signals.shape[2], factors.activations.shape[2])
        outputs, inputs = factors.not_zero()
        if len(outputs) * len(inputs) < math.prod(sizes):
            factors = factors.at(outputs, inputs)
            places = (outputs[:, None] * sizes[1] + inputs).flatten()
            bases = {name: basis.index_select(1, places) for name, basis in bases.items()}
            sizes = (len(outputs), len(inputs))
        if not factors.is_cheaper_shared:
            self.add_rows(factors.weight_rows(), bases)
            return
        gram = factors.gram()
        self.squares.add_(gram.diagonal(dim1=-2, dim2=-1))
        if self.gram is not None:
            self.gram.add_(gram)
        for name, basis in bases.items():
            factors.add_projection(basis.unflatten(1, sizes), self.projections[name])
