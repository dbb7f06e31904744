"""Files of unknown origin: opened without waiting, parsed and unpacked within bounds."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import struct
import zipfile
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from deltabars.errors import BadValueError, DataError, first_line

# A header of safetensors: so many bytes, or this part of its file.
_HEADER, _PART = 4 << 20, 8
_VALUES = 1 << 20  # of JSON, at most: each takes up to some hundred bytes of memory
# What a packed file may unpack to: this many times its length, or this much in any case.
MOST_TIMES = 100
ALWAYS = 64 << 20


def open_plain(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file to read its bytes; an OSError for pipes and devices, which may never end."""
    try:
        # Without waiting for somebody to write to it, should it be a pipe.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except ValueError as error:  # a zero byte
        raise OSError(errno.EINVAL, "no file can have such a name") from error
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        raise OSError(
            errno.EINVAL, f"it is a {'folder' if stat.S_ISDIR(mode) else 'pipe or device'}"
        )
    return os.fdopen(number, "rb")


def length_of(file: BinaryIO) -> int:
    """Return the number of bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def read_outline(file: BinaryIO) -> tuple[int, bytes]:
    """Return the stated length of a safetensors header, and as much of it as there is.

    A ValueError where there is none, or one that is long beside what the file holds.
    """
    size, start = length_of(file), file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
    if length is None or length > max(_HEADER, size // _PART):
        raise ValueError("it has no header, or one that is far longer than its tensors need")
    return length, file.read(length)


def read_start(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the bytes of a file; a ValueError for more than `most`."""
    with open_plain(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; a ValueError where a key is there twice, or it is too deep or too long."""
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    if sum(raw.count(mark) for mark in (b"[", b"{", b",")) > _VALUES:
        raise ValueError(f"it has more than {_VALUES:,} values")
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a key twice")
    return found


def check_unpacked(unpacked: int, packed: int, always: int = ALWAYS) -> None:
    """Refuse, by a ValueError, to unpack more than `always` and far more than a file has bytes."""
    if unpacked > max(always, MOST_TIMES * packed):
        raise ValueError(
            f"its {packed:,} bytes would unpack to {unpacked:,}, more than {MOST_TIMES} times "
            "as many"
        )


def read_arrays(
    path: Path, what: str, kind: type[BadValueError] = DataError
) -> dict[str, np.ndarray]:
    """Read the arrays of an .npz file by name; an error of a `kind` where it is none, or harmful.

    The size that each array states is compared with its bytes before it is read.
    """
    try:
        with open_plain(path) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            check_unpacked(sum(member.file_size for member in members), length_of(file))
            found = {member.filename[:-4]: _read_array(archive, member) for member in members}
            if len(found) < len(members):
                raise ValueError("two arrays of one name")
            return found
    except FileNotFoundError as error:
        raise kind(f"{what}: expected an .npz file, got {path}, which does not exist.") from error
    except Exception as error:  # whatever zipfile and NumPy make of bytes that are not theirs
        raise kind(
            f"{what}: expected an .npz file, got {path}, which is truncated or is none "
            f"({first_line(error)})."
        ) from error


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    packed = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # as NumPy writes
    if not member.filename.endswith(".npy") or member.compress_type not in packed:
        raise ValueError(f"{member.filename!r} is no array of NumPy")
    with archive.open(member) as start:
        version = np.lib.format.read_magic(start)
        if version not in ((1, 0), (2, 0)):
            raise ValueError("it has named fields")
        read = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
        shape, _, dtype = read(start)
        there = member.file_size - start.tell()
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        raise ValueError(f"expected numbers or texts, got {dtype}")
    count = math.prod(shape)
    if count * dtype.itemsize != there or not 0 <= count <= member.file_size:
        raise ValueError(f"{there:,} bytes of {member.filename!r} for an array of shape {shape}")
    with archive.open(member) as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        if file.read(1):
            raise ValueError(f"{member.filename!r} does not end where it should")
    return array
