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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deltabars.errors import CorruptFileError, FormatVersionError, StorageError, first_line
from deltabars.runtime.vectors import Part
from deltabars.storage.reading import open_plain, parse_json, read_outline
from deltabars.storage.writing import write_text, write_whole

# 2 has the scales of parameters with λs of their own; 3 eigenvectors that were rounded, or are in
# several files, and is written only where that is so.
FORMAT_VERSION, USUAL_VERSION = 3, 2
INDEX, HEAD = "index.json", "fit.safetensors"
_ENTRY, _VECTORS = "deltabars", ".vectors"
_NAME = re.compile(r"vectors-\d{5,9}-of-\d{5,9}\.safetensors")
_LONGEST_INDEX = 16 << 20
_THREADS = 4  # that digests are computed in

Parts = dict[str, tuple[Part, ...]]  # all columns of the eigenvectors, in order, by matrix


def write(
    path: str | os.PathLike[str],
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    version: int = USUAL_VERSION,
) -> str:
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


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the header and the tensors of a file.

    Raises:
        CorruptFileError: the file is not a deltabars file, truncated, or altered.
        FormatVersionError, StorageError: it is of a newer format; it cannot be opened.
    """
    header, mapped = read_mapped(path)
    del header["digest"]
    # Copied, because the file's tensors lie at any address, and the last bits of a product depend
    # on how its factors are aligned.
    return header, {name: tensor.clone() for name, tensor in mapped.items()}


def read_mapped(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the header with its digest, and map the tensors, which stay in the file.

    The file is read through once, to see that it matches its digest. Errors as for `read`.
    """
    header, tensors = _opened(Path(path), with_tensors=True)
    content = {name: value for name, value in header.items() if name != "digest"}
    if header.get("digest") != _digest(content, tensors):
        raise CorruptFileError(
            f"{path} is altered: its content does not match its digest. Save the fit again."
        )
    return header, tensors


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the header alone, from a file whose length and format version are checked."""
    return _opened(Path(path), with_tensors=False)[0]


def _opened(source: Path, *, with_tensors: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with open_plain(source) as file:
            read_outline(file)
            own = f"/dev/fd/{file.fileno()}"  # under the name there may be another file by now
            with safe_open(own if os.path.exists(own) else source, framework="pt") as content:
                text = (content.metadata() or {}).get(_ENTRY, "null")
                names = list(content.keys()) if with_tensors else []
                tensors = {name: content.get_tensor(name) for name in names}
        header = parse_json(text)
    except OSError as error:
        raise StorageError(f"Cannot read {source}: {error.strerror or error}") from error
    except ValueError as error:
        raise CorruptFileError(f"{source} is not a deltabars file.") from error
    except Exception as error:  # whatever safetensors makes of bytes that are not its own
        raise CorruptFileError(
            f"{source} is truncated or altered: it cannot be read ({first_line(error)})."
        ) from error
    if not isinstance(header, dict):
        raise CorruptFileError(f"{source} is not a deltabars file.")
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
    folder: Path, number: int, count: int, matrices: Mapping[str, Tensor], start: int, stop: int
) -> dict[str, Any]:
    """Write the columns `start` to `stop` of the eigenvectors, (K, p) by matrix, to a file.

    It is the file `number`, from 1 on, of `count`. Return its entry in the index.
    """
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


def write_index(
    folder: Path,
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    entries: Sequence[Mapping[str, Any]],
) -> None:
    """Complete files of columns to a fit: write its header, its small tensors, and the index."""
    content = {
        "format": FORMAT_VERSION,
        "fit": {"file": HEAD, "digest": write(folder / HEAD, header, tensors, FORMAT_VERSION)},
        "total_size": sum(entry["bytes"] for entry in entries),
        "parts": sorted(entries, key=lambda entry: entry["start"]),
    }
    write_text(folder / INDEX, json.dumps({**content, "digest": _digest(content)}, indent=1))


def is_fit_folder(path: Path) -> bool:
    """Return whether a folder has an index, and nothing but the files of a fit."""
    names = set(os.listdir(path))
    return INDEX in names and all(name in (INDEX, HEAD) or _NAME.fullmatch(name) for name in names)


def read_fit(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], Parts]:
    """Read the header and the small tensors of a fit, and map its eigenvectors.

    Every file is read through, for its digest. Memory: that of the small tensors. Errors as for
    `read`; likewise where the files of a folder do not belong together.
    """
    if os.path.isdir(path):  # False for names that no file can have
        return _read_folder(path)
    header, mapped = read_mapped(path)
    small = {name: each.clone() for name, each in mapped.items() if not name.endswith(_VECTORS)}
    return header, small, {name: (part,) for name, part in _parts(mapped, 0).items()}


def _parts(mapped: Mapping[str, Tensor], start: int) -> dict[str, Part]:
    return {
        name.removesuffix(_VECTORS): Part(start, start + rows.shape[1], rows)
        for name, rows in mapped.items()
        if name.endswith(_VECTORS) and rows.ndim == 2
    }


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], Parts]:
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
        _check_version(path, content["format"])
        if content.pop("digest") != _digest(content):
            raise ValueError("it does not match its digest")
        entries = [(str(entry["file"]), entry["digest"]) for entry in content["parts"]]
        digest = content["fit"]["digest"]
        if not entries or not all(_NAME.fullmatch(name) for name, _ in entries):
            raise ValueError("expected the names of files of columns beside it")
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        reason = str(error) if type(error) is ValueError else "it cannot be read"
        raise CorruptFileError(f"{path} is altered: {reason}.") from error
    with ThreadPoolExecutor(_THREADS) as pool:
        head, *files = pool.map(
            lambda entry: _of_index(folder / entry[0], entry[1]), [(HEAD, digest), *entries]
        )
    parts: dict[str, list[Part]] = {}
    done: Any = 0
    kinds = set()
    for (name, _), (header, mapped) in zip(entries, files, strict=True):
        found, stop = _parts(mapped, done), header.get("stop")
        whole = len(found) == len(mapped) and all(part.stop == stop for part in found.values())
        if not found or not whole or header.get("start") != done:
            raise CorruptFileError(
                f"{folder / name} is altered: expected columns from {done} on, got "
                f"{header.get('start')} to {stop}."
            )
        kinds.add(tuple((name, len(p.rows), p.rows.dtype) for name, p in sorted(found.items())))
        for matrix, part in found.items():
            parts.setdefault(matrix, []).append(part)
        done = stop
    if len(kinds) > 1:
        raise CorruptFileError(
            f"{folder} is altered: its files have eigenvectors of different matrices, number or "
            "type."
        )
    small = {name: tensor.clone() for name, tensor in head[1].items()}
    return head[0], small, {matrix: tuple(own) for matrix, own in parts.items()}


def _of_index(path: Path, digest: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    header, mapped = read_mapped(path)
    if header["digest"] != digest:
        raise CorruptFileError(f"{path} is altered: it is not the one of the index.")
    return header, mapped
