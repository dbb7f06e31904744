"""Objects of a user's own code, by name: `package.module:object` or `path/to/file.py:object`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from deltabars.cli.sources.weights import read_weights
from deltabars.errors import BadValueError, ModelError, UsageError, printable, shortened

_DOTTED = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_MODULE = re.compile(_DOTTED)


def is_name(spec: str) -> bool:
    """Whether a text looks like the name of an object: `module:object` or `file.py:object`."""
    place, colon, what = spec.rpartition(":")
    known_place = place.endswith(".py") or _MODULE.fullmatch(place) is not None
    return bool(colon) and known_place and re.fullmatch(_DOTTED, what) is not None


def check_texts(option: str, arguments: Any, *texts: Any) -> None:
    """Refuse names that are no texts, or that no file can have, and arguments without names.

    Raises:
        BadValueError: they are.
    """
    for text in texts:
        if text is not None and (not isinstance(text, str) or "\0" in text):
            raise BadValueError(f"{option}: expected a text without zero bytes, got {text!r}.")
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise BadValueError(f"{option}-args: expected values by name, got {arguments!r}.")


def with_full_path(spec: str) -> str:
    """The same name with the whole path of its file, so that it holds in every folder."""
    place, _, what = spec.rpartition(":")
    return f"{Path(place).absolute()}:{what}" if place.endswith(".py") else spec


@contextmanager
def user_code(spec: str, option: str) -> Iterator[None]:
    """Run code of the user's: what it prints goes to stderr, and it cannot end the program.

    Raises:
        BadValueError: it tried to.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        raise BadValueError(
            f"{option}: expected code that can be imported, got {spec}, which ends the program "
            f"(exit code {error.code}). Put what a script does under if __name__ == '__main__'."
        ) from error


def find_object(spec: str, option: str) -> Any:
    """The object of that name. This runs the module or the file, as importing it would.

    Raises:
        BadValueError: there is no such module, file or object.
    """
    if not is_name(spec):
        raise BadValueError(
            f"{option}: expected package.module:object or path/to/file.py:object, got {spec!r}."
        )
    place, _, what = spec.rpartition(":")
    with user_code(spec, option):
        is_file = place.endswith(".py")
        found: Any = _run_file(Path(place), option) if is_file else _find(place, option)
    for part in what.split("."):
        if not hasattr(found, part):
            known = sorted(name for name in vars(found) if not name.startswith("_"))
            raise BadValueError(
                f"{option}: expected an object {what!r} in {place}, got none of that name among "
                f"{', '.join(known[:12]) or 'nothing'}."
            )
        found = getattr(found, part)
    return found


def _find(name: str, option: str) -> ModuleType:
    with _first_on_path(Path.cwd()):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # something that the module itself imports
            raise BadValueError(
                f"{option}: expected a module that Python finds here or among the installed "
                f"packages, got {name!r}. A file is named with its ending: file.py:object."
            ) from error


def _run_file(path: Path, option: str) -> ModuleType:
    """The module of a file, run once for as long as the file stays the same."""
    if not os.path.isfile(path):
        raise BadValueError(f"{option}: expected a Python file, got {path}, which does not exist.")
    state = path.stat()
    key = f"{path.absolute()}:{state.st_mtime_ns}:{state.st_size}"
    name = f"deltabars_file_{hashlib.blake2b(os.fsencode(key), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look there
    try:
        with _first_on_path(path.absolute().parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    """Imports look in a folder first, as they do for a script that lies there."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


_MARK = "_deltabars_trained"
# What torch.compile and FSDP put into names, and what modules within others are usually called.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_USUAL = ("module", "model", "net", "network")

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
    weights, notice = _unwrapped(weights, wanted)
    missing, unexpected = _differences(weights, wanted)
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
    if notice is not None:
        print(printable(f"deltabars: --weights: {notice} in {path}"), file=sys.stderr)


def _differences(names: Iterable[str], wanted: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    """The names of a model's state that are missing, and those that it does not have."""
    given = set(names)
    shared = {value.data_ptr() for name, value in wanted.items() if name in given}
    # Of tied weights, a safetensors file has one name.
    missing = [
        name
        for name, value in wanted.items()
        if name not in given and not (value.numel() and value.data_ptr() in shared)
    ]
    return missing, [name for name in names if name not in wanted]


def _unwrapped(
    weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], str | None]:
    """Weights by the names of the model, and what was taken off theirs.

    Something before all names is left out, whatever it is; where there are others beside them, such
    as of a loss or of averaged weights, what modules and wrappers are usually called alone is.

    Raises:
        ModelError: several sets of weights have the model's names.
    """
    own = {_without_wrappers(name): name for name in wanted}
    plain = {_without_wrappers(name): name for name in weights}
    clash = len(own) < len(wanted) or len(plain) < len(weights) or not wanted
    if clash or not any(_differences(weights, wanted)):
        return weights, None
    state = {name: wanted[full] for name, full in own.items()}
    first = next(iter(state.values())).data_ptr()
    ends = [f".{name}" for name, value in state.items() if value.data_ptr() == first]
    whole = [f".{name}" for name in plain]
    before = {name.removesuffix(end) for name in whole for end in ends if name.endswith(end)}
    found: dict[str, dict[str, Tensor]] = {}
    for prefix in sorted(f"{part[1:]}." if part else "" for part in before):
        inside = {
            name.removeprefix(prefix): weights[full]
            for name, full in plain.items()
            if name.startswith(prefix)
        }
        usual = all(part in _USUAL for part in prefix.split(".")[:-1])
        if (usual or len(inside) == len(plain)) and not any(_differences(inside, state)):
            found[prefix] = inside
    if len(found) > 1:
        raise ModelError(
            f"--weights: expected one set of the model's weights, got {len(found)}, under "
            f"{' and '.join(map(repr, found))}. Save the one that is meant by itself."
        )
    if not found:
        return weights, None
    ((prefix, inside),) = found.items()
    taken = sorted({part for name in weights for part in name.split(".") if part in _WRAPPERS})
    what = [prefix] * bool(prefix) + [f"{part}." for part in taken]
    left = len(weights) - len(inside)
    notice = f"{' and '.join(map(repr, what)) or 'nothing'} is taken off {len(inside)} names"
    if left:
        notice += f", and {left} others are left out,"
    return {own[name]: value for name, value in inside.items()}, notice


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _kind(value: Tensor) -> tuple[bool, bool]:
    return value.is_floating_point(), value.is_complex()
