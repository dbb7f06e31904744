"""Process groups: the collectives that a fit needs, on torch.distributed.

`current_group()` is the default process group of torch, or a group of this process alone, whose
collectives do nothing. A process that fails ends its collectives with an error in the others:
that is the business of the launcher (torchrun) and of the timeout of the process group.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deltabars.errors import BadValueError, DeltaBarsError, ProcessError, first_line, option

# torch 2.13 has other names for them.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Columns:
    """The columns of rows (b, P) that each process holds: contiguous ranges, in rank order."""

    bounds: tuple[int, ...]  # where each range begins, and P at the end: (R + 1,)
    rank: int = 0  # of this process

    @classmethod
    def even(cls, size: int, group: Group) -> Columns:
        """Split P columns into ranges of one length; the last ones may be shorter."""
        each = -(-size // group.size)
        return cls(tuple(min(each * k, size) for k in range(group.size + 1)), group.rank)

    @property
    def own(self) -> slice:
        """The range of this process."""
        return slice(self.bounds[self.rank], self.bounds[self.rank + 1])

    @property
    def widths(self) -> list[int]:
        """How many columns each process holds."""
        return [b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)]

    def among(self, indices: Tensor | None) -> Columns:
        """Restrict the ranges to the columns at ascending indices (P',); to all if None."""
        if indices is None:
            return self
        bounds = torch.searchsorted(indices.cpu(), torch.tensor(self.bounds)).tolist()
        return Columns(tuple(bounds), self.rank)


class Group:
    """The processes that work together; of one process alone, collectives return what they get."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size  # the rank is from 0 to size − 1
        self.collectives = self.bytes = 0  # so far: how many, and what this process has sent
        backend = str(dist.get_backend()) if size > 1 else ""
        self._has_nccl = "nccl" in backend
        # NCCL alone has no collectives between CPUs.
        on_gpus = backend in ("nccl", "cuda:nccl")
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else None

    @property
    def is_first(self) -> bool:
        """Whether this process prints, and writes what is written once."""
        return self.rank == 0

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        return self._in_place(dist.all_reduce, tensor, op=dist.ReduceOp.SUM)

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Broadcast the tensor of the first process, in place."""
        return self._in_place(dist.broadcast, tensor, src=0)

    def broadcast_object(self, value: Any) -> Any:
        """Broadcast a small object of the first process."""
        return self.gather_objects(value if self.is_first else None)[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather a small object of each process, on all of them."""
        if self.size == 1:
            return [value]
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self._device)
        sizes = torch.empty(self.size, dtype=torch.int64, device=own.device)
        self._run(_GATHER, sizes, torch.tensor([len(own)], device=own.device))
        sent = _padded(own[None], int(sizes.max()))
        found = sent.new_empty(self.size, sent.shape[1])
        self._run(_GATHER, found, sent)
        # From processes of the same launch.
        parts = zip(found.cpu().numpy(), sizes.tolist(), strict=True)
        return [pickle.loads(part[:size].tobytes()) for part, size in parts]

    def gather_columns(self, part: Tensor, columns: Columns) -> Tensor:
        """Gather all columns (b, P) of rows of which each process holds its own (b, p)."""
        if self.size == 1:
            return part
        rows, widths = part.shape[0], columns.widths
        self._check_device(part)
        sent = _padded(part, max(widths))
        found = sent.new_empty(self.size * rows, max(widths))
        self._run(_GATHER, found, sent)
        parts = found.view(self.size, rows, max(widths))
        return torch.cat([each[:, :width] for each, width in zip(parts, widths, strict=True)], 1)

    def reduce_columns(self, whole: Tensor, columns: Columns) -> Tensor:
        """Sum (b, P) over all processes and keep the own columns (b, p); may overwrite `whole`."""
        if self.size == 1:
            return whole
        widths = columns.widths
        if not (self._has_nccl and whole.is_cuda):  # Gloo's own is an all-reduce and more
            return self.all_reduce_(whole)[:, columns.own].contiguous()
        sent = whole.new_zeros(self.size, len(whole), max(widths))
        for target, part in zip(sent, whole.split(widths, dim=1), strict=True):
            target[:, : part.shape[1]] = part
        sent = sent.flatten(0, 1)
        found = sent.new_empty(len(whole), max(widths))
        self._run(_SCATTER, found, sent)
        return found[:, : widths[self.rank]].contiguous()

    def exchange_rows(self, rows: Tensor, columns: Columns) -> Tensor:
        """Exchange whole rows (n, P) of each process for the own columns (Σn, p) of all rows."""
        if self.size == 1:
            return rows
        self._check_device(rows)
        counts, widths = self.gather_objects(len(rows)), columns.widths
        sent = torch.cat([part.reshape(-1) for part in rows.split(widths, dim=1)])
        own = widths[self.rank]
        received = [count * own for count in counts]
        found = sent.new_empty(sum(received))
        given = [len(rows) * width for width in widths]
        self._run(dist.all_to_all_single, found, sent, received, given)
        return found.view(sum(counts), own)

    def _check_device(self, tensor: Tensor) -> None:
        if self._device is not None and not tensor.is_cuda:
            raise BadValueError(
                "Process group: expected a backend for the CPU, which the fit computes on, got "
                "NCCL alone. Use init_process_group('cpu:gloo,cuda:nccl'), or "
                f"{option('device', 'cuda')}."
            )

    def _in_place(self, operation: Any, tensor: Tensor, **options: Any) -> Tensor:
        if self.size == 1:
            return tensor
        # On the GPU of this process, where the backend needs that.
        held = tensor.contiguous().to(None if tensor.is_cuda else self._device)
        self._run(operation, held, **options)
        return tensor if held is tensor else tensor.copy_(held)

    def _run(self, operation: Any, *arguments: Any, **options: Any) -> None:
        self.collectives += 1
        self.bytes += [each for each in arguments if isinstance(each, Tensor)][-1].nbytes
        try:
            operation(*arguments, **options)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, DeltaBarsError):
                raise
            raise ProcessError(
                f"Processes: expected an answer from all {self.size}, got an error "
                f"({first_line(error).rstrip('.')}). Another process has failed or was ended: its "
                "own output has the reason. Start again; a checkpoint is resumed."
            ) from error


_known: tuple[Any, Group] = (None, Group())  # torch's group, and ours
_IS_ALONE: ContextVar[bool] = ContextVar("deltabars_alone", default=False)


def current_group() -> Group:
    """Return torch's default process group; a group of this process alone where there is none."""
    is_alone = _IS_ALONE.get() or not (dist.is_available() and dist.is_initialized())
    if is_alone or dist.get_world_size() == 1:
        return Group()
    global _known
    if _known[0] is not dist.group.WORLD:
        _known = dist.group.WORLD, Group(dist.get_rank(), dist.get_world_size())
    return _known[1]


@contextmanager
def alone() -> Iterator[None]:
    """Work in this process alone, in a program that has a process group.

    Example:
        >>> import deltabars
        >>> from deltabars.recipes.digits import L2, trained_digits
        >>> digits, model, train = trained_digits()
        >>> with deltabars.distributed.alone():  # in one process, while the others do other work
        ...     fit = deltabars.fit(model, train, l2=L2, rank=10, progress=False)
    """
    token = _IS_ALONE.set(True)
    try:
        yield
    finally:
        _IS_ALONE.reset(token)


def same_everywhere(group: Group, value: Any) -> bool:
    """Return whether all processes hold the same value."""
    values = group.gather_objects(value)
    return all(other == values[0] for other in values)


def check_same_options(group: Group, values: Mapping[str, Any]) -> None:
    """Refuse options that differ between processes, before anything of their size is sent.

    Values are equal where their `repr` is. Collectives of different lengths would end the process.
    """
    if group.size == 1:
        return
    first, *others = group.gather_objects({name: repr(value) for name, value in values.items()})
    for rank, other in enumerate(others, 1):
        names = [name for name in values if other[name] != first[name]]
        if names:
            raise BadValueError(
                f"fit: expected the same options in every process, got another {', '.join(names)} "
                f"in process {rank} than in process 0. Only the data may differ."
            )


def _padded(part: Tensor, width: int) -> Tensor:
    if part.shape[1] == width:
        return part.contiguous()
    return torch.nn.functional.pad(part, (0, width - part.shape[1]))
