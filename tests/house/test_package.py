"""The package: a wheel that works with the core dependencies alone, its metadata, no network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from tests.scans import environment

ROOT = Path(__file__).parents[2]
ADDRESS = "https://github.com/deltabars/deltabars"

NO_SOCKETS = """
import socket, sys


def refuse(*arguments, **keywords):
    print("a socket was asked for", file=sys.stderr, flush=True)
    import traceback
    traceback.print_stack()
    raise OSError("no network here")


class Refused(socket.socket):
    def __new__(cls, family=socket.AF_INET, *arguments, **keywords):
        if family == socket.AF_UNIX:  # of processes on one machine
            return super().__new__(cls, family, *arguments, **keywords)
        refuse()


socket.socket = Refused
socket.create_connection = socket.getaddrinfo = refuse
"""
PROGRAM = """
import sys
from pathlib import Path
import deltabars
from deltabars.cli import main
from deltabars.report.page import save_report

workshop, out = map(Path, sys.argv[1:])
data, run = str(workshop / "test.npz"), str(out / "run")
model = ["--model", f"{workshop / 'net.py'}:make", "--weights", str(workshop / "net.safetensors")]
for words in (
    ["fit", *model, "--data", str(workshop / "train"), "--gray", "--l2", "0.01", "--rank", "5",
     "--out", run, "--quiet"],
    ["predict", run, "--data", data, "--quiet"],
    ["spectrum", run, "--out", str(out / "s.png")],
    ["report", run, "--data", data, "--out", str(out / "b.html")],
):
    assert main(words) == 0, words
print("done")
"""
CORE = """
import numpy, sys, torch, deltabars
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
inputs = torch.randn(60, 4)
fit = deltabars.fit(model, (inputs, torch.arange(60) % 3), l2=0.1, rank=5, progress=False)
out = fit.predict(inputs[:5])
fit.save("fit.deltabars")
again = deltabars.load("fit.deltabars", model).predict(inputs[:5])
assert torch.equal(out.std, again.std)
print(sorted(set(sys.modules) & {"scipy", "sklearn", "matplotlib", "pandas", "pytest"}))
"""


def test_no_network_is_asked_for(workshop, tmp_path):
    """Sockets raise; where the system allows it there is no network either."""
    (tmp_path / "sitecustomize.py").write_text(NO_SOCKETS)
    path = f"{tmp_path}:{environment().get('PYTHONPATH', '')}"
    run = {"capture_output": True, "text": True, "env": environment() | {"PYTHONPATH": path}}
    alone = shutil.which("unshare") and ["unshare", "-rn"]
    if not alone or subprocess.run([*alone, "true"], capture_output=True).returncode:
        alone = []
    program = [sys.executable, "-c", PROGRAM, str(workshop.folder), str(tmp_path)]
    done = subprocess.run([*alone, *program], **run)
    assert done.stdout.endswith("done\n"), done.stderr
    assert "a socket was asked for" not in done.stderr
    check = "import socket\nsocket.create_connection(('127.0.0.1', 9))\n"
    seen = subprocess.run([sys.executable, "-c", check], **run)
    assert "no network here" in seen.stderr  # the sockets of the test are those that raise


def core_distributions() -> set[str]:
    """The core dependencies, and theirs, without extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting, found = list(project["dependencies"]), set()
    while waiting:
        requirement = waiting.pop()
        if "extra ==" in requirement:
            continue
        name = re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")
        try:
            waiting += metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError:  # of another platform
            continue
        found.add(name)
    return found


def test_a_wheel_works_with_the_core_alone(tmp_path):
    """In a new environment that holds the core dependencies and nothing else."""
    build = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run(
        [sys.executable, *build, "--wheel-dir", str(tmp_path), str(ROOT)],
        check=True, capture_output=True, cwd=tmp_path,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("deltabars-*.whl")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    for name in core_distributions():
        for file in metadata.distribution(name).files or ():
            top = file.parts[0]
            target = packages / top
            if top != ".." and not target.exists():
                os.symlink(Path(str(metadata.distribution(name).locate_file(top))), target)
    # pip would otherwise uninstall the package of this environment.
    install = ["-m", "pip", "install", "--no-deps", "--ignore-installed", "--quiet"]
    install += ["--prefix", str(venv), str(wheel)]
    subprocess.run([sys.executable, *install], check=True, capture_output=True)
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = {"cwd": tmp_path, "capture_output": True, "text": True, "env": clean}
    done = subprocess.run([str(venv / "bin/python"), "-W", "ignore", "-c", CORE], **run)
    assert done.stdout == "[]\n", done.stderr
    command = [str(venv / "bin/python"), str(venv / "bin/deltabars"), "--version"]
    done = subprocess.run(command, **run)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version in done.stdout, done.stderr


def test_what_is_installed_is_pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    for name in core_distributions():
        version = metadata.version(name).partition("+")[0]
        assert pinned[name].partition("+")[0] == version, name


def test_links_of_the_readme_hold_on_other_sites():
    """On a page of the package index there is no folder docs beside it."""
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 20
    for link in links:
        assert link.startswith("https://"), link
        inside = re.fullmatch(rf"{ADDRESS}/(?:blob|raw)/main/([^#]*)(?:#(.*))?", link)
        if inside is None:
            continue
        page = ROOT / inside[1]
        assert page.is_file(), link
        if inside[2]:
            titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}
            assert inside[2] in anchors, link


def test_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["urls"]) >= {"Homepage", "Documentation", "Issues", "Changelog"}
    assert all(url.startswith(ADDRESS) for url in project["urls"].values())
    assert project["authors"]
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)}
    assert versions < set(project["classifiers"])
    for file in ("CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "LICENSE"):
        assert (ROOT / file).is_file()
