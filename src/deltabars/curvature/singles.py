"""Rows of derivatives of one example after the other, in the quickest way that a model bears."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from deltabars.errors import ModelWarning, first_line, option
from deltabars.problem.data import Inputs, map_leaves
from deltabars.problem.network import Network
from deltabars.runtime.memory import ran_out
from deltabars.runtime.precision import without_noise

Rows = dict[str, Tensor]  # (B, R, ·) by name of a parameter
Way = Callable[[Inputs, Tensor, tuple[str, ...]], Rows]
Check = Callable[[Rows], bool]

# What torch raises where it cannot go through a model; other errors are the model's own.
UNSUPPORTED = (RuntimeError, IndexError, TypeError)

_AGREE = 1e-3  # relative: a wrong way is off by as much as the derivatives themselves
ROUNDING = 100  # units in the last place of all derivatives together


class Singles:
    """The rows v·∂z/∂ω (B, R, ·) of cotangents v (B, R, C) by some parameters, example by example.

    Three ways, of which the first is taken that works and gives rows that pass a check: all
    examples and all rows at once, by two `vmap`s; all examples at once and row after row; plain
    autograd, which needs no check. torch has operations that support one `vmap` and not two, some
    of them without an error (the derivative of a PReLU is wrong where there are as many rows as
    examples), and operations of one's own may be wrong under any.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._ways: list[Way] = [self._together, self._row_by_row, self._by_autograd]
        self._said = False

    def rows(
        self,
        inputs: Inputs,
        cotangents: Tensor,
        names: tuple[str, ...],
        agrees: Check | None = None,
    ) -> Rows:
        """The rows by the named parameters; `agrees` checks them.

        Cost: a forward pass and R backward passes an example; by plain autograd in as many calls.
        """
        while True:
            rows = self._try(inputs, cotangents, names)
            if rows is None:
                continue
            if agrees is None or len(self._ways) == 1 or agrees(rows):
                return rows
            self._give_up(names, "its derivatives under vmap are not those of autograd")

    def _try(self, inputs: Inputs, cotangents: Tensor, names: tuple[str, ...]) -> Rows | None:
        """The rows in the present way; None where it failed and there is another one."""
        if len(self._ways) == 1:
            return self._by_autograd(inputs, cotangents, names)
        try:
            with without_noise():  # one by one inside torch is still faster than here
                return self._ways[0](inputs, cotangents, names)
        except UNSUPPORTED as error:
            if ran_out(error):
                raise
            reason = first_line(error)
        self._give_up(names, reason)
        return None

    def _give_up(self, names: tuple[str, ...], reason: str) -> None:
        del self._ways[0]
        if len(self._ways) == 1:
            self.warn(names, f"one that it cannot ({reason})")

    def warn(self, names: Sequence[str], what: str) -> None:
        """Say once that parameters are slower than they might be."""
        if self._said:
            return
        self._said = True
        count = len(self._network.trained)
        warnings.warn(
            "Model: expected operations that torch can differentiate for many examples at once, "
            f"got {what}. Going on example by example for {len(names)} of {count} parameters "
            f"({names[0]}{', …' if len(names) > 1 else ''}), which is slower; leave them out with "
            f"{option('params=')} if it takes too long.",
            ModelWarning,
            stacklevel=3,
        )

    def _together(self, inputs: Inputs, cotangents: Tensor, names: tuple[str, ...]) -> Rows:
        def rows(pull: Callable[[Tensor], tuple[Rows]], back: Tensor) -> Rows:
            if len(back) == 1:  # one vmap less
                return {name: part[None] for name, part in pull(back[0])[0].items()}
            derivatives: Rows = torch.func.vmap(pull)(back)[0]
            return derivatives

        return self._over_examples(rows, inputs, cotangents, names)

    def _row_by_row(self, inputs: Inputs, cotangents: Tensor, names: tuple[str, ...]) -> Rows:
        def rows(pull: Callable[[Tensor], tuple[Rows]], back: Tensor) -> Rows:
            parts = [pull(row)[0] for row in back.unbind()]
            return {name: torch.stack([part[name] for part in parts]) for name in names}

        return self._over_examples(rows, inputs, cotangents, names)

    def _over_examples(
        self,
        rows: Callable[[Callable[[Tensor], tuple[Rows]], Tensor], Rows],
        inputs: Inputs,
        cotangents: Tensor,
        names: tuple[str, ...],
    ) -> Rows:
        trained = dict(self._network.trained)
        chosen = {name: trained[name] for name in names}

        def one(example: Inputs, back: Tensor) -> Rows:
            def output(at: Rows) -> Tensor:
                return self._network.one_output({**trained, **at}, example)

            return rows(torch.func.vjp(output, chosen)[1], back)

        parts = torch.func.vmap(one)(inputs, cotangents)
        return {name: part.reshape(*part.shape[:2], -1) for name, part in parts.items()}

    def _by_autograd(self, inputs: Inputs, cotangents: Tensor, names: tuple[str, ...]) -> Rows:
        trained = {
            name: value.detach().requires_grad_(name in names)
            for name, value in self._network.trained.items()
        }
        chosen = [trained[name] for name in names]
        examples, count, _ = cotangents.shape
        rows = {
            name: value.new_zeros(examples, count, value.numel())
            for name, value in zip(names, chosen, strict=True)
        }
        for n in range(examples):
            example = map_leaves(lambda leaf, n=n: leaf[n : n + 1], inputs)  # type: ignore[misc]
            with torch.enable_grad():
                output = self._network.outputs(trained, example)
            if not output.requires_grad:
                continue
            for r in range(count):
                parts = torch.autograd.grad(
                    output,
                    chosen,
                    cotangents[n, r : r + 1],
                    retain_graph=r + 1 < count,
                    materialize_grads=True,
                )
                for name, part in zip(names, parts, strict=True):
                    rows[name][n, r] = part.flatten()
        return rows


def agree(found: Tensor, exact: Tensor, whole: float) -> bool:
    """Whether derivatives by one parameter are the exact ones; by all of them they are `whole`.

    Some are zero but for rounding, such as those by the bias of attention's keys.
    """
    gap = float((found - exact).norm())
    rounding = ROUNDING * torch.finfo(exact.dtype).eps * whole
    return gap <= max(_AGREE * float(exact.norm()), rounding) or not bool(exact.isfinite().all())


def total_norm(parts: Iterable[Tensor]) -> float:
    """The norm of all parts together."""
    return math.hypot(*(float(part.norm()) for part in parts))
