"""Tensors by name from files of weights, read without code and within the length of the file.

Files of torch.save hold a pickle, which is a program: it names functions to import and call, and
may ask for any amount of memory. It is not given to torch or to the pickle module. Its steps are
followed here: containers are built, tensors are views of the file's own bytes, and whatever else it
names becomes an object that does nothing, as the optimisers, options and hyperparameters do that
training frameworks put beside the weights.
"""

from __future__ import annotations

import os
import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file
from torch import Tensor

from deltabars.errors import ModelError, first_line, shortened
from deltabars.storage.reading import length_of, open_plain, read_outline

_PICKLED = (".pt", ".pth", ".ckpt", ".bin")
# Where training programs put the weights, beside other things.
_INNER = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "weights")
_DEEPEST = 4  # of them in one another
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of torch.save before its files were archives
# Steps of a pickle: so many in any case, one for so many bytes of the file, and for a call.
_STEPS, _BYTES_A_STEP, _STEPS_A_CALL = 1 << 18, 16, 8


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a weights file by name, on the CPU. Reading it runs no code.

    Memory: the tensors', and at most some ten times the rest of the file.

    Raises:
        ModelError: the file is missing, broken, of another kind, or holds no state dict.
    """
    source = Path(path)
    if not os.path.isfile(source):  # also of a name that no file can have
        raise ModelError(f"--weights: expected a file, got {source}, which does not exist.")
    if source.suffix == ".safetensors":
        try:
            with open_plain(source) as file:
                read_outline(file)
            return load_file(source)
        except Exception as error:  # whatever safetensors makes of bytes that are not its own
            raise ModelError(
                f"--weights: expected a safetensors file, got {source}, which is broken or is "
                f"none ({first_line(error)})."
            ) from error
    if source.suffix not in _PICKLED:
        raise ModelError(
            f"--weights: expected a .ckpt, a .bin, or a file that ends in .safetensors, .pt or "
            f".pth, got {source.name}."
        )
    try:
        with open_plain(source) as file:
            is_archive = file.read(2) == b"PK"
            file.seek(0)
            content, unknown = (_read_archive if is_archive else _read_stream)(file)
    except Exception as error:  # whatever becomes of bytes that mean nothing
        raise ModelError(
            f"--weights: expected a file of torch.save in {source}, got one that is broken or none "
            f"({first_line(error).rstrip('.')}). Save it with torch.save(model.state_dict(), …)."
        ) from error
    return _state_dict(content, source, unknown)


def _state_dict(content: Any, source: Path, unknown: str | None) -> dict[str, Tensor]:
    """The state dict in what a file holds: by itself, or under one of the usual names."""
    for _ in range(_DEEPEST):
        inside = [key for key in _INNER if isinstance(content, dict) and _is_dict(content.get(key))]
        if not inside:
            break
        content = content[inside[0]]
    odd = f"a {shortened(unknown)}, which would run code when read" if unknown else None
    if not _is_dict(content):
        found = odd if isinstance(content, _Inert) and odd else f"a {type(content).__name__}"
    else:
        other = [name for name, value in content.items() if not isinstance(value, Tensor)]
        if not other:
            return dict(content)
        found = f"{shortened(repr(other[0]))}, a tensor without values in the file, or none at all"
    raise ModelError(
        f"--weights: expected a state dict in {source}, by itself or under one of "
        f"{', '.join(_INNER)}, got {found}. Save it with torch.save(model.state_dict(), …)."
    )


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)


class _Inert:
    """What stands for everything that a pickle names and that is not read."""


_INERT = _Inert()


@dataclass(frozen=True)
class _Function:
    """What a pickle may call."""

    call: Callable[..., Any]


@dataclass(frozen=True)
class _Storage:
    """Bytes of the file (n,), and what numbers they are; None where the tensor says it."""

    bytes: Tensor
    dtype: torch.dtype | None


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Tensor:
    """A view of a storage; torch refuses one that goes beyond its end."""
    dtype = rest[2] if len(rest) > 2 and isinstance(rest[2], torch.dtype) else storage.dtype
    found = storage.bytes.view(dtype).as_strided(_sizes(size), _sizes(stride), _size(offset))
    for notes in (part for part in rest if isinstance(part, dict)):  # views, of the same bytes
        found = found.conj() if notes.get("conj") else found
        found = torch._neg_view(found) if notes.get("neg") else found
    return found


def _dict(items: Any = ()) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in items:
        _extend(found, list(pair), "SETITEM")
    return found


def _first(tensor: Any, *_: Any) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ValueError("a parameter is no tensor")
    return tensor


def _from_type(function: Any, kind: Any, arguments: Any, *_: Any) -> Any:
    return _called(function, arguments)


def _sizes(value: Any) -> list[int]:
    if not isinstance(value, tuple):
        raise ValueError("the shape of a tensor is none")
    return [_size(number) for number in value]


def _size(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError("the shape of a tensor is none")
    return value


def _called(function: Any, arguments: Any) -> Any:
    if isinstance(function, _Inert):
        return _INERT
    if not isinstance(function, _Function) or not isinstance(arguments, tuple):
        raise ValueError("it calls what is no function")
    return function.call(*arguments)


_KINDS = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16,
    "BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32, "Short": torch.int16,
    "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool,
    "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
}  # fmt: skip
_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Function(_dict),
    ("torch", "Size"): _Function(lambda sizes=(): tuple(sizes)),
    ("torch._utils", "_rebuild_tensor"): _Function(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): _Function(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): _Function(_tensor),
    ("torch._utils", "_rebuild_parameter"): _Function(_first),
    ("torch._utils", "_rebuild_parameter_with_state"): _Function(_first),
    ("torch._tensor", "_rebuild_from_type_v2"): _Function(_from_type),
    **{
        ("torch", f"{name}Storage"): _Storage(torch.empty(0), kind) for name, kind in _KINDS.items()
    },
    ("torch.storage", "UntypedStorage"): _Storage(torch.empty(0), None),
    **{
        ("torch", str(kind)[6:]): kind for kind in vars(torch).values() if type(kind) is torch.dtype
    },
}
_VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING",
    "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "UNICODE",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
}  # fmt: skip
_CONSTANTS = {
    "NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "EMPTY_SET": _INERT,
    "BYTEARRAY8": _INERT,
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass
class _Pickle:
    """The steps of a pickle, followed one by one.

    Attributes:
        storage: gives the bytes that a persistent id names.
        left: steps that may follow.
        unknown: the first thing it named that is not read.
    """

    storage: Callable[[Any], Any]
    left: int
    unknown: str | None = None
    _stack: list[Any] = field(default_factory=list)
    _marks: list[list[Any]] = field(default_factory=list)
    _memo: dict[int, Any] = field(default_factory=dict)

    def read(self, file: BinaryIO) -> Any:
        """The object of the next pickle in a file, which is read up to its end."""
        self._stack, self._marks, self._memo = [], [], {}
        for code, argument, _ in pickletools.genops(file):
            self.left -= 1
            if self.left < 0:
                raise ValueError("its pickle has far more steps than weights need")
            self._step(code.name, argument)
        return self._stack.pop()

    def _step(self, name: str, argument: Any) -> None:
        stack, pop = self._stack, self._stack.pop
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[argument])
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if name == "EMPTY_LIST" else {})
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack.append(tuple([pop() for _ in range(count)][::-1]))
        elif name == "MARK":
            self._marks.append(stack)
            self._stack = []
        elif name == "BINPERSID":
            asked = pop()  # "module" with the code of a class, in files before the archives
            stack.append(_INERT if asked[0] == "module" else self.storage(asked))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            what, module = (pop(), pop()) if name == "STACK_GLOBAL" else _split(argument)
            stack.append(self._find(module, what))
        elif name in ("REDUCE", "NEWOBJ", "NEWOBJ_EX"):
            if name == "NEWOBJ_EX":
                pop()  # keyword arguments, which nothing that is called here has
            arguments = pop()
            self._call(pop(), arguments)
        elif name == "BUILD":
            pop()  # a state: nothing that is read here has one
        elif name in ("APPEND", "SETITEM"):
            items = [pop() for _ in range(1 if name == "APPEND" else 2)][::-1]
            _extend(stack[-1], items, name)
        elif name in ("POP", "DUP"):
            stack.append(stack[-1]) if name == "DUP" else pop()
        elif name not in ("PROTO", "FRAME", "STOP"):
            self._step_to_mark(name, argument)

    def _step_to_mark(self, name: str, argument: Any) -> None:
        items, self._stack = self._stack, self._marks.pop()
        if name in ("APPENDS", "SETITEMS", "ADDITEMS"):
            _extend(self._stack[-1], items, name)
        elif name in ("TUPLE", "LIST", "FROZENSET"):
            kinds = {"TUPLE": tuple, "LIST": list}
            self._stack.append(kinds[name](items) if name in kinds else _INERT)
        elif name == "DICT":
            self._stack.append({})
            _extend(self._stack[-1], items, name)
        elif name == "OBJ":
            self._call(items[0], tuple(items[1:]))
        elif name == "INST":
            what, module = _split(argument)
            self._call(self._find(module, what), tuple(items))
        elif name != "POP_MARK":
            raise ValueError(f"its pickle has a step {name}, which weights do not need")

    def _call(self, function: Any, arguments: Any) -> None:
        self.left -= _STEPS_A_CALL
        self._stack.append(_called(function, arguments))

    def _find(self, module: Any, name: Any) -> Any:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("it names what is no text")
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        self.unknown = self.unknown or f"{module}.{name}"
        return _INERT


def _split(argument: str) -> tuple[str, str]:
    module, _, name = argument.partition(" ")
    return name, module


def _extend(target: Any, items: list[Any], name: str) -> None:
    """Add to a list, or keys and values to a dict: texts alone are keys of what is looked for."""
    if isinstance(target, _Inert):
        return
    if name in ("APPEND", "APPENDS") and isinstance(target, list):
        target.extend(items)
    elif name in ("SETITEM", "SETITEMS", "DICT") and isinstance(target, dict):
        pairs = zip(items[::2], items[1::2], strict=True)
        target.update((key, value) for key, value in pairs if isinstance(key, str))
    else:
        raise ValueError("it adds to what is no container")


def _named(pid: Any) -> tuple[Any, str, int, int]:
    """What numbers a persistent id means, the key of its storage, how many, and their bytes."""
    kind, key, count = pid[1], pid[2], _size(pid[4])
    if pid[0] != "storage" or not isinstance(kind, _Storage) or not isinstance(key, str):
        raise ValueError("it names no storage")
    if len(pid) > 5 and pid[5] is not None:
        raise ValueError("it has a view of a storage, as files before torch 0.4 had")
    return kind.dtype, key, count, count * (1 if kind.dtype is None else kind.dtype.itemsize)


def _read_archive(file: BufferedReader) -> tuple[Any, str | None]:
    """What is in a zip archive of torch.save, whose records are not packed."""
    length = length_of(file)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    records = {member.filename: member for member in members}
    if len(records) < len(members) or sum(member.file_size for member in members) > length:
        raise ValueError("its records overlap, or are packed")
    (pickle,) = [name for name in records if name.endswith("/data.pkl")]
    folder = pickle.removesuffix("data.pkl")
    known: dict[str, Tensor] = {}

    def record(name: str) -> Tensor:
        member = records[folder + name]
        file.seek(member.header_offset)
        head = file.read(30)
        if member.compress_type != zipfile.ZIP_STORED or head[:4] != b"PK\3\4":
            raise ValueError("its records are packed")
        file.seek(sum(struct.unpack("<HH", head[26:])), os.SEEK_CUR)
        return _read_bytes(file, torch.empty(member.file_size, dtype=torch.uint8))

    def storage(pid: Any) -> _Storage:
        dtype, key, _, size = _named(pid)
        if key not in known:
            known[key] = record(f"data/{key}")
        if len(known[key]) != size:
            raise ValueError(f"{len(known[key])} bytes of a storage of {size}")
        return _Storage(known[key], dtype)

    if f"{folder}byteorder" in records and bytes(record("byteorder").tolist()) != b"little":
        raise ValueError("its numbers are big-endian")
    pickled = record("data.pkl").numpy().tobytes()
    steps = _Pickle(storage, _STEPS + length // _BYTES_A_STEP)
    return steps.read(BytesIO(pickled)), steps.unknown


def _read_stream(file: BufferedReader) -> tuple[Any, str | None]:
    """What is in a file of torch.save as it was before its archives: pickles, then the bytes."""
    length = length_of(file)
    known: dict[str, tuple[Tensor, int]] = {}

    def storage(pid: Any) -> _Storage:
        dtype, key, count, size = _named(pid)
        if key not in known:
            if size + sum(len(values) for values, _ in known.values()) > length:
                raise ValueError("its storages are longer than the file")
            known[key] = torch.empty(size, dtype=torch.uint8), count
        if len(known[key][0]) != size:
            raise ValueError("a storage has two sizes")
        return _Storage(known[key][0], dtype)

    steps = _Pickle(storage, _STEPS + length // _BYTES_A_STEP)
    if steps.read(file) != _MAGIC or steps.read(file) != _PROTOCOL:
        raise ValueError("it does not begin as one")
    system = steps.read(file)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise ValueError("its numbers are big-endian")
    content = steps.read(file)
    keys = steps.read(file)
    known_keys = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not known_keys or sorted(keys) != sorted(known):
        raise ValueError("its storages are others than its tensors have")
    for key in keys:
        values, count = known[key]
        if file.read(8) != struct.pack("<q", count):
            raise ValueError("a storage has another length")
        _read_bytes(file, values)
    return content, steps.unknown


def _read_bytes(file: BufferedReader, into: Tensor) -> Tensor:
    if len(into) and file.readinto(into.numpy().data) != len(into):
        raise ValueError("it is truncated")
    return into
