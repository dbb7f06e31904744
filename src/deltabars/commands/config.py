"""--config FILE.toml: options from a file, before those of the command line."""

from __future__ import annotations

import argparse
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deltabars.errors import BadValueError, first_line, shortened
from deltabars.reading import read_start

_FLAG = "--config"
_MOST = 1 << 20  # bytes


def with_config(
    arguments: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]
) -> list[str]:
    """The arguments with those of the config file before them, which they then replace.

    Keys of the file are names of options, with or without the dashes between words. A table
    named as a command has options of that command alone, so that one file serves several.

    Raises:
        BadValueError: the file cannot be read, or has a key that is no option of the command.
    """
    given = list(arguments)
    path = _find(given)
    if path is None or not given or given[0] not in commands:
        return given
    known = _known(commands[given[0]])
    words: list[str] = []
    for key, value in _options(path, given[0], list(commands)).items():
        name = key.replace("_", "-")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)
            other = next((other for other in commands if name in _known(commands[other])), None)
            hint = (
                f", which is one of `deltabars {other}`: put it below [{other}]."
                if other
                else f". The nearest one is {near[0]!r}."
            )
            raise BadValueError(
                f"--config: expected options of `deltabars {given[0]}` in {path}, got "
                f"{shortened(repr(key))}{hint}"
            )
        words += _words(name, value, known[name], path)
    return [given[0], *words, *given[1:]]


def _known(command: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options of a command that a file can give."""
    return {
        name[2:]: action
        for action in command._actions
        for name in action.option_strings
        if name.startswith("--") and name not in (_FLAG, "--help")
    }


def _find(arguments: list[str]) -> Path | None:
    found = None
    for place, word in enumerate(arguments):
        if word == "--":
            break
        if word == _FLAG and place + 1 < len(arguments):
            found = Path(arguments[place + 1])
        elif word.startswith(f"{_FLAG}="):
            found = Path(word.partition("=")[2])
    return found


def _options(path: Path, command: str, commands: list[str]) -> dict[str, Any]:
    try:
        content = tomllib.loads(read_start(path, _MOST).decode("utf-8"))
    except OSError as error:
        raise BadValueError(
            f"--config: expected a file that can be read, got {path}: {error.strerror}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadValueError(f"--config: expected TOML, got {path}: {first_line(error)}.") from error
    tables = {name: content.pop(name) for name in commands if isinstance(content.get(name), dict)}
    return {**content, **tables.get(command, {})}


def _words(name: str, value: Any, action: argparse.Action, path: Path) -> list[str]:
    """An option as it would be on the command line."""
    flag = f"--{name}"
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise BadValueError(f"--config: expected {name} = true or false in {path}.")
        return [flag] if value else []
    if isinstance(value, Mapping):
        if action.nargs is None:
            return [f"{flag}={json.dumps(value)}"]
        return [flag, *(f"{pattern}={number}" for pattern, number in value.items())]
    if isinstance(value, bool):
        raise BadValueError(f"--config: expected a value for {name} in {path}, got {value}.")
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, str(value)] if action.nargs else [f"{flag}={value}"]
