"""One digest for values of every kind, to recognise data, weights and options used before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor


def fingerprint(*parts: Any) -> str:
    """Return a digest of some values, 32 hexadecimal digits.

    Equal values have equal digests, in every process and on every device. Numbers count by value (1
    is 1.0), a tuple equals a list, the order of a mapping or a set does not matter, and a tensor
    equals an array of the same shape, type and bits.

    Args:
        parts: None, booleans, numbers, texts, bytes, tensors, arrays, `torch.dtype` and
            `torch.device`; and sequences, sets and mappings of these.

    Raises:
        TypeError: a value is of another kind.

    Cost: one pass; tensors on another device are copied to the CPU, one at a time.
    """
    digest = hashlib.blake2b(digest_size=16)
    for piece in _pieces(parts):
        digest.update(piece)
    return digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the numbers of a tensor as bytes, in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # One number is contiguous with any stride, but torch views no bytes of it unless that is 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data


def _pieces(value: Any) -> Iterator[bytes | memoryview]:
    """Yield a value as bytes, each part after its kind and length, so that no two are alike."""
    if isinstance(value, Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield tensor_bytes(value)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        native = np.array(value, value.dtype.newbyteorder("="), order="C")
        yield from _pieces(torch.from_numpy(native))
    elif isinstance(value, np.ndarray | np.generic):
        yield from _pieces(value.tolist())
    elif isinstance(value, list | tuple):
        yield f"list {len(value)};".encode()
        for each in value:
            yield from _pieces(each)
    elif isinstance(value, set | frozenset):
        yield f"set {len(value)};".encode()
        yield from sorted(b"".join(_pieces(each)) for each in value)
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)};".encode()
        entries = [(b"".join(_pieces(key)), each) for key, each in value.items()]
        for key, each in sorted(entries, key=lambda entry: entry[0]):
            yield key
            yield from _pieces(each)
    else:
        kind, content = _scalar(value)
        yield f"{kind} {len(content)};".encode()
        yield content


def _scalar(value: Any) -> tuple[str, bytes]:
    if isinstance(value, bytes | bytearray):
        return "bytes", bytes(value)
    if isinstance(value, str):
        return "text", value.encode(errors="surrogatepass")  # names of files may have surrogates
    if value is None or isinstance(value, bool | torch.dtype | torch.device):
        return "constant", str(value).encode()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, Number):
        return "number", repr(value).encode()
    raise TypeError(
        f"fingerprint: expected numbers, texts, bytes, tensors, arrays or containers of them, got "
        f"{type(value).__name__}. Pass its attributes."
    )
