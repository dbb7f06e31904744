"""Rules of the house that no other tool checks."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import deltabars

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("room", ["eigen", "covariance"])
def test_solvers_and_covariances_do_not_know_torch_nn(room):
    for path in (ROOT / "src" / "deltabars" / room).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("torch.nn"), path
            if isinstance(node, ast.Import):
                assert not any(name.name.startswith("torch.nn") for name in node.names), path
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) != "torch.nn", path


def test_the_core_needs_no_extra():
    """Import everything but the recipes and see that no optional library came along."""
    program = (
        "import sys, deltabars, deltabars.cli, deltabars.metrics, deltabars.ranking\n"
        "extras = {'torchvision', 'matplotlib', 'sklearn', 'scipy', 'pandas', 'IPython'}\n"
        "extras |= {'lightning', 'pytorch_lightning', 'torchmetrics', 'plotly', 'PIL', 'pyarrow'}\n"
        "print(sorted(extras & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("room", "library"),
    [
        ("lightning", "lightning"),
        ("pytorch_lightning", "pytorch_lightning"),
        ("torchmetrics", "torchmetrics"),
        ("sklearn", "sklearn"),
    ],
)
def test_an_integration_names_its_extra(room, library):
    extra = "lightning" if "lightning" in room else room
    program = (
        f"import sys, deltabars.errors\nsys.modules[{library!r}] = None\n"
        f"try:\n    import deltabars.integrations.{room}\n"
        "except deltabars.errors.MissingDependencyError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"pip install 'deltabars[{extra}]'." in done.stdout, done.stderr


def test_version_and_public_names():
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{deltabars.__version__}"' in project
    assert f"[{deltabars.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    for name in deltabars.__all__:
        assert hasattr(deltabars, name)
    assert (ROOT / "src/deltabars/py.typed").exists()
