"""The licences of everything that deltabars and its extras install: `python tools/licences.py`."""

from __future__ import annotations

import re
from importlib import metadata

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


def plain(name: str) -> str:
    """A name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def dependencies() -> list[str]:
    """Names of all that deltabars needs with its extras, as far as it is installed."""
    waiting = [(_OWN, extra) for extra in extras()] + [(_OWN, "")]
    seen, found = set(waiting), set()
    while waiting:
        name, extra = waiting.pop()
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for text in needed:
            if not applies(text, extra):
                continue
            match = re.match(r"([\w.-]+)(?:\[([\w,.\s-]+)\])?", text)
            assert match is not None
            for wanted in ["", *(match[2] or "").split(",")]:
                item = plain(match[1]), wanted.strip()
                if item not in seen:
                    seen.add(item)
                    waiting.append(item)
    return sorted(found - {_OWN})


def extras() -> list[str]:
    """The extras that a user may ask for."""
    given = metadata.metadata(_OWN).get_all("Provides-Extra") or []
    return [extra for extra in given if extra not in _TOOLS]


def applies(requirement: str, extra: str) -> bool:
    """Whether a requirement holds here, with an extra or without."""
    from packaging.requirements import Requirement

    marker = Requirement(requirement).marker
    return marker is None or marker.evaluate({"extra": extra})


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


def problems() -> list[str]:
    """Dependencies whose licence is not among those allowed, nor known."""
    found = []
    for name in dependencies():
        said = licence(name)
        fine = bool(ALLOWED.search(said)) and not REFUSED.search(said)
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
