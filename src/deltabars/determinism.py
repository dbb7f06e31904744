"""The same bits from the same seed."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltabars.turns import Shared, Turns

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_CUDNN: Any = torch.backends.cudnn
_MEMORY: Any = torch.utils.deterministic


def same_bits(wanted: bool) -> AbstractContextManager[None]:
    """Deterministic algorithms alone, if that is wanted; what was set before is put back.

    cuBLAS reads its part from the environment when it starts, so this comes before the first
    product on a GPU.
    """
    return _deterministic() if wanted else nullcontext()


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    environment = os.environ.get(_CUBLAS)
    os.environ.setdefault(_CUBLAS, ":4096:8")
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
    """Whether a call draws random numbers, from torch or from NumPy's or Python's own state."""
    before, kind = _python_numbers(), cast(Any, _Draws)
    with kind() as mode:
        work()
    return bool(mode.any) or before != _python_numbers()


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


def _python_numbers() -> tuple[Any, ...]:
    return random.getstate(), pickle.dumps(np.random.get_state())


def with_own_numbers(batches: Iterable[Any], seed: int) -> Iterator[Any]:
    """Go through batches with torch's random numbers begun at a seed, as far as they draw any.

    A loader that shuffles then has the same order, whatever the program drew before; and what the
    program draws next is what it would have drawn without this. The generator is the process's, so
    threads take turns.
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
