"""Numbers that are handed out to ranks, each to the one that asks first."""

from __future__ import annotations

import itertools
import secrets
import time

from torch.distributed import distributed_c10d

from deltabars.errors import RankError, first_line
from deltabars.ranks import Ranks

_PAUSE = 0.05  # seconds between two looks at how many are done


class Numbers:
    """0, 1, 2, …, each given to one rank only: a fast one gets more of them.

    All ranks make it together, and use it within `Ranks.together`.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._alone = itertools.count()
        self._prefix = ranks.agreed(f"deltabars/numbers/{secrets.token_hex(8)}")

    def next(self) -> int:
        """The next number that no other rank has."""
        if self._ranks.count == 1:
            return next(self._alone)
        return self._add("given", 1) - 1

    def finish(self) -> None:
        """Wait, for as long as the others live, until all ranks have come here.

        Raises:
            RankError: one of them has failed.
        """
        if self._ranks.count == 1:
            return
        self._add("done", 1)
        while self._add("done", 0) < self._ranks.count:
            self._ranks.check()
            time.sleep(_PAUSE)

    def _add(self, name: str, count: int) -> int:
        self._ranks.check()
        try:
            store = distributed_c10d._get_default_store()
            return int(store.add(f"{self._prefix}/{name}", count))
        except RuntimeError as error:
            raise RankError(
                "Ranks: expected the store of the process group, got an error "
                f"({first_line(error).rstrip('.')}): the process that holds it is gone. Start "
                "again; what is done is not done again."
            ) from error
