"""The lock file of the test environment: `python tools/lock.py`, or `--check` of what is installed.

Written from pip's own report of what it would install, without addresses. torch has no hash: its
builds for a CPU and for each CUDA are other files of the same version.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
UNHASHED = {"torch"}
_HEAD = """\
# The test environment: versions, and the sha256 of the archives that pip chose for
# CPython {python} on {platform}; other platforms have other archives of the same versions.
# Made by `make lock`; `make verify-lock` compares it with what is installed.
# torch has no hash: its builds for a CPU and for each CUDA differ under one version.
"""


def plain(name: str) -> str:
    """A name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read(path: Path = LOCK) -> dict[str, tuple[str, str | None]]:
    """Version and sha256 by name."""
    found = {}
    text = path.read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            match = re.fullmatch(r"(\S+)==(\S+)(?:\s+--hash=sha256:([0-9a-f]{64}))?\s*", line)
            if match is None:
                raise SystemExit(f"{path.name}: expected NAME==VERSION --hash=sha256:…, got {line}")
            found[match[1]] = (match[2], match[3])
    return found


def differences(locked: dict[str, tuple[str, str | None]]) -> list[str]:
    """What is installed in another version than the lock has."""
    found = []
    for name, (version, _) in locked.items():
        try:
            here = metadata.version(name).partition("+")[0]  # 2.13.0+cpu is a build of 2.13.0
        except metadata.PackageNotFoundError:
            here = "nothing"
        if here != version:
            found.append(f"{name}: expected {version}, got {here}")
    return found


def chosen(*arguments: str) -> dict[str, tuple[str, str | None]]:
    """What pip would install: version and sha256 by name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
             "--report", report, "-c", "constraints.txt", *arguments],
            check=True, cwd=ROOT,
        )  # fmt: skip
        items = json.loads(report.read_text())["install"]
    found = {}
    for item in items:
        name = plain(item["metadata"]["name"])
        if name == "deltabars":
            continue
        hashes = item["download_info"].get("archive_info", {}).get("hashes", {})
        version = item["metadata"]["version"].partition("+")[0]
        found[name] = (version, None if name in UNHASHED else hashes["sha256"])
    return found


def main() -> None:
    """Write the lock file, or compare it with what is installed."""
    if sys.argv[1:] == ["--check"]:
        wrong = differences(read())
        if wrong:
            raise SystemExit("\n".join(wrong))
        print(f"{len(read())} distributions are installed as {LOCK.name} has them.")
        return
    found = chosen(".[dev]") | chosen("--no-deps", "-r", "peers.txt")
    lines = [_HEAD.format(python="{}.{}".format(*sys.version_info), platform=sys.platform)]
    for name, (version, digest) in sorted(found.items()):
        end = "" if digest is None else f" \\\n    --hash=sha256:{digest}"
        lines.append(f"{name}=={version}{end}\n")
    LOCK.write_text("".join(lines))


if __name__ == "__main__":
    main()
