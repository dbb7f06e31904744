"""How much memory a computation may take."""

from __future__ import annotations

import os

import torch

from deltabars.errors import BadValueError


def resolve_budget(memory_budget: int | None, device: torch.device) -> int:
    """The bytes to stay within: the given number, or half of what is free on the device."""
    if memory_budget is None:
        return free_bytes(device) // 2
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, int) or memory_budget <= 0:
        raise BadValueError(
            f"memory_budget: expected a whole number of bytes above zero, got {memory_budget!r}."
        )
    return memory_budget


def free_bytes(device: torch.device) -> int:
    """The memory that is free on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every platform tells
        return 4 << 30


def rows_within(budget: int, bytes_per_row: int, most: int) -> int:
    """How many rows fit the budget: at least one, at most `most`."""
    return max(1, min(most, budget // max(1, bytes_per_row)))
