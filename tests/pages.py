"""A page about real handwritten digits, small and quick, and what it was made of."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import deltabars
from deltabars.recipes.digits import L2, digits_network, load_digits, train_to_convergence
from deltabars.report.page import save_report

HOSTILE = '<script>document.title = "taken over"</script><img src=x onerror=alert(1)> & "7".png'
COUNT = 300
RANK = 40


@dataclass(frozen=True)
class Made:
    """Digits, a fit of a network that was trained on some of them, and its prediction of others."""

    fit: deltabars.DeltaFit
    images: Any
    labels: Any
    prediction: deltabars.Prediction

    @property
    def names(self) -> list[str]:
        """Names like files'; that of input 7 is hostile."""
        return [HOSTILE if i == 7 else f"scan-{i:03d}.png" for i in range(len(self.images))]

    def save(self, path: Path, **options: Any) -> Path:
        """The page of these digits, at its path."""
        settings = {"targets": self.labels, "names": self.names, "progress": False, **options}
        save_report(path, self.fit, self.images, **settings)
        return path


@lru_cache(maxsize=1)
def digits() -> Made:
    """The digits' fit: trained for a moment, which is near enough to an optimum."""
    scans, model = load_digits(), digits_network()
    train = (scans.train_images[:400], scans.train_labels[:400])
    train_to_convergence(model, *train, L2, steps=40)
    fit = deltabars.fit(model, train, l2=L2, rank=RANK, progress=False)
    images, labels = scans.test_images[:COUNT], scans.test_labels[:COUNT]
    return Made(fit, images, labels, fit.predict(images))


def data_of(path: Path) -> dict[str, Any]:
    """The data inside a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())
    assert found
    return json.loads(found.group(1))
