"""Models by name, with weights from a file. Weights are never unpickled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from deltabars.errors import ModelError, UsageError, shortened
from deltabars.sources.names import check_texts, find_object, user_code, with_full_path
from deltabars.sources.weights import read_weights

_MARK = "_deltabars_trained"

Factory = TypeVar("Factory")


def trained(factory: Factory) -> Factory:
    """Mark a class, function or Module as one that has trained weights without a weights file.

    `deltabars fit --model net.py:load` refuses a factory without `--weights`, whose weights are
    those of the initialisation as far as anybody can know, unless it is marked.

    Example:
        >>> import deltabars, torch
        >>> @deltabars.trained
        ... def load():
        ...     model = torch.nn.Linear(4, 3)
        ...     model.load_state_dict(torch.load("net.pt"))
        ...     return model
    """
    setattr(factory, _MARK, True)
    return factory


@dataclass(frozen=True)
class NamedModel:
    """A model as it is named on a command line.

    Attributes:
        spec: `package.module:factory` or `path/to/file.py:factory`: a Module, or a class or
            function that makes one.
        weights: a `.safetensors` file, or a state dict in a file of torch.save, such as a
            checkpoint of Lightning; None for the weights that the factory gives.
        arguments: keyword arguments of the factory.
        untrained: the weights of the initialisation are wanted: those of torch's seed 0.
    """

    spec: str
    weights: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    untrained: bool = False

    def __post_init__(self) -> None:
        check_texts("--model", self.arguments, self.spec, self.weights)
        if self.spec is None:
            raise ModelError("--model: expected the name of a model, got none.")

    def check_weights(self) -> None:
        """Refuse a model of which nothing says that it has been trained.

        Raises:
            UsageError: neither weights, nor a factory that `trained` marks, nor `untrained`.
        """
        if self.weights is not None and self.untrained:
            raise UsageError("--untrained: expected no --weights with it, got both")
        if self.weights is not None or self.untrained:
            return
        if not getattr(find_object(self.spec, "--model"), _MARK, False):
            raise UsageError(
                f"--weights: expected the trained weights of {self.spec}, got none. Give --weights "
                "FILE; or mark a factory that loads them itself with @deltabars.trained; or give "
                "--untrained to fit the initial ones"
            )

    def load(self) -> nn.Module:
        """The model with its weights. The user's own code makes it.

        Raises:
            BadValueError, ModelError: there is no such factory, it makes no Module, or the weights
                are not its.
        """
        made = self._made()
        if self.weights is not None:
            _give(made, read_weights(self.weights), self.weights)
        return made.eval()

    def _made(self) -> nn.Module:
        with _initial_weights(self.untrained):
            made = find_object(self.spec, "--model")
        if not isinstance(made, nn.Module):
            if not callable(made):
                raise ModelError(
                    f"--model: expected a Module, or a class or function that makes one, got "
                    f"{self.spec}, which is a {type(made).__name__}."
                )
            with user_code(self.spec, "--model"), _initial_weights(self.untrained):
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
        return made

    def absolute(self) -> NamedModel:
        """The same with whole paths, so that it holds in every folder."""
        weights = None if self.weights is None else str(Path(self.weights).absolute())
        return NamedModel(with_full_path(self.spec), weights, dict(self.arguments), self.untrained)


@contextmanager
def _initial_weights(same: bool) -> Iterator[None]:
    """Initial weights that a later command finds again, where they are what is fitted."""
    with torch.random.fork_rng(devices=[], enabled=same):
        if same:
            torch.default_generator.manual_seed(0)
        yield


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
