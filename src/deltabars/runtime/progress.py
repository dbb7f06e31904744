"""Progress of long loops: a bar on a terminal and in a notebook, else a line now and then."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from typing import Any, TextIO

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Show one long loop: `with Progress("Hessian", total, "pair") as bar: bar.show(done, note)`.

    The total is that of the units, where it is known. The stream is stderr by default.
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
            kind: Any = tqdm
            if self._in_notebook and find_spec("ipywidgets") is not None:  # else tqdm.auto warns
                from tqdm.auto import tqdm as widget

                kind = widget
            self._bar = kind(
                total=self._total,
                desc=self._title,
                unit=f" {self._unit}",
                file=self._stream,
                leave=False,
                dynamic_ncols=True,
            )
        return self

    def show(self, done: int, note: str = "", seconds: float | None = None) -> None:
        """Report that `done` units are finished, with a note such as the products so far.

        The seconds that are left are estimated from the units so far by default.
        """
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(done - self._bar.n)
            return
        now = time.monotonic()
        if now - self._printed < SECONDS_BETWEEN_LINES:
            return
        self._printed = now
        elapsed = now - self._started
        if seconds is None and self._total and done:
            seconds = elapsed * (self._total - done) / done
        of = f"/{self._total}" if self._total else ""
        extra = f", {note}" if note else ""
        left = "" if seconds is None else f", about {seconds:.0f} s left"
        self.line(f"{self._title}: {done}{of} {self._unit}s{extra}, {elapsed:.0f} s{left}")

    def line(self, text: str) -> None:
        """Print a line that stays."""
        if self._enabled and self._bar is not None and not self._in_notebook:
            self._bar.write(text, file=self._stream)
        elif self._enabled:
            print(text, file=self._stream, flush=True)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.refresh()  # the last numbers, however short the loop was
            self._bar.close()
