"""The licences of everything that deltabars and its extras install: `python tools/licences.py`."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# Licences under which a library may be used beside ours; each word of an expression counts.
ALLOWED = re.compile(
    r"(apache|mit\b|bsd|isc\b|psf|python software foundation|mpl|mozilla public|hpnd|cc0|zlib|"
    r"unlicense|cnri|0bsd|openssl|ofl|bsl|blueoak|mit-cmu|historical permission)",
    re.IGNORECASE,
)
REFUSED = re.compile(r"\b(agpl|gpl|gnu|lgpl|sspl|proprietary|commercial)", re.IGNORECASE)
# Those whose metadata say nothing that can be read, or name a refused one beside: with the reason.
KNOWN: dict[str, str] = {}
_OWN = "deltabars"
# Extras of ours that are tools of development, and not what a user runs.
_TOOLS = {"dev", "docs"}


def dependencies() -> list[str]:
    """Names of all that deltabars needs with its extras, as far as it is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    own = project["dependencies"] + [
        text for name, texts in extras.items() if name not in _TOOLS for text in texts
    ]
    waiting = [Requirement(text) for text in own]
    seen: set[tuple[str, str]] = set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name == _OWN:  # an extra that names another one, which is among them
            continue
        for extra in ("", *wanted.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += [found for found in needed(name) if applies(found, extra)]
    return sorted({name for name, _ in seen if is_installed(name)})


def needed(name: str) -> list[Requirement]:
    """What a distribution asks for."""
    return (
        [Requirement(text) for text in metadata.requires(name) or []] if is_installed(name) else []
    )


def is_installed(name: str) -> bool:
    """Whether there is a distribution of that name."""
    return any(True for _ in metadata.distributions(name=name))


def applies(wanted: Requirement, extra: str) -> bool:
    """Whether a requirement holds here, with an extra or without."""
    return wanted.marker is None or wanted.marker.evaluate({"extra": extra})


def licence(name: str) -> str:
    """What a distribution says of its licence, in one line."""
    about = metadata.metadata(name)
    expression = about.get("License-Expression")
    if expression:
        return expression
    classes = [c.rpartition("::")[2].strip() for c in about.get_all("Classifier") or []
               if c.startswith("License ::") and "::" in c[9:]]  # fmt: skip
    classes = [text for text in classes if text != "OSI Approved"]
    if classes:
        return " AND ".join(classes)
    return " ".join((about.get("License") or "").split())[:80]


def is_allowed(said: str) -> bool:
    """Whether what is said of a licence names one that is allowed, and none that is refused."""
    parts = re.split(r"\s+(?:AND|OR)\s+", re.sub(r"\s+WITH\s+\S+", "", said))
    return all(ALLOWED.search(part) for part in parts) and not REFUSED.search(said)


def problems() -> list[str]:
    """Dependencies whose licence is not among those allowed, nor known."""
    found = []
    for name in dependencies():
        said = licence(name)
        fine = is_allowed(said)
        if not fine and name not in KNOWN:
            found.append(f"{name}: expected a licence that is allowed, got {said or 'none'!r}")
        if fine and name in KNOWN:
            found.append(f"{name}: expected no reason where none is needed")
    return found


def main() -> None:
    """Print what each says, and end with 1 if one is not allowed."""
    for name in dependencies():
        print(f"{name:28} {licence(name)}{'  (' + KNOWN[name] + ')' if name in KNOWN else ''}")
    wrong = problems()
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
