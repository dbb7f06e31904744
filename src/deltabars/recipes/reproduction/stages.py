"""Stages of a long run: each is computed once and kept in a file, so that a run can go on."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deltabars.errors import BadValueError, StorageError
from deltabars.storage.reading import parse_json, read_arrays
from deltabars.storage.writing import write_text, write_whole

SECONDS = "seconds"
_IDENTITY = "run.json"

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Stages:
    """The kept stages of one run, in one folder.

    Attributes:
        folder: where their files are.
        say: told what is computed and what was kept.
    """

    folder: Path
    say: Callable[[str], None]
    _known: dict[str, Arrays] = field(default_factory=dict)

    @classmethod
    def open(
        cls, folder: Path, identity: Mapping[str, Any], say: Callable[[str], None], fresh: bool
    ) -> Stages:
        """The folder of a run; made if it is not there, emptied first if `fresh`.

        Args:
            identity: what all stages depend on, to be written as JSON. A folder of a run with
                another one is refused.
        """
        try:
            path = folder / _IDENTITY
            if not path.is_file() and folder.is_dir() and any(folder.iterdir()):
                raise BadValueError(
                    f"--out: expected a new folder or one of a run, got one with other files in "
                    f"{folder}. Name another folder."
                )
            if fresh and folder.is_dir():
                shutil.rmtree(folder)
            folder.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                _compare(_read_identity(path), json.loads(json.dumps(identity)), folder)
            else:
                write_text(path, json.dumps(identity, indent=1))
        except OSError as error:
            raise StorageError(f"Cannot write to {folder}: {error.strerror or error}.") from error
        return cls(folder, say)

    def arrays(self, name: str, compute: Callable[[], Arrays]) -> Arrays:
        """A stage whose result is arrays: read back, or computed and written.

        The seconds that it took are among them.
        """
        if name not in self._known:
            self._known[name] = self._read_or_compute(name, compute)
        return self._known[name]

    def _read_or_compute(self, name: str, compute: Callable[[], Arrays]) -> Arrays:
        path = self.folder / f"{name}.npz"
        if path.is_file():
            self.say(f"{name}: kept from before")
            return read_arrays(path, f"Stage {name} (remove it to compute it again)")
        self.say(f"{name}: computing")
        started = time.perf_counter()
        arrays = {**compute(), SECONDS: np.array(time.perf_counter() - started)}
        self.say(f"{name}: {float(arrays[SECONDS]):.1f} s")
        write_whole(path, lambda draft: np.savez_compressed(draft, **arrays))  # type: ignore[arg-type]
        return arrays


def _read_identity(path: Path) -> Mapping[str, Any]:
    try:
        kept = parse_json(path.read_text())
    except ValueError as error:  # no JSON, or no text
        raise StorageError(f"{path} is altered: {error}.") from error
    if not isinstance(kept, dict):
        raise StorageError(f"{path} is altered: it holds a {type(kept).__name__}.")
    return kept


def _compare(kept: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    for key in {**kept, **wanted}:
        if kept.get(key) != wanted.get(key):
            raise BadValueError(
                f"--out: expected a new folder or one of the same run, got {folder.parent}, which "
                f"holds a run with {key} {kept.get(key)} and not {wanted.get(key)}. Name another "
                "folder, or start anew with --fresh."
            )
