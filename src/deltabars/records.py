"""Predictions as they are kept in files, with the names and targets of their inputs.

Whoever can write such a file decides what it says, so nothing that it says is imported or called.
What data a prediction is of is a matter of the command line and of run.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltabars.archives import read_arrays
from deltabars.errors import CorruptFileError, first_line
from deltabars.judging import Judgement
from deltabars.prediction import Prediction
from deltabars.reading import parse_json
from deltabars.sources import NamedData

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
        prediction = Prediction(**{**dict.fromkeys(_OPTIONAL), **values}, judged=judged)
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
