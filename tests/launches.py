"""Commands in several processes at once, as a launcher starts them, and data that they share."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow.dataset
import pyarrow.parquet

from deltabars.cli.entry import main
from tests.stopping import end, start

ROOT = Path(__file__).resolve().parents[1]
# Inputs that are made when they are asked for; each time one is, its number and process are noted.
DATA = """\
import os, time, torch
from torch.utils.data import DataLoader, Dataset

class Made(Dataset):
    def __init__(self, count, log="", pause=0.0, fails_at=None):
        self.count, self.log, self.pause, self.fails_at = count, log, pause, fails_at

    __len__ = lambda self: self.count

    def __getitem__(self, number):
        if number == self.fails_at:
            raise FileNotFoundError(2, "No such file or directory", f"{number}.png")
        time.sleep(self.pause)
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{os.environ.get('RANK', '0')} {number}\\n")
        generator = torch.Generator().manual_seed(number)
        return torch.rand(1, 8, 8, generator=generator), number % 10

def loader(count, batch_size=5, **options):
    return DataLoader(Made(count, **options), batch_size=batch_size)
"""


def launch(count: int, arguments: list[object], said: Path, **environment: str) -> list[int]:
    """A command in several processes without an agent; what each says goes to `said`.RANK."""
    return launch_all(count, lambda _: main([str(each) for each in arguments]), said, environment)


def launch_all(
    count: int, work: Callable[[int], int], said: Path, environment: Mapping[str, str]
) -> list[int]:
    """The same of anything that returns an exit status: `work(rank)`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def one(rank: int) -> None:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), **shared, **environment})
        with open(f"{said}.{rank}", "w", buffering=1) as file:
            os.dup2(file.fileno(), 2)  # torch's own library writes there too
            sys.stdout = sys.stderr = file
            os._exit(work(rank))

    return [start(lambda rank=rank: one(rank)) for rank in range(count)]


def ended(pids: list[int]) -> list[int]:
    """The exit statuses of processes, when all have ended."""
    return [end(pid) for pid in pids]


def rows_of(folder: Path) -> list[dict[str, object]]:
    """The rows of a folder, read as a user would."""
    return pyarrow.dataset.dataset(folder).to_table().to_pylist()


def times_each(rows: list[Mapping[str, object]], count: int) -> set[int]:
    """How often inputs 0 … count − 1 occur; {1} if each does once, and no other one."""
    numbers = [row["number"] for row in rows]
    return {numbers.count(number) for number in {*range(count), *numbers}}
