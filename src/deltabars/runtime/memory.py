"""Memory budgets, and what to do when memory runs out."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from deltabars.errors import BadValueError, MemoryWarning, NotEnoughMemoryError, option, warn

Result = TypeVar("Result")

# Bytes of a chunk where memory is plentiful: little more than a CPU's caches, or a GPU's fill.
_NOMINAL = {"cpu": 1 << 28}
_NOMINAL_ELSEWHERE = 1 << 34

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

# The parts of the budget, in eighths.
DATA, KEPT, BASIS, CHUNK = "data", "kept between products", "Krylov basis", "chunk"
_EIGHTHS = {DATA: 1, KEPT: 3, BASIS: 2, CHUNK: 2}


def share(budget: int, of: str) -> int:
    """Return the bytes of a budget for one of DATA, KEPT, BASIS and CHUNK."""
    return budget * _EIGHTHS[of] // 8


def resolve_budget(memory_budget: int | None, device: torch.device) -> int:
    """Return the given number of bytes, or half of what is free on the device."""
    if memory_budget is None:
        return free_bytes(device) // 2
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, int) or memory_budget <= 0:
        raise BadValueError(
            f"memory_budget: expected a whole number of bytes above zero, got {memory_budget!r}."
        )
    return memory_budget


def read_bytes(given: Any, name: str) -> int:
    """Read a number of bytes above zero: 8000000000, "8GB", "500MiB"."""
    found = _BYTES.fullmatch(given.strip()) if isinstance(given, str) else None
    if found is not None:
        base = 1024 if found[3] else 1000
        given = int(float(found[1]) * base ** _POWERS[found[2].lower()])
    if not isinstance(given, int) or isinstance(given, bool) or given <= 0:
        raise BadValueError(f"{name}: expected bytes, such as 8GB or 500MiB, got {given!r}.")
    return given


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free on a device now."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = {name: value.split()[0] for name, _, value in (x.partition(":") for x in lines)}
        return int(kilobytes["MemAvailable"]) * 1024
    except (OSError, KeyError, ValueError, IndexError):  # not on every platform
        return 4 << 30


def chunk_within(budget: int, bytes_per_item: int, most: int, device: torch.device) -> int:
    """Return how many items to process at a time: at least one, at most `most`.

    As many as take a nominal amount (256 MiB on a CPU), rounded down to a power of two; fewer only
    where that is more than a quarter of the budget. So the chunks, and with them the last bits of
    sums, do not depend on how much memory happens to be free, unless it is scarce.
    """
    nominal = _NOMINAL.get(device.type, _NOMINAL_ELSEWHERE)
    fitting = max(1, min(nominal, share(budget, CHUNK)) // max(1, bytes_per_item))
    return min(most, 1 << (fitting.bit_length() - 1))


class ChunkSize:
    """How many examples are processed at a time; its `value` is halved when memory runs out."""

    def __init__(self, value: int, warned: list[str] | None = None) -> None:
        self.value = value
        self._warned: list[str] = [] if warned is None else warned

    def at_most(self, value: int) -> ChunkSize:
        """Return a separate number for another kind of work; the warning is given once for both."""
        return ChunkSize(min(self.value, value), self._warned)

    def each(self, batches: Iterable[Any], work: Callable[[Any], Result]) -> Iterator[Result]:
        """Yield the results of `work` on all examples in turn, at most `value` at a time.

        Args:
            batches: of examples, with a length and `split(size)`, which yields them in parts.
        """
        for batch in batches:
            waiting = deque(batch.split(self.value))
            while waiting:
                part = waiting.popleft()
                result = attempt(partial(work, part)) if len(part) <= self.value else None
                if result is not None:
                    yield result
                    continue
                if len(part) <= self.value:
                    self.halve(len(part))
                waiting.extendleft(reversed(list(part.split(self.value))))

    def halve(self, failed: int) -> None:
        """Halve the number of examples that there was no memory for; warn once."""
        if failed <= 1:
            raise NotEnoughMemoryError(
                "Memory: expected room for one example at a time, got too little. Free some, use "
                f"a larger device, or choose fewer parameters with {option('params=')}."
            )
        self.value = (failed + 1) // 2
        if not self._warned:
            self._warned.append(
                f"Memory: expected room for {failed} examples at a time, got too little; "
                f"continuing with {self.value} or fewer. Start there with "
                f"{option('batch_size=')}, or with a smaller {option('memory_budget=')}."
            )
            warn(self._warned[0], MemoryWarning)


def attempt(work: Callable[[], Result]) -> Result | None:
    """Return the result of `work`, or None where memory runs out."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
    # Only here, after the exception and the tensors that its traceback holds are gone.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def ran_out(error: BaseException) -> bool:
    """Return whether an error is of memory that could not be had, on a GPU or on a CPU."""
    said = str(error) if isinstance(error, RuntimeError) else ""
    is_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_of_memory or "can't allocate memory" in said or "ALLOC_FAILED" in said
