"""Eigenvectors in files: in a shorter type, with the loss measured, and in several files."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltabars.errors import BadValueError, CorruptFileError, FormatVersionError, StorageError
from deltabars.runtime.vectors import (
    Basis,
    Part,
    PartedVectors,
    ShardedVectors,
    add_inner,
    columns,
    ranges,
)
from deltabars.storage import format as storage
from deltabars.storage.reading import open_plain, parse_json
from deltabars.storage.writing import write_text

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_ROUNDING_UP = 1 + 1e-3  # of norms that are computed in float32 and float64


def stored_dtype(asked: Any, vectors: Basis) -> torch.dtype:
    """Return the type to store eigenvectors in: the one asked for, or their own.

    Raises:
        BadValueError: it is none of float64, float32, bfloat16 and float16.
    """
    if asked is None:
        return vectors.stored if isinstance(vectors, PartedVectors) else vectors.dtype
    found = DTYPES.get(asked) if isinstance(asked, str) else asked
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        raise BadValueError(
            f"dtype: expected None or one of {', '.join(DTYPES)}, got {asked!r}. None stores the "
            "eigenvectors as they are."
        )
    return found


def rounded(vectors: Basis, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Round the columns `start` to `stop` to a type, (K, p), on the CPU; block by block."""
    count, _ = vectors.shape
    result = torch.empty(count, stop - start, dtype=dtype)
    for indices in _blocks(vectors, start, stop):
        result[:, indices.start - start : indices.stop - start] = columns(vectors, indices).to(
            dtype
        )
    return result


def measured_loss(vectors: Basis, dtype: torch.dtype) -> dict[str, float]:
    """Measure what eigenvectors Q lose when they are stored as Q̃, rounded to a type.

    Returns:
        `norm`: ‖Q̃ − Q‖₂, which no projection of a vector f is further off than, times ‖f‖;
        `orthogonality`: the largest entry of |Q̃Q̃ᵀ − I|. Empty where nothing is lost.

    Cost: 4·K²·P operations; memory: a block of columns three times.
    """
    part = vectors.part if isinstance(vectors, ShardedVectors) else vectors
    sums = loss_sums(part, dtype)
    if sums is None:
        return {}
    return loss_of(
        vectors.space.group.all_reduce_(sums) if isinstance(vectors, ShardedVectors) else sums
    )


def loss_sums(vectors: Basis, dtype: torch.dtype) -> Tensor | None:
    """Sum (Q̃ − Q)(Q̃ − Q)ᵀ and Q̃Q̃ᵀ over columns, (2, K, K), float64; None where nothing is lost.

    Sums over several ranges of columns add up.
    """
    if torch.promote_types(dtype, vectors.dtype) == dtype:
        return None
    count, size = vectors.shape
    sums = torch.zeros(2, count, count, dtype=torch.float64, device=vectors.device)
    for indices in _blocks(vectors, 0, size):
        exact = columns(vectors, indices)
        there = exact.to(dtype).to(exact.dtype)
        gap = there - exact
        add_inner(sums[0], gap, gap)
        add_inner(sums[1], there, there)
    return sums


def loss_of(sums: Tensor) -> dict[str, float]:
    """Return what `measured_loss` does, from the sums over all columns."""
    norm = float(torch.linalg.eigvalsh(sums[0])[-1].clamp(min=0).sqrt())
    if norm == 0:
        return {}
    beside = sums[1] - torch.eye(sums.shape[1], dtype=sums.dtype, device=sums.device)
    return {"norm": norm * _ROUNDING_UP, "orthogonality": float(beside.abs().max())}


def _blocks(vectors: Basis, start: int, stop: int) -> Iterator[slice]:
    width = max(1, vectors.shape[0] * vectors.dtype.itemsize)
    return ranges(start, stop, width, vectors.device)


INDEX, HEAD = "index.json", "fit.safetensors"
_NAME = re.compile(r"vectors-\d{5,9}-of-\d{5,9}\.safetensors")
_LONGEST_INDEX = 16 << 20
_THREADS = 4  # that digests are computed in


@dataclass(frozen=True)
class PartEntry:
    """One file of columns, as the index has it.

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
    """Complete files of columns to a fit: write its header, its small tensors, and the index.

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
    """Return whether a folder has an index, and nothing but the files of a fit."""
    try:
        names = set(os.listdir(path))
    except OSError:
        return False
    return INDEX in names and all(name in (INDEX, HEAD) or _NAME.fullmatch(name) for name in names)


def read(
    folder: Path,
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, tuple[Part, ...]]]:
    """Read the header and the small tensors, and map the parts of each matrix's eigenvectors.

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
    """Columns that are mapped from a file; a pickle has its name, and not the numbers.

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
    """Map the columns of a file that was open in another process, without reading them."""
    header, tensors = storage.read_mapped(path, verify=False)
    if header.get("digest") != digest or name not in tensors:
        raise StorageError(
            f"{path}: expected the file that the fit was loaded from, got another. Load it again."
        )
    return MappedPart(start, stop, tensors[name], os.path.abspath(path), name, digest)


def map_one(path: Any, header: Mapping[str, Any], name: str, rows: Tensor) -> MappedPart:
    """Return all columns of eigenvectors in a fit of one file, mapped from it."""
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
    """Read the digest of the small file, and the files of columns, in order and complete."""
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
