"""Known weaknesses of what is installed, by pip-audit: `python tools/audit.py`.

Where pip-audit or its advisories cannot be had, that is said in one line, and nothing fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LOCK = Path(__file__).resolve().parent.parent / "requirements.lock"
NOTHING = "audit: no advisory data can be had here, so nothing was checked."
_PATIENCE = 120  # seconds


def main() -> None:
    """Print what was found; the exit code is 1 if there is anything."""
    with tempfile.TemporaryDirectory() as folder:
        tool = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, "pip-audit"]
        # Without hashes: pip-audit then looks up versions, and downloads nothing.
        plain = [line.split(" \\")[0] for line in LOCK.read_text().splitlines() if "==" in line]
        versions = Path(folder) / "versions.txt"
        versions.write_text("\n".join(plain))
        audit = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--format=json",
                 "--progress-spinner=off", "--timeout=10", "-r", str(versions)]  # fmt: skip
        try:
            subprocess.run(tool, check=True, capture_output=True, timeout=_PATIENCE)
            done = subprocess.run(audit, capture_output=True, text=True, timeout=_PATIENCE,
                                  env=os.environ | {"PYTHONPATH": folder})  # fmt: skip
            found = json.loads(done.stdout)["dependencies"]
        except (subprocess.SubprocessError, OSError, ValueError, KeyError):
            print(NOTHING)
            return
    said, weak = told(found)
    print(said)
    if weak:
        raise SystemExit("\n".join(weak))


def told(found: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """What pip-audit found in one line, and the weaknesses; what it skipped was not checked."""
    checked = [item for item in found if "skip_reason" not in item]
    if not checked:
        return NOTHING, []
    weak = [
        f"{item['name']} {item['version']}: {known['id']}"
        for item in checked
        for known in item["vulns"]
    ]
    skipped = len(found) - len(checked)
    return f"audit: {len(checked)} checked, {skipped} not, {len(weak)} known weaknesses.", weak


if __name__ == "__main__":
    main()
