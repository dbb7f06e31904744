"""Tensors by name from files of weights, read without code and within the length of the file.

Files of torch.save hold a pickle, which names functions to call and may ask for any amount of
memory. Its steps are followed here with a table of those few that rebuild tensors. Whatever else it
names becomes an object that does nothing, such as the optimisers, options and hyperparameters that
training frameworks put beside the weights.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, ClassVar

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
# Of torch.save before its files were archives: so many pickles, and what they may name.
_PICKLES_OF_A_STREAM = 5
_PLAIN = re.compile(
    r"collections OrderedDict|torch \w+Storage|torch\._utils _rebuild_(tensor|parameter)\w*"
)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a weights file by name, on the CPU. Reading it runs no code.

    Memory: the tensors', and at most some ten times the rest of the file.

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
            if not is_pickled:
                read_outline(file)
                return load_file(source)
            is_archive = file.read(2) == b"PK"
            file.seek(0)
            content, unknown = _read_archive(file) if is_archive else (_read_stream(file), "")
    except Exception as error:  # whatever becomes of bytes that mean nothing
        kind = "file of torch.save" if is_pickled else "safetensors file"
        raise ModelError(
            f"--weights: expected a {kind}, got {source}, which is broken or is none "
            f"({first_line(error).rstrip('.')})."
        ) from error
    return _state_dict(content, source, unknown)


def _state_dict(content: Any, source: Path, unknown: str) -> dict[str, Tensor]:
    """Return the state dict in what a file holds: by itself, or under one of the usual names."""
    for _ in range(_DEEPEST):
        inside = [key for key in _INNER if isinstance(content, dict) and _is_dict(content.get(key))]
        if not inside:
            break
        content = content[inside[0]]
    if _is_dict(content):
        other = [name for name, value in content.items() if not isinstance(value, Tensor)]
        if not other:
            return dict(content)
        found = f"{shortened(repr(other[0]))}, a tensor without values in the file, or none at all"
    elif isinstance(content, _Inert):
        found = f"a {shortened(unknown)}, which would run code when read"
    else:
        found = f"a {type(content).__name__}"
    raise ModelError(
        f"--weights: expected a state dict in {source}, by itself or under one of "
        f"{', '.join(_INNER)}, got {found}. Save it with torch.save(model.state_dict(), …)."
    )


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)


class _Inert:
    """What stands for everything that a pickle names and that is not read."""

    def __init__(self, *arguments: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...


def _tensor(storage: Tensor, offset: int, size: Any, stride: Any, *rest: Any) -> Tensor:
    """Return a view of a storage; torch refuses one that goes beyond its end."""
    if any(isinstance(part, dict) and part for part in rest):
        raise ValueError("it has a conjugate or negative view")
    kinds = [part for part in rest if isinstance(part, torch.dtype)]
    return storage.view(kinds[0] if kinds else storage.dtype).as_strided(size, stride, offset)


def _parameter(tensor: Any, *_: Any) -> Any:
    return tensor


def _from_type(function: Any, kind: Any, arguments: Any, *_: Any) -> Any:
    return _called(function, arguments)


def _called(function: Any, arguments: Any) -> Any:
    if isinstance(function, _Inert):
        return function
    if function not in _CALLED or not isinstance(arguments, tuple):
        raise ValueError("it calls what is no function")
    return function(*arguments)


def _dict(*_: Any) -> dict[str, Any]:
    return {}


_CALLED = (_Inert, _dict, _tensor, _parameter, _from_type)
_STORAGES = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16,
    "BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32, "Short": torch.int16,
    "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool,
    "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
}  # fmt: skip
_KNOWN: dict[str, Any] = {
    "collections.OrderedDict": _dict,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    **{str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)},
    **{f"torch.{name}Storage": kind for name, kind in _STORAGES.items()},
    "torch.storage.UntypedStorage": torch.uint8,  # the tensor says what its numbers are
}


class _Bounded(BytesIO):
    """Bytes of a pickle, which is read a step at a time."""

    def __init__(self, content: bytes, left: int) -> None:
        super().__init__(content)
        self.left = left

    def read(self, size: int | None = -1) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise ValueError("its pickle has far more steps than weights need")
        return super().read(size)


class _Unpickler(pickle._Unpickler):  # Python's own in Python: the one in C has no table of steps
    """Rebuilds tensors, containers of them, and nothing else."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: _Bounded, storage: Callable[[torch.dtype, str, int], Tensor]) -> None:
        super().__init__(file)
        self.storage = storage
        self.unknown = ""  # the first thing it names that is not read

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in _KNOWN:
            self.unknown = self.unknown or full
        return _KNOWN.get(full, _Inert)

    def persistent_load(self, pid: Any) -> Tensor:
        what, kind, key, _, count = pid
        if what != "storage" or not isinstance(key, str) or not isinstance(kind, torch.dtype):
            raise ValueError("it names no storage")
        return self.storage(kind, key, count)

    def _call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.stack.append(_called(function, arguments))

    def _set_state(self) -> None:
        self.stack.pop()  # nothing that is read here has one

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._add([key, value])

    def _set_items(self) -> None:
        self._add(self.pop_mark())

    def _add(self, items: list[Any]) -> None:
        """Add keys and values to a dict; texts alone are keys of what is looked for."""
        if isinstance(self.stack[-1], dict):
            pairs = zip(items[::2], items[1::2], strict=True)
            self.stack[-1].update((key, value) for key, value in pairs if isinstance(key, str))
        elif not isinstance(self.stack[-1], _Inert):
            raise ValueError("it adds to what is no container")

    dispatch: ClassVar[dict[int, Any]] = {
        # The steps of protocol 2, which torch.save writes, without dicts of keys of any kind.
        **{
            ord(step.code): pickle._Unpickler.dispatch[ord(step.code)]
            for step in pickletools.opcodes
            if step.proto <= 2 and step.name != "DICT"
        },
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
        pickle.BUILD[0]: _set_state,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
    }


def _read_archive(file: BufferedReader) -> tuple[Any, str]:
    """Return what is in a zip archive of torch.save, and the first name in it that is not read."""
    length = length_of(file)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    records = {member.filename: member for member in members}
    if len(records) < len(members) or sum(member.file_size for member in members) > length:
        raise ValueError("its records overlap, or are packed")
    (folder,) = [name.removesuffix("data.pkl") for name in records if name.endswith("/data.pkl")]
    known: dict[str, Tensor] = {}

    def record(name: str) -> Tensor:
        member = records[folder + name]
        file.seek(member.header_offset)
        head = file.read(30)
        if member.compress_type != zipfile.ZIP_STORED or head[:4] != b"PK\3\4":
            raise ValueError("its records are packed")
        file.seek(sum(struct.unpack("<HH", head[26:])), os.SEEK_CUR)
        content = torch.empty(member.file_size, dtype=torch.uint8)
        if len(content) and file.readinto(content.numpy().data) != len(content):
            raise ValueError("it is truncated")
        return content

    def storage(kind: torch.dtype, key: str, count: int) -> Tensor:
        if key not in known:
            known[key] = record(f"data/{key}")
        if len(known[key]) != count * kind.itemsize:
            raise ValueError(f"{len(known[key])} bytes of a storage of {count} numbers")
        return known[key].view(kind)

    if f"{folder}byteorder" in records and bytes(record("byteorder").tolist()) != b"little":
        raise ValueError("its numbers are big-endian")
    steps = _Bounded(record("data.pkl").numpy().tobytes(), _STEPS + length // _BYTES_A_STEP)
    unpickler = _Unpickler(steps, storage)
    return unpickler.load(), unpickler.unknown


def _read_stream(file: BufferedReader) -> Any:
    """Return what is in a file of torch.save as it was before its archives, by torch.

    Its pickles must name tensors and dicts alone: torch knows other things that take memory.
    """
    left = _STEPS + length_of(file) // _BYTES_A_STEP
    for _ in range(_PICKLES_OF_A_STREAM):
        for code, name, _ in pickletools.genops(file):
            left -= 1
            if left < 0 or (code.name == "GLOBAL" and not _PLAIN.fullmatch(str(name))):
                raise ValueError(f"it names {name}, or has far more steps than weights need")
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)
