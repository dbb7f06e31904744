"""The documentation: every block runs, every example of the API is true, and the site builds."""

from __future__ import annotations

import doctest
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if re.search(r"^```(python|bash)$", page.read_text(), flags=re.MULTILINE)
)
API = re.findall(r"^::: (.+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)
WITH_EXAMPLES = (
    "deltabars.fit", "deltabars.load", "deltabars.last_layer", "deltabars.prediction.metrics",
    "deltabars.prediction.ranking", "deltabars.eigen.lanczos", "deltabars.likelihoods.Gaussian",
    "deltabars.curvature.HessianOperator", "deltabars.cli.blocks.predict_to",
)  # fmt: skip


def blocks(page):
    """The blocks of a page as (language, text), in their order."""
    found = re.findall(r"^```(python|bash)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    assert found
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs(page, tmp_path, monkeypatch):
    """From top to bottom, in an empty folder, with warnings as errors."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for language, text in blocks(page):
        if language == "python":
            exec(compile(text, page.name, "exec"), names)
        else:
            script = f'deltabars() {{ "{sys.executable}" -m deltabars "$@"; }}\n{text}'
            environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
            command = ["bash", "-euo", "pipefail", "-c", script]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", API)
def test_examples_of_the_api(name):
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    examples = 0
    for test in finder.find(pkgutil.resolve_name(name), name):
        examples += len(test.examples)
        runner.run(test)
    assert runner.failures == 0
    assert examples or name not in WITH_EXAMPLES


def test_the_api_has_all_public_names():
    import deltabars

    for name in deltabars.__all__:
        thing = getattr(deltabars, name)
        whole = thing.__name__ if isinstance(thing, ModuleType) else f"deltabars.{name}"
        assert any(whole in known for known in API), name


def test_the_site_builds_with_links_that_have_targets_and_needs_no_other(tmp_path):
    pytest.importorskip("mkdocs", reason="MkDocs cannot be imported here")
    command = ["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        assert (tmp_path / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file()
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(https?:)', text), page
        for link in re.findall(r'href="([^":]*#[^"]+)"', text):  # MkDocs checks pages alone
            path, _, part = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if target.suffix == ".html" and target.is_file() and part != "__skip":
                assert re.search(f'id="{re.escape(part)}"', target.read_text()), (page, link)
