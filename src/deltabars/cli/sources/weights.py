"""Tensors by name from files of weights: read by safetensors and torch, and nothing of them is run.

Before torch reads a file, the names in its pickle and its length are looked at: what torch does not
know is replaced by an object that does nothing, such as the optimisers and hyperparameters that
training frameworks put beside the weights, and what asks for far more memory is refused.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import re
import zipfile
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from deltabars.errors import ModelError, first_line, shortened
from deltabars.storage.reading import length_of, open_plain, read_outline

_PICKLED = (".pt", ".pth", ".ckpt", ".bin")
# Where training programs put the weights, beside other things.
_INNER = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "weights")
_DEEPEST = 4  # of them in one another
# Steps of a pickle: so many in any case, and one for so many bytes of the file.
_STEPS, _BYTES_A_STEP = 1 << 18, 16
_PICKLES_OF_A_STREAM = 5  # of torch.save before its files were archives
# What torch would call for bytes of any stated number, or for more of them at each call.
_TAKES_MEMORY = re.compile(
    r"(?i)\w+ bytearray|(base[\W_]?64|bz2|hex|quopri|quoted\W?printable|uu|zip|zlib)([\W_]codec)?"
)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a weights file by name, on the CPU. Reading it runs no code.

    Raises:
        ModelError: the file is missing, broken, of another kind, or holds no state dict.
    """
    source = Path(path)
    if not os.path.isfile(source):  # also of a name that no file can have
        raise ModelError(f"--weights: expected a file, got {source}, which does not exist.")
    if source.suffix not in (".safetensors", *_PICKLED):
        raise ModelError(
            f"--weights: expected a .ckpt, a .bin, or a file that ends in .safetensors, .pt or "
            f".pth, got {source.name}."
        )
    is_pickled = source.suffix in _PICKLED
    try:
        with open_plain(source) as file:
            if is_pickled:
                content = _read_pickled(file)
            else:
                read_outline(file)
                content = load_file(source)
    except Exception as error:  # whatever becomes of bytes that mean nothing
        kind = "file of torch.save" if is_pickled else "safetensors file"
        raise ModelError(
            f"--weights: expected a {kind}, got {source}, which is broken or is none "
            f"({first_line(error).rstrip('.')})."
        ) from error
    for _ in range(_DEEPEST):
        inside = [key for key in _INNER if _is_dict(content) and _is_dict(content.get(key))]
        content = content[inside[0]] if inside else content
    found = f"a {type(content).__name__}"
    if _is_dict(content):
        other = [name for name, value in content.items() if not _is_plain(value)]
        if not other:
            return dict(content)
        found = f"{shortened(repr(other[0]))}, a tensor without values in the file, or none at all"
    elif isinstance(content, _Inert):
        found = "an object of a class, which would run code when read"
    raise ModelError(
        f"--weights: expected a state dict in {source}, by itself or under one of "
        f"{', '.join(_INNER)}, got {found}. Save it with torch.save(model.state_dict(), …)."
    )


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)


def _is_plain(value: Any) -> bool:
    is_dense = isinstance(value, Tensor) and value.is_cpu and value.layout == torch.strided
    return is_dense and not value.is_quantized


class _Inert:
    """What stands for everything that a pickle names and that torch does not know."""

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def _read_pickled(file: BufferedReader) -> Any:
    """Return what is in a file of torch.save: an archive, or a stream as before torch 1.6."""
    length, unknown = length_of(file), []
    if file.read(2) == b"PK":
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > length:
                raise ValueError("its records overlap, or are packed")
            (name,) = [m.filename for m in members if m.filename.endswith("/data.pkl")]
            with archive.open(name) as pickled:
                _check_memory(pickled, 1, length)
        file.seek(0)
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    else:
        file.seek(0)
        _check_memory(file, _PICKLES_OF_A_STREAM, length)
    file.seek(0)
    try:
        with torch.serialization.safe_globals([(_Inert, name) for name in unknown]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # a page on how to run what is in the file
        raise ValueError("torch.load(weights_only=True) does not read it") from error


def _check_memory(file: IO[bytes], pickles: int, length: int) -> None:
    """Refuse pickles, one behind another in a file of that length, that take far more memory."""
    left = _STEPS + length // _BYTES_A_STEP
    for _ in range(pickles):
        for _, argument, _ in pickletools.genops(file):
            left -= 1
            if left < 0 or (isinstance(argument, str) and _TAKES_MEMORY.fullmatch(argument)):
                raise ValueError("its pickle takes far more memory than weights need")
