"""Predictions as they are kept in files, with the names and targets of their inputs.

Whoever can write such a file decides what it says, so nothing that it says is imported or called.
What data a prediction is of is a matter of the command line and of run.json.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.cli.sources.data import NamedData
from deltabars.cli.sources.models import NamedModel
from deltabars.cli.sources.source import Source, fingerprint_of
from deltabars.errors import (
    BadValueError,
    CorruptFileError,
    DataWarning,
    StorageError,
    first_line,
    shortened,
)
from deltabars.fitting.files import MAX_FILE_SIZE
from deltabars.fitting.fitted import DeltaFit, load
from deltabars.prediction.prediction import Judgement, Prediction
from deltabars.runtime.distributed import current_group
from deltabars.runtime.vectors import group_of
from deltabars.storage import format as storage
from deltabars.storage.format import INDEX
from deltabars.storage.reading import parse_json, read_arrays, read_start
from deltabars.storage.writing import (
    check_parent,
    read_settled,
    remove_left,
    turn,
    write_text,
    write_whole,
    write_whole_folder,
)

_TUPLES = ("size", "mean", "std")
_ONE_AN_INPUT = ("score", "entropy", "mutual_information", "saturated", "impossible")
_MARKS = ("saturated", "impossible")
_OPTIONAL = ("covariance", "label")
_UNKNOWN = NamedData("data that are not named")


@dataclass(frozen=True, eq=False)
class Kept:
    """A prediction with the names and targets of its inputs, as it is kept in a RUN.

    Attributes:
        prediction: of all inputs, on the CPU.
        names: of the inputs.
        targets: where they are known.
        data: how the data are named, by the command line or by run.json; a file says it as well,
            for people who read it.
        about: what the prediction was asked for, and the data's fingerprint.
    """

    prediction: Prediction
    names: tuple[str, ...]
    targets: Tensor | None
    data: NamedData
    about: Mapping[str, Any]

    def arrays(self) -> dict[str, Any]:
        """All of it as arrays by name, which `read_kept` reads again."""
        found: dict[str, Any] = {
            f"prediction.{name}": value for name, value in self.prediction.numpy().items()
        }
        found["names"] = np.array(self.names)
        if self.targets is not None:
            found["targets"] = self.targets.cpu().numpy()
        if self.prediction.judgement is not None:
            found["judgement"] = np.array(json.dumps(asdict(self.prediction.judgement)))
        about = {**self.about, "data": asdict(self.data.absolute())}
        found["about"] = np.array(json.dumps(about))
        return found


def read_kept(path: Path, data: NamedData = _UNKNOWN) -> Kept:
    """The prediction that a file holds, of these data.

    Raises:
        DataError, CorruptFileError: the file is broken, or holds something else.
    """
    arrays = read_arrays(path, "Kept predictions (remove the file to compute them again)")
    try:
        about = parse_json(str(arrays["about"]))
        about.pop("data", None)  # a text to read: see above
        values: dict[str, Any] = {
            field.name: torch.from_numpy(arrays[f"prediction.{field.name}"])
            for field in fields(Prediction)
            if f"prediction.{field.name}" in arrays
        }
        judged = None
        if "judgement" in arrays:  # older files have none
            judged = Judgement.read(parse_json(str(arrays["judgement"])))
        prediction = Prediction(**{**dict.fromkeys(_OPTIONAL), **values}, judgement=judged)
        targets = torch.from_numpy(arrays["targets"]) if "targets" in arrays else None
        names = tuple(str(name) for name in arrays["names"])
        _check(values, names, targets)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CorruptFileError(f"{path} is altered: remove it ({first_line(error)}).") from error
    return Kept(prediction, names, targets, data, about)


def _check(values: Mapping[str, Tensor], names: tuple[str, ...], targets: Tensor | None) -> None:
    """Refuse fields whose shapes do not go together."""
    count, width = values["mean"].shape  # B, C
    expected = {"covariance": (count, width, width)}
    for name, value in values.items():
        one = name.startswith(_ONE_AN_INPUT)
        shape = expected.get(name, (count,) if one else (count, width))
        whole = name in ("label", "classes")
        # A label is one of all classes, or a row of yes and no.
        fits = value.shape == shape or (name == "label" and value.shape == (count,))
        kind = value.dtype == torch.bool if name in _MARKS else whole != value.is_floating_point()
        if not fits or not kind or value.is_complex():
            raise ValueError(f"{name} of shape {tuple(value.shape)}")
    if len(names) != count or (targets is not None and len(targets) != count):
        raise ValueError(f"{len(names)} names of {count} inputs")


def named_data(raw: Mapping[str, Any]) -> NamedData:
    """Named data as they come from JSON, which has no tuples."""
    values = dict(raw)
    for name in _TUPLES:
        if values.get(name) is not None:
            values[name] = tuple(values[name])
    return NamedData(**values)


_FIT, _DESCRIPTION, _PREDICTIONS = "fit.deltabars", "run.json", "predictions"
_ASIDE = "aside"  # the names of predictions that commands made to look at
_FORMAT = 1
_MOST = 16 << 20  # bytes of a description


@dataclass(frozen=True)
class Run:
    """A RUN folder.

    Attributes:
        path: the folder.
        model: how the model is named.
        data: how the training data are named.
        classes: their names, where they are known.
        about: the rest of run.json.
        predicted: how the data of each kept prediction are named, by the name of its file, the
            last one last. It is here and not in the files because naming data may run code.
        fit_digest: of the fit's file, when the folder was opened; None where that cannot be read.
    """

    path: Path
    model: NamedModel
    data: NamedData
    classes: tuple[str, ...] | None
    about: Mapping[str, Any]
    predicted: dict[str, NamedData] = field(default_factory=dict)
    fit_digest: str | None = None

    @classmethod
    def create(
        cls,
        path: str | Path,
        fit: DeltaFit,
        model: NamedModel,
        data: NamedData,
        classes: tuple[str, ...] | None = None,
        *,
        loss: Mapping[str, Any] | None = None,
        columns: Sequence[str] | None = None,
        overwrite: bool = False,
        dtype: torch.dtype | str | None = None,
        max_file_size: int | str = MAX_FILE_SIZE,
    ) -> Run:
        """Write a RUN folder, whole or not at all; the fit as `DeltaFit.save` is told to.

        `loss` is that of the training as it was given, by the names of `named_loss`'s arguments;
        `columns` are those of the training table, which other tables then have to have.
        In a process group all ranks call it together.

        Raises:
            BadValueError: there are not as many names of classes as the fit has outputs.
            StorageError: it cannot be written, or exists and is not to be overwritten.
        """
        _check_names(classes, fit.num_outputs)
        folder = Path(path).absolute()
        about = {
            "format": _FORMAT,
            "manifest": fit.diagnostics.get("manifest"),
            "outputs": fit.num_outputs,
            **({} if loss is None else {"loss": dict(loss)}),
            **({} if columns is None else {"columns": list(columns)}),
        }
        content = {
            **about,
            "model": {
                name: value
                for name, value in asdict(model.absolute()).items()
                if value or name != "untrained"  # which 0.5 did not have
            },
            "data": asdict(data.absolute()),
            "classes": classes,
        }

        group = current_group()

        def write(draft: Path) -> None:
            if group.is_first:
                check_new(folder, overwrite)
            if group.is_first or group_of(fit.spectra).size > 1:
                fit.save(draft / _FIT, dtype=dtype, max_file_size=max_file_size)
            if group.is_first:
                (draft / _DESCRIPTION).write_text(json.dumps(content, indent=1) + "\n")

        write_whole_folder(folder, write, group, replace=overwrite)
        return cls.open(folder)

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The RUN in a folder.

        Raises:
            StorageError, CorruptFileError: there is none, or its description is altered.
        """
        folder = Path(path)
        return read_settled(folder, lambda: cls._open(folder))

    @classmethod
    def _open(cls, folder: Path) -> Run:
        if not os.path.isfile(folder / _DESCRIPTION):
            raise StorageError(
                f"RUN: expected a folder that `deltabars fit --out` made, got {folder}, which "
                f"{'has no ' + _DESCRIPTION if os.path.isdir(folder) else 'does not exist'}."
            )
        try:
            content = parse_json(read_start(folder / _DESCRIPTION, _MOST))
            model, data = NamedModel(**content.pop("model")), named_data(content.pop("data"))
            kept = content.pop(_PREDICTIONS, {})
            predicted = {name: named_data(raw) for name, raw in kept.items()}
            classes = content.pop("classes")
            names = None if classes is None else tuple(classes)
            digest = _fit_digest(folder)
            found = cls(folder, model, data, names, content, predicted, digest)
            newer = content["format"] > _FORMAT
            outputs = content["outputs"]
            if not isinstance(outputs, int) or outputs < 1:
                raise TypeError("outputs")
            if classes is not None and not _are_names(classes):
                raise TypeError("classes")
            if not _are_names(content.get(_ASIDE, [])):
                raise TypeError(_ASIDE)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptFileError(
                f"{folder / _DESCRIPTION} is altered: it cannot be read "
                f"({first_line(error)}). Fit again."
            ) from error
        if newer:
            raise StorageError(f"{folder} is of a newer deltabars. Install that.")
        return found

    @property
    def num_outputs(self) -> int:
        """C."""
        return int(self.about["outputs"])

    def load_fit(
        self, *, device: str | None = None, offload: bool | None = None, progress: bool = True
    ) -> DeltaFit:
        """The fit, with the model that it was made of. The user's own code makes the model."""
        model = self.model.load()
        try:
            return load(self.path / _FIT, model, device=device, offload=offload, progress=progress)
        finally:
            self._check_same_fit()

    def load_data(self, data: NamedData | str | None = None) -> Source:
        """Data for the fit: the training data by default; pictures are prepared as these were.

        Raises:
            BadValueError: other classes or columns than those of the training data.
        """
        if isinstance(data, str):
            data = NamedData(data).prepared_as(self.data)
        source = (self.data if data is None else data).load(self.about.get("columns"))
        if self.classes is None:
            _check_names(source.classes, self.num_outputs)
            return source
        return source.with_classes(self.classes)

    def keep(self, kept: Kept, *, aside: bool = False) -> Path:
        """Keep a prediction; one of the same data and options takes the place of the former.

        What is kept `aside` is found again, and is not the latest.
        """
        kept = replace(kept, about=self._about(kept.about))
        folder = self.path / _PREDICTIONS
        path = folder / f"{_name(kept.data)}-{_key(kept.data, kept.about)}.npz"
        try:
            # Of several commands that keep predictions, or replace the RUN, at the same time.
            with turn(self.path):
                self._check_same_fit()
                folder.mkdir(exist_ok=True)
                if folder.is_symlink():
                    raise StorageError(
                        f"Cannot write {folder}: expected a folder in the RUN, got a link to "
                        "another."
                    )
                remove_left(folder)
                write_whole(path, lambda draft: np.savez(draft, **kept.arrays()))
                content = parse_json(read_start(self.path / _DESCRIPTION, _MOST))
                named, others = content.setdefault(_PREDICTIONS, {}), content.get(_ASIDE, [])
                if not aside or path.name not in named:
                    named.pop(path.name, None)
                    named[path.name] = asdict(kept.data.absolute())
                    here = [path.name] if aside else []
                    content[_ASIDE] = [name for name in others if name != path.name] + here
                write_text(self.path / _DESCRIPTION, json.dumps(content, indent=1))
        except OSError as error:
            raise StorageError(f"Cannot write {folder}: {error.strerror or error}.") from error
        return path

    def _about(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """What a prediction was asked for, and of which fit."""
        return {**about, "fit": self.fit_digest}

    def _check_same_fit(self) -> None:
        """Refuse a RUN that another command has replaced since it was opened."""
        if _fit_digest(self.path) != self.fit_digest:
            raise StorageError(
                f"RUN: expected {self.path} to stay as it was, got another fit in it: `fit "
                "--overwrite` has replaced it in the meantime. Start the command again."
            )

    def find(self, data: NamedData, about: Mapping[str, Any]) -> Kept | None:
        """The kept prediction of these data, asked for in the same way; None if there is none."""
        if about.get("fingerprint") is None:
            return None
        asked = self._about(about)
        path = self.path / _PREDICTIONS / f"{_name(data)}-{_key(data, asked)}.npz"
        kept = read_kept(path, data) if path.is_file() else None
        return None if kept is None or kept.about.get("fit") != self.fit_digest else kept

    def when(self, kept: Kept) -> datetime | None:
        """When a prediction was kept; None where it is not there."""
        key = _key(kept.data, self._about(kept.about))
        path = self.path / _PREDICTIONS / f"{_name(kept.data)}-{key}.npz"
        return datetime.fromtimestamp(path.stat().st_mtime) if path.is_file() else None

    def latest(self) -> Kept | None:
        """The prediction that was kept last, and not aside; None if there is none.

        Files that run.json does not name are left out with a warning: nobody knows of which data
        they are, but for what they say themselves.
        """
        folder, now = self.path / _PREDICTIONS, Run.open(self.path)
        known, beside = now.predicted, set(now.about.get(_ASIDE, ()))
        files = {path.name for path in folder.glob("*.npz") if not path.name.startswith("draft-")}
        if strange := sorted(files - set(known)):
            _warn_left_out(folder, strange, files, f"{_DESCRIPTION} does not name them")
        foreign = []
        try:
            for name in [name for name in reversed(known) if name in files - beside]:
                kept = read_kept(folder / name, known[name])
                if kept.about.get("fit") == self.fit_digest:
                    return kept
                foreign.append(name)
            return None
        finally:
            if foreign:
                reason = "they are of another fit, or of an older version"
                _warn_left_out(folder, foreign, files, reason)


def _warn_left_out(folder: Path, names: Sequence[str], files: set[str], reason: str) -> None:
    warnings.warn(
        f"RUN: {len(names)} of {len(files)} files in {folder} are left out, such as "
        f"{shortened(names[0])}: {reason}. Predict their data again, or remove them.",
        DataWarning,
        stacklevel=3,
    )


def _fit_digest(folder: Path) -> str | None:
    """The digest of a RUN's fit, by its header or index; None where that cannot be read."""
    path = folder / _FIT
    try:
        if path.is_dir():
            return str(parse_json(read_start(path / INDEX, _MOST))["digest"])
        return str(storage.read_header(path)["digest"])
    except (StorageError, OSError, ValueError, KeyError, TypeError):
        return None


def check_new(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot become a RUN, before anything is computed."""
    if os.path.lexists(folder):
        is_run = (folder / _DESCRIPTION).is_file() and (folder / _FIT).exists()
        if not overwrite or not is_run or folder.is_symlink():
            advice = "Give --overwrite to replace it." if is_run else "It is no RUN."
            raise StorageError(
                f"--out: expected a folder that does not exist, got {folder}. {advice}"
            )
    check_parent(folder, "--out")


def _check_names(classes: Sequence[str] | None, outputs: int) -> None:
    if classes is not None and len(classes) != outputs:
        raise BadValueError(
            f"--data: expected a class name for each of the {outputs} outputs, got {len(classes)} "
            "names. Give as many, or none."
        )


def _are_names(classes: Any) -> bool:
    return isinstance(classes, list) and all(isinstance(name, str) for name in classes)


def _name(data: NamedData) -> str:
    plain = re.sub(r"[^\w.-]+", "-", Path(data.spec).name).strip("-.")
    return plain[:60] or "data"


def _key(data: NamedData, about: Mapping[str, Any]) -> str:
    named = json.dumps([asdict(data.absolute()), dict(about)], sort_keys=True)
    return fingerprint_of(named)[:12]
