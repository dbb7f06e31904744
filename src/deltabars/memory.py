"""How much memory a computation may take."""

from __future__ import annotations

from pathlib import Path

import torch

from deltabars.errors import BadValueError

_NOMINAL = 1 << 30  # bytes


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
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = {name: value.split()[0] for name, _, value in (x.partition(":") for x in lines)}
        return int(kilobytes["MemAvailable"]) * 1024
    except (OSError, KeyError, ValueError, IndexError):  # not every platform tells
        return 4 << 30


def chunk_within(budget: int, bytes_per_item: int, most: int) -> int:
    """How many items to work on at a time: at least one, at most `most`.

    As many as take a gibibyte, rounded down to a power of two; fewer only where that is more than
    an eighth of the budget. So the chunks, and with them the last bits of sums, do not depend on
    how much memory happens to be free, unless it is scarce.
    """
    fitting = max(1, min(_NOMINAL, budget // 8) // max(1, bytes_per_item))
    return min(most, 1 << (fitting.bit_length() - 1))
