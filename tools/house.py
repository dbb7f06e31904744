"""Measure the house: entries, files, lines, imports, and the ways of a fit and a prediction.

python tools/house.py            # print the numbers beside their limits; exit 1 if one is over
"""

from __future__ import annotations

import sys
from pathlib import Path

import grimp
from walk import walks

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "deltabars"
LIMITS = {
    "entries at the top of src/deltabars": 16,
    "files of source": 140,
    "lines of source": 22_500,
    "lines of tests": 19_500,
    "longest import chain": 15,
    "modules in import cycles": 0,
    "files that a fit passes through": 23,
    "files that a prediction passes through": 20,
}


def lines(folder: Path) -> int:
    """Count the lines of Python in a folder."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def imports() -> dict[str, set[str]]:
    """Return what each module imports, type-checking imports included."""
    graph = grimp.build_graph("deltabars", exclude_type_checking_imports=False, cache_dir=None)
    return {
        module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules
    }


def cycles(graph: dict[str, set[str]]) -> set[str]:
    """Return the modules that import themselves by way of others."""
    return {module for module in graph if module in reached(graph, module)}


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return the modules that one imports, directly or not."""
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += graph[module]
    return found


def longest_chain(graph: dict[str, set[str]]) -> list[str]:
    """Return the longest chain of imports of a graph without cycles."""
    chains: dict[str, list[str]] = {}

    def chain(module: str) -> list[str]:
        if module not in chains:
            below = max((chain(other) for other in sorted(graph[module])), key=len, default=[])
            chains[module] = [module, *below]
        return chains[module]

    return max((chain(module) for module in sorted(graph)), key=len)


def measure() -> tuple[dict[str, int], list[str], set[str]]:
    """Return the numbers by name, the longest import chain, and the modules in cycles."""
    hidden = ("__pycache__", "py.typed")
    entries = [path for path in SOURCE.iterdir() if path.name not in hidden]
    graph = imports()
    circular = cycles(graph)
    chain = [] if circular else longest_chain(graph)
    values = (
        len(entries),
        len(list(SOURCE.rglob("*.py"))),
        lines(SOURCE),
        lines(ROOT / "tests"),
        len(chain),
        len(circular),
        *map(len, walks().values()),
    )
    return dict(zip(LIMITS, values, strict=True)), chain, circular


def main() -> int:
    """Print the numbers; return 1 if one is over its limit."""
    numbers, chain, circular = measure()
    for name, value in numbers.items():
        over = "" if value <= LIMITS[name] else "   OVER"
        print(f"{name:40}{value:8,}   at most {LIMITS[name]:,}{over}")
    print("longest chain: " + " > ".join(name.removeprefix("deltabars.") for name in chain))
    if circular:
        print("cycles: " + ", ".join(sorted(circular)))
    return int(any(value > LIMITS[name] for name, value in numbers.items()))


if __name__ == "__main__":
    sys.exit(main())
