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
from pathlib import Path
from types import ModuleType
from typing import Any

from deltabars.errors import BadValueError

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
