"""Data by name: a folder, an .npz file, downloaded files, or a factory of the user's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deltabars.errors import BadValueError, DataError
from deltabars.sources.arrays import from_factory, read_downloaded, read_npz
from deltabars.sources.columns import ENDINGS, read_table
from deltabars.sources.folders import read_folder
from deltabars.sources.names import check_texts, is_name, with_full_path
from deltabars.sources.pictures import Preparation
from deltabars.sources.source import Source

_DOWNLOADED = {"mnist": "*-idx3-ubyte*", "cifar10": "*_batch*.bin"}
_IMAGES = ("folder", "npz", *_DOWNLOADED)
# How pictures are prepared, and of which kinds of data.
_APPLIES = {
    "size": ("folder",),
    "crop": ("folder",),
    "gray": ("folder",),
    "mean": _IMAGES,
    "std": _IMAGES,
    "target": ("table",),
}


@dataclass(frozen=True)
class NamedData:
    """Data as they are named on a command line.

    Attributes:
        spec: a folder of pictures, an `.npz` file, a table (`.csv`, `.parquet`), a folder of
            MNIST's idx files or of CIFAR-10's binary batches, or `package.module:factory` or
            `path/to/file.py:factory`.
        part: `"train"` or `"test"`, of MNIST and CIFAR-10; the former by default.
        size, crop, gray, mean, std: as for `Preparation`.
        target: of a table, the column with the targets.
        arguments: keyword arguments of the factory.
    """

    spec: str
    part: str | None = None
    size: tuple[int, int] | None = None
    crop: bool = False
    gray: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    target: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_texts("--data", self.arguments, self.spec, self.part, self.target)
        if self.spec is None:
            raise DataError("--data: expected the name of data, got none.")

    def load(self, columns: Sequence[str] | None = None) -> Source:
        """The data; a folder of pictures is read as it is needed.

        Args:
            columns: that a table must have, those of a fit; then it may be without the target.

        Raises:
            BadValueError, DataError: there are no such data, or an option does not apply to them.
        """
        preparation = Preparation(self.size, self.crop, self.gray, self.mean, self.std)
        path = Path(self.spec)
        kind = self._kind
        self._check_options(kind)
        if kind == "factory":
            return from_factory(self.spec, self.arguments)
        if kind == "npz":
            return read_npz(path, preparation)
        if kind == "table":
            return read_table(path, self.target, columns)
        if kind == "folder":
            return read_folder(path, preparation)
        return read_downloaded(path, kind, self.part or "train", preparation)

    def absolute(self) -> NamedData:
        """The same with whole paths, so that it holds in every folder."""
        is_path = os.path.exists(self.spec) or not is_name(self.spec)
        spec = str(Path(self.spec).absolute()) if is_path else with_full_path(self.spec)
        return replace(self, spec=spec, arguments=dict(self.arguments))

    def prepared_as(self, other: NamedData) -> NamedData:
        """These data, prepared as others are where nothing else is said and where it applies."""
        kind = self._kind
        given = {
            name: getattr(self, name) or getattr(other, name)
            for name, kinds in _APPLIES.items()
            if kind in kinds
        }
        return replace(self, **given)

    @property
    def _kind(self) -> str:
        path = Path(self.spec)
        if os.path.isdir(path):
            for kind, pattern in _DOWNLOADED.items():
                if any(path.glob(pattern)):
                    return kind
            return "folder"
        if path.suffix == ".npz":
            return "npz"
        if path.suffix.lower() in ENDINGS and os.path.exists(path):
            return "table"
        if is_name(self.spec):
            return "factory"
        found = "is a file of another kind" if os.path.exists(path) else "does not exist"
        raise DataError(
            "--data: expected a folder, an .npz file, a table, module:factory or file.py:factory, "
            f"got {self.spec}, which {found}."
        )

    def _check_options(self, kind: str) -> None:
        for name, kinds in {
            **_APPLIES, "part": tuple(_DOWNLOADED), "arguments": ("factory",)
        }.items():  # fmt: skip
            if getattr(self, name) and kind not in kinds:
                option = {"arguments": "data-args"}.get(name, name)
                raise BadValueError(
                    f"--{option}: expected data of the kind {' or '.join(kinds)} with it, got "
                    f"{self.spec} ({kind})."
                )
