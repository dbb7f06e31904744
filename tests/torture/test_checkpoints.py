"""Fits that are killed, whose files are altered, and whose disk is full, again and again.

Whatever happens, what the folder gives in the end has the bits of a fit that nothing happened to.
"""

from __future__ import annotations

import random
import shutil
import warnings
from functools import partial

import pytest

from deltabars.errors import CheckpointWarning
from tests.fitting.test_checkpoints import files
from tests.hostile import mutated
from tests.stopping import (
    LONGER,
    WAYS,
    differing,
    end,
    fit,
    full_disk,
    kill_after,
    killed_until_it_ends,
    start,
)

ALL = {way: given for way, given in {**WAYS, **LONGER}.items() if way != "incremental"}
STEPS = {"block_krylov": 12, "auto": 6, "ggn": 12}


def killed(chance, way, folder, options):
    """Kill it at random moments until it ends."""
    kills, _ = killed_until_it_ends(folder, chance, STEPS.get(way, 60), 12, **options)
    return f"{kills} kills"


def altered(chance, way, folder, options):
    """Change, remove or exchange files of a killed fit."""
    kill_after(folder, 4, **options)
    for _ in range(chance.randint(1, 3)):
        contents = files(folder)
        path, other = (chance.choice(sorted(contents)) for _ in range(2))
        match chance.choice(["mutate", "mutate", "mutate", "remove", "exchange"]):
            case "mutate":
                path.write_bytes(mutated(contents[path], chance))
            case "remove" if len(contents) > 1:
                path.unlink()
            case _:
                path.write_bytes(contents[other])
    return "altered"


def in_no_room(chance, way, folder, options):
    """Let it run on a disk that is full for some files or for all, perhaps killed before."""
    if chance.random() < 0.5:
        kill_after(folder, chance.randint(1, 4), **options)
    pid = start(partial(_limited, folder, round(10 ** chance.uniform(1, 5.5)), options))
    assert end(pid) == 0
    return "full disk"


def _limited(folder, limit, options):
    with full_disk(limit), warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        fit(folder, **options)


@pytest.mark.parametrize("harm", [killed, altered, in_no_room])
def test_fits_in_a_folder(harm, seconds_left, seeds, tmp_path):
    count, said = 0, []
    for seed in seeds:
        chance, way, folder = random.Random(seed), list(ALL)[seed % len(ALL)], tmp_path / str(seed)
        options = dict(ALL[way], seed=chance.randrange(1000))
        if isinstance(options["rank"], int):
            options["rank"] += chance.randrange(6)
        once = fit(**options)
        said.append(harm(chance, way, folder, options))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            different = differing(fit(folder, **options), once)
        assert not different, f"{seed}: {way} {options}: {different}"
        shutil.rmtree(folder)
        count += 1
    print(f"\n{harm.__name__}: {count} fits ({', '.join(said)}), 0 results that differ in a bit")
