"""Pictures of the demonstration's report: `make screenshots`."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image

from deltabars.recipes.demo import run_demo
from tests import browsing

_TALL = {"width": 1280, "height": 1780}


def main(folder: Path) -> None:
    """Light, dark with an input open, and on a phone."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as place, browsing.chromium() as browser:
        report = Path(place) / "report.html"
        run_demo(Path(place) / "picture.png", report=report, progress=False)
        trouble: list[str] = []
        for name, scheme, viewport, opens in (
            ("light", "light", _TALL, False),
            ("dark", "dark", browsing.DESK, True),
            ("phone", "light", {**browsing.PHONE, "height": 1950}, False),
        ):
            page = browsing.open_window(
                browser, report.as_uri(), trouble, scheme=scheme, viewport=viewport
            )
            if opens:
                page.locator("#body button").nth(1).click()
                page.wait_for_selector("#settling-plot .main-svg")
            shot = Path(place) / f"{name}.png"
            page.screenshot(path=shot)
            with Image.open(shot) as picture:
                picture.convert("RGB").save(folder / f"report-{name}.png", optimize=True)
        if trouble:
            raise SystemExit("\n".join(trouble))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
