"""Files made to harm: mutations of good ones, what reads them, and a child that is watched."""

from __future__ import annotations

import gc
import gzip
import io
import json
import os
import random
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

import deltabars
from deltabars.cli import entry
from deltabars.cli.options import with_config
from deltabars.cli.runs import Kept, Run, read_kept
from deltabars.cli.sources.data import NamedData
from deltabars.cli.sources.models import NamedModel
from deltabars.errors import DeltaBarsError
from deltabars.recipes.images import read_cifar10, read_idx
from deltabars.storage import format as storage
from tests.networks import make_case
from tests.scans import idx_bytes

ABSURD = (-1, 0, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1)
LONGEST_MESSAGE = 700
_PATIENCE = 60  # seconds that a child may take


@dataclass(frozen=True)
class Subject:
    """A reader of files: its name, where the file lies, good files, and how it is read."""

    name: str
    file: str
    seeds: tuple[bytes, ...]
    read: Callable[[Path], Any]


@dataclass(frozen=True)
class Tried:
    """What became of some files: how many were read and refused, what went wrong, and memory."""

    read: int
    refused: int
    wrong: list[str]
    peak: int  # bytes above what the process had before


def mutated(seed: bytes, draw: random.Random) -> bytes:
    """A file altered in one to four ways."""
    content = bytearray(seed)
    for _ in range(draw.randint(1, 4)):
        content = bytearray(draw.choice(_WAYS)(content, draw))
    return bytes(content)


def _truncate(content: bytearray, draw: random.Random) -> bytes:
    return bytes(content[: draw.randrange(len(content) + 1)])


def _flip(content: bytearray, draw: random.Random) -> bytes:
    early = draw.random() < 0.5  # headers come first
    for _ in range(draw.randint(1, 8) if content else 0):
        place = draw.randrange(min(len(content), 400) if early else len(content))
        content[place] ^= 1 << draw.randrange(8)
    return bytes(content)


def _put_number(content: bytearray, draw: random.Random) -> bytes:
    size, place = draw.choice((2, 4, 8)), draw.randrange(min(len(content), 400) + 1)
    low = draw.choice(ABSURD) & (256**size - 1)
    content[place : place + size] = low.to_bytes(size, draw.choice(("little", "big")))
    return bytes(content)


def _splice(content: bytearray, draw: random.Random) -> bytes:
    start, length = draw.randrange(len(content) + 1), draw.randint(1, 200)
    piece = content[start : start + length]
    new = (b"", piece * draw.randint(2, 50), draw.randbytes(len(piece)))
    content[start : start + length] = draw.choice(new)
    return bytes(content)


def _tamper(content: bytearray, draw: random.Random) -> bytes:
    """JSON stays JSON, with something else in one place; of other content some bits flip."""
    try:
        tree = json.loads(bytes(content))
    except (ValueError, RecursionError):
        return _flip(content, draw)
    waiting, nodes = [tree], list[tuple[Any, Any]]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict | list):
            places = list(node) if isinstance(node, dict) else range(len(node))
            nodes += [(node, place) for place in places]
            waiting += [node[place] for place in places]
    if nodes:
        node, place = draw.choice(nodes)
        node[place] = draw.choice(_THINGS)
    return json.dumps(tree).encode()


_THINGS = (
    None, True, -1, 0, 0.5, 2**62, 10**30, 1e308, float("nan"), float("inf"), "", "x", "\0",
    "../..", "a" * 5000, [], {}, [[]], {"a": {}}, [1, -2], ["a", 1], "os:system", "/dev/zero",
)  # fmt: skip
_WAYS = (_truncate, _flip, _flip, _put_number, _splice, _splice, _tamper, _tamper, _tamper)


def every_truncation(subject: Subject, most: int) -> list[bytes]:
    """The good files cut at lengths that are spread over them."""
    return [s[: len(s) * k // most] for s in subject.seeds for k in range(most)]


def try_all(subject: Subject, contents: Iterator[bytes] | list[bytes]) -> Tried:
    """Let a child process read files, in a folder that must stay as it is."""
    return in_child(lambda: _try_all(subject, contents))


def _try_all(subject: Subject, contents: Iterator[bytes] | list[bytes]) -> tuple[int, int, list]:
    read, refused, wrong = 0, 0, []
    with tempfile.TemporaryDirectory() as outside:
        path = Path(outside) / "inside" / subject.file
        path.parent.mkdir(parents=True)
        for content in contents:
            path.write_bytes(content)
            before = sorted(str(p) for p in Path(outside).rglob("*"))
            problem = None
            try:
                subject.read(path)
                read += 1
            except DeltaBarsError as error:
                message = str(error)
                refused += 1
                if not message or "\n" in message or len(message) > LONGEST_MESSAGE:
                    problem = f"a message that is not one sentence: {message!r}"
            except BaseException as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                problem = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
            if sorted(str(p) for p in Path(outside).rglob("*")) != before:
                problem = "files were written"
            if problem is not None:
                kept = Path(tempfile.gettempdir()) / f"deltabars-hostile-{subject.name}"
                kept.write_bytes(content)
                wrong.append(f"{subject.name}: {problem}; the file: {kept}")
    return read, refused, wrong


def in_child(work: Callable[[], tuple[int, int, list]]) -> Tried:
    """Run work in a forked child, with its peak of memory; one that hangs or crashes is wrong."""
    gc.collect()  # what a child let go of would be taken for what it takes, or would hide it
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_PATIENCE)
        try:
            before = _status("VmRSS")  # the peak of a new process is what it begins with
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = work()
            answer = json.dumps([*result, _status("VmHWM") - before])
        except BaseException:
            answer = json.dumps([0, 0, [traceback.format_exc()], 0])
        with os.fdopen(writer, "w") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or not text:
        return Tried(0, 0, [f"the process ended with status {status} (14: it hung)"], 0)
    return Tried(*json.loads(text))


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def made(write: Callable[[Path], Any], name: str = "file") -> bytes:
    """The bytes that something writes to a file."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / name)
        return (Path(folder) / name).read_bytes()


def picture(kind: str) -> bytes:
    """A small picture file."""
    pixels = np.random.default_rng(0).integers(0, 255, (9, 7, 3)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def subjects() -> list[Subject]:
    """All readers, with good files."""
    case = make_case("dense")
    fit = deltabars.fit(case.model, case.data, l2=0.05, rank=4, progress=False)
    state = {name: value.float() for name, value in case.model.state_dict().items()}
    images = np.arange(5 * 28 * 28, dtype=np.uint8).reshape(5, 28, 28)
    arrays = {"inputs": np.ones((6, 4), np.float32), "targets": np.arange(6) % 3}
    prediction = fit.predict(case.unseen).to("cpu")
    names = tuple(f"picture {number}" for number in range(7))
    kept = Kept(prediction, names, torch.arange(7) % 3, NamedData("some.npz"), {"rank": 3})
    model = asdict(NamedModel("tests.networks:dense"))
    description = {"format": 1, "manifest": {"torch": "2", "options": {}}, "outputs": 3}
    description |= {"model": model, "data": asdict(NamedData("some.npz")), "classes": ["a", "b"]}
    _, commands = entry.make_parser()

    def read_fit(path: Path) -> None:
        deltabars.load(path, case.model, progress=False).predict(case.unseen)

    def read_forged(path: Path) -> None:
        """The header, altered, with a digest that is right."""
        try:
            header = dict(json.loads(path.read_bytes()))
        except (ValueError, TypeError, RecursionError) as error:
            raise DeltaBarsError("no header") from error
        with tempfile.TemporaryDirectory() as folder:
            storage.write(Path(folder) / "forged", header, tensors)
            read_fit(Path(folder) / "forged")

    def weights(path: Path) -> None:
        NamedModel("tests.networks:dense", str(path)).load()

    def pictures(path: Path) -> None:
        NamedData(str(path.parent)).load().dataset[0]

    def options(path: Path) -> None:
        with_config(["fit", "--config", str(path)], commands)

    cifar, described = bytes(2 * 3073), json.dumps(description).encode()
    whole = made(fit.save)
    predictions = made(lambda path: np.savez(path, **kept.arrays()), "a.npz")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "fit").write_bytes(whole)
        header, tensors = storage.read(Path(folder) / "fit")
    idx = idx_bytes(images)
    legacy = made(lambda path: torch.save(state, path, _use_new_zipfile_serialization=False))
    plain, packed = (
        made(lambda path, write=write: write(path, **arrays), "a.npz")
        for write in (np.savez, np.savez_compressed)
    )
    config = (
        b'l2 = {"*" = 0.01, "*.bias" = 1e-4}\nrank = 20\nout = "run"\n[fit]\nmean = [0.5, 0.2]\n'
    )
    found = [
        Subject("fit", "a.deltabars", (whole,), read_fit),
        Subject("forged-fit", "header.json", (json.dumps(header).encode(),), read_forged),
        Subject("idx", "a-idx3-ubyte", (idx, gzip.compress(idx)), read_idx),
        Subject("cifar", "test_batch.bin", (cifar,), lambda p: read_cifar10(p.parent, "test")),
        Subject("npz", "a.npz", (plain, packed), lambda path: NamedData(str(path)).load()),
        Subject("safetensors", "a.safetensors", (made(lambda p: save_file(state, p)),), weights),
        Subject("pt", "a.pt", (made(lambda path: torch.save(state, path)), legacy), weights),
        Subject("config", "c.toml", (config,), options),
        Subject("run", "run.json", (described,), lambda p: Run.open(p.parent)),
        Subject("kept", "a.npz", (predictions,), read_kept),
    ]  # fmt: skip
    for kind in ("png", "jpeg", "gif", "bmp", "tiff", "webp"):
        found.append(Subject(f"picture-{kind}", f"a.{kind}", (picture(kind),), pictures))
    return found
