"""RUN folders: a fit, how its model and data are named, and predictions that were made with it.

RUN/fit.deltabars           the fit, as `DeltaFit.save` writes it
RUN/run.json                the model, the data, class names, versions
RUN/predictions/NAME.npz    predictions of other data, for `rank` and `report`
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.errors import BadValueError, CorruptFileError, StorageError
from deltabars.fitted import DeltaFit
from deltabars.loading import load
from deltabars.prediction import Prediction
from deltabars.recipes.paper import read_arrays
from deltabars.sources import NamedData, NamedModel, Source
from deltabars.sources.source import fingerprint_of
from deltabars.writing import check_parent, write_whole

_FIT, _DESCRIPTION, _PREDICTIONS = "fit.deltabars", "run.json", "predictions"
_FORMAT = 1
_TUPLES = ("size", "mean", "std")


@dataclass(frozen=True, eq=False)
class Kept:
    """A prediction with the names and targets of its inputs, as it is kept in a RUN.

    Attributes:
        prediction: of all inputs, on the CPU.
        names: of the inputs.
        targets: where they are known.
        data: how the data are named.
        about: what the prediction was asked for, and the data's fingerprint.
    """

    prediction: Prediction
    names: tuple[str, ...]
    targets: Tensor | None
    data: NamedData
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A RUN folder.

    Attributes:
        path: the folder.
        model: how the model is named.
        data: how the training data are named.
        classes: their names, where they are known.
        about: the rest of run.json.
    """

    path: Path
    model: NamedModel
    data: NamedData
    classes: tuple[str, ...] | None
    about: Mapping[str, Any]

    @classmethod
    def create(
        cls,
        path: str | Path,
        fit: DeltaFit,
        model: NamedModel,
        data: NamedData,
        classes: tuple[str, ...] | None = None,
        *,
        overwrite: bool = False,
    ) -> Run:
        """Write a RUN folder, whole or not at all.

        Raises:
            StorageError: it cannot be written, or exists and is not to be overwritten.
        """
        folder = Path(path).absolute()
        check_new(folder, overwrite)
        about = {
            "format": _FORMAT,
            "torch": torch.__version__,
            "data_fingerprint": fit.diagnostics["data_fingerprint"],
            "seed": fit.diagnostics["seed"],
            "outputs": fit.num_outputs,
        }
        content = {
            **about,
            "model": asdict(model.absolute()),
            "data": asdict(data.absolute()),
            "classes": classes,
        }
        draft, former = (
            folder.with_name(f".{folder.name}.{os.getpid()}.{kind}") for kind in ("draft", "former")
        )
        try:
            draft.mkdir()
            fit.save(draft / _FIT)
            (draft / _DESCRIPTION).write_text(json.dumps(content, indent=1) + "\n")
            if folder.exists():
                os.replace(folder, former)
            os.replace(draft, folder)
        except OSError as error:
            raise StorageError(f"Cannot write {folder}: {error.strerror or error}.") from error
        finally:
            if former.exists() and not folder.exists():
                os.replace(former, folder)
            shutil.rmtree(draft, ignore_errors=True)
            shutil.rmtree(former, ignore_errors=True)
        return cls.open(folder)

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The RUN in a folder.

        Raises:
            StorageError, CorruptFileError: there is none, or its description is altered.
        """
        folder = Path(path)
        if not (folder / _DESCRIPTION).is_file():
            raise StorageError(
                f"RUN: expected a folder that `deltabars fit --out` made, got {folder}, which "
                f"{'has no ' + _DESCRIPTION if folder.is_dir() else 'does not exist'}."
            )
        try:
            content = json.loads((folder / _DESCRIPTION).read_text())
            model, data = NamedModel(**content.pop("model")), named_data(content.pop("data"))
            classes = content.pop("classes")
            found = cls(folder, model, data, None if classes is None else tuple(classes), content)
            newer = content["format"] > _FORMAT
            if not isinstance(content["outputs"], int):
                raise TypeError("outputs")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptFileError(
                f"{folder / _DESCRIPTION} is altered: it cannot be read ({error}). Fit again."
            ) from error
        if newer:
            raise StorageError(f"{folder} is of a newer deltabars. Install that.")
        return found

    @property
    def num_outputs(self) -> int:
        """C."""
        return int(self.about["outputs"])

    def load_fit(self, *, device: str | None = None, progress: bool = True) -> DeltaFit:
        """The fit, with the model that it was made of. The user's own code makes the model."""
        model = self.model.load()
        return load(self.path / _FIT, model, device=device, progress=progress)

    def load_data(self, data: NamedData | str | None = None) -> Source:
        """Data for the fit: the training data by default; pictures are prepared as these were.

        Raises:
            BadValueError: other classes than those of the training data.
        """
        if isinstance(data, str):
            data = NamedData(data).prepared_as(self.data)
        source = (self.data if data is None else data).load()
        given, own = source.classes, self.classes
        if given is not None and own is not None and given != own:
            odd = sorted(set(given) ^ set(own)) or ["their order"]
            raise BadValueError(
                f"--data: expected the {len(own)} classes of the fit, or pictures without classes "
                f"beside one another, got {len(given)} (the difference: {', '.join(odd[:5])})."
            )
        return replace(source, classes=own if own is not None else given)

    def keep(self, kept: Kept) -> Path:
        """Keep a prediction; one of the same data and options takes the place of the former."""
        arrays: dict[str, Any] = {
            f"prediction.{name}": value for name, value in kept.prediction.numpy().items()
        }
        arrays["names"] = np.array(kept.names)
        if kept.targets is not None:
            arrays["targets"] = kept.targets.cpu().numpy()
        about = {**kept.about, "data": asdict(kept.data.absolute())}
        arrays["about"] = np.array(json.dumps(about))
        folder = self.path / _PREDICTIONS
        path = folder / f"{_name(kept.data)}-{_key(kept.data, kept.about)}.npz"
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(f"Cannot write {folder}: {error.strerror or error}.") from error
        write_whole(path, lambda draft: np.savez(draft, **arrays))
        return path

    def find(self, data: NamedData, about: Mapping[str, Any]) -> Kept | None:
        """The kept prediction of these data, asked for in the same way; None if there is none."""
        if about.get("fingerprint") is None:
            return None
        path = self.path / _PREDICTIONS / f"{_name(data)}-{_key(data, about)}.npz"
        return _read(path) if path.is_file() else None

    def latest(self) -> Kept | None:
        """The prediction that was kept last; None if there is none."""
        found = [
            path
            for path in (self.path / _PREDICTIONS).glob("*.npz")
            if not path.name.startswith("draft-")
        ]
        return _read(max(found, key=lambda path: path.stat().st_mtime_ns)) if found else None


def check_new(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot become a RUN, before anything is computed."""
    if folder.is_symlink() or folder.exists():
        is_run = (folder / _DESCRIPTION).is_file() and (folder / _FIT).is_file()
        if not overwrite or not is_run or folder.is_symlink():
            advice = "Give --overwrite to replace it." if is_run else "It is no RUN."
            raise StorageError(
                f"--out: expected a folder that does not exist, got {folder}. {advice}"
            )
    check_parent(folder, "--out")


def named_data(raw: Mapping[str, Any]) -> NamedData:
    """Named data as they come from JSON, which has no tuples."""
    values = dict(raw)
    for name in _TUPLES:
        if values.get(name) is not None:
            values[name] = tuple(values[name])
    return NamedData(**values)


def _name(data: NamedData) -> str:
    plain = re.sub(r"[^\w.-]+", "-", Path(data.spec).name).strip("-.")
    return plain[:60] or "data"


def _key(data: NamedData, about: Mapping[str, Any]) -> str:
    named = json.dumps([asdict(data.absolute()), dict(about)], sort_keys=True)
    return fingerprint_of(named)[:12]


def _read(path: Path) -> Kept:
    arrays = read_arrays(path, "Kept predictions (remove the file to compute them again)")
    try:
        about = json.loads(str(arrays["about"]))
        data = named_data(about.pop("data"))
        values: dict[str, Any] = {
            field.name: torch.from_numpy(arrays[f"prediction.{field.name}"])
            for field in fields(Prediction)
            if f"prediction.{field.name}" in arrays
        }
        absent: dict[str, Any] = {field.name: None for field in fields(Prediction)}
        prediction = Prediction(**{**absent, **values})
        targets = torch.from_numpy(arrays["targets"]) if "targets" in arrays else None
        names = tuple(str(name) for name in arrays["names"])
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptFileError(f"{path} is altered: remove it ({error}).") from error
    return Kept(prediction, names, targets, data, about)
