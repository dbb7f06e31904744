"""Rules of the house that no other tool checks: its size, its words, its dependencies."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import house
import pytest

import deltabars

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "deltabars"
EXTRAS = {
    "torchvision", "matplotlib", "sklearn", "scipy", "pandas", "IPython", "lightning",
    "pytorch_lightning", "torchmetrics", "plotly", "PIL", "pyarrow", "shtab",
}  # fmt: skip
# Words of nobody but their author (CONTRIBUTING.md).
PRIVATE = re.compile(
    r"(gone|go|goes|going) on with\b|\b(dealt|shared|handed) out\b|\b(does|do) not bear\b"
    r"|\b(is|are) told\b|\btold apart\b|\bone another in\b|\bat the (most|least)\b|of its own kind",
    re.IGNORECASE,
)


@pytest.fixture(scope="module")
def numbers():
    return house.measure()


@pytest.mark.parametrize("name", house.LIMITS)
def test_the_house_stays_small(numbers, name):
    found, chain, circular = numbers
    assert found[name] <= house.LIMITS[name], (chain, circular)


def test_every_room_opens_with_what_is_in_it():
    for path in SOURCE.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert len(text) > 40, path
        if path.parent.parent == SOURCE:
            modules = {other.name for other in path.parent.iterdir() if other.suffix == ".py"}
            named = set(re.findall(r"`(\w+\.py)`", text))
            assert named <= modules, path


def test_plain_words():
    for folder in ("src", "docs", "tests", "benchmarks"):
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]:
            if path != Path(__file__):
                found = PRIVATE.search(path.read_text())
                assert found is None, (path, found and found[0])


@pytest.mark.parametrize("room", ["eigen", "covariance"])
def test_solvers_and_covariances_do_not_use_torch_nn(room):
    for path in (SOURCE / room).glob("*.py"):
        assert not re.search(r"\btorch\.nn\b|from torch import .*\bnn\b", path.read_text()), path


def test_the_core_needs_no_extra():
    """Import everything but the recipes: no optional library comes along."""
    program = (
        "import sys, deltabars, deltabars.cli, deltabars.metrics, deltabars.ranking\n"
        "[getattr(deltabars, name) for name in deltabars.__all__]\n"
        f"print(sorted({EXTRAS!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_an_integration_names_its_extra():
    rooms = ["sklearn", "torchmetrics", "lightning", "pytorch_lightning"]
    program = (
        "import importlib, sys, deltabars.errors\n"
        f"for room in {rooms!r}:\n"
        "    sys.modules |= {room: None, 'pytorch_lightning': None}\n"
        "    try:\n        importlib.import_module(f'deltabars.integrations.{room}')\n"
        "    except deltabars.errors.MissingDependencyError as error:\n        print(error)\n"
        "    if room in ('torchmetrics', 'sklearn'):\n        del sys.modules[room]\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    extras = re.findall(r"pip install 'deltabars\[(\w+)\]'\.", done.stdout)
    assert extras == ["sklearn", "torchmetrics", "lightning", "lightning"], done.stderr


def test_version_and_public_names():
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{deltabars.__version__}"' in project
    assert f"[{deltabars.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {deltabars.__version__}" in (ROOT / "CITATION.cff").read_text()
    for name in deltabars.__all__:
        assert hasattr(deltabars, name)
    assert (SOURCE / "py.typed").exists()


def test_names_of_version_0_5_are_importable():
    """For one version."""
    program = (
        "import deltabars, deltabars.checkpoints, deltabars.ranks, deltabars.metrics\n"
        "from deltabars.blocks import predict_to\n"
        "assert deltabars.ranks is deltabars.distributed and deltabars.ranks.alone\n"
        "assert deltabars.checkpoints.CheckpointFolder is deltabars.CheckpointFolder\n"
        "assert issubclass(deltabars.errors.RankError, deltabars.errors.DeltaBarsError)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
