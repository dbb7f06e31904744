"""Progress of long loops: a bar on a terminal and in a notebook, else a line now and then."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """One long loop: `with Progress("Hessian", total, "pair") as bar: bar.show(done, note)`.

    Args:
        title: what is being done.
        total: how many units there are, where that is known.
        unit: their name.
        enabled: whether to show anything.
        stream: where to; stderr by default.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        unit: str,
        enabled: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._enabled = enabled
        self._in_notebook = stream is None and "ipykernel.zmqshell" in sys.modules
        self._stream = stream if stream is not None else sys.stderr
        self._bar: Any = None
        self._started = self._printed = 0.0

    def __enter__(self) -> Progress:
        self._started = self._printed = time.monotonic()
        if self._enabled and (self._in_notebook or self._stream.isatty()):
            self._bar = _bar_class(self._in_notebook)(
                total=self._total,
                desc=self._title,
                unit=f" {self._unit}",
                file=self._stream,
                leave=False,
                dynamic_ncols=True,
            )
        return self

    def show(self, done: int, note: str = "") -> None:
        """Report that `done` units are finished, with a note such as the products so far."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(done - self._bar.n)
            return
        now = time.monotonic()
        if now - self._printed >= _SECONDS_BETWEEN_LINES:
            self._printed = now
            elapsed = now - self._started
            of, left = "", ""
            if self._total:
                of = f"/{self._total}"
                left = f", about {elapsed * (self._total - done) / done:.0f} s left" if done else ""
            extra = f", {note}" if note else ""
            print(
                f"{self._title}: {done}{of} {self._unit}s{extra}, {elapsed:.0f} s{left}",
                file=self._stream,
                flush=True,
            )

    def show_products(self, products: int, done: int) -> None:
        """Report as the eigensolvers do: the products so far, and the pairs that converged."""
        self.show(done, f"{products} products")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.refresh()  # the last numbers, however short the loop was
            self._bar.close()


def _bar_class(in_notebook: bool) -> Any:
    """A widget in a notebook that has widgets, else a line of text that is written over."""
    if in_notebook and find_spec("ipywidgets") is not None:  # without them tqdm.auto warns
        from tqdm.auto import tqdm as widget

        return widget
    return tqdm
