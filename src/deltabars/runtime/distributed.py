"""Which columns of long rows are whose."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from deltabars.errors import BadValueError, DeltaBarsError, RankError, first_line, option


@dataclass(frozen=True)
class Columns:
    """Which columns of (b, P) each rank has: contiguous ranges, in the order of the ranks.

    Attributes:
        bounds: where they begin, and P: (R + 1,).
        rank: whose they are here.
    """

    bounds: tuple[int, ...]
    rank: int = 0

    @classmethod
    def even(cls, size: int, group: Group) -> Columns:
        """Ranges of one length, but for the last ones."""
        each = -(-size // group.size)
        return cls(tuple(min(each * k, size) for k in range(group.size + 1)), group.rank)

    @property
    def own(self) -> slice:
        """The range of this rank."""
        return slice(self.bounds[self.rank], self.bounds[self.rank + 1])

    @property
    def widths(self) -> list[int]:
        """How many columns each rank has."""
        return [b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)]

    def among(self, places: Tensor | None) -> Columns:
        """The same ranges of the columns at some places (P',), ascending; of all if None."""
        if places is None:
            return self
        bounds = torch.searchsorted(places.cpu(), torch.tensor(self.bounds)).tolist()
        return Columns(tuple(bounds), self.rank)


_BEAT = 0.5  # seconds
_SILENCE = 30.0  # seconds without a beat after which the next rank counts as dead
_ARRIVAL = 300.0  # seconds that the next rank may come later than this one
_SHORT_SILENCE = 4.0  # likewise of any rank, when a message has failed
_OVER = "over"  # the last beat of a rank that is done


class Watch:
    """The heartbeat of one rank, which listens to that of the next one.

    What one rank says or finds out all others read from the store within a second.

    Attributes:
        messages: that this rank has begun to send, for those who ask who is behind.
    """

    def __init__(self, rank: int, count: int, session: str) -> None:
        self.messages = 0
        self._rank, self._count = rank, count
        self._prefix = f"deltabars/{session}"
        self._store = distributed_c10d.PrefixStore(self._prefix, _store())
        self._failure: str | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="deltabars-watch", daemon=True)
        self._beats = 0
        self._beat()
        self._thread.start()

    def check(self) -> None:
        """Raise what has become of another rank, if anything has."""
        if self._failure is not None:
            raise RankError(self._failure)

    def tell(self, error: BaseException) -> None:
        """Say to the others that this rank has failed, and of what."""
        if isinstance(error, RankError):  # they have it from where this rank has it
            return
        kind = "" if isinstance(error, DeltaBarsError) else f"{type(error).__name__}: "
        self._publish(
            f"Ranks: expected all {self._count} to go on, got an error on rank {self._rank}: "
            f"{kind}{' '.join(str(error).split())}"
        )

    def find_out(self) -> None:
        """After a message that failed: raise which rank is to blame, if that can be found out."""
        before = self._all_beats()
        ends = time.monotonic() + _SHORT_SILENCE
        while time.monotonic() < ends:
            self.check()
            time.sleep(_BEAT / 2)
        after = self._all_beats()
        silent = [
            rank
            for rank, (beat, _) in after.items()
            if beat != _OVER and beat == before.get(rank, (beat,))[0]
        ]
        behind = [rank for rank in after if after[rank][1] < self.messages]
        if silent:
            self._publish(self._silence(silent))
        elif behind:
            self._publish(
                f"Ranks: expected all {self._count} to come to the same message, got none from "
                f"{_named(behind)} in time. Look for what holds it up, such as data that cannot be "
                "read, or allow more time."
            )
        self.check()

    def stop(self) -> None:
        """End the heartbeat."""
        self._is_over.set()
        self._thread.join()
        with suppress(Exception):  # a store that is gone needs no farewell
            self._store.set(f"beat/{self._rank}", f"{_OVER}:{self.messages}")

    def _listen(self) -> None:
        other = (self._rank + 1) % self._count
        heard, since = "", time.monotonic()
        while not self._is_over.wait(_BEAT):
            try:
                self._beat()
                if self._store.check(["failed"]):
                    self._failure = self._store.get("failed").decode()
                    return
                beat = self._read(other)[0]
            except Exception as error:  # the store lives in one of the processes
                self._failure = (
                    "Ranks: expected the store of the process group, got an error "
                    f"({first_line(error).rstrip('.')}): the process that holds it is gone, rank 0 "
                    "as a rule. Start again; a checkpoint is gone on with."
                )
                return
            now = time.monotonic()
            if beat != heard:
                heard, since = beat, now
            elif heard != _OVER and now - since > (_SILENCE if heard else _ARRIVAL):
                self._publish(self._silence([other]) if heard else self._absence(other))

    def _silence(self, group: list[int]) -> str:
        return (
            f"Ranks: expected all {self._count} to be there, got nothing any more from "
            f"{_named(group)}, which was killed or has lost its connection. Start again; a "
            "checkpoint is gone on with, on fewer ranks if need be."
        )

    def _absence(self, rank: int) -> str:
        return (
            f"Ranks: expected all {self._count} to come to the same call, got nothing from "
            f"{_named([rank])} so far. Call it on every rank, or on one within "
            "deltabars.ranks.alone()."
        )

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self._rank}", f"{self._beats}:{self.messages}")

    def _publish(self, failure: str) -> None:
        """The first failure that is told is the one that counts."""
        try:
            self._failure = self._store.compare_set("failed", "", failure).decode()
        except Exception:  # without a store nobody can be told, and the others notice that too
            self._failure = failure

    def _read(self, rank: int) -> tuple[str, int]:
        key = f"beat/{rank}"
        if not self._store.check([key]):
            return "", 0
        beat, _, messages = self._store.get(key).decode().partition(":")
        return beat, int(messages)

    def _all_beats(self) -> dict[int, tuple[str, int]]:
        try:
            return {k: self._read(k) for k in range(self._count) if k != self._rank}
        except Exception:
            return {}


def _store() -> Any:
    """The store of the default process group, by a connection of its own."""
    store = distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def _named(group: list[int]) -> str:
    return ("rank " if len(group) == 1 else "ranks ") + ", ".join(map(str, group))


# torch 2.13 has other names for them.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_FAREWELL = 1.5  # seconds
_LONGEST_NAP = 2e-3  # seconds between two looks at a message that is under way


class Group:
    """One process alone: everything that has to be shared is shared already.

    Attributes:
        rank: of this process, 0 to size − 1.
        size: how many there are.
        messages: how many collective operations there were.
        bytes: that this rank has given into them.
    """

    rank = 0
    size = 1

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


class _ProcessGroup(Group):
    """The ranks of the default process group."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
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
        watch = Watch(self.rank, self.size, f"{self._number}/{self._sessions}")
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
        sizes = torch.empty(self.size, dtype=torch.int64, device=own.device)
        self._send(_GATHER, sizes, torch.tensor([len(own)], device=own.device))
        sent = _padded(own[None], int(sizes.max()))
        held = sent.new_empty(self.size, sent.shape[1])
        self._send(_GATHER, held, sent)
        return [_object(part[:size]) for part, size in zip(held, sizes.tolist(), strict=True)]

    def all_columns(self, part: Tensor, columns: Columns) -> Tensor:
        rows, widths = part.shape[0], columns.widths
        self._check_device(part)
        sent = _padded(part, max(widths))
        found = sent.new_empty(self.size * rows, max(widths))
        self._send(_GATHER, found, sent)
        parts = found.view(self.size, rows, max(widths))
        return torch.cat([each[:, :width] for each, width in zip(parts, widths, strict=True)], 1)

    def summed_columns(self, whole: Tensor, columns: Columns) -> Tensor:
        widths = columns.widths
        if not (self._has_nccl and whole.is_cuda):  # Gloo's own is an all-reduce and more
            return self.sum_(whole)[:, columns.own].contiguous()
        sent = whole.new_zeros(self.size, len(whole), max(widths))
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
                f"Ranks: expected a message between {self.size} of them, got an error "
                f"({first_line(error).rstrip('.')}). Look at the output of the others."
            ) from error


def current_group() -> Group:
    """The ranks of torch's default process group; one that is alone without a group."""
    if _IS_ALONE.get() or not (dist.is_available() and dist.is_initialized()):
        return Group()
    if dist.get_world_size() == 1:
        return Group()
    group = dist.group.WORLD
    found = _GROUPS.get(id(group))
    if found is None or found[0] is not group:
        _GROUPS.clear()  # those of groups that are no more
        found = _GROUPS[id(group)] = (group, _ProcessGroup())
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
_GROUPS: dict[int, tuple[Any, _ProcessGroup]] = {}
_IS_ALONE: ContextVar[bool] = ContextVar("deltabars_alone", default=False)


def _object(held: Tensor) -> Any:
    return pickle.loads(held.cpu().numpy().tobytes())  # from ranks of one launch, as torch does it


def _padded(part: Tensor, width: int) -> Tensor:
    if part.shape[1] == width:
        return part.contiguous()
    return torch.nn.functional.pad(part, (0, width - part.shape[1]))


def same_everywhere(group: Group, value: Any) -> bool:
    """Whether all ranks have the same value."""
    values: Sequence[Any] = group.gather(value)
    return all(other == values[0] for other in values)


def check_same_options(group: Group, values: Mapping[str, Any]) -> None:
    """Refuse other values on one rank than on another, before anything of their size is sent.

    Messages of different lengths would end the process.

    Args:
        values: by name; those are the same whose `repr` is.
    """
    digests = {
        name: hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
        for name, value in values.items()
    }
    first, *others = group.gather(digests)
    for rank, other in enumerate(others, 1):
        names = [name for name in values if other[name] != first[name]]
        if names:
            raise BadValueError(
                f"fit: expected the same options on every rank, got another {', '.join(names)} on "
                f"rank {rank} than on rank 0. Only the data may differ."
            )


_PAUSE = 0.05  # seconds between two looks at how many are done


class Numbers:
    """0, 1, 2, …, each given to one rank only: a fast one gets more of them.

    All ranks make it together, and use it within `Ranks.together`.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._alone = itertools.count()
        self._prefix = group.agreed(f"deltabars/numbers/{secrets.token_hex(8)}")

    def next(self) -> int:
        """The next number that no other rank has."""
        if self._group.size == 1:
            return next(self._alone)
        return self._add("given", 1) - 1

    def finish(self) -> None:
        """Wait, for as long as the others live, until all ranks have come here.

        Raises:
            RankError: one of them has failed.
        """
        if self._group.size == 1:
            return
        self._add("done", 1)
        while self._add("done", 0) < self._group.size:
            self._group.check()
            time.sleep(_PAUSE)

    def _add(self, name: str, count: int) -> int:
        self._group.check()
        try:
            store = distributed_c10d._get_default_store()
            return int(store.add(f"{self._prefix}/{name}", count))
        except RuntimeError as error:
            raise RankError(
                "Ranks: expected the store of the process group, got an error "
                f"({first_line(error).rstrip('.')}): the process that holds it is gone. Start "
                "again; what is done is not done again."
            ) from error
