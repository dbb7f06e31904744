"""Whether the other ranks are still there: heartbeats in the store of a process group."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

from torch.distributed import distributed_c10d

from deltabars.errors import DeltaBarsError, RankError, first_line

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

    def _silence(self, ranks: list[int]) -> str:
        return (
            f"Ranks: expected all {self._count} to be there, got nothing any more from "
            f"{_named(ranks)}, which was killed or has lost its connection. Start again; a "
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


def _named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
