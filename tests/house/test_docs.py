"""The documentation: every block runs, every example of the API is true, and the site builds."""

from __future__ import annotations

import doctest
import importlib
import os
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
            run_commands(text)


def run_commands(text):
    """A block of shell commands, the first failure of which ends it."""
    script = f'deltabars() {{ "{sys.executable}" -m deltabars "$@"; }}\n{text}'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", API)
def test_examples_of_the_api(name):
    thing = find(name)
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    examples = 0
    for test in finder.find(thing, name):
        examples += len(test.examples)
        runner.run(test)
    assert runner.failures == 0
    assert examples or name not in WITH_EXAMPLES


def find(name):
    """A module, or what is in one."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        return getattr(find(module), last)


def test_the_api_has_all_public_names():
    import deltabars

    for name in deltabars.__all__:
        thing = getattr(deltabars, name)
        whole = thing.__name__ if isinstance(thing, ModuleType) else f"deltabars.{name}"
        assert any(whole in known for known in API), name


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="MkDocs cannot be imported here")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds_without_a_warning(site):
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file()


def test_the_site_fetches_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(https?:)', page.read_text())
        assert not fetched, page


def test_links_within_the_site_have_targets(site):
    """MkDocs checks pages; this checks places in them too."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        for link in re.findall(r'href="([^":]*#[^"]+)"', text):
            path, _, place = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if target.suffix == ".html" and target.is_file() and place != "__skip":
                assert re.search(f'id="{re.escape(place)}"', target.read_text()), (page, link)
