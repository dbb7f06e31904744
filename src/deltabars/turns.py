"""Threads: one at a time at an object, and switches of the process that several of them share."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakValueDictionary


class Turns:
    """A lock for each object, which lives for as long as a thread has it or waits for it."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """Forget all locks: after a fork there is nobody left to give them back."""
        self._guard = threading.Lock()
        self._locks: WeakValueDictionary[int, Any] = WeakValueDictionary()

    @contextmanager
    def at(self, thing: object) -> Iterator[None]:
        """Wait until no other thread is at an object; a thread may be there several times."""
        with self._guard:
            lock = self._locks.get(id(thing))
            if lock is None:
                lock = self._locks[id(thing)] = threading.RLock()
        with lock:
            yield


class Shared:
    """A context of the whole process: the first thread in opens it, the last one out closes it.

    Args:
        make: gives the context, which a thread may open and another one close.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._inside = 0
        self._context: AbstractContextManager[Any] | None = None
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Be in the context."""
        with self._guard:
            if not self._inside:
                self._context = self._make()
                self._context.__enter__()
            self._inside += 1
        try:
            yield
        finally:
            with self._guard:
                self._inside -= 1
                if not self._inside:
                    assert self._context is not None
                    self._context.__exit__(None, None, None)

    def renew(self) -> None:
        """Another guard: after a fork there is nobody left to give the old one back."""
        self._guard = threading.Lock()


@contextmanager
def _without_noise() -> Iterator[None]:
    with warnings.catch_warnings():
        # Of torch's own: operations that vmap takes one by one, and a deprecation in its set-up.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        warnings.filterwarnings("ignore", message="`torch.jit.script`")
        yield


# Threads that each saved and restored the process's filters would restore one another's.
without_noise = Shared(_without_noise)
