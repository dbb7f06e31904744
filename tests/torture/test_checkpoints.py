"""Fits that are killed, whose files are altered, and whose disk is full, again and again."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from deltabars.errors import CheckpointWarning, StorageError
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

ALL = {**WAYS, **LONGER}
STEPS = {"incremental": 0, "block_krylov": 12, "auto": 6, "ggn": 12}


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
        kill_after(left, STEPS.get(way, 30), **options)
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
            kill_after(folder, chance.randint(2, STEPS.get(way, 40)), **options)
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


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_a_small_disk(seconds_left, first_seed, tmp_path):
    """A real file system that fills up while the basis grows, and has room again later."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = 0
    number = 0
    while seconds_left() > 0:
        chance, way, options = a_case(first_seed, number)
        once = fit(**options)
        size = chance.randint(20, 400)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("a small disk cannot be mounted here")
        try:
            for _ in range(2):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", CheckpointWarning)
                    different = differing(fit(disk, **options), once)
                assert not different, f"case {number}: {way} {options}, {size} kB: {different}"
        finally:
            subprocess.run(["umount", str(disk)], check=True)
        done += 1
        number += 1
    print(f"\nsmall disks: {done} fits of two runs each, 0 results that differ in a bit")


PROGRAM = """\
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from tests.stopping import LONGER, WAYS, fit
fit(Path(sys.argv[1]), **{**WAYS, **LONGER}[sys.argv[2]])
"""


def test_kills_of_whole_programs(seconds_left, first_seed, tmp_path):
    """The same with a new Python each time, killed at any time of its life."""

    def begin(folder, way):
        return subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), way])

    kills = fits = 0
    while seconds_left() > 0:
        chance, way, _ = a_case(first_seed, fits)
        once, folder = fit(**ALL[way]), tmp_path / str(fits)
        began = time.monotonic()
        assert begin(tmp_path / f"alone {fits}", way).wait() == 0
        most = 0.9 * (time.monotonic() - began)
        while True:
            program = begin(folder, way)
            try:
                assert program.wait(chance.uniform(0, most)) == 0
                break
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
                kills += 1
                most *= 1.1  # it ends, however slow the machine becomes
        assert not differing(fit(folder, **ALL[way]), once)
        fits += 1
    print(f"\nwhole programs: {fits} fits killed {kills} times, 0 results that differ in a bit")


def test_a_crowd(seconds_left, first_seed, tmp_path):
    """Processes that all want one folder, some of which are killed: it stays whole."""
    rounds = refused = 0
    while seconds_left() > 0:
        chance, way, options = a_case(first_seed, rounds)
        once, folder = fit(**options), tmp_path / str(rounds)

        def work(folder=folder, options=options):
            try:
                fit(folder, **options)
            except StorageError:
                os._exit(3)

        crowd = [start(work) for _ in range(5)]
        for pid in crowd[:3]:
            time.sleep(chance.uniform(0, 0.2))
            os.kill(pid, 9)
        refused += sum(end(pid) == 3 for pid in crowd)
        different = differing(fit(folder, **options), once)
        assert not different, f"round {rounds}: {way} {options}: {different}"
        rounds += 1
    print(
        f"\ncrowds: {rounds} crowds of 5 processes, {refused} refused, 0 results that differ in "
        "a bit"
    )
