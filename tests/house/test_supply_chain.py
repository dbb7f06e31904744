"""What the tests run with: pinned, hashed, of known licences; and no network at run time."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import audit
import licences
import lock
import pytest

from tests.scans import environment

ROOT = Path(__file__).parents[2]

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
import tomllib
from pathlib import Path
import deltabars
from deltabars.cli import main
from deltabars.report.page import save_report
from deltabars.cli.sources import NamedData, NamedModel

workshop, out = map(Path, sys.argv[1:])
model = NamedModel(f"{workshop / 'net.py'}:make", str(workshop / "net.safetensors")).load()
data = NamedData(str(workshop / "train"), gray=True).load()
fit = deltabars.fit(model, data.data, l2=0.01, rank=5, progress=False)
fit.save(out / "a")
fit = deltabars.load(out / "a", model)
inputs = NamedData(str(workshop / "test.npz")).load().dataset
fit.predict(inputs)
save_report(out / "r.html", fit, inputs)
data, run = str(workshop / "test.npz"), str(workshop / "run")
for words in (
    ["predict", run, "--data", data, "--quiet"],
    ["spectrum", run, "--out", str(out / "s.png")],
    ["report", run, "--data", data, "--out", str(out / "b.html")],
):
    assert main(words) == 0, words
print("done")
"""


def without_network(workshop, out, *before: str) -> subprocess.CompletedProcess[str]:
    (out / "sitecustomize.py").write_text(NO_SOCKETS)
    path = f"{out}:{environment().get('PYTHONPATH', '')}"
    return subprocess.run(
        [*before, sys.executable, "-c", PROGRAM, str(workshop.folder), str(out)],
        capture_output=True, text=True, env=environment() | {"PYTHONPATH": path},
    )  # fmt: skip


def can_unshare() -> bool:
    try:
        return subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0
    except OSError:
        return False


def test_no_network_is_asked_for(workshop, tmp_path):
    """Sockets raise; where the system allows it there is no network either."""
    before = ("unshare", "-rn") if can_unshare() else ()
    done = without_network(workshop, tmp_path, *before)
    assert done.stdout.endswith("done\n"), done.stderr
    assert "a socket was asked for" not in done.stderr
    check = (
        "import socket\ntry:\n    socket.create_connection(('127.0.0.1', 9))\n"
        "except OSError as error:\n    print(error)"
    )
    seen = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True,
        env=environment() | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert seen.stdout == "no network here\n"  # the sockets of the test are those that raise


def test_the_lock_file_is_that_of_the_constraints():
    locked = lock.read()
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    pinned = {lock.plain(name): version for name, version in pinned.items()}
    assert {name: version for name, (version, _) in locked.items() if name in pinned} == {
        name: pinned[name] for name in locked if name in pinned
    }
    assert set(locked) <= set(pinned)
    assert {name for name, (_, digest) in locked.items() if digest is None} == lock.UNHASHED
    text = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"https?:|file:|--index|--find|@ ", text)


def test_every_tool_of_development_is_locked():
    locked = lock.read()
    project = (ROOT / "pyproject.toml").read_text()
    for name in re.findall(r'"([A-Za-z][\w-]*)(?:\[\w+\])?(?:>=[\d.]+)?",?', _extras(project)):
        assert lock.plain(name) in locked, f"{name}: run `make lock`"


def _extras(project: str) -> str:
    part = project.partition("[project.optional-dependencies]")[2].partition("[project.scripts]")[0]
    return re.sub(r'"deltabars\[[^"]*"', "", part)


def test_what_is_installed_is_locked():
    assert lock.differences(lock.read()) == []
    assert lock.differences({"numpy": ("0.0.1", None), "no-such-thing": ("1", None)}) == [
        f"numpy: expected 0.0.1, got {lock.metadata.version('numpy')}",
        "no-such-thing: expected 1, got nothing",
    ]


def test_licences_are_allowed():
    names = licences.dependencies()
    assert {"torch", "numpy", "safetensors", "tqdm", "pillow", "plotly", "lightning"} <= set(names)
    assert licences.problems() == []


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("MIT", True), ("Apache-2.0 AND MIT", True), ("BSD License", True), ("", False),
        ("Some Other AND MIT", False), ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-3.0-or-later", False), ("MIT AND LGPL-2.1", False), ("Proprietary", False),
        ("GNU General Public License v3 (GPLv3)", False), ("UNKNOWN", False),
    ],
)  # fmt: skip
def test_which_licences_are_allowed(text, allowed):
    assert licences.is_allowed(text) == allowed


def test_what_was_not_audited_is_not_called_sound():
    skipped = {"name": "a", "skip_reason": "Dependency not found"}
    sound = {"name": "b", "version": "1", "vulns": []}
    weak = {"name": "c", "version": "2", "vulns": [{"id": "PYSEC-1"}]}
    assert audit.told([]) == (audit.NOTHING, [])
    assert audit.told([skipped, skipped]) == (audit.NOTHING, [])
    assert audit.told([skipped, sound])[0] == "audit: 1 checked, 1 not, 0 known weaknesses."
    assert audit.told([sound, weak])[1] == ["c 2: PYSEC-1"]


class TestPackage:
    ADDRESS = "https://github.com/deltabars/deltabars"

    def test_links_of_the_readme_hold_on_other_sites(self):
        """On a page of the package index there is no folder docs beside it."""
        links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
        assert len(links) > 20
        for link in links:
            assert link.startswith("https://"), link
            inside = re.fullmatch(rf"{self.ADDRESS}/(?:blob|raw)/main/([^#]*)(?:#(.*))?", link)
            if inside is None:
                continue
            page = ROOT / inside[1]
            assert page.is_file(), link
            if inside[2]:
                titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
                anchors = {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}
                assert inside[2] in anchors, link

    def test_metadata(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert set(project["urls"]) >= {"Homepage", "Documentation", "Issues", "Changelog"}
        assert all(url.startswith(self.ADDRESS) for url in project["urls"].values())
        assert project["authors"]
        versions = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)}
        assert versions < set(project["classifiers"])
