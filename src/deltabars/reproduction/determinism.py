"""The same bits from the same seed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_CUDNN: Any = torch.backends.cudnn
_MEMORY: Any = torch.utils.deterministic


@contextmanager
def same_bits(wanted: bool) -> Iterator[None]:
    """Deterministic algorithms alone, if that is wanted; what was set before is put back.

    cuBLAS reads its part from the environment when it starts, so this comes before the first
    product on a GPU.
    """
    if not wanted:
        yield
        return
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
