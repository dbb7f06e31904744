"""RUN folders: a fit, how its model and data are named, and predictions that were made with it.

Nothing that a file of predictions says is imported or called: data are named by run.json alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
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
    warn,
)
from deltabars.fitting.files import MAX_FILE_SIZE
from deltabars.fitting.fitted import DeltaFit, load
from deltabars.prediction.prediction import Evidence, Judgement, Prediction
from deltabars.runtime.distributed import current_group
from deltabars.runtime.vectors import group_of
from deltabars.storage import format as storage
from deltabars.storage import writing
from deltabars.storage.reading import parse_json, read_arrays, read_start
from deltabars.storage.writing import check_parent, write_text

_FIT, _DESCRIPTION, _PREDICTIONS = "fit.deltabars", "run.json", "predictions"
_FORMAT = 1
_MOST = 16 << 20  # bytes of a description
_UNKNOWN = NamedData("data that are not named")


@dataclass(frozen=True, eq=False)
class Kept:
    """A prediction of data as they are named, with the names and targets of its inputs.

    `about` has `asked`, the arguments of `predict`, the data's `fingerprint`, and of which `fit`.
    """

    prediction: Prediction
    names: tuple[str, ...]
    targets: Tensor | None
    data: NamedData
    about: Mapping[str, Any]

    def arrays(self) -> dict[str, Any]:
        """Return all of it as arrays by name, which `read_kept` reads again."""
        found: dict[str, Any] = {f"prediction.{k}": v for k, v in self.prediction.numpy().items()}
        found["names"] = np.array(self.names)
        if self.targets is not None:
            found["targets"] = self.targets.cpu().numpy()
        if self.prediction.judgement is not None:
            found["judgement"] = np.array(json.dumps(asdict(self.prediction.judgement)))
        about = {**self.about, "data": asdict(self.data.absolute())}
        return found | {"about": np.array(json.dumps(about))}


def read_kept(path: Path, data: NamedData = _UNKNOWN) -> Kept:
    """Read the prediction that a file holds, of these data; refuse what is altered."""
    arrays = read_arrays(path, "Kept predictions (remove the file to compute them again)")
    try:
        about = parse_json(str(arrays["about"]))
        about.pop("data", None)
        known = {f"prediction.{each.name}": each.name for each in fields(Prediction)}
        values: dict[str, Any] = {
            known[key]: torch.from_numpy(arrays[key]) for key in known.keys() & arrays.keys()
        }
        targets = torch.from_numpy(arrays["targets"]) if "targets" in arrays else None
        names = tuple(str(name) for name in arrays["names"])
        count, width = values["mean"].shape  # B, C
        shapes = [(count,), (count, width), (count, width, width)]
        odd = [name for name, value in values.items() if value.shape not in shapes]
        many = {len(names), count if targets is None else len(targets), len(values["score"])}
        if odd or many != {count} or not values["mean"].is_floating_point():
            raise ValueError(f"{odd or 'inputs'} of another shape")
        if "judgement" in arrays:  # older files have none
            raw = parse_json(str(arrays["judgement"]))
            own = {each.name for each in fields(Evidence)}  # version 0.5 has others, too
            raw["evidence"] = {k: v for k, v in dict(raw["evidence"]).items() if k in own}
            values["judgement"] = Judgement.read(raw)
        prediction = Prediction(**{"covariance": None, "label": None, **values})
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CorruptFileError(f"{path} is altered: remove it ({first_line(error)}).") from error
    return Kept(prediction, names, targets, data, about)


@dataclass(frozen=True)
class Run:
    """A RUN folder: how its model and its training data are named, and the rest of run.json."""

    path: Path
    model: NamedModel
    data: NamedData
    classes: tuple[str, ...] | None  # their names, where they are known
    about: Mapping[str, Any]
    # The data of each kept prediction, by the name of its file.
    predicted: Mapping[str, NamedData] = field(default_factory=dict)
    fit_digest: str | None = None  # of the fit's file, when the folder was opened

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
        """Write a RUN folder, whole or not at all; in a process group all processes do it together.

        `loss` is that of the training, by the names of `named_loss`'s arguments; `columns` those of
        the training table; `dtype` and `max_file_size` are as for `DeltaFit.save`.
        """
        _check_names(classes, fit.num_outputs)
        folder, group = Path(path).absolute(), current_group()
        content = {
            "format": _FORMAT,
            "manifest": fit.diagnostics.get("manifest"),
            "outputs": fit.num_outputs,
            **({} if loss is None else {"loss": dict(loss)}),
            **({} if columns is None else {"columns": list(columns)}),
            "model": asdict(model.absolute()),
            "data": asdict(data.absolute()),
            "classes": classes,
        }

        def write(draft: Path) -> None:
            if group.is_first:
                check_new(folder, overwrite)
            if group.is_first or group_of(fit.spectra).size > 1:
                fit.save(draft / _FIT, dtype=dtype, max_file_size=max_file_size)
            if group.is_first:
                write_text(draft / _DESCRIPTION, json.dumps(content, indent=1))

        writing.write_whole_folder(folder, write, group, replace=overwrite)
        return cls.open(folder)

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Read the description of a RUN; refuse a folder that is none, or that is altered."""
        return writing.read_settled(Path(path), lambda: cls._open(Path(path)))

    @classmethod
    def _open(cls, folder: Path) -> Run:
        if not os.path.isfile(folder / _DESCRIPTION):
            raise StorageError(
                f"RUN: expected a folder that `deltabars fit --out` made, got {folder}, which "
                f"{'has no ' + _DESCRIPTION if os.path.isdir(folder) else 'does not exist'}."
            )
        try:
            content = _read_json(folder / _DESCRIPTION)
            newer = content["format"] > _FORMAT
            model, data = NamedModel(**content.pop("model")), _named(content.pop("data"))
            predicted = {k: _named(raw) for k, raw in content.pop(_PREDICTIONS, {}).items()}
            classes, outputs = content.pop("classes"), content["outputs"]
            texts = [*(classes or []), *content.get("aside", [])]
            if not isinstance(outputs, int) or outputs < 1 or {*map(type, texts)} - {str}:
                raise TypeError("outputs, or names that are no texts")
            names = None if classes is None else tuple(classes)
            found = cls(folder, model, data, names, content, predicted, _fit_digest(folder))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            said = f"{folder / _DESCRIPTION} is altered ({first_line(error)}). Fit again."
            raise CorruptFileError(said) from error
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
        """Load the fit, with the model that it was made of. The user's own code makes the model."""
        path, model = self.path / _FIT, self.model.load()
        return load(path, model, device=device, offload=offload, progress=progress)

    def load_data(self, data: NamedData | str | None = None) -> Source:
        """Load data with the classes and columns of the training data, or these themselves."""
        if isinstance(data, str):
            data = NamedData(data).prepared_as(self.data)
        source = (self.data if data is None else data).load(self.about.get("columns"))
        if self.classes is None:
            _check_names(source.classes, self.num_outputs)
            return source
        return source.with_classes(self.classes)

    def path_of(self, data: NamedData, about: Mapping[str, Any]) -> Path:
        """Return where a prediction of these data, asked for in this way, is kept."""
        name = re.sub(r"[^\w.-]+", "-", Path(data.spec).name).strip("-.")[:60] or "data"
        asked = [asdict(data.absolute()), {**about, "fit": self.fit_digest}]
        key = fingerprint_of(json.dumps(asked, sort_keys=True))[:12]
        return self.path / _PREDICTIONS / f"{name}-{key}.npz"

    def keep(self, kept: Kept, *, is_latest: bool = True) -> Path:
        """Keep a prediction; if it `is_latest`, commands without data are about it from now on."""
        kept = replace(kept, about={**kept.about, "fit": self.fit_digest})
        path = self.path_of(kept.data, kept.about)
        folder = path.parent
        try:
            # Of several commands that keep predictions, or replace the RUN, at the same time.
            with writing.turn(self.path):
                if _fit_digest(self.path) != self.fit_digest:
                    raise StorageError(
                        f"RUN: expected {self.path} as it was, got another fit in it. Start again."
                    )
                folder.mkdir(exist_ok=True)
                if folder.is_symlink():
                    raise OSError("expected a folder, got a link to another")
                writing.remove_left(folder)
                writing.write_whole(path, lambda draft: np.savez(draft, **kept.arrays()))
                content = _read_json(self.path / _DESCRIPTION)
                latest = _latest_of(content, list(content.get(_PREDICTIONS, {})))
                content.setdefault(_PREDICTIONS, {})[path.name] = asdict(kept.data.absolute())
                content["latest"] = path.name if is_latest else latest
                write_text(self.path / _DESCRIPTION, json.dumps(content, indent=1))
        except OSError as error:
            raise StorageError(f"Cannot write {folder}: {error.strerror or error}.") from error
        return path

    def find(self, data: NamedData, about: Mapping[str, Any]) -> Kept | None:
        """Return the kept prediction of these data, asked for in the same way, if there is one."""
        path = self.path_of(data, about)
        return self._read(path, data) if about.get("fingerprint") is not None else None

    def latest(self) -> Kept | None:
        """Return the last prediction of `deltabars predict`, if there is one."""
        now = Run.open(self.path)
        name = _latest_of(now.about, list(now.predicted)) or ""
        data = now.predicted.get(name)
        return None if data is None else self._read(self.path / _PREDICTIONS / name, data)

    def _read(self, path: Path, data: NamedData) -> Kept | None:
        kept = read_kept(path, data) if path.is_file() else None
        if kept is None or kept.about.get("fit") == self.fit_digest:
            return kept
        warn(f"RUN: {path} is left out: it is of another fit. Predict again.", DataWarning)
        return None


def check_new(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot become a RUN, before anything is computed."""
    if os.path.lexists(folder):
        is_run = (folder / _DESCRIPTION).is_file() and (folder / _FIT).exists()
        if not overwrite or not is_run or folder.is_symlink():
            advice = "Give --overwrite to replace it." if is_run else "It is no RUN."
            said = f"--out: expected a folder that does not exist, got {folder}. {advice}"
            raise StorageError(said)
    check_parent(folder, "--out")


def _read_json(path: Path) -> dict[str, Any]:
    return dict(parse_json(read_start(path, _MOST)))


def _latest_of(content: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the name of the last prediction; version 0.5 named those that were not it."""
    if "latest" in content:
        return content["latest"] if isinstance(content["latest"], str) else None
    return next((name for name in reversed(names) if name not in content.get("aside", ())), None)


def _named(raw: Mapping[str, Any]) -> NamedData:
    """Return named data from JSON, which has no tuples."""
    plain: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
    return NamedData(**plain)


def _fit_digest(folder: Path) -> str | None:
    """Return the digest of a RUN's fit, by its header or index; None where it cannot be read."""
    path = folder / _FIT
    try:
        index = path / storage.INDEX
        return str((_read_json(index) if path.is_dir() else storage.read_header(path))["digest"])
    except (StorageError, OSError, ValueError, KeyError, TypeError):
        return None


def _check_names(classes: Sequence[str] | None, outputs: int) -> None:
    if classes is not None and len(classes) != outputs:
        raise BadValueError(
            f"--data: expected a class name for each of the {outputs} outputs, got {len(classes)}."
        )
