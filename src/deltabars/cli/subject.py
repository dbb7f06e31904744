"""What options name: the model, data, fit and predictions, as objects and as printed Python."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from deltabars.cli.launching import compute_device
from deltabars.cli.options import SPREADS
from deltabars.cli.runs import Kept, Run
from deltabars.cli.sources.data import NamedData
from deltabars.cli.sources.models import NamedModel
from deltabars.cli.sources.source import Source
from deltabars.cli.tables import Columns, check_ending, columns_of, write_table
from deltabars.errors import BadValueError, DataError, printable
from deltabars.fitting.fitted import DeltaFit
from deltabars.prediction.prediction import Prediction
from deltabars.runtime.progress import Progress
from deltabars.storage.writing import check_can_write, check_parent

PICTURES = (".png", ".pdf", ".svg")
_MANY_CLASSES, _FEW = 100, "top5"
_DATA = ("data", "data_args", "target", "part", "size", "crop", "gray", "mean", "std")


def sayer(quiet: bool) -> Callable[[str], None]:
    """Return a function that prints a line about the work on stderr, or that does nothing."""

    def say(line: str) -> None:
        if not quiet:
            print(printable(f"… {line}"), file=sys.stderr, flush=True)

    return say


def check_file(path: Path | None, endings: Sequence[str], option: str = "--out") -> None:
    """Refuse the name of a file of another kind, and one that cannot be written."""
    if path is None:
        return
    check_ending(path, option, endings)
    check_can_write(path, option)


def named_model(options: argparse.Namespace, kept: NamedModel | None = None) -> NamedModel:
    """Return the model that was named; of a RUN the one that was kept, with what was given."""
    new = kept is None
    kept = kept or NamedModel(options.model, None, {}, options.untrained)
    return NamedModel(
        options.model or kept.spec,
        options.weights or kept.weights,
        kept.arguments if options.model_args is None else options.model_args,
        kept.untrained and (new or not options.weights),
    )


def named_data(options: argparse.Namespace, kept: NamedData | None = None) -> NamedData:
    """Return the data that were named; prepared as the kept ones, unless options say otherwise."""
    size = options.size
    if size is not None and len(size) > 2:
        raise BadValueError(f"--size: expected one or two whole numbers, got {len(size)}.")
    given = {name: getattr(options, name) for name in ("mean", "std", "crop", "gray", "target")}
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    given["size"] = None if size is None else (size[0], size[-1])
    spec, part, arguments = options.data, options.part, options.data_args
    if kept is not None and spec is None:
        spec, part, arguments = kept.spec, part or kept.part, arguments or kept.arguments
    found = NamedData(spec, part, arguments=arguments or {}, **given)
    return found if kept is None else found.prepared_as(kept)


def _asked_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `predict` that were given."""
    found: dict[str, Any] = {"estimator": options.estimator, "rank": options.rank}
    found["full_rank"] = False if options.low_rank else None
    found["spread"] = options.spread
    given = options.classes or []
    if given and all(text.isdecimal() for text in given):
        found["classes"] = [int(text) for text in given]
    elif given:
        found["classes"] = " ".join(given)  # such as top5; the fit refuses others
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Subject:
    """What a command on a RUN is about."""

    options: argparse.Namespace
    run: Run  # with another model where one was given
    data: NamedData  # named; else, to look at, those predicted last; else the training data
    asked: dict[str, Any]  # the arguments of `predict`
    latest: Kept | None = None  # the last prediction of the RUN, where it is about that

    @classmethod
    def open(cls, options: argparse.Namespace, *, looks: bool = False) -> Subject:
        """Read the RUN; `looks` of a command that looks at the predictions that there are."""
        run = open_run(options)
        latest = run.latest() if looks and options.data is None else None
        data, asked = named_data(options, latest.data if latest else run.data), _asked_of(options)
        named = asked or any(getattr(options, name) for name in _DATA)
        if latest is not None and not named:
            return cls(options, run, data, dict(latest.about["asked"]), latest)
        if asked.get("spread") == SPREADS[0]:  # as without it
            del asked["spread"]
        if "classes" not in asked and run.num_outputs > _MANY_CLASSES:
            asked["classes"] = _FEW
        return cls(options, run, data, asked)

    def load(self) -> tuple[DeltaFit, Source]:
        """Load the fit and the data; what the fit cannot give is refused before data are read."""
        fit = load_fit(self.run, self.options)
        known = {k: v for k, v in self.asked.items() if k in ("estimator", "rank", "classes")}
        names = fit.check_request(batch_size=self.options.batch_size, **known)[0]
        if "spread" in self.asked:  # which a fit of an earlier version lacks
            fit.meat_of(fit.matrices_of(names[0], self.asked["spread"])[0])
        return fit, self.run.load_data(self.data)

    def prediction(self) -> Kept:
        """Return the prediction; it is computed, and kept, where it is not there yet."""
        if self.latest is not None:
            return self.latest
        needs_check = _asked_of(self.options) or self.options.batch_size is not None
        fit, source = self.load() if needs_check else (None, self.run.load_data(self.data))
        kept = self.run.find(self.data, self._about(source))
        if kept is not None:
            return kept
        sayer(self.options.quiet)(f"predicting {self.data.spec}")
        return self.predict(fit or load_fit(self.run, self.options), source, looks=True)[0]

    def predict(
        self, fit: DeltaFit, source: Source, out: Path | None = None, *, looks: bool = False
    ) -> tuple[Kept, Path]:
        """Predict all inputs, write a table, and keep the result (not as the last if it `looks`).

        Returns what is kept, and where.
        """
        check_parent(self.run.path / "predictions", "RUN")
        parts: list[Prediction] = []
        names: list[str] = []
        targets: list[torch.Tensor] = []
        quiet, size = fit.with_progress(False), self.options.batch_size

        def tables() -> Iterator[Columns]:
            shown = not self.options.quiet
            with Progress("Predicting", len(source) or None, "input", shown) as bar:
                for batch in source.batches(fit.signature):
                    part = quiet.predict(batch.inputs, batch_size=size, **self.asked).to("cpu")
                    own = [source.name(len(names) + k) for k in range(len(part))]
                    parts.append(part)
                    names.extend(own)
                    targets.extend([] if batch.targets is None else [batch.targets])
                    yield columns_of(part, own, batch.targets, source.classes)
                    bar.show(len(names))
            if not names:
                raise DataError("--data: expected at least one input, got none.")

        if out is not None:
            write_table(out, tables())
        else:
            deque(tables(), maxlen=0)
        whole = Prediction.concatenate(parts)
        known = torch.cat(targets) if targets else None
        kept = Kept(whole, tuple(names), known, self.data, self._about(source))
        return kept, self.run.keep(kept, is_latest=not looks)

    def describe(self, kept: Kept) -> str:
        """Say in words what a prediction is of, how it was asked for, and when it was made."""
        asked = [f"{name.replace('_', '-')} {value}" for name, value in kept.about["asked"].items()]
        path = self.run.path_of(kept.data, kept.about)
        text = f"{len(kept.names):,} inputs of {printable(kept.data.spec)}"
        if path.is_file():
            text += f", predicted {datetime.fromtimestamp(path.stat().st_mtime):%Y-%m-%d %H:%M}"
        return text + (f" with {printable(', '.join(asked))}" if asked else "")

    def _about(self, source: Source) -> dict[str, Any]:
        return {"asked": self.asked, "fingerprint": source.fingerprint}

    def lines(self, *imports: str) -> list[str]:
        """Return Python that gives `run`, its `fit`, `data` and `source`."""
        options = self.options
        given = {"spec": options.model, "weights": options.weights, "arguments": options.model_args}
        model = call("replace", Code("run.model"), **given)
        other = any(value is not None for value in given.values())
        device = str(compute_device(options.device))
        return [
            "from dataclasses import replace" * other,
            "from deltabars.cli.runs import Run",
            "from deltabars.cli.sources.data import NamedData",
            *imports,
            f"\nrun = {call('Run.open', options.fitted)}",
            f"run = replace(run, model={model})" if other else "",
            f"fit = {call('run.load_fit', device=device, offload=options.offload)}",
            f"data = {made(self.data)}",
            "source = run.load_data(data)",
        ]


def open_run(options: argparse.Namespace) -> Run:
    """Return the RUN that was named, with another model where one was given."""
    found = Run.open(options.fitted)
    return replace(found, model=named_model(options, found.model))


def load_fit(run: Run, options: argparse.Namespace) -> DeltaFit:
    """Return the fit of a RUN, on the device that was asked for."""
    device = str(compute_device(options.device))
    return run.load_fit(device=device, offload=options.offload, progress=not options.quiet)


class Code(str):
    """Text that is code already."""


def program(*lines: str) -> str:
    """Return the lines of a program, without the empty ones."""
    return "\n".join(filter(None, lines))


def call(function: str, *arguments: Any, **named: Any) -> Code:
    """Return a call as code; arguments that are None are left out."""
    parts = [_literal(value) for value in arguments if value is not None]
    parts += [f"{name}={_literal(value)}" for name, value in named.items() if value is not None]
    if len(line := ", ".join(parts)) > 80:
        line = "".join(f"\n    {part}," for part in parts) + "\n"
    return Code(f"{function}({line})")


def made(value: Any) -> Code:
    """Return a model or data by name as code, with the attributes that are not the usual ones."""
    usual = vars(type(value)(value.spec))
    given = {name: found for name, found in vars(value).items() if found != usual[name]}
    return call(type(value).__name__, value.spec, **given)


def _literal(value: Any) -> str:
    if isinstance(value, Code):
        return str(value)
    return repr(str(value)) if isinstance(value, Path) else repr(value)
