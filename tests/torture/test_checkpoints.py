"""Fits that are killed, whose files are altered, and whose disk is full, again and again."""

from __future__ import annotations

import random
import shutil
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

from deltabars.errors import CheckpointWarning
from tests.fitting.test_checkpoints import files as states
from tests.fitting.test_checkpoints import full_disk
from tests.stopping import (
    LONGER,
    WAYS,
    differing,
    end,
    fit,
    kill_after,
    killed_until_it_ends,
    start,
)

ALL = {way: given for way, given in {**WAYS, **LONGER}.items() if way != "incremental"}
STEPS = {"block_krylov": 12, "auto": 6, "ggn": 12}


def a_case(seed, number):
    """A way to fit, each in turn, with options of its own."""
    chance = random.Random(f"{seed}:{number}")
    way = list(ALL)[(seed + number) % len(ALL)]
    options = dict(ALL[way], seed=chance.randrange(1000))
    if isinstance(options["rank"], int):
        options["rank"] += chance.randrange(6)
    return chance, way, options


def test_kills(seconds_left, first_seed, tmp_path):
    """Killed at random moments until it ends; the bits are those of a fit that was not."""
    total: Counter[str] = Counter()
    number = 0
    while seconds_left() > 0:
        chance, way, options = a_case(first_seed, number)
        folder = tmp_path / str(number)
        once = fit(**options)
        count = killed_until_it_ends(folder, chance, STEPS.get(way, 60), 12, **options)
        different = differing(fit(folder, **options), once)
        assert not different, f"case {number}: {way} {options}: {different}"
        total += Counter(fits=1, kills=count.kills, with_state=count.with_state)
        shutil.rmtree(folder)
        number += 1
    print(
        f"\nkills: {total['fits']} fits killed {total['kills']} times ({total['with_state']} with "
        "a state on disk), 0 results that differ in a bit"
    )


def test_altered_files(seconds_left, first_seed, tmp_path):
    """Bytes changed, cut off, put in, or files removed or exchanged: never another result."""
    total: Counter[str] = Counter()
    number = 0
    while seconds_left() > 0:
        chance, way, options = a_case(first_seed, number)
        once = fit(**options)
        left = tmp_path / f"left {number}"
        kill_after(left, 4, **options)
        for trial in range(6):
            folder = Path(shutil.copytree(left, tmp_path / f"{number} {trial}"))
            for _ in range(chance.randint(1, 3)):
                alter(chance, folder)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", CheckpointWarning)
                different = differing(fit(folder, **options), once)
            assert not different, f"case {number}.{trial}: {way} {options}: {different}"
            total += Counter(folders=1, warned=bool(caught))
            shutil.rmtree(folder)
        shutil.rmtree(left)
        number += 1
    print(
        f"\naltered: {total['folders']} folders, {total['warned']} with a warning, 0 results that "
        "differ in a bit"
    )


def alter(chance, folder):
    """Do something to one of the files of a folder."""
    files = [path for path in states(folder) if path.stat().st_size]
    if not files:
        return
    path = chance.choice(files)
    content = bytearray(path.read_bytes())
    match chance.choice(["flip", "cut", "grow", "remove", "exchange", "zeros", "insert"]):
        case "flip":
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        case "cut":
            del content[chance.randrange(len(content)) :]
        case "grow":
            content += bytes(chance.randrange(1, 5000))
        case "remove":
            path.unlink()
            return
        case "exchange":
            content = bytearray(chance.choice(files).read_bytes())
        case "zeros":
            place = chance.randrange(len(content))
            content[place : place + 512] = bytes(len(content[place : place + 512]))
        case "insert":
            content[chance.randrange(len(content)) :] += b"x"
    path.write_bytes(content)


def test_full_disks(seconds_left, first_seed, tmp_path):
    """A disk that is full for some files, for all, or within a run that is killed as well."""
    total: Counter[str] = Counter()
    number = 0
    while seconds_left() > 0:
        chance, way, options = a_case(first_seed, number)
        folder = tmp_path / str(number)
        once = fit(**options)
        if chance.random() < 0.5:
            kill_after(folder, chance.randint(1, 4), **options)
        limit = round(10 ** chance.uniform(1, 5.5))
        pid = start(partial(in_no_room, folder, limit, options))
        assert end(pid) == 0, f"case {number}: {way} {options}, files of {limit} bytes"
        different = differing(fit(folder, **options), once)
        assert not different, f"case {number}: {way} {options}: {different}"
        total["fits"] += 1
        shutil.rmtree(folder)
        number += 1
    print(f"\nfull disks: {total['fits']} fits, 0 that failed, 0 results that differ in a bit")


def in_no_room(folder, limit, options):
    with full_disk(limit), warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        fit(folder, **options)
