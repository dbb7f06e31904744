"""The format of saved fits: safetensors with a JSON header. Reading a file runs no code.

The header is the entry `deltabars` of the safetensors metadata. It carries a format version and a
digest of itself and of all tensors, so that an altered file is recognised.

A fit is one file, or a folder of several:

    index.json                      which file has which columns, with the digest of each
    fit.safetensors                 the header and the small tensors
    vectors-00001-of-00004.safetensors …    a range of columns of the eigenvectors of all matrices
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deltabars.errors import CorruptFileError, FormatVersionError, StorageError, first_line
from deltabars.runtime.vectors import Part
from deltabars.storage.reading import open_plain, parse_json, read_outline, read_start
from deltabars.storage.writing import write_text, write_whole

# 2 has the scales of parameters with λs of their own; 3 eigenvectors that were rounded, or are in
# several files, and is written only where that is so.
FORMAT_VERSION, USUAL_VERSION = 3, 2
INDEX, HEAD = "index.json", "fit.safetensors"
_ENTRY, _VECTORS = "deltabars", ".vectors"
_NAME = re.compile(r"vectors-\d{5,9}-of-\d{5,9}\.safetensors")
_LONGEST_INDEX = 16 << 20
_THREADS = 4  # that digests are computed in

Header = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Content = tuple[dict[str, Any], dict[str, Tensor]]
Parts = dict[str, tuple[Part, ...]]  # all columns of the eigenvectors, in order, by matrix


def write(path: Any, header: Header, tensors: Tensors, version: int = USUAL_VERSION) -> str:
    """Write a file, whole or not at all; return its digest."""
    target = Path(path)
    if not target.parent.is_dir():
        raise StorageError(f"Cannot write {target}: the folder {target.parent} does not exist.")
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = {**header, "format": version}
    content["digest"] = _digest(content, plain)
    try:
        write_whole(
            target, lambda draft: save_file(plain, draft, metadata={_ENTRY: json.dumps(content)})
        )
    except SafetensorError as error:
        reason = str(error).rpartition("I/O error: ")[2]  # of a full disk, say
        raise StorageError(f"Cannot write {target}: {reason}.") from error
    return str(content["digest"])


def read(path: Any) -> Content:
    """Read the header and the tensors of a file.

    Raises:
        CorruptFileError: the file is not a deltabars file, truncated, or altered.
        FormatVersionError, StorageError: it is of a newer format; it cannot be opened.
    """
    header, mapped = _read_mapped(Path(path))
    del header["digest"]
    return header, _copied(mapped)


def _copied(mapped: Tensors) -> dict[str, Tensor]:
    # The file's tensors lie at any address, and the last bits of a product depend on how its
    # factors are aligned.
    return {name: tensor.clone() for name, tensor in mapped.items()}


def _read_mapped(path: Path) -> Content:
    """Read the header with its digest, which is checked, and map the tensors."""
    header, tensors = _opened(path, with_tensors=True)
    content = {name: value for name, value in header.items() if name != "digest"}
    if header.get("digest") != _digest(content, tensors):
        raise CorruptFileError(
            f"{path} is altered: its content does not match its digest. Save the fit again."
        )
    return header, tensors


def read_header(path: Any) -> dict[str, Any]:
    """Read the header alone, from a file whose length and format version are checked."""
    return _opened(Path(path), with_tensors=False)[0]


def _opened(source: Path, *, with_tensors: bool) -> Content:
    try:
        with open_plain(source) as file:
            read_outline(file)
            own = f"/dev/fd/{file.fileno()}"  # under the name there may be another file by now
            with safe_open(own if os.path.exists(own) else source, framework="pt") as content:
                text = (content.metadata() or {}).get(_ENTRY, "null")
                names = list(content.keys()) if with_tensors else []
                tensors = {name: content.get_tensor(name) for name in names}
        header = parse_json(text)
        if not isinstance(header, dict):
            raise ValueError("it has no header")
    except OSError as error:
        raise StorageError(f"Cannot read {source}: {error.strerror or error}") from error
    except ValueError as error:
        raise CorruptFileError(f"{source} is not a deltabars file.") from error
    except Exception as error:  # whatever safetensors makes of bytes that are not its own
        raise CorruptFileError(
            f"{source} is truncated or altered: it cannot be read ({first_line(error)})."
        ) from error
    _check_version(source, header.get("format"))
    return header, tensors


def _check_version(source: Path, found: Any) -> None:
    if not isinstance(found, int) or found < 1:
        raise CorruptFileError(f"{source} is altered: it has no format version.")
    if found > FORMAT_VERSION:
        raise FormatVersionError(
            f"{source} has format {found}; this version of deltabars reads up to "
            f"{FORMAT_VERSION}. Install a newer deltabars."
        )


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> str:
    digest = hashlib.blake2b(digest_size=32)
    digest.update(json.dumps(header, sort_keys=True).encode())
    for name, tensor in sorted((tensors or {}).items()):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_part(
    folder: Path, number: int, count: int, matrices: Tensors, start: int, stop: int
) -> dict[str, Any]:
    """Write columns of the eigenvectors, (K, p) by matrix; return the file's entry in the index."""
    name = f"vectors-{number:05d}-of-{count:05d}.safetensors"
    tensors = {f"{matrix}{_VECTORS}": rows for matrix, rows in matrices.items()}
    header = {"start": start, "stop": stop}
    return {
        "file": name,
        **header,
        "matrices": sorted(matrices),
        "digest": write(folder / name, header, tensors, FORMAT_VERSION),
        "bytes": sum(rows.nbytes for rows in matrices.values()),
    }


def write_index(folder: Path, header: Header, tensors: Tensors, entries: list[Any]) -> None:
    """Complete files of columns to a fit by its header, its small tensors, and the index."""
    content = {
        "format": FORMAT_VERSION,
        "fit": {"file": HEAD, "digest": write(folder / HEAD, header, tensors, FORMAT_VERSION)},
        "total_size": sum(entry["bytes"] for entry in entries),
        "parts": sorted(entries, key=lambda entry: entry["start"]),
    }
    write_text(folder / INDEX, json.dumps({**content, "digest": _digest(content)}, indent=1))


def is_fit_folder(path: Path) -> bool:
    """Return whether a folder has nothing but the files of a fit."""
    return all(name in (INDEX, HEAD) or _NAME.fullmatch(name) for name in os.listdir(path))


def read_fit(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], Parts]:
    """Read the header and the small tensors of a fit, and map its eigenvectors.

    Every file is read through, for its digest. Memory: that of the small tensors. Errors as for
    `read`; likewise where the files of a folder do not belong together.
    """
    if not os.path.isdir(path):  # so, too, for names that no file can have
        header, mapped = _read_mapped(path)
        vectors = {name: mapped.pop(name) for name in [*mapped] if name.endswith(_VECTORS)}
        return header, _copied(mapped), _joined([(path, 0, vectors)])
    entries = _read_index(path / INDEX)
    with ThreadPoolExecutor(_THREADS) as pool:
        files = list(pool.map(lambda entry: _read_mapped(path / entry[0]), entries))
    for (name, digest), (header, _) in zip(entries, files, strict=True):
        if header["digest"] != digest:
            raise CorruptFileError(f"{path / name} is altered: it is not the one of the index.")
    (header, small), *parts = files
    found = zip(entries[1:], parts, strict=True)
    joined = _joined((path / name, own.get("start"), rows) for (name, _), (own, rows) in found)
    return header, _copied(small), joined


def _read_index(path: Path) -> list[tuple[str, str]]:
    """Return the name and the digest of each file: that of the small tensors is the first."""
    try:
        content = parse_json(read_start(path, _LONGEST_INDEX))
        _check_version(path, content["format"])
        if content.pop("digest") != _digest(content):
            raise ValueError("it does not match its digest")
        entries = [(str(entry["file"]), entry["digest"]) for entry in content["parts"]]
        if not entries or not all(_NAME.fullmatch(name) for name, _ in entries):
            raise ValueError("expected the names of files of columns beside it")
        return [(HEAD, content["fit"]["digest"]), *entries]
    except OSError as error:
        raise StorageError(f"Cannot read {path}: {error.strerror or error}") from error
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CorruptFileError(
            f"{path} is altered: it cannot be read ({first_line(error)})."
        ) from error


def _joined(files: Iterable[tuple[Path, Any, Tensors]]) -> Parts:
    """Join the columns of files: each with its first column, and rows by matrix."""
    parts: dict[str, tuple[Part, ...]] = {}
    for path, start, vectors in files:
        for name, rows in vectors.items():
            matrix = name.removesuffix(_VECTORS)
            before = parts.get(matrix, ())
            done = before[-1].stop if before else 0
            if rows.ndim != 2 or start != done:
                raise CorruptFileError(
                    f"{path} is altered: expected columns from {done} on, got those from {start}."
                )
            parts[matrix] = (*before, Part(done, done + rows.shape[1], rows))
    return parts
