"""Which inputs are in the page, and which of them in its gallery."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deltabars.report.page.subject import Subject

_OF_A_CLASS = 4  # most certain inputs of a class in the gallery, and as many least certain ones
_MOST_CLASSES = 24


@dataclass(frozen=True)
class Shelf:
    """A class of the gallery: the places of its most and of its least certain inputs."""

    label: int
    count: int  # inputs of this predicted class
    most: list[int]  # the most certain one first
    least: list[int]  # the least certain one first


def choose_shelves(subject: Subject, rows: int) -> list[Shelf]:
    """The gallery: by predicted class, in the order of the classes; empty but for categories.

    Of more than 24 classes, those that were predicted most often. There are fewer classes where the
    page has fewer rows than they would fill.
    """
    if subject.kind != "categorical" or subject.prediction.label is None:
        return []
    label = subject.prediction.label.numpy()
    score = subject.prediction.score.double().numpy()
    counts = np.bincount(label, minlength=len(subject.classes))
    room = max(1, min(_MOST_CLASSES, rows // (2 * _OF_A_CLASS)))
    chosen = np.argsort(-counts, kind="stable")[:room]
    shelves = []
    for c in sorted(int(c) for c in chosen if counts[c]):
        places = np.flatnonzero(label == c)
        order = places[np.argsort(score[places], kind="stable")]
        few = min(_OF_A_CLASS, (len(order) + 1) // 2)  # an input is in one of the two rows
        most, least = order[:few], order[::-1][: min(_OF_A_CLASS, len(order) - few)]
        shelves.append(Shelf(c, len(order), most.tolist(), least.tolist()))
    return shelves


def choose_rows(subject: Subject, rows: int, shelves: list[Shelf]) -> list[int]:
    """The places of the inputs in the page, ascending: all, if there are no more than `rows`.

    Else the gallery's, then the highest scores up to half of the rows, then an even sample of the
    others over the order of their scores.
    """
    total = len(subject)
    if total <= rows:
        return list(range(total))
    order = np.argsort(-subject.prediction.score.double().numpy(), kind="stable")
    first = [place for shelf in shelves for place in (*shelf.most, *shelf.least)]
    chosen = dict.fromkeys([*first, *order.tolist()[: rows // 2]])
    kept = list(chosen)[:rows]
    rest = [place for place in order.tolist() if place not in chosen]
    even = np.linspace(0, len(rest) - 1, max(0, rows - len(kept))).round().astype(int)
    return sorted([*kept, *(rest[i] for i in dict.fromkeys(even.tolist()))])
