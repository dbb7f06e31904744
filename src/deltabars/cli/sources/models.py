"""Models by name: objects of the user's own code, with weights from files that run none.

Before torch reads a file of weights, its pickle is looked at: classes that torch does not know,
such as hyperparameters beside the weights, are replaced by one that does nothing, and what asks for
far more memory than weights need is refused.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import pickletools
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from types import ModuleType
from typing import IO, Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deltabars.errors import BadValueError, ModelError, UsageError, first_line, printable, shortened
from deltabars.storage.reading import length_of, open_plain, read_outline

_DOTTED = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_MARK = "_deltabars_trained"
# What torch.compile and FSDP put into the names of weights.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


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
    """Run the user's code, which imports from its folder, prints to stderr, and cannot exit."""
    place = spec.rpartition(":")[0]
    folder = str(Path(place).absolute().parent if place.endswith(".py") else Path.cwd())
    sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        raise BadValueError(
            f"{option}: expected code that can be imported, got {spec}, which ends the program "
            f"(exit code {error.code}). Put a script under if __name__ == '__main__'."
        ) from error
    finally:
        sys.path.remove(folder)


def find_object(spec: str, option: str) -> Any:
    """Return the object of that name. This runs the module or the file, as importing it would."""
    if not is_name(spec):
        raise BadValueError(
            f"{option}: expected package.module:object or path/to/file.py:object, got {spec!r}."
        )
    place, _, what = spec.rpartition(":")
    with user_code(spec, option):
        run = _run_file if place.endswith(".py") else _import
        found: Any = run(place, option)
    for part in what.split("."):
        if not hasattr(found, part):
            known = sorted(name for name in vars(found) if not name.startswith("_"))
            raise BadValueError(
                f"{option}: expected an object {what!r} in {place}, got {', '.join(known[:12])}."
            )
        found = getattr(found, part)
    return found


def _import(name: str, option: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise BadValueError(
            f"{option}: expected a module that Python finds, got {name!r}. A file is named with "
            "its ending: file.py:object."
        ) from error


def _run_file(path: str, option: str) -> ModuleType:
    """Return the module of a file, run once for as long as the file stays the same."""
    if not os.path.isfile(path):
        raise BadValueError(f"{option}: expected a Python file, got {path}, which does not exist.")
    state = os.stat(path)
    name = f"{os.path.abspath(path)}:{state.st_mtime_ns}:{state.st_size}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)  # dataclasses look for it in sys.modules
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


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
    """A model as it is named on a command line."""

    spec: str  # a Module, or a class or function that makes one, by name
    weights: str | None = None  # a file of them; None for those that the factory gives
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the factory, by keyword
    untrained: bool = False  # initial weights are wanted: those of torch's seed 0

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
            self._seed()
            made = find_object(self.spec, "--model")
            if not isinstance(made, nn.Module) and callable(made):
                self._seed()  # again: a file is not run twice
                with user_code(self.spec, "--model"):
                    made = made(**self.arguments)
            elif self.arguments:
                raise ModelError(f"--model-args: expected none, got {self.spec}, no function.")
        if not isinstance(made, nn.Module):
            raise ModelError(
                f"--model: expected a torch.nn.Module, or a class or function that makes one, got "
                f"{self.spec}, which is a {type(made).__name__} or makes one."
            )
        if self.weights is not None:
            _give(made, read_weights(self.weights), self.weights)
        return made.eval()

    def _seed(self) -> None:
        if self.untrained:  # initial weights that a later command finds again
            torch.default_generator.manual_seed(0)

    def absolute(self) -> NamedModel:
        """Return the same with whole paths, so that it holds in every folder."""
        weights = None if self.weights is None else str(Path(self.weights).absolute())
        return replace(self, spec=with_full_path(self.spec), weights=weights)


def _give(model: nn.Module, weights: dict[str, Tensor], path: str) -> None:
    """Copy weights into a model whose state has the same names and shapes."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    if not _agree(weights, state):
        weights = _renamed(weights, state, path)
    for name, value in weights.items():
        own = state[name]
        kinds = {(each.is_floating_point(), each.is_complex()) for each in (own, value)}
        if own.shape != value.shape or len(kinds) > 1:
            raise ModelError(
                f"--weights: expected {name!r} of shape {tuple(own.shape)} and {own.dtype}, got "
                f"{tuple(value.shape)} and {value.dtype}, in {path}. Make the model as it was "
                "trained (--model-args)."
            )
    model.load_state_dict(weights, strict=False)


def _agree(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> bool:
    """Tell whether names are those of a state; of tied weights, a file may have one name."""
    if not weights.keys() <= state.keys():
        return False
    given = {state[name].data_ptr() for name in weights}
    return all(name in weights or value.data_ptr() in given for name, value in state.items())


def _renamed(
    weights: dict[str, Tensor], state: Mapping[str, Tensor], path: str
) -> dict[str, Tensor]:
    """Return the one set of weights whose names have something before or in them; print what."""
    own = {_plain(name): name for name in state}
    plain = {_plain(name): value for name, value in weights.items()}
    found: dict[str, dict[str, Tensor]] = {}
    for prefix in sorted({name[: at.end()] for name in plain for at in re.finditer(r"^|\.", name)}):
        names = [name for name in plain if name.startswith(prefix)]
        inside = {own.get(name.removeprefix(prefix), ""): plain[name] for name in names}
        if _agree(inside, state) and len(plain) == len(weights):
            found[prefix] = inside
    if len(found) > 1:
        raise ModelError(
            f"--weights: expected one set of the model's weights, got {len(found)}, under "
            f"{' and '.join(map(repr, found))}. Save one by itself."
        )
    if not found:
        missing = [f"without {name!r}" for name in state if name not in weights]
        unknown = [f"with an unknown {name!r}" for name in weights if name not in state]
        first = " and ".join(shortened(some[0]) for some in (missing, unknown) if some)
        raise ModelError(
            f"--weights: expected the names of the model's state, got {path} {first} (in all "
            f"{len(missing)} missing, {len(unknown)} unknown). Names must agree in full."
        )
    prefix, inside = found.popitem()
    taken = {f"{part}." for name in weights for part in name.split(".") if part in _WRAPPERS}
    what = " and ".join(repr(part) for part in (prefix, *sorted(taken)) if part) or "nothing"
    others = len(weights) - len(inside)
    left = f", and {others} others are left out," if others else ""
    said = f"deltabars: --weights: {what} is taken off {len(inside)} names{left} in {path}"
    print(printable(said), file=sys.stderr)
    return inside


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


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
    """Return the tensors of a weights file by name, on the CPU. Reading it runs no code."""
    source = Path(path)
    if not os.path.isfile(source):  # also of a name that no file can have
        raise ModelError(f"--weights: expected a file, got {source}, which does not exist.")
    is_pickled = source.suffix in _PICKLED
    if source.suffix != ".safetensors" and not is_pickled:
        endings = ", ".join((".safetensors", *_PICKLED))
        raise ModelError(f"--weights: expected a file that ends in {endings}, got {source.name}.")
    try:
        with open_plain(source) as file:
            if not is_pickled:
                read_outline(file)
            content = _read_pickled(file) if is_pickled else load_file(source)
    except Exception as error:  # whatever becomes of bytes that mean nothing
        kind = "file of torch.save" if is_pickled else "safetensors file"
        raise ModelError(
            f"--weights: expected a {kind}, got {source}, which is broken or is none "
            f"({first_line(error).rstrip('.')})."
        ) from error
    for _ in range(_DEEPEST):
        held = content if isinstance(content, dict) else {}
        inside = [held[key] for key in _INNER if isinstance(held.get(key), dict) and held[key]]
        content = inside[0] if inside else content
    found = f"a {type(content).__name__}"
    if isinstance(content, _Inert):
        found = "an object of a class, which would run code when read"
    elif isinstance(content, dict) and content:
        other = [name for name, value in content.items() if not _is_dense(value)]
        if not other:
            return dict(content)
        found = f"{shortened(repr(other[0]))}, a tensor without values in the file, or none at all"
    raise ModelError(
        f"--weights: expected a state dict in {source}, by itself or under one of "
        f"{', '.join(_INNER)}, got {found}. Save it with torch.save(model.state_dict(), …)."
    )


def _is_dense(value: Any) -> bool:
    is_strided = isinstance(value, Tensor) and value.is_cpu and value.layout == torch.strided
    return is_strided and not value.is_quantized


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
