"""Models by name, with weights from a file. Weights are never unpickled."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deltabars.errors import ModelError, first_line, shortened
from deltabars.reading import check_unpacked, length_of, open_plain
from deltabars.sources.names import check_texts, find_object, user_code, with_full_path

_ZEROS = b"bytearray"
_PICKLED = (".pt", ".pth")
_INNER = ("state_dict", "model")  # where training scripts put the weights, beside other things


@dataclass(frozen=True)
class NamedModel:
    """A model as it is named on a command line.

    Attributes:
        spec: `package.module:factory` or `path/to/file.py:factory`: a Module, or a class or
            function that makes one.
        weights: a `.safetensors` file, or a state dict in a `.pt` or `.pth` file; None for the
            weights that the factory gives.
        arguments: keyword arguments of the factory.
    """

    spec: str
    weights: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_texts("--model", self.arguments, self.spec, self.weights)
        if self.spec is None:
            raise ModelError("--model: expected the name of a model, got none.")

    def load(self) -> nn.Module:
        """The model with its weights. The user's own code makes it.

        Raises:
            BadValueError, ModelError: there is no such factory, it makes no Module, or the weights
                are not its.
        """
        made = find_object(self.spec, "--model")
        if not isinstance(made, nn.Module):
            if not callable(made):
                raise ModelError(
                    f"--model: expected a Module, or a class or function that makes one, got "
                    f"{self.spec}, which is a {type(made).__name__}."
                )
            with user_code(self.spec, "--model"):
                made = made(**self.arguments)
        elif self.arguments:
            raise ModelError(
                f"--model-args: expected none for {self.spec}, which is a Module already."
            )
        if not isinstance(made, nn.Module):
            raise ModelError(
                f"--model: expected a torch.nn.Module from {self.spec}, got a "
                f"{type(made).__name__}."
            )
        if self.weights is not None:
            _give(made, read_weights(self.weights), self.weights)
        return made.eval()

    def absolute(self) -> NamedModel:
        """The same with whole paths, so that it holds in every folder."""
        weights = None if self.weights is None else str(Path(self.weights).absolute())
        return NamedModel(with_full_path(self.spec), weights, dict(self.arguments))


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a weights file by name, on the CPU. Reading it runs no code.

    Raises:
        ModelError: the file is missing, broken, of another kind, or holds no state dict.
    """
    source = Path(path)
    if not os.path.isfile(source):  # also of a name that no file can have
        raise ModelError(f"--weights: expected a file, got {source}, which does not exist.")
    if source.suffix == ".safetensors":
        try:
            return load_file(source)
        except Exception as error:  # whatever safetensors makes of bytes that are not its own
            raise ModelError(
                f"--weights: expected a safetensors file, got {source}, which is broken or is "
                f"none ({first_line(error)})."
            ) from error
    if source.suffix not in _PICKLED:
        raise ModelError(
            f"--weights: expected a file that ends in .safetensors, .pt or .pth, got {source.name}."
        )
    try:
        _check_pickle(source)
        content = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch makes of bytes that are not its own
        raise ModelError(
            f"--weights: expected tensors alone in {source}, got a file that is broken or that "
            "would run code when read. Save it with torch.save(model.state_dict(), …)."
        ) from error
    for key in _INNER:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise ModelError(
            f"--weights: expected a state dict in {source}, by itself or under 'state_dict' or "
            f"'model', got a {type(content).__name__} of other things."
        )
    return dict(content)


def _check_pickle(path: Path) -> None:
    """Refuse what torch's reader takes, and what would take memory without bound.

    Raises:
        ValueError: an archive that unpacks to far more than its length, or a call of `bytearray`,
            which makes as many zeros as a file asks for and which no state dict needs.
    """
    with open_plain(path) as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                check_unpacked(sum(member.file_size for member in members), length_of(file))
                pickles = [member for member in members if member.filename.endswith(".pkl")]
                found = any(_ZEROS in archive.read(member) for member in pickles)
        else:
            file.seek(0)
            found = _ZEROS in file.read()
    if found:
        raise ValueError("it calls bytearray")


def _give(model: nn.Module, weights: Mapping[str, Tensor], path: str) -> None:
    """Copy weights into a model whose state has the same names and shapes."""
    wanted = {
        name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)
    }
    shared = {value.data_ptr() for name, value in wanted.items() if name in weights}
    # Of tied weights, a safetensors file has one name.
    missing = [
        name
        for name, value in wanted.items()
        if name not in weights and not (value.numel() and value.data_ptr() in shared)
    ]
    unexpected = [name for name in weights if name not in wanted]
    if missing or unexpected:
        first = [
            f"{what} {shortened(repr(names[0]))}"
            + (f" and {len(names) - 1} more" if names[1:] else "")
            for what, names in (("without", missing), ("with an unknown", unexpected))
            if names
        ]
        raise ModelError(
            f"--weights: expected the names of the model's state, got {path} {', '.join(first)}. "
            "Names must agree in full; rename them in the file if a wrapper put something before."
        )
    for name, value in weights.items():
        if wanted[name].shape != value.shape:
            raise ModelError(
                f"--weights: expected {name!r} of shape {tuple(wanted[name].shape)}, got "
                f"{tuple(value.shape)} in {path}. Make the model as it was trained (--model-args)."
            )
        if value.device.type != "cpu" or value.layout != torch.strided or value.is_quantized:
            raise ModelError(
                f"--weights: expected plain numbers for {name!r}, got a tensor without values of "
                f"its own, or a sparse or quantized one, in {path}."
            )
        if _kind(wanted[name]) != _kind(value):
            raise ModelError(
                f"--weights: expected {wanted[name].dtype} for {name!r}, got {value.dtype} in "
                f"{path}."
            )
    model.load_state_dict(dict(weights), strict=False)


def _kind(value: Tensor) -> tuple[bool, bool]:
    return value.is_floating_point(), value.is_complex()
