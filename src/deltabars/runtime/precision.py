"""Precision, determinism and random numbers: switches of the process, which threads share."""

from __future__ import annotations

import os
import pickle
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from deltabars.errors import BadValueError, ModelError


class _Renewed:
    """Locks that are new after a fork, when there is nobody left to give the old ones back."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """Begin with free locks."""
        self._guard = threading.Lock()


class Turns(_Renewed):
    """A lock for each object, which lives for as long as a thread has it or waits for it."""

    def renew(self) -> None:
        """Forget all locks."""
        super().renew()
        self._locks: WeakValueDictionary[int, Any] = WeakValueDictionary()

    @contextmanager
    def at(self, thing: object) -> Iterator[None]:
        """Wait until no other thread is at an object; a thread may be there several times."""
        with self._guard:
            lock = self._locks.setdefault(id(thing), threading.RLock())
        with lock:
            yield


class Shared(_Renewed):
    """A context of the whole process: the first thread in opens it, the last one out closes it."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self._make, self._inside, self._stack = make, 0, ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter the context, and leave it."""
        with self._guard:
            if not self._inside:
                self._stack.enter_context(self._make())
            self._inside += 1
        try:
            yield
        finally:
            with self._guard:
                self._inside -= 1
                if not self._inside:
                    self._stack.close()


@contextmanager
def _without_noise() -> Iterator[None]:
    with warnings.catch_warnings():
        # Of torch's own: operations that vmap takes one by one, and a deprecation in its set-up.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        warnings.filterwarnings("ignore", message="`torch.jit.script`")
        yield


# Threads that each saved and restored the process's filters would restore one another's.
without_noise = Shared(_without_noise)


_CUDNN: Any = torch.backends.cudnn  # its switches are set up at run time


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No autocast, no TF32, no inference mode, no recording of gradients; all put back after.

    Attention takes its plain form: the fused ones have no forward or per-example derivatives.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),  # torch.func turns gradients on where it needs them
        torch.autocast(device.type, enabled=False),
        _ieee() if device.type == "cuda" else nullcontext(),
        _plain(),
    ):
        yield


@contextmanager
def _plain_attention() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


_plain = Shared(_plain_attention)


@contextmanager
def float32_products(device: torch.device, how: str) -> Iterator[None]:
    """Float32 products and convolutions on a GPU as they are (`"ieee"`) or in `"tf32"`."""
    if device.type != "cuda":
        yield
        return
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, _CUDNN.conv)
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = how
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


# The error of TF32 is of the order of λ itself.
_ieee = Shared(lambda: float32_products(torch.device("cuda"), "ieee"))


def working_dtype(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Return the type to compute in: the given one, or the model's own, or float32."""
    supported = (torch.float32, torch.float64)
    if asked is not None and asked not in supported:
        expected = "torch.float32 or torch.float64"
        raise BadValueError(f"dtype: expected {expected}, got {asked!r}: curvature needs digits.")
    if asked is None and not own.is_floating_point:
        raise ModelError(f"Expected real floating-point parameters, got {own}.")
    return asked or (own if own in supported else torch.float32)


_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_MEMORY: Any = torch.utils.deterministic


def same_bits(wanted: bool) -> AbstractContextManager[None]:
    """Deterministic algorithms alone, if that is wanted; what was set before is put back."""
    return _deterministic() if wanted else nullcontext()


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    environment = os.environ.get(_CUBLAS)
    os.environ.setdefault(_CUBLAS, ":4096:8")  # read before the first product on a GPU
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill, benchmark = _MEMORY.fill_uninitialized_memory, _CUDNN.benchmark
    torch.use_deterministic_algorithms(True)
    _MEMORY.fill_uninitialized_memory = False  # nothing reads memory that nothing has written
    _CUDNN.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
        _MEMORY.fill_uninitialized_memory, _CUDNN.benchmark = fill, benchmark
        if environment is None:
            os.environ.pop(_CUBLAS, None)


_deterministic = Shared(_deterministic_algorithms)
_TURNS = Turns()


def draws_numbers(work: Callable[[], Any]) -> bool:
    """Return whether a call draws random numbers: from torch, NumPy or Python."""
    before = random.getstate(), pickle.dumps(np.random.get_state())
    with cast(Any, _Draws)() as mode:
        work()
    return bool(mode.any) or before != (random.getstate(), pickle.dumps(np.random.get_state()))


class _Draws(TorchDispatchMode):
    any = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do not import torch's compiler for it, which takes seconds; nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.any |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def with_own_numbers(batches: Iterable[Any], seed: int) -> Iterator[Any]:
    """Go through batches with torch's random numbers begun at a seed, as far as they draw any.

    So a loader that shuffles has the same order whatever the program drew before, and the program
    draws what it would have drawn. The generator is the process's: threads take turns.
    """
    state = torch.Generator().manual_seed(seed).get_state()
    iterator: Iterator[Any] | None = None
    while True:
        with _TURNS.at(_TURNS), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            iterator = iter(batches) if iterator is None else iterator  # this may draw as well
            try:
                batch = next(iterator)
            except StopIteration:
                return
            state = torch.get_rng_state()
        yield batch
