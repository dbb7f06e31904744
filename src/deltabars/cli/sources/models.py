"""Objects of a user's own code, by name: `package.module:object` or `path/to/file.py:object`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping
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
_MARK = "_deltabars_trained"
# What torch.compile and FSDP put into names, and what modules within others are usually called.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_USUAL = {"module", "model", "net", "network", ""}


def is_name(spec: str) -> bool:
    """Tell whether a text looks like an object's name: `module:object` or `file.py:object`."""
    place, _, what = spec.rpartition(":")
    is_place = place.endswith(".py") or re.fullmatch(_DOTTED, place)
    return bool(is_place and re.fullmatch(_DOTTED, what))


def check_texts(option: str, arguments: Any, *texts: Any) -> None:
    """Refuse names that are no texts, or that no file can have, and arguments without names."""
    for text in texts:
        if text is not None and (not isinstance(text, str) or "\0" in text):
            raise BadValueError(f"{option}: expected a text without zero bytes, got {text!r}.")
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise BadValueError(f"{option}-args: expected values by name, got {arguments!r}.")


def with_full_path(spec: str) -> str:
    """Return the same name with the whole path of its file, so that it holds in every folder."""
    place, _, what = spec.rpartition(":")
    return f"{Path(place).absolute()}:{what}" if place.endswith(".py") else spec


@contextmanager
def user_code(spec: str, option: str) -> Iterator[None]:
    """Run code of the user's: what it prints goes to stderr, and it cannot end the program."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        raise BadValueError(
            f"{option}: expected code that can be imported, got {spec}, which ends the program "
            f"(exit code {error.code}). Put what a script does under if __name__ == '__main__'."
        ) from error


def find_object(spec: str, option: str) -> Any:
    """Return the object of that name. This runs the module or the file, as importing it would."""
    if not is_name(spec):
        raise BadValueError(
            f"{option}: expected package.module:object or path/to/file.py:object, got {spec!r}."
        )
    place, _, what = spec.rpartition(":")
    with user_code(spec, option):
        is_file = place.endswith(".py")
        found: Any = _run_file(Path(place), option) if is_file else _import(place, option)
    for part in what.split("."):
        if not hasattr(found, part):
            known = [name for name in vars(found) if not name.startswith("_")]
            raise BadValueError(
                f"{option}: expected an object {what!r} in {place}, got none of that name among "
                f"{', '.join(sorted(known)[:12]) or 'nothing'}."
            )
        found = getattr(found, part)
    return found


def _import(name: str, option: str) -> ModuleType:
    try:
        with _first_on_path(Path.cwd()):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise BadValueError(
            f"{option}: expected a module that Python finds here or among the installed packages, "
            f"got {name!r}. A file is named with its ending: file.py:object."
        ) from error


def _run_file(path: Path, option: str) -> ModuleType:
    """Return the module of a file, run once for as long as the file stays the same."""
    if not os.path.isfile(path):
        raise BadValueError(f"{option}: expected a Python file, got {path}, which does not exist.")
    key = f"{path.absolute()}:{path.stat().st_mtime_ns}:{path.stat().st_size}"
    name = f"deltabars_file_{hashlib.blake2b(os.fsencode(key), digest_size=8).hexdigest()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            with _first_on_path(path.absolute().parent):
                spec.loader.exec_module(module)  # dataclasses look for it in sys.modules
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    """Let imports look in a folder first, as they do for a script that lies there."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


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
        """Refuse a model of which nothing says that it has been trained."""
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
        """Return the model with its weights. The user's own code makes it."""
        with torch.random.fork_rng(devices=[], enabled=self.untrained):
            made = self._made()
        if self.weights is not None:
            _give(made, read_weights(self.weights), self.weights)
        return made.eval()

    def _made(self) -> nn.Module:
        self._seed()
        made = find_object(self.spec, "--model")
        if isinstance(made, nn.Module) and self.arguments:
            raise ModelError(
                f"--model-args: expected none for {self.spec}, which is a Module already."
            )
        if not isinstance(made, nn.Module) and callable(made):
            self._seed()  # again: a file is not run twice
            with user_code(self.spec, "--model"):
                made = made(**self.arguments)
        if not isinstance(made, nn.Module):
            raise ModelError(
                f"--model: expected a torch.nn.Module, or a class or function that makes one, got "
                f"{self.spec}, which is a {type(made).__name__} or makes one."
            )
        return made

    def _seed(self) -> None:
        """Draw initial weights that a later command finds again, where they are wanted."""
        if self.untrained:
            torch.default_generator.manual_seed(0)

    def absolute(self) -> NamedModel:
        """Return the same with whole paths, so that it holds in every folder."""
        weights = None if self.weights is None else str(Path(self.weights).absolute())
        return NamedModel(with_full_path(self.spec), weights, dict(self.arguments), self.untrained)


def _give(model: nn.Module, weights: dict[str, Tensor], path: str) -> None:
    """Copy weights into a model whose state has the same names and shapes."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    if not _agree(weights, state):
        weights = _unwrapped(weights, state, path)
    if not _agree(weights, state):
        missing = [name for name in state if name not in weights]
        unknown = [name for name in weights if name not in state]
        first = [
            f"{what} {shortened(repr(names[0]))}" + f" and {len(names) - 1} more" * (len(names) > 1)
            for what, names in (("without", missing), ("with an unknown", unknown))
            if names
        ]
        raise ModelError(
            f"--weights: expected the names of the model's state, got {path} {', '.join(first)}. "
            "Names must agree in full; rename them in the file if a wrapper put something before."
        )
    for name, value in weights.items():
        own = state[name]
        kinds = [(each.is_floating_point(), each.is_complex()) for each in (value, own)]
        if own.shape != value.shape or kinds[0] != kinds[1]:
            raise ModelError(
                f"--weights: expected {name!r} of shape {tuple(own.shape)}, got "
                f"{tuple(value.shape)}, and {own.dtype}, got {value.dtype}, in {path}. Make the "
                "model as it was trained (--model-args)."
            )
    model.load_state_dict(weights, strict=False)


def _agree(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> bool:
    """Tell whether names are those of a state; of tied weights, a file may have one name."""
    if not weights.keys() <= state.keys():
        return False
    given = {state[name].data_ptr() for name in weights}
    return all(name in weights or value.data_ptr() in given for name, value in state.items())


def _unwrapped(
    weights: dict[str, Tensor], state: Mapping[str, Tensor], path: str
) -> dict[str, Tensor]:
    """Return weights by the names of the model, and print what was taken off theirs.

    Something before all names is left out, whatever it is; where there are others beside them, such
    as of a loss or of averaged weights, what modules and wrappers are usually called alone is.
    """
    own = {_without_wrappers(name): name for name in state}
    plain = {_without_wrappers(name): value for name, value in weights.items()}
    if len(plain) < len(weights):
        return weights
    parts = [name.split(".") for name in plain]
    found: dict[str, dict[str, Tensor]] = {}
    for prefix in sorted({".".join([*each[:k], ""]) for each in parts for k in range(len(each))}):
        is_whole = all(name.startswith(prefix) for name in plain)
        if not is_whole and not set(prefix.split(".")) <= _USUAL:
            continue
        names = [name for name in plain if name.startswith(prefix)]
        inside = {own.get(name.removeprefix(prefix), ""): plain[name] for name in names}
        if _agree(inside, state):
            found[prefix] = inside
    if len(found) > 1:
        raise ModelError(
            f"--weights: expected one set of the model's weights, got {len(found)}, under "
            f"{' and '.join(map(repr, found))}. Save the one that is meant by itself."
        )
    for prefix, inside in found.items():
        taken = {f"{part}." for name in weights for part in name.split(".") if part in _WRAPPERS}
        what = " and ".join(repr(part) for part in (prefix, *sorted(taken)) if part) or "nothing"
        left = len(weights) - len(inside)
        others = f", and {left} others are left out," if left else ""
        text = f"deltabars: --weights: {what} is taken off {len(inside)} names{others} in {path}"
        print(printable(text), file=sys.stderr)
    return found.popitem()[1] if found else weights


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
