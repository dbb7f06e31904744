"""Stages of a long run: each is computed once and kept in a file, so that a run can be resumed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deltabars.errors import BadValueError, StorageError
from deltabars.storage.reading import parse_json, read_arrays
from deltabars.storage.writing import write_text, write_whole

SECONDS = "seconds"

Arrays = dict[str, np.ndarray]


class Stages:
    """The kept stages of one run in one folder, which is made if it does not exist.

    Args:
        folder: where the files are.
        identity: what all stages depend on, in JSON's types. A folder with another is refused.
        say: is called with a line on what is computed and what is read.
        fresh: empty the folder first.
    """

    def __init__(
        self, folder: Path, identity: Mapping[str, Any], say: Callable[[str], None], fresh: bool
    ) -> None:
        self.folder, self.say = folder, say
        self._known: dict[str, Arrays] = {}
        path = folder / "run.json"
        try:
            if not path.is_file() and folder.is_dir() and any(folder.iterdir()):
                got = f"got one with other files in {folder}. Name another folder."
                raise BadValueError(f"--out: expected a new folder or one of a run, {got}")
            if fresh and folder.is_dir():
                shutil.rmtree(folder)
            folder.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                _check_same(path, json.loads(json.dumps(identity)))
            else:
                write_text(path, json.dumps(identity, indent=1))
        except OSError as error:
            raise StorageError(f"Cannot write to {folder}: {error.strerror or error}.") from error

    def arrays(self, name: str, compute: Callable[[], Arrays]) -> Arrays:
        """Return the arrays of a stage and the seconds it took: read, or computed and written."""
        if name in self._known:
            return self._known[name]
        path = self.folder / f"{name}.npz"
        if path.is_file():
            self.say(f"{name}: kept from before")
            arrays = read_arrays(path, f"Stage {name} (remove it to compute it again)")
        else:
            self.say(f"{name}: computing")
            started = time.perf_counter()
            arrays = {**compute(), SECONDS: np.array(time.perf_counter() - started)}
            self.say(f"{name}: {float(arrays[SECONDS]):.1f} s")
            write_whole(path, lambda draft: np.savez_compressed(draft, **arrays))  # type: ignore[arg-type]
        self._known[name] = arrays
        return arrays


def _check_same(path: Path, wanted: Mapping[str, Any]) -> None:
    try:
        kept = parse_json(path.read_text())
    except ValueError as error:  # no JSON, or no text
        raise StorageError(f"{path} is altered: {error}.") from error
    if not isinstance(kept, dict):
        raise StorageError(f"{path} is altered: it holds a {type(kept).__name__}.")
    for key in {**kept, **wanted}:
        if kept.get(key) != wanted.get(key):
            raise BadValueError(
                f"--out: expected a new folder or one of the same run, got {path.parents[1]}, "
                f"which holds a run with {key} {kept.get(key)} and not {wanted.get(key)}. Name "
                "another folder, or start anew with --fresh."
            )
