"""The file format: safetensors with a JSON header. Reading a file runs no code.

The header is the entry `deltabars` of the safetensors metadata. It carries a format version and a
digest of itself and of all tensors, so that an altered file is recognised.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltabars.errors import CorruptFileError, FormatVersionError, StorageError, first_line
from deltabars.storage.reading import length_of, open_plain, parse_json, read_outline
from deltabars.storage.writing import write_whole

# 2 has the scales of parameters with λs of their own; 3 eigenvectors that were rounded, or are in
# several files, and is written only where that is so.
FORMAT_VERSION, USUAL_VERSION = 3, 2
_ENTRY = "deltabars"


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
        FormatVersionError: it was written in a newer format.
        StorageError: it cannot be opened.
    """
    source = Path(path)
    header, there = _mapped(source)
    # Copied, because the file's tensors lie at any address, and the last bits of a product depend
    # on how its factors are aligned.
    tensors = {name: tensor.clone() for name, tensor in there.items()}
    _check_digest(source, header, tensors)
    del header["digest"]
    return header, tensors


def read_mapped(
    path: str | os.PathLike[str], *, verify: bool = True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the header with its digest, and map the tensors, which stay in the file.

    Args:
        verify: whether to read the file once, to see that it matches its digest.

    Raises:
        CorruptFileError, FormatVersionError, StorageError: as for `read`.
    """
    source = Path(path)
    header, tensors = _mapped(source)
    if verify:
        _check_digest(source, header, tensors)
    return header, tensors


def _mapped(source: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with _opened(source) as file:
        header = _header(file, source)
        try:
            return header, load_file(_same(file, source))
        except Exception as error:  # whatever safetensors makes of bytes that are not its own
            raise CorruptFileError(
                f"{source} is altered: its tensors cannot be read ({first_line(error)})."
            ) from error


def _check_digest(source: Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    content = {name: value for name, value in header.items() if name != "digest"}
    if header.get("digest") != _digest(content, tensors):
        raise CorruptFileError(
            f"{source} is altered: its content does not match its digest. Save the fit again."
        )


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the header alone, from a file whose length and format version are checked."""
    source = Path(path)
    with _opened(source) as file:
        return _header(file, source)


@contextmanager
def _opened(source: Path) -> Iterator[BinaryIO]:
    try:
        file = open_plain(source)
    except OSError as error:
        raise StorageError(f"Cannot read {source}: {error.strerror or error}") from error
    with file:
        yield file


def _same(file: BinaryIO, source: Path) -> str:
    """Return a path of an open file: under its name there may be another by now."""
    own = f"/dev/fd/{file.fileno()}"
    return own if os.path.exists(own) else str(source)


def _header(file: BinaryIO, source: Path) -> dict[str, Any]:
    try:
        size = length_of(file)
        length, raw = read_outline(file)
    except OSError as error:
        raise StorageError(f"Cannot read {source}: {error.strerror or error}") from error
    except ValueError as error:
        raise CorruptFileError(f"{source} is not a deltabars file.") from error
    if len(raw) < length:
        raise CorruptFileError(f"{source} is truncated: it ends inside its header.")
    try:
        outline = parse_json(raw)
        metadata = outline.pop("__metadata__", {})
        ends = [int(entry["data_offsets"][1]) for entry in outline.values()]
        header = parse_json(metadata[_ENTRY]) if _ENTRY in metadata else None
    except (
        ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError
    ) as error:  # fmt: skip
        raise CorruptFileError(f"{source} is altered: its header cannot be read.") from error
    if not isinstance(header, dict):
        raise CorruptFileError(f"{source} is not a deltabars file.")
    found = header.get("format")
    if not isinstance(found, int) or found < 1:
        raise CorruptFileError(f"{source} is altered: its header has no format version.")
    if found > FORMAT_VERSION:
        raise FormatVersionError(
            f"{source} has format {found}; this version of deltabars reads up to "
            f"{FORMAT_VERSION}. Install a newer deltabars."
        )
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        what = "truncated" if size < expected else "altered"
        raise CorruptFileError(f"{source} is {what}: expected {expected} bytes, got {size}.")
    return header


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=32)
    digest.update(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
