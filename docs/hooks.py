"""What the site shows from outside its folder: the results of the paper's experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Add results/ as a folder of the site."""
    for path in sorted((ROOT / "results").glob("*/*.*")):
        place = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to them are relative to the repository."""
    return markdown.replace("../results/", "results/")
