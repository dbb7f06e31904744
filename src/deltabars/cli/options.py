"""What a command says while it works: a line a step, on stderr."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch

from deltabars.cli.sources.data import NamedData
from deltabars.cli.sources.models import NamedModel
from deltabars.errors import BadValueError, first_line, printable, shortened
from deltabars.runtime.memory import read_bytes
from deltabars.storage.reading import parse_json, read_start


def sayer(quiet: bool) -> Callable[[str], None]:
    """A function that prints a line, or that does nothing."""
    return _ignore if quiet else _say


def _say(line: str) -> None:
    print(printable(f"… {line}"), file=sys.stderr, flush=True)


def _ignore(line: str) -> None:
    """Say nothing."""


class Code(str):
    """Text that is code already."""


def program(*lines: str) -> str:
    """Lines of a program, without the empty ones."""
    return "\n".join(line for line in lines if line)


def call(function: str, *arguments: Any, **named: Any) -> Code:
    """A call; arguments that are None are left out."""
    parts = [literal(value) for value in arguments if value is not None]
    parts += [f"{name}={literal(value)}" for name, value in named.items() if value is not None]
    line = f"{function}({', '.join(parts)})"
    if len(line) <= 88 or len(parts) < 2:
        return Code(line)
    inside = "".join(f"    {part},\n" for part in parts)
    return Code(f"{function}(\n{inside})")


def made(value: Any) -> Code:
    """A dataclass as code, with the attributes that are not the usual ones."""
    given: dict[str, Any] = {}
    for field in fields(value):
        usual = field.default
        if field.default_factory is not MISSING:
            usual = field.default_factory()
        found = getattr(value, field.name)
        if found != usual:
            given[field.name] = dict(found) if isinstance(usual, dict) else found
    first = next(iter(given))
    return call(type(value).__name__, given.pop(first), **given)


def literal(value: Any) -> str:
    """A value as Python writes it."""
    if isinstance(value, Code):
        return str(value)
    return repr(str(value)) if isinstance(value, Path) else repr(value)


DEVICE_HELP = "where to compute (default: cuda where there is one, else cpu)"
DATA_HELP = """\
MODEL is package.module:factory or path/to/file.py:factory: a Module, or a class or function that
makes one. Naming it runs that code. Weights are read without running any. A factory that loads its
weights itself is marked with @deltabars.trained.

DATA is one of
  a folder of pictures        sub-folders are the classes, in sorted order; or no sub-folders
  FILE.npz                    arrays inputs (or images, x) and targets (or labels, y)
  FILE.csv, FILE.parquet      columns of numbers, and --target COLUMN
  a folder of MNIST's idx files, or of CIFAR-10's binary batches (with --part)
  module:factory, file.py:factory    that gives a Dataset, a DataLoader or a pair of tensors
Pictures are RGB (--gray: one channel), pixels from 0 to 1, channels first.
"""


def add_model(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """--model, --weights, --model-args."""
    note = "" if required else " (default: as it was fitted)"
    add = parser.add_argument_group("the model").add_argument
    add(
        "--model",
        required=required,
        metavar="MODEL",
        help=f"module:factory or file.py:factory{note}",
    )
    add("--weights", metavar="FILE", help=f".safetensors, or a state dict in .pt or .pth{note}")
    if required:
        add("--untrained", action="store_true", help="no weights: fit those of the initialisation")
    add("--model-args", type=json_object, metavar="JSON", help="keyword arguments of the factory")


def add_data(parser: argparse.ArgumentParser, *, required: bool, default: str = "") -> None:
    """--data and how pictures are prepared."""
    group = parser.add_argument_group(
        "the data", None if default == "" else "How pictures are prepared is kept from the fit."
    )
    add = group.add_argument
    add("--data", required=required, metavar="DATA", help=f"a folder, .npz or factory{default}")
    add("--data-args", type=json_object, metavar="JSON", help="keyword arguments of the factory")
    add("--target", metavar="COLUMN", help="of a table: the column with the targets")
    add("--part", choices=("train", "test"), help="of MNIST and CIFAR-10 (default: train)")
    add(
        "--size",
        type=int,
        nargs="+",
        metavar="N",
        help="height and width to resize to, or both in one",
    )
    add("--crop", action="store_true", help="with --size: cut the middle out, do not squeeze")
    add("--gray", action="store_true", help="one channel")
    add("--mean", type=float, nargs="+", metavar="X", help="of the channels, to subtract")
    add("--std", type=float, nargs="+", metavar="X", help="of the channels, to divide by")


def add_run(parser: argparse.ArgumentParser) -> None:
    """RUN and what a loaded fit needs."""
    parser.add_argument("fitted", type=Path, metavar="RUN", help="what `deltabars fit --out` made")
    add_model(parser, required=False)
    parser.add_argument("--device", help=DEVICE_HELP)
    parser.add_argument(
        "--offload",
        action="store_true",
        default=None,
        help="leave the eigenvectors in the files (default: where they are too large for memory)",
    )


def add_asked(parser: argparse.ArgumentParser) -> None:
    """What is asked of a prediction."""
    add = parser.add_argument_group("the prediction").add_argument
    add("--estimator", choices=("hessian", "opg", "sandwich", "ggn"), help="default: the fit's own")
    add("--rank", type=int, metavar="K", help="use the first eigenpairs only (default: all)")
    add("--low-rank", action="store_true", help="the K pairs alone, without the rest of the space")
    add(
        "--classes",
        nargs="+",
        metavar="CLASS",
        help="top5 or the like, or class numbers (default: all, or top5 of more than 100)",
    )
    add("--batch-size", type=int, metavar="N", help="inputs worked on at a time")


def add_output(parser: argparse.ArgumentParser) -> None:
    """--json and --quiet."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def named_model(options: argparse.Namespace, kept: NamedModel | None = None) -> NamedModel:
    """The model that was named, or the one that was kept, with what was given instead."""
    spec = options.model if kept is None else options.model or kept.spec
    weights = options.weights if kept is None else options.weights or kept.weights
    arguments = options.model_args
    if arguments is None:
        arguments = {} if kept is None else kept.arguments
    untrained = options.untrained if kept is None else kept.untrained and not options.weights
    return NamedModel(spec, weights, arguments, untrained)


def named_data(options: argparse.Namespace, kept: NamedData | None = None) -> NamedData:
    """The data that were named; pictures are prepared as `kept` says, unless options say else."""
    size = options.size
    if size is not None and len(size) > 2:
        raise BadValueError(f"--size: expected one or two whole numbers, got {len(size)}.")
    given: dict[str, Any] = {
        "size": None if size is None else (size[0], size[-1]),
        "crop": options.crop,
        "gray": options.gray,
        "mean": None if options.mean is None else tuple(options.mean),
        "std": None if options.std is None else tuple(options.std),
        "target": options.target,
    }
    spec, part, arguments = options.data, options.part, options.data_args
    if kept is not None and spec is None:
        spec, part, arguments = kept.spec, part or kept.part, arguments or kept.arguments
    found = NamedData(spec, part, arguments=arguments or {}, **given)
    return found if kept is None else found.prepared_as(kept)


def is_data_named(options: argparse.Namespace) -> bool:
    """Whether any option says which data are meant."""
    names = ("data", "data_args", "target", "part", "size", "crop", "gray", "mean", "std")
    return any(getattr(options, name) for name in names)


def asked_of(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `predict` that were given."""
    found: dict[str, Any] = {}
    if options.estimator is not None:
        found["estimator"] = options.estimator
    if options.rank is not None:
        found["rank"] = options.rank
    if options.low_rank:
        found["full_rank"] = False
    if options.classes is not None:
        found["classes"] = _classes(options.classes)
    return found


def _classes(given: list[str]) -> str | list[int]:
    if len(given) == 1 and not given[0].isdecimal():
        return given[0]
    try:
        return [int(text) for text in given]
    except ValueError as error:
        raise BadValueError(
            f"--classes: expected top5 or the like, or class numbers, got {' '.join(given)}."
        ) from error


def json_object(text: str) -> dict[str, Any]:
    """Keyword arguments in JSON."""
    try:
        found = parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return found


def memory(text: str) -> int:
    """A number of bytes: 8000000000, 8GB, 500MiB."""
    try:
        return read_bytes(text, "bytes")
    except BadValueError as error:
        raise argparse.ArgumentTypeError(
            f"expected bytes, such as 8GB or 500MiB, got {text!r}"
        ) from error


def compute_device(asked: str | None) -> torch.device:
    """The device that was asked for; without one, cuda where there is one, else the CPU."""
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
        torch.empty(0, device=device)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("another kind of device.")
    except (RuntimeError, AssertionError) as error:
        known = re.fullmatch(r"cpu|cuda(:\d+)?", asked) is not None
        why = f": {first_line(error)}" if known else " (mps has no float64, which is needed)."
        raise BadValueError(
            f"--device: expected cpu, cuda or cuda:N, got {asked!r}"
            + (why if known or asked.startswith("mps") else ".")
        ) from error
    return device


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
