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

WORTH_REPORTING = 60.0  # seconds
ENOUGH = 0.5  # seconds that are measured; less is mostly chance
_MOST_STEPS = 8  # that are measured
_PRODUCTS_A_PAIR = 2.2  # about what trained networks take
_FIRST = 40  # further products of Lanczos, before the first pair; of blocks, four
_SOME_PAIRS = 100  # where their number is not known


class Forecast:
    """Forecast the cost of one matrix's eigenpairs; report it where it is more than a minute.

    Args:
        name: of the matrix.
        operator: the matrix.
        report: called once with one line.
        kind: of the solver.
        pairs: how many are wanted, at most.
        block: vectors a product.
        is_open: whether the number of pairs is chosen on the way.
        most: vectors that are held at once.
    """

    def __init__(
        self,
        name: str,
        operator: CurvatureOperator,
        report: Callable[[str], None],
        *,
        kind: str,
        pairs: int,
        block: int,
        is_open: bool,
        most: int,
    ) -> None:
        self._name, self._operator, self._report = name, operator, report
        self._pairs = min(pairs, _SOME_PAIRS) if is_open else pairs
        self._is_open = is_open and pairs > _SOME_PAIRS
        rows = operator if isinstance(operator, RowOperator) else None
        size, width = operator.shape[0], operator.spaces.whole.width * operator.dtype.itemsize
        further = 4 * block if block > 1 else _FIRST
        limit = size if rows is None else min(size, rows.num_rows + 2 * block)
        usual = int(_PRODUCTS_A_PAIR * self._pairs) + further
        total = size if kind == "dense" else max(self._pairs, min(usual, limit))
        held = size if kind == "dense" else min(total, most)
        kept = 0
        if rows is not None and kind == "incremental":
            total, block, held = rows.num_rows, rows.num_rows, 2 * self._pairs
        elif rows is not None and rows.keeps_rows:
            kept = rows.num_rows * operator.spaces.reached.width * operator.dtype.itemsize
        elif isinstance(operator, HessianOperator):
            kept = operator.kept_bytes
        self._total, self._block = total, block  # products with vectors (rows, if incremental)
        # Over the data; a last one is for the audit.
        self._passes = 1 if kept and rows is not None else -(-total // block) + 1
        self._bytes = kept + held * width
        self._started = time.monotonic()
        self._chunks: list[tuple[float, int]] = []  # when each began, and its examples
        self._steps: list[tuple[float, int]] = []
        self._found: dict[str, Any] = {}
        self._has_reported = False
        operator.problem.on_chunk = self._chunk

    def end(self) -> dict[str, Any]:
        """Stop measuring; return the last forecast."""
        self._operator.problem.on_chunk = None
        return self._found

    def left(self) -> float | None:
        """Return the seconds that remain by the last forecast; None where it is too rough."""
        left = float(self._found.get("seconds", 0.0)) - (time.monotonic() - self._started)
        return left if left > 0 and not self._is_open else None

    def _chunk(self, size: int) -> None:
        """Measure the chunks of the first pass, until it can be forecast."""
        problem = self._operator.problem
        if problem.device.type == "cuda":
            torch.cuda.synchronize(problem.device)
        now = time.monotonic()
        self._chunks.append((now, size))
        if len(self._chunks) < 3 or now - self._chunks[1][0] < ENOUGH:
            return  # the first one is slower: it sets up what the others use
        problem.on_chunk = None
        done = sum(count for _, count in self._chunks[1:-1])
        seconds = (now - self._chunks[1][0]) / done * problem.data.num_here
        self._forecast(seconds * self._passes, seconds)

    def step(self, done: int) -> None:
        """Measure a step of the solver, after so many products (rows, if incremental)."""
        if len(self._steps) > _MOST_STEPS:
            return
        self._operator.problem.on_chunk = None
        now = time.monotonic()
        self._steps.append((now, done))
        first, before = self._steps[0]
        if len(self._steps) > 1:  # the first one sets up what the others use
            each = (now - first) / max(1, done - before)
            seconds = first - self._started + each * max(0, self._total - before)
            self._forecast(seconds, each * self._block, is_clear=now - first > ENOUGH)

    def _forecast(self, seconds: float, each: float, is_clear: bool = True) -> None:
        products = -(-self._total // self._block)
        self._found = {
            "products": products,
            "seconds_each": each,
            "seconds": seconds,
            "bytes": self._bytes,
            "pairs": self._pairs,
        }
        if is_clear and seconds > WORTH_REPORTING and not self._has_reported:
            self._has_reported = True
            pairs = f"{'every ' if self._is_open else ''}{self._pairs} pairs"
            size, unit = (3600, "hours") if seconds >= 5400 else (60, "minutes")
            if seconds < 90:
                size, unit = 1, "seconds"
            self._report(
                f"Eigenpairs of the {self._name}: expected about {seconds / size:.0f} {unit} for "
                f"{pairs} (about {products:,} products of {each:.2g} s), and "
                f"{self._bytes / 1e9:.2g} GB. Less: {'; '.join(self._cheaper())}."
            )

    def _cheaper(self) -> list[str]:
        """List cheaper ways."""
        found, problem = [], self._operator.problem
        if isinstance(self._operator, GGNOperator) and problem.num_outputs > 1:
            rows = f"with one row an example in place of {problem.num_outputs}"
            found.append(f"{option('estimator', 'opg')}, {rows}")
        if isinstance(self._operator, HessianOperator):
            found.append(f"{option('estimator', 'opg')}, with one gradient an example in all")
        chosen, last = problem.parameters, LastLayer().names(problem.network.model)
        if not set(chosen.names) <= set(last):
            sizes = dict(zip(chosen.names, chosen.sizes, strict=True))
            count = sum(sizes.get(name, 0) for name in last)
            found.append(
                f"{option('params', LastLayer())}, with {count:,} in place of {chosen.size:,} "
                "parameters"
            )
        aim = f"a larger {option('tolerance')}" if self._is_open else f"a smaller {option('rank')}"
        return [*found, f"{aim}, a part of the data, or {option('max_seconds')}"]
