"""Arrays in .npz files, read without running code and within the length of the file."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from deltabars.errors import BadValueError, DataError, first_line
from deltabars.reading import check_unpacked, length_of, open_plain

_ENDING = ".npy"
_WAYS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # in which NumPy writes


def read_arrays(
    path: Path, what: str, kind: type[BadValueError] = DataError
) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name.

    Before an array is read, what its header says is compared with how long it is.

    Raises:
        BadValueError, or what `kind` is: the file is missing, broken, holds objects, or would
            unpack to far more than its length.
    """
    try:
        with open_plain(path) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            check_unpacked(sum(member.file_size for member in members), length_of(file))
            found = {_name(member): _read(archive, member) for member in members}
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


def _name(member: zipfile.ZipInfo) -> str:
    if not member.filename.endswith(_ENDING):
        raise ValueError(f"{member.filename!r} is no array")
    return member.filename.removesuffix(_ENDING)


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    if member.compress_type not in _WAYS:
        raise ValueError(f"{member.filename!r} is packed in a way that NumPy does not use")
    with archive.open(member) as start:
        length = _check_header(start, member)
    with archive.open(member) as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        if file.read(1) or array.nbytes != length:
            raise ValueError(f"{member.filename!r} does not end where it should")
    return array


def _check_header(file: Any, member: zipfile.ZipInfo) -> int:
    """The bytes of an array, from a header that agrees with how many there are."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0}
    readers[2, 0] = np.lib.format.read_array_header_2_0
    if version == (3, 0):  # as the second, but for names of fields, which none of ours has
        raise ValueError("it has named fields")
    shape, _, dtype = readers[version](file)
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        raise ValueError(f"expected numbers or texts, got {dtype}")
    there = member.file_size - file.tell()
    length = math.prod(shape) * dtype.itemsize
    if length != there or any(not 0 <= size <= member.file_size for size in shape):
        raise ValueError(f"{there:,} bytes of {member.filename!r} for an array of shape {shape}")
    if dtype.itemsize == 0 and math.prod(shape) > member.file_size:
        raise ValueError(f"an array of shape {shape} of nothing")
    return length
