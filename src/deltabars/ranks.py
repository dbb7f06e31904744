"""The processes that work on one thing together, as torch.distributed has them."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deltabars.columns import Columns
from deltabars.errors import (
    BadValueError,
    DeltaBarsError,
    RankError,
    first_line,
    option,
)
from deltabars.watching import Watch

# torch 2.13 has other names for them.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_FAREWELL = 1.5  # seconds
_LONGEST_NAP = 2e-3  # seconds between two looks at a message that is under way


class Ranks:
    """One process alone: everything that has to be shared is shared already.

    Attributes:
        rank: of this process, 0 to count − 1.
        count: how many there are.
        messages: how many collective operations there were.
        bytes: that this rank has given into them.
    """

    rank = 0
    count = 1

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0

    @property
    def is_first(self) -> bool:
        """Whether this is the one that speaks, and writes what is written once."""
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work of all ranks: where one of them fails, the others stop with an error that names it.

        Raises:
            RankError: another rank has failed, or is not heard from any more.
        """
        yield

    def check(self) -> None:
        """Within `together`, between messages: raise what has become of another rank."""

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, in place."""
        return tensor

    def agree_(self, tensor: Tensor) -> Tensor:
        """A tensor as the first rank has it, in place."""
        return tensor

    def agreed(self, value: Any) -> Any:
        """A small object as the first rank has it."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """A small object of each rank."""
        return [value]

    def all_columns(self, part: Tensor, columns: Columns) -> Tensor:
        """All columns (b, P) of rows that each rank has its own columns of, (b, p)."""
        return part

    def summed_columns(self, whole: Tensor, columns: Columns) -> Tensor:
        """The own columns (b, p) of the sum of (b, P) over all ranks, which is used up."""
        return whole

    def exchanged(self, rows: Tensor, columns: Columns) -> Tensor:
        """The own columns (Σn, p) of the rows (n, P) that each rank has some of, in their order."""
        return rows


class _Group(Ranks):
    """The ranks of the default process group."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._watch: Watch | None = None
        self._sessions = 0
        self._number = next(_NUMBERS)  # a store may outlive its group
        backend = str(dist.get_backend())
        self._has_nccl = "nccl" in backend
        # NCCL alone has no messages between CPUs.
        on_gpus = backend in ("nccl", "cuda:nccl")
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else None

    @contextmanager
    def together(self) -> Iterator[None]:
        if self._watch is not None:  # within another
            yield
            return
        self._sessions += 1
        watch = Watch(self.rank, self.count, f"{self._number}/{self._sessions}")
        self._watch = watch
        try:
            yield
        except BaseException as error:
            watch.tell(error)
            if self.is_first:  # the store may end with this process: let the others read it
                time.sleep(_FAREWELL)
            raise
        finally:
            self._watch = None
            watch.stop()

    def check(self) -> None:
        if self._watch is not None:
            self._watch.check()

    def sum_(self, tensor: Tensor) -> Tensor:
        return self._sent(dist.all_reduce, tensor, op=dist.ReduceOp.SUM)

    def agree_(self, tensor: Tensor) -> Tensor:
        return self._sent(dist.broadcast, tensor, src=0)

    def agreed(self, value: Any) -> Any:
        held = self._tensor(value if self.is_first else None)
        size = torch.tensor([len(held)], device=held.device)
        self._send(dist.broadcast, size, src=0)
        held = held if self.is_first else held.new_empty(int(size))
        self._send(dist.broadcast, held, src=0)
        return value if self.is_first else _object(held)

    def gather(self, value: Any) -> list[Any]:
        own = self._tensor(value)
        sizes = torch.empty(self.count, dtype=torch.int64, device=own.device)
        self._send(_GATHER, sizes, torch.tensor([len(own)], device=own.device))
        sent = _padded(own[None], int(sizes.max()))
        held = sent.new_empty(self.count, sent.shape[1])
        self._send(_GATHER, held, sent)
        return [_object(part[:size]) for part, size in zip(held, sizes.tolist(), strict=True)]

    def all_columns(self, part: Tensor, columns: Columns) -> Tensor:
        rows, widths = part.shape[0], columns.widths
        self._check_device(part)
        sent = _padded(part, max(widths))
        found = sent.new_empty(self.count * rows, max(widths))
        self._send(_GATHER, found, sent)
        parts = found.view(self.count, rows, max(widths))
        return torch.cat([each[:, :width] for each, width in zip(parts, widths, strict=True)], 1)

    def summed_columns(self, whole: Tensor, columns: Columns) -> Tensor:
        widths = columns.widths
        if not (self._has_nccl and whole.is_cuda):  # Gloo's own is an all-reduce and more
            return self.sum_(whole)[:, columns.own].contiguous()
        sent = whole.new_zeros(self.count, len(whole), max(widths))
        for place, part in zip(sent, whole.split(widths, dim=1), strict=True):
            place[:, : part.shape[1]] = part
        sent = sent.flatten(0, 1)
        found = sent.new_empty(len(whole), max(widths))
        self._send(_SCATTER, found, sent)
        return found[:, : widths[self.rank]].contiguous()

    def exchanged(self, rows: Tensor, columns: Columns) -> Tensor:
        self._check_device(rows)
        counts, widths = self.gather(len(rows)), columns.widths
        sent = torch.cat([part.reshape(-1) for part in rows.split(widths, dim=1)])
        own = widths[self.rank]
        sizes = [count * own for count in counts]
        found = sent.new_empty(sum(sizes))
        given = [len(rows) * width for width in widths]
        self._send(
            dist.all_to_all_single,
            found,
            sent,
            output_split_sizes=sizes,
            input_split_sizes=given,
        )
        return found.view(sum(counts), own)

    def _check_device(self, tensor: Tensor) -> None:
        if self._device is not None and not tensor.is_cuda:
            raise BadValueError(
                "Process group: expected a backend for the CPU, which the fit computes on, got "
                "NCCL alone. Use init_process_group('cpu:gloo,cuda:nccl'), or "
                f"{option('device', 'cuda')}."
            )

    def _tensor(self, value: Any) -> Tensor:
        held = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        return held if self._device is None else held.to(self._device)

    def _sent(self, operation: Any, tensor: Tensor, **options: Any) -> Tensor:
        """A tensor that an operation changes in place, by way of the device that it needs."""
        held = tensor.contiguous()
        if self._device is not None and held.device.type != "cuda":
            held = held.to(self._device)
        self._send(operation, held, **options)
        return tensor if held is tensor else tensor.copy_(held)

    def _send(self, operation: Any, *tensors: Tensor, **options: Any) -> None:
        with self._sending(tensors[-1].nbytes):
            work = operation(*tensors, async_op=True, **options)
            nap = 1e-5
            while not work.is_completed():
                self.check()
                time.sleep(nap)
                nap = min(1.5 * nap, _LONGEST_NAP)
            work.wait()

    @contextmanager
    def _sending(self, size: int) -> Iterator[None]:
        self.messages += 1
        self.bytes += size
        if self._watch is not None:
            self._watch.messages = self.messages
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, DeltaBarsError):
                raise
            if self._watch is not None:
                self._watch.find_out()
            raise RankError(
                f"Ranks: expected a message between {self.count} of them, got an error "
                f"({first_line(error).rstrip('.')}). Look at the output of the others."
            ) from error


def current() -> Ranks:
    """The ranks of torch's default process group; one that is alone without a group."""
    if _IS_ALONE.get() or not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    if dist.get_world_size() == 1:
        return Ranks()
    group = dist.group.WORLD
    found = _GROUPS.get(id(group))
    if found is None or found[0] is not group:
        _GROUPS.clear()  # those of groups that are no more
        found = _GROUPS[id(group)] = (group, _Group())
    return found[1]


@contextmanager
def alone() -> Iterator[None]:
    """Work of this process alone, in a program that has a process group.

    Example:
        >>> import deltabars
        >>> from deltabars.recipes.digits import L2, trained_digits
        >>> digits, model, train = trained_digits()
        >>> with deltabars.ranks.alone():  # on one rank, say, while the others do something else
        ...     fit = deltabars.fit(model, train, l2=L2, rank=10, progress=False)
    """
    token = _IS_ALONE.set(True)
    try:
        yield
    finally:
        _IS_ALONE.reset(token)


_NUMBERS = itertools.count(1)
_GROUPS: dict[int, tuple[Any, _Group]] = {}
_IS_ALONE: ContextVar[bool] = ContextVar("deltabars_alone", default=False)


def _object(held: Tensor) -> Any:
    return pickle.loads(held.cpu().numpy().tobytes())  # from ranks of one launch, as torch does it


def _padded(part: Tensor, width: int) -> Tensor:
    if part.shape[1] == width:
        return part.contiguous()
    return torch.nn.functional.pad(part, (0, width - part.shape[1]))


def same_everywhere(ranks: Ranks, value: Any) -> bool:
    """Whether all ranks have the same value."""
    values: Sequence[Any] = ranks.gather(value)
    return all(other == values[0] for other in values)


def check_same_options(ranks: Ranks, values: Mapping[str, Any]) -> None:
    """Refuse other values on one rank than on another, before anything of their size is sent.

    Messages of different lengths would end the process.

    Args:
        values: by name; those are the same whose `repr` is.
    """
    digests = {
        name: hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
        for name, value in values.items()
    }
    first, *others = ranks.gather(digests)
    for rank, other in enumerate(others, 1):
        names = [name for name in values if other[name] != first[name]]
        if names:
            raise BadValueError(
                f"fit: expected the same options on every rank, got another {', '.join(names)} on "
                f"rank {rank} than on rank 0. Only the data may differ."
            )
