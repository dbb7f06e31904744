"""Every command with its options, in tables, and options from a file.

Nothing heavy is imported here, so that `--help` and wrong usage are answered at once.
"""

from __future__ import annotations

import argparse
import difflib
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from deltabars.errors import BadValueError, first_line, printable, shortened
from deltabars.runtime import VERSION

ESTIMATORS = ("opg", "hessian", "sandwich", "ggn")
SPREADS = ("posterior", "sampling")
LOSSES = ("ce", "bce", "mse")
CRITERIA = ("score", "mutual_information", "entropy", "probability", "target")
STORED = ("float64", "float32", "bfloat16", "float16")
EXPERIMENTS = ("mnist", "cifar10")
_OF_FILES = ("FILE", "FILE.html", "DIR", "RUN", "OUT", "FIGURE", "DATA", "MODEL")
_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}  # as shtab has them

Row = tuple[str, dict[str, Any]]


def _row(name: str, text: str, metavar: str | None = None, **more: Any) -> Row:
    return name, {"help": text} | ({"metavar": metavar} if metavar else {}) | more


def _flag(name: str, text: str, default: bool | None = False) -> Row:
    return name, {"help": text, "action": "store_true", "default": default}


def _read_as(read: Callable[[str], Any], expected: str, word: str = "") -> Callable[[str], Any]:
    """Return what reads a value, or a word that stands for one, and says what was expected."""

    def read_or_refuse(text: str) -> Any:
        try:
            return text if word and text == word else read(text)
        except (ValueError, RecursionError) as error:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from error

    return read_or_refuse


def _json_object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


def _bytes(text: str) -> int:
    from deltabars.runtime.memory import read_bytes  # imports torch

    return read_bytes(text, "bytes")


_JSON = _read_as(_json_object, "a JSON object")
_MEMORY = _read_as(_bytes, "bytes, such as 8GB or 500MiB")


@dataclass(frozen=True)
class Command:
    """A command: its texts, and its options by the title of their group (`""` has none)."""

    brief: str
    text: str
    examples: str
    options: Mapping[str, tuple[Row, ...]]
    shared: bool = False  # torchrun may start it in several processes


def _model(default: str = "") -> tuple[Row, ...]:
    text = f"module:factory or file.py:factory{default}"
    untrained = _flag("--untrained", "no weights: fit those of the initialisation")
    return (
        _row("--model", text, "MODEL", required=not default),
        _row("--weights", f".safetensors, or a state dict in .pt or .pth{default}", "FILE"),
        *([] if default else [untrained]),
        _row("--model-args", "keyword arguments of the factory", "JSON", type=_JSON),
    )


def _data(default: str = "", *, required: bool = True, names: str = "--data") -> tuple[Row, ...]:
    channels = {"type": float, "nargs": "+"}
    size = "height and width to resize to, or both in one"
    return (
        _row(names, f"a folder, .npz or factory{default}", "DATA", required=required, dest="data"),
        _row("--data-args", "keyword arguments of the factory", "JSON", type=_JSON),
        _row("--target", "of a table: the column with the targets", "COLUMN"),
        _row("--part", "of MNIST and CIFAR-10 (default: train)", choices=("train", "test")),
        _row("--size", size, "N", type=int, nargs="+"),
        _flag("--crop", "with --size: cut the middle out, do not squeeze"),
        _flag("--gray", "one channel"),
        _row("--mean", "of the channels, to subtract", "X", **channels),
        _row("--std", "of the channels, to divide by", "X", **channels),
    )


_DEVICE = _row("--device", "where to compute (default: cuda where there is one, else cpu)")
_BATCH = _row("--batch-size", "examples worked on at a time", "N", type=int)
_QUIET = _flag("--quiet", "no progress")
_OUTPUT = (_flag("--json", "print one JSON object instead of text"), _QUIET)
_WAIT = "under torchrun: seconds to wait for another process (default: %(default)s)"
_LAUNCH = _row("--rank-timeout", _WAIT, "S", type=float, default=600.0)
_PYTHON = _flag("--print-python", "print the Python this stands for, and end")
_RUN = (
    _row("fitted", "what `deltabars fit --out` made", "RUN", type=Path),
    _DEVICE,
    _flag("--offload", "leave the eigenvectors in the files (default: where they are large)", None),
    *_OUTPUT,
)
_KEPT_MODEL = {"the model": _model(" (default: as it was fitted)")}
_PREPARED = "the data (pictures are prepared as for the fit, unless options say otherwise)"
_LATEST = {_PREPARED: _data(" (default: what was predicted last)", required=False)}
_SPREAD = "of what: posterior, what the data leave open; sampling, what retraining would move"
_CLASSES = "top5 or the like, or numbers (default: all; top5 of more than 100)"
_ASKED = {
    "the prediction": (
        _row("--estimator", "default: the fit's own", choices=ESTIMATORS),
        _row("--rank", "use the first eigenpairs only (default: all)", "K", type=int),
        _flag("--low-rank", "the K pairs alone, without the rest of the space"),
        _row("--spread", f"{_SPREAD} (default: posterior)", choices=SPREADS),
        _row("--classes", _CLASSES, "CLASS", nargs="+"),
        _BATCH,
    )
}
_RANK = _read_as(int, "a whole number or auto", "auto")
_NOISE = _read_as(float, "a number or estimate", "estimate")
_LIKELIHOODS = ("categorical", "bernoulli", "gaussian")
_SOLVERS = ("auto", "krylov", "dense", "arpack", "incremental")
_FIT = (
    _row("--l2", "the training's weight_decay; PATTERN=λ …; or auto, what the data support "
         "(default: auto)", "λ", nargs="+"),
    _row("--estimator", "default: auto, which is opg with a given λ, and ggn with --l2 auto",
         choices=("auto", *ESTIMATORS)),
    _row("--rank", "how many eigenpairs, or auto (default: 100)", "K", type=_RANK),
    _row("--tolerance", "of --rank auto: score_error / score (default: 0.05)", "X", type=float),
    _row("--solver", "default: auto", choices=_SOLVERS),
    _row("--params", "that count; or last-layer (default: all)", "PATTERN", nargs="+"),
    _row("--loss", "CrossEntropyLoss (the default), BCEWithLogitsLoss or MSELoss", choices=LOSSES),
    _row("--likelihood", "in place of --loss: summed over the outputs", choices=_LIKELIHOODS),
    _row("--label-smoothing", "of ce", "X", type=float),
    _row("--class-weights", "of ce, one a class", "X", type=float, nargs="+"),
    _row("--pos-weight", "of bce, one, or one an output", "X", type=float, nargs="+"),
    _row("--noise", "of mse: the targets' standard deviation, or estimate", "σ", type=_NOISE),
    _flag("--allow-probabilities", "take outputs that look like probabilities for logits", None),
    _row("--seed", "of the start vectors (default: 0)", "N", type=int),
    _DEVICE,
    _row("--dtype", "how precisely (default: as the model)", choices=("float32", "float64")),
    _row("--memory-budget", "such as 8GB (default: half of what is free)", "BYTES", type=_MEMORY),
    _BATCH,
    _row("--residual-tolerance", "of the eigenpairs", "X", type=float),
    _row("--max-products", "passes over the data a matrix at most", "N", type=int),
    _row("--max-seconds", "stop after so long with the pairs that there are", "S", type=float),
    _row("--smallest", "eigenvalues of the Hessian's lower end as well", "N", type=int),
    _row("--checkpoint", "save the state there; the same command resumes it", "DIR", type=Path),
)  # fmt: skip
_FIT_FILES = (
    _row("--store", "what the eigenvectors are stored in (default: as computed)", choices=STORED),
    _row("--max-file-size", "several files above that (default: 5GB)", "BYTES", type=_MEMORY),
    _row("--out", "a new folder", "RUN", type=Path, required=True),
    _flag("--overwrite", "replace a RUN that is there"),
)
COUNTS = {
    "train-images": "the first so many training images",
    "test-images": "likewise of the test images",
    "rank": "K, the number of eigenpairs",
    "steps": "training steps",
    "initialisations": "networks in the spread of the spectra, the main one included",
    "hessians": "of how many of them the spectrum of H is computed",
    "hessian-rank": "how many eigenvalues of it, of all but the main network (default: K)",
    "bootstrap": "bootstrap replicates, with fixed and as many with varying initial weights",
    "samples": "networks drawn by the sampler",
}
_SOURCES = """
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

COMMANDS = {
    "demo": Command(
        "train on handwritten digits and put error bars on the predictions",
        """\
Train a small network on scikit-learn's handwritten digits, fit the four estimators, print what they
say, and draw the most and least certain digits. Then retrain six times on bootstrap samples, and
compare the error bars with the scatter. Takes about a minute on two cores.
""",
        "deltabars demo --out digits.png --report digits.html",
        {"": (
            _row("--out", "where the picture goes (default: %(default)s); that of the check is "
                 "beside it, as …-check", "FILE", type=Path, default=Path("deltabars-demo.png")),
            _row("--report", "where a page about the digits goes", "FILE.html", type=Path),
            _QUIET,
        )},
    ),
    "fit": Command(
        "fit error bars to a trained network",
        """\
Compute the eigenpairs that put error bars on a trained network's predictions, from the network and
its training data, and keep them in a new folder RUN for the other commands.
""" + _SOURCES,
        """\
deltabars fit --model net.py:Net --weights net.safetensors --data train/ --out run
  deltabars fit --model net.py:Net --weights net.safetensors --data train/ --l2 0.01 --out run
  deltabars fit --config fit.toml --out run      # fit.toml: model = "net.py:Net", l2 = 0.01, …
  torchrun --nproc-per-node=8 -m deltabars fit --config fit.toml --out run       # on eight GPUs
""",
        {"the model": _model(), "the data": _data(), "the fit": _FIT, "how it is kept": _FIT_FILES,
         "": (*_OUTPUT, _LAUNCH, _PYTHON)},
        shared=True,
    ),
    "predict": Command(
        "predictions with error bars, as a table",
        """\
Put error bars on the predictions of other data with a fit. Writes one row an input: its name, label
and score, and mean, std and std_error of every class. The predictions are kept in RUN/predictions,
for `deltabars rank` and `deltabars report`.

With a FOLDER as --out the rows go to Parquet files of a block of inputs each, and nothing is held
in memory. After a kill the same command writes the blocks that are missing, also under torchrun.
FOLDER/_manifest.json is there when all of them are.
""" + _SOURCES,
        """\
deltabars predict run --data test/ --out test.csv
  deltabars predict run --data test/ --spread sampling --out test.csv
  torchrun --nproc-per-node=8 -m deltabars predict run --data data.py:millions --out scores/
""",
        {"": (
            *_RUN,
            _row("--out", ".csv, .jsonl or .parquet; or FOLDER/, for any number of inputs", "FILE"),
            _flag("--overwrite", "replace a FILE that is there"),
            _row("--block-size", "inputs a file in FOLDER (default: up to 10,000)", "N", type=int),
            _LAUNCH, _PYTHON,
        ), **_KEPT_MODEL, _PREPARED: _data(" to predict"), **_ASKED},
        shared=True,
    ),
    "rank": Command(
        "the inputs to look at first",
        """\
List the inputs to look at first: those with the highest score, whose probabilities are least
settled. Without --data the last predictions of the RUN, or else its training data. --by target
lists those whose own label is least probable; --wrong --most-certain, those that the network
contradicts with certainty.
""" + _SOURCES,
        """\
deltabars rank run                               # of what was predicted last
  deltabars rank run --data train/ --by target     # training pictures that may be mislabelled
  deltabars rank run --by mutual_information       # unlike the training data
""",
        {"": (*_RUN, _row("--out", ".csv, .jsonl or .parquet", "FILE", type=Path)),
         **_KEPT_MODEL, **_LATEST, **_ASKED, "the list": (
            _row("--count", "how many (default: %(default)s)", "N", type=int, default=20),
            _row("--by", "the order (default: score)", choices=CRITERIA, default="score"),
            _flag("--most-certain", "the other end of the order"),
            _flag("--per-class", "so many of each predicted class"),
            _flag("--wrong", "those alone whose predicted class is not the target"),
        )},
    ),
    "spectrum": Command(
        "the eigenvalues of a fit",
        """\
Show K, how far the last eigenvalue λ_K is above λ, how many parameters the data determine, and the
eigenvalues with their residuals.
""",
        "deltabars spectrum run --out spectrum.png --values eigenvalues.csv",
        {"": (
            *_RUN,
            _row("--out", "a figure: .png, .pdf or .svg", "FIGURE", type=Path),
            _row("--values", "all eigenvalues: .csv, .jsonl or .parquet", "FILE", type=Path),
        ), **_KEPT_MODEL},
    ),
    "report": Command(
        "a page to look through the predictions",
        """\
Write one page that opens in a browser, from disk and without a network. Without --data it is about
the last predictions of the RUN, or else about its training data.
""" + _SOURCES,
        "deltabars report run --data train/ --out training.html --title 'Which pictures are odd?'",
        {"": (
            *_RUN,
            _row("--out", "the page: .html", "FILE", type=Path, required=True),
            _row("--rows", "inputs in the page (default: 1000)", "N", type=int, default=1000),
            _row("--title", "of the page"),
        ), **_KEPT_MODEL, **_LATEST, **_ASKED},
    ),
    "check": Command(
        "whether the error bars are those that retraining shows",
        """\
Compare the error bars of a fit with the scatter of networks that are trained again on bootstrap
samples of its training data. A slope of 1 is right; at 0.5 the bars are twice too wide. INPUTS are
to be predicted by every network; held-out ones, a few hundred.

--train FUNCTION retrains here: module:function or file.py:function. The function gets a bootstrap
sample of the training data, a Dataset (of tensors a TensorDataset), trains a network as that of the
fit was trained, and returns it, or its state dict. torch's seed is 0 at each call, so that every
network starts from the same initial weights. The networks are kept in --folder; a check that was
stopped is resumed by the same command.

--replicas FILE ... takes the weights of networks that are retrained already, in place of --train.

--calibrate NEW writes a new RUN whose bars have the level of the retrained networks. Two are
enough for it: the fit knows the shape.
""" + _SOURCES,
        """\
deltabars check run --inputs test/ --train train.py:retrain --out check.png
  deltabars check run --inputs test/ --replicas first.pt second.pt --calibrate calibrated
""",
        {"": (
            *_RUN,
            _row("--out", "a figure: .png, .pdf or .svg", "FIGURE", type=Path),
        ), "the retrained networks": (
            _row("--train", "a function that trains on the data that it gets", "FUNCTION"),
            _row("--replicas", ".safetensors, or state dicts in .pt or .pth", "FILE", nargs="+"),
            _row("--count", "of --train: how many (default: 16)", "N", type=int),
            _row("--seed", "of --train: of the samples (default: 0)", "N", type=int),
            _row("--folder", "of --train: where they are kept (default: RUN/check)", "DIR",
                 type=Path),
        ), "the comparison": (
            _row("--spread", f"{_SPREAD} (default: sampling)", choices=SPREADS, default="sampling"),
            _row("--calibrate", "write the calibrated fit, as a new folder", "RUN", type=Path),
        ), **_KEPT_MODEL, _PREPARED: _data(" to predict", names="--inputs --data")},
    ),
    "reproduce": Command(
        "the paper's networks, table and figures",
        """\
Train the paper's network, put error bars on all training and test images, and write results.json
and every figure of the paper. Each stage is kept in OUT/stages: a run that was stopped is resumed.
The paper's size is for a GPU; --small takes about two minutes on two cores. DIR holds the files as
they are downloaded: MNIST's four idx files, or the binary version of CIFAR-10.
""",
        """\
deltabars reproduce mnist --data mnist/ --small
  deltabars reproduce cifar10 --data cifar-10-batches-bin/ --bootstrap 16
""",
        {"": (
            _row("experiment", "which of the paper's two", choices=EXPERIMENTS),
            _row("--data", "the downloaded files", "DIR", type=Path, required=True),
            _row("--out", "default: reproduction-EXPERIMENT[-small]", "OUT", type=Path),
            _flag("--small", "a taste: 600 images, 20 eigenpairs, few networks"),
            _row("--weights", "trained weights, .npz, instead of training", "FILE", type=Path),
            _row("--seed", "of everything that is drawn (default: 0)", type=int, default=0),
            *(_row(f"--{name}", text, "N", type=int) for name, text in COUNTS.items()),
            _DEVICE,
            _flag("--any-order", "do not insist on the same bits in every run"),
            _flag("--fresh", "throw kept stages away first"),
            _QUIET,
        )},
    ),
    "completion": Command(
        "a script with which a shell completes commands and options",
        "Print a script (shtab's) that completes the commands of deltabars and their options.",
        'eval "$(deltabars completion bash)"              # in ~/.bashrc',
        {"": (_row("shell", "which shell", choices=tuple(_FILES)),)},
    ),
}  # fmt: skip
_COMMON = (
    _row("--config", "options from a TOML file; those given here win", "FILE"),
    _flag("--debug", "the traceback of an error as well"),
)


def make_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser, and those of its commands by name."""
    parser = _Parser(
        prog="deltabars",
        description="Error bars for the predictions of trained PyTorch networks.",
        epilog="`deltabars COMMAND --help` has examples.",
    )
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=command.brief,
            description=command.text,
            epilog=f"examples:\n  {command.examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # a shortened --config would not be seen
        )
        for title, rows in command.options.items():
            group = own.add_argument_group(title) if title else own
            for option, settings in rows:
                action = group.add_argument(*option.split(), **settings)
                if action.metavar in _OF_FILES:
                    action.complete = _FILES  # type: ignore[attr-defined]
        for option, settings in _COMMON:
            own.add_argument(option, **settings)
    return parser, commands.choices


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage in one line, which names the command that lists the options."""

    def error(self, message: str) -> NoReturn:
        said = printable(" ".join(message.removeprefix("argument ").split()).rstrip("."))
        self.exit(2, f"deltabars: {said} (usage: {self.prog} --help)\n")


_MOST = 1 << 20  # bytes of a file


def with_config(
    arguments: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]
) -> list[str]:
    """Return the arguments after those of the config file, which they replace.

    Keys of the file are names of options. A table named as a command has options of that one alone.
    """
    given = list(arguments)
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config", type=Path)
    try:
        path = finder.parse_known_args(given)[0].config
    except argparse.ArgumentError:  # no value: the command's parser says so
        path = None
    if path is None or given[0] not in commands:
        return given
    known = {
        name[2:]: action
        for action in commands[given[0]]._actions
        for name in action.option_strings
        if name.startswith("--") and name not in ("--config", "--help")
    }
    words: list[str] = []
    for key, value in _read(path, given[0], list(commands)).items():
        name = key.replace("_", "-")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1, 0.0)[0]
            raise BadValueError(
                f"--config: expected options of `deltabars {given[0]}` in {path}, got "
                f"{shortened(repr(key))}. The nearest one is {nearest!r}; those of another command "
                "go below its name, such as [rank]."
            )
        words += _words(name, value, known[name], path)
    # The option between them ends lists of values, before a RUN that may come next.
    return [given[0], *words, f"--config={path}", *given[1:]]


def _read(path: Path, command: str, commands: list[str]) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST + 1)
        if len(raw) > _MOST:
            raise ValueError(f"it has more than {_MOST:,} bytes")
        content = tomllib.loads(raw.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise BadValueError(f"--config: expected TOML, got {path}: {why}.") from error
    tables = {name: content.pop(name) for name in commands if isinstance(content.get(name), dict)}
    return {**content, **tables.get(command, {})}


def _words(name: str, value: Any, action: argparse.Action, path: Path) -> list[str]:
    """Return an option as it would be on the command line."""
    if isinstance(value, bool) != (action.nargs == 0):
        expected = f"{name} = true or false" if action.nargs == 0 else f"a value for {name}"
        raise BadValueError(f"--config: expected {expected} in {path}, got {shortened(value)}.")
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    if isinstance(value, Mapping) and action.nargs is None:
        value = json.dumps(value, default=str)
    elif isinstance(value, Mapping):
        value = [f"{pattern}={number}" for pattern, number in value.items()]
    if isinstance(value, list) or action.nargs:
        return [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return [f"--{name}={value}"]
