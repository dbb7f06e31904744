"""A fit in a folder: eigenvectors in several safetensors files, with an index of them.

FOLDER/index.json                              which file has which columns, and its digest
FOLDER/fit.safetensors                         the header and all that is small
FOLDER/vectors-00001-of-00004.safetensors …    columns of the eigenvectors, of each matrix (K, p)

Files hold ranges of parameters, so that each process of a distributed fit can write its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from deltabars import storage
from deltabars.errors import CorruptFileError, FormatVersionError, StorageError
from deltabars.reading import open_plain, parse_json
from deltabars.vectors import Part
from deltabars.writing import write_text

INDEX, HEAD = "index.json", "fit.safetensors"
_NAME = re.compile(r"vectors-\d{5,9}-of-\d{5,9}\.safetensors")
_LONGEST_INDEX = 16 << 20
_THREADS = 4  # that digests are computed in


@dataclass(frozen=True)
class PartEntry:
    """What the index says of one file.

    Attributes:
        file: its name.
        start, stop: which columns it has.
        matrices: whose eigenvectors.
        digest: of the file.
        bytes: of its tensors.
    """

    file: str
    start: int
    stop: int
    matrices: tuple[str, ...]
    digest: str
    bytes: int


def write_part(
    folder: Path,
    number: int,
    count: int,
    matrices: Mapping[str, Tensor],
    start: int,
    stop: int,
) -> PartEntry:
    """Write the columns `start` to `stop` of the eigenvectors, (K, p) by matrix, to a file.

    Args:
        folder: where; it exists.
        number, count: the file's number, from 1 on, of so many.

    Returns:
        What `write_index` needs to know of it.
    """
    name = f"vectors-{number:05d}-of-{count:05d}.safetensors"
    tensors = {f"{matrix}.vectors": rows for matrix, rows in matrices.items()}
    digest = storage.write(
        folder / name, {"start": start, "stop": stop}, tensors, storage.FORMAT_VERSION
    )
    held = sum(rows.numel() * rows.element_size() for rows in matrices.values())
    return PartEntry(name, start, stop, tuple(sorted(matrices)), digest, held)


def write_index(
    folder: Path,
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    parts: Sequence[PartEntry],
) -> None:
    """Write what makes files of columns a fit: its header, its small tensors, and the index.

    Args:
        parts: of all files, in any order.
    """
    ordered = sorted(parts, key=lambda part: part.start)
    digest = storage.write(folder / HEAD, header, tensors, storage.FORMAT_VERSION)
    content: dict[str, Any] = {
        "format": storage.FORMAT_VERSION,
        "fit": {"file": HEAD, "digest": digest},
        "total_size": sum(part.bytes for part in ordered),
        "parts": [asdict(part) for part in ordered],
    }
    content["digest"] = _digest(content)
    write_text(folder / INDEX, json.dumps(content, indent=1))


def is_fit_folder(path: Path) -> bool:
    """Whether a folder has an index, and nothing but what a fit has."""
    try:
        names = set(os.listdir(path))
    except OSError:
        return False
    return INDEX in names and all(name in (INDEX, HEAD) or _NAME.fullmatch(name) for name in names)


def read(
    folder: Path,
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, tuple[Part, ...]]]:
    """The header, the small tensors, and the parts of each matrix's eigenvectors, mapped.

    Every file is read through, for its digest. Memory: that of the small tensors.

    Raises:
        CorruptFileError: the index or a file is altered, or they do not belong together.
        FormatVersionError: it was written in a newer format.
        StorageError: a file cannot be opened.
    """
    digest, entries = _index(folder)
    header, there = storage.read_mapped(folder / HEAD)
    tensors = {name: tensor.clone() for name, tensor in there.items()}
    if header.pop("digest") != digest:
        raise CorruptFileError(f"{folder / HEAD} is altered: it is not the one of the index.")
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda entry: _part(folder, entry), entries))
    parts: dict[str, tuple[Part, ...]] = {
        matrix: tuple(part[matrix] for part in found) for matrix in (found[0] if found else {})
    }
    for matrix, own in parts.items():
        if len({(len(part.rows), part.rows.dtype) for part in own}) > 1:
            raise CorruptFileError(
                f"{folder} is altered: its files have eigenvectors of the {matrix} that differ in "
                "number or type."
            )
    return header, tensors, parts


@dataclass(frozen=True, eq=False)
class MappedPart(Part):
    """Columns that are mapped from a file; a pickle has the name of that, and not the numbers.

    Attributes:
        path: the file.
        name: of the tensor in it.
        digest: of the file.
    """

    path: str = ""
    name: str = ""
    digest: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.path, self.name, self.digest, self.start, self.stop)


def _reopened(path: str, name: str, digest: str, start: int, stop: int) -> MappedPart:
    """The columns of a file that was open in another process. Its numbers are not read."""
    header, tensors = storage.read_mapped(path, verify=False)
    if header.get("digest") != digest or name not in tensors:
        raise StorageError(
            f"{path}: expected the file that the fit was loaded from, got another. Load it again."
        )
    return MappedPart(start, stop, tensors[name], os.path.abspath(path), name, digest)


def map_one(path: Any, header: Mapping[str, Any], name: str, rows: Tensor) -> MappedPart:
    """All columns of eigenvectors in a fit of one file, mapped from it."""
    own = os.path.abspath(path)
    return MappedPart(0, rows.shape[1], rows, own, name, str(header["digest"]))


def _part(folder: Path, entry: PartEntry) -> dict[str, MappedPart]:
    path = folder / entry.file
    header, tensors = storage.read_mapped(path)
    same = (header["digest"], header.get("start"), header.get("stop"))
    names = {f"{matrix}.vectors": matrix for matrix in entry.matrices}
    width = entry.stop - entry.start
    shaped = all(rows.ndim == 2 and rows.shape[1] == width for rows in tensors.values())
    if same != (entry.digest, entry.start, entry.stop) or set(tensors) != set(names) or not shaped:
        raise CorruptFileError(f"{path} is altered: it is not the one of the index.")
    own = os.path.abspath(path)
    return {
        matrix: MappedPart(entry.start, entry.stop, tensors[name], own, name, entry.digest)
        for name, matrix in names.items()
    }


def _index(folder: Path) -> tuple[str, list[PartEntry]]:
    """The digest of the small file, and what there is of columns, in their order, all of them."""
    path = folder / INDEX
    try:
        with open_plain(path) as file:
            raw = file.read(_LONGEST_INDEX + 1)
    except OSError as error:
        raise StorageError(f"Cannot read {path}: {error.strerror or error}") from error
    try:
        if len(raw) > _LONGEST_INDEX:
            raise ValueError("it is too long")
        content = parse_json(raw)
        version = content["format"]
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ValueError("it has no format version")
        if version > storage.FORMAT_VERSION:
            raise FormatVersionError(
                f"{path} has format {version}; this version of deltabars reads up to "
                f"{storage.FORMAT_VERSION}. Install a newer deltabars."
            )
        if content.pop("digest") != _digest(content):
            raise ValueError("it does not match its digest")
        entries = [_entry(raw) for raw in content["parts"]]
        digest = content["fit"]["digest"]
        if not isinstance(digest, str) or content["fit"]["file"] != HEAD:
            raise ValueError("it names another file of the fit")
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CorruptFileError(f"{path} is altered: {_reason(error)}.") from error
    done = 0
    for entry in entries:
        if entry.start != done or entry.matrices != entries[0].matrices:
            raise CorruptFileError(
                f"{path} is altered: expected columns from {done} on, of the same matrices in "
                f"every file, got {entry.start} to {entry.stop}."
            )
        done = entry.stop
    if not entries or len({entry.file for entry in entries}) < len(entries):
        raise CorruptFileError(f"{path} is altered: expected files of columns, each of them once.")
    return digest, entries


def _entry(raw: Any) -> PartEntry:
    entry = PartEntry(**{**raw, "matrices": tuple(raw["matrices"])})
    numbers = (entry.start, entry.stop, entry.bytes)
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise TypeError("its numbers are none")
    if not isinstance(entry.file, str) or not _NAME.fullmatch(entry.file):
        raise ValueError("it names a file that is not beside it")
    if not 0 <= entry.start < entry.stop < 1 << 62:
        raise ValueError("it has columns that cannot be")
    if not entry.matrices or not all(isinstance(name, str) for name in entry.matrices):
        raise ValueError("it has matrices that cannot be")
    return entry


def _reason(error: BaseException) -> str:
    return str(error) if type(error) is ValueError else "it cannot be read"


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=32).hexdigest()
