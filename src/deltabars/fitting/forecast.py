"""The cost of eigenpairs, forecast from the times of the first chunks and products of a fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from deltabars.curvature.base import CurvatureOperator, RowOperator
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.hessian import HessianOperator
from deltabars.errors import option
from deltabars.problem.parameters import LastLayer

_WORTH_REPORTING = 60.0  # seconds
_ENOUGH = 0.5  # seconds that are measured; less is mostly chance
_MOST_STEPS = 8  # that are looked at
_A_PAIR = 2.2  # products, about what trained networks take
_FIRST = 40  # and so many of Lanczos before the first pair
_SOME_PAIRS = 100  # where nobody knows how many there will be


class Forecast:
    """Forecast the cost of one matrix's eigenpairs; report it where it is more than a minute.

    Args:
        name: of the matrix.
        operator: the matrix.
        report: called once with one line.
    """

    def __init__(
        self, name: str, operator: CurvatureOperator, report: Callable[[str], None]
    ) -> None:
        self._name, self._operator, self._report = name, operator, report
        self._problem = operator.problem
        self._has_reported = self._is_done = False
        self._found: dict[str, Any] = {}

    def begin(self, kind: str, pairs: int, block: int, is_open: bool, most: int) -> None:
        """Start measuring.

        Args:
            kind: of the solver.
            pairs: how many are wanted, at most.
            block: vectors a product.
            is_open: whether the number of pairs is chosen on the way.
            most: vectors that a Krylov basis may have.
        """
        self._kind, self._block, self._most = kind, block, most
        self._pairs = min(pairs, _SOME_PAIRS) if is_open else pairs
        self._is_open = is_open and pairs > _SOME_PAIRS
        self._started = time.monotonic()
        self._chunks: list[tuple[float, int]] = []  # when one was asked for, and its examples
        self._steps: list[tuple[float, int]] = []
        self._pass = 0.0  # seconds
        self._is_done = False
        self._problem.on_chunk = self._chunk

    def end(self) -> dict[str, Any]:
        """Stop measuring; return the last forecast."""
        self._is_done, self._problem.on_chunk = True, None
        return self._found

    def left(self) -> float | None:
        """Return the seconds that remain by the last forecast; None where it is too rough."""
        passed = time.monotonic() - self._started
        left = float(self._found.get("seconds", 0.0)) - passed
        return left if left > 0 and not self._is_open else None

    def _chunk(self, size: int) -> None:
        """Note that a chunk of the first pass is about to be processed."""
        if self._is_done or self._steps or self._pass:
            self._problem.on_chunk = None
            return
        if self._problem.device.type == "cuda":
            torch.cuda.synchronize(self._problem.device)
        now = time.monotonic()
        self._chunks.append((now, size))
        if len(self._chunks) < 3 or now - self._chunks[1][0] < _ENOUGH:
            return  # the first one is slower: it sets up what the others use
        done = sum(count for _, count in self._chunks[1:-1])
        each = (now - self._chunks[1][0]) / done
        self._pass = each * self._problem.data.num_here
        self._foresee(self._pass * self._passes, self._pass)

    def step(self, done: int) -> None:
        """Note that a step of the solver is over: so many products (rows, if incremental)."""
        if self._is_done or len(self._steps) > _MOST_STEPS:
            return
        now = time.monotonic()
        self._steps.append((now, done))
        (first, before), total = self._steps[0], self._products
        if len(self._steps) == 1:
            return  # it sets up what the others use
        each = (now - first) / max(1, done - before)
        grown = 1.0
        if self._kind == "krylov":  # to stay orthogonal costs more with every vector
            operator, rows = self._operator, 2 * self._problem.num_examples
            if isinstance(operator, RowOperator):
                rows = operator.num_rows
            grown = (rows + min(total, self._most)) / (rows + 2 * done)
        seconds = first - self._started + each * max(0, total - before) * max(1.0, grown)
        self._foresee(seconds, each * self._block, clear=now - first > _ENOUGH)

    def _foresee(self, seconds: float, each: float, clear: bool = True) -> None:
        products = -(-self._products // self._block) if self._kind != "incremental" else 1
        self._found = {
            "products": products,
            "seconds_each": each,
            "seconds": seconds,
            "bytes": self._bytes,
            "pairs": self._pairs,
        }
        if clear and seconds > _WORTH_REPORTING and not self._has_reported:
            self._has_reported = True
            every = f"every {self._pairs} pairs" if self._is_open else f"{self._pairs} pairs"
            self._report(
                f"Eigenpairs of the {self._name}: expected {_in_words(seconds)} for {every} (about "
                f"{products:,} products of {each:.2g} s), and {self._bytes / 1e9:.2g} GB. Less: "
                f"{'; '.join(self._cheaper())}."
            )

    def _cheaper(self) -> list[str]:
        """List cheaper ways."""
        found, problem = [], self._problem
        outputs = problem.num_outputs
        if isinstance(self._operator, GGNOperator) and outputs > 1:
            found.append(
                f"{option('estimator', 'opg')}, with one row an example in place of {outputs}"
            )
        if isinstance(self._operator, HessianOperator):
            found.append(f"{option('estimator', 'opg')}, with one gradient an example in all")
        model, chosen = problem.network.model, problem.parameters
        last = LastLayer().names(model)
        if not set(chosen.names) <= set(last):
            sizes = dict(zip(chosen.names, chosen.sizes, strict=True))
            count = sum(sizes.get(name, 0) for name in last)
            found.append(
                f"{option('params', LastLayer())}, with {count:,} in place of {chosen.size:,} "
                "parameters"
            )
        aim = f"a larger {option('tolerance')}" if self._is_open else f"a smaller {option('rank')}"
        return [*found, f"{aim}, a part of the data, or {option('max_seconds')}"]

    @property
    def _keeps_rows(self) -> bool:
        return isinstance(self._operator, RowOperator) and self._operator.keeps_rows

    @property
    def _products(self) -> int:
        """The products with vectors in all; the rows of an incremental pass."""
        operator, size = self._operator, self._operator.shape[0]
        if self._kind == "incremental" and isinstance(operator, RowOperator):
            return operator.num_rows
        if self._kind == "dense":
            return size
        count = int(_A_PAIR * self._pairs) + (4 * self._block if self._block > 1 else _FIRST)
        if isinstance(operator, RowOperator):  # beyond its rows there is nothing to be found
            size = min(size, operator.num_rows + 2 * self._block)
        return max(self._pairs, min(count, size))

    @property
    def _passes(self) -> int:
        """The passes over the data."""
        if self._keeps_rows or self._kind == "incremental":
            return 1
        return -(-self._products // self._block) + 1  # for the trace, or the audit

    @property
    def _bytes(self) -> int:
        operator, spaces = self._operator, self._problem.spaces
        kept = operator.kept_bytes if isinstance(operator, HessianOperator) else 0
        if isinstance(operator, RowOperator) and operator.keeps_rows:
            kept = operator.num_rows * spaces.reached.width * operator.dtype.itemsize
        size = operator.shape[0]
        rows = size if self._kind == "dense" else min(self._products, self._most)
        if self._kind == "incremental":
            rows = 2 * self._pairs
        return kept + rows * spaces.whole.width * operator.dtype.itemsize


def _in_words(seconds: float) -> str:
    """Round a time to a few words."""
    for size, name in ((3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"about {seconds / size:.0f} {name}"
    return f"about {seconds:.0f} seconds"
