"""`deltabars demo`: train on handwritten digits and put error bars on the predictions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from deltabars.cli.options import program
from deltabars.errors import DeltaBarsError

_PICTURES = (".png", ".pdf", ".svg")


def register(commands: Any) -> None:
    """Add the command to the parser's."""
    demo = commands.add_parser(
        "demo",
        help="train on handwritten digits and put error bars on the predictions",
        description="Train a small network on scikit-learn's handwritten digits (no download), "
        "fit the hessian, opg, sandwich and ggn estimators, print what they say, and draw the "
        "most and least certain digits. Takes about half a minute on two cores.",
        epilog="example: deltabars demo --out digits.png --report digits.html",
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("deltabars-demo.png"),
        metavar="FILE",
        help="where the picture goes (default: %(default)s)",
    )
    demo.add_argument(
        "--report",
        type=Path,
        metavar="FILE.html",
        help="where a page about the test digits goes, to be opened in a browser (default: none)",
    )
    demo.add_argument("--quiet", action="store_true", help="no progress")
    demo.set_defaults(run=run, python=python)


def run(options: argparse.Namespace) -> None:
    """Run the demonstration and print what it found."""
    from deltabars.recipes.demo import describe, run_demo

    # A second thread saves a tenth of the time on an idle machine and takes ten times as long on
    # a busy one: the network is so small that its threads mostly wait for one another.
    torch.set_num_threads(1)
    if not options.out.parent.is_dir():
        raise DeltaBarsError(f"--out: expected a folder that exists, got {options.out.parent}.")
    if options.out.suffix not in _PICTURES:
        raise DeltaBarsError(
            f"--out: expected a file name that ends in one of {', '.join(_PICTURES)}, got "
            f"{options.out.name!r}."
        )
    if options.report is not None:
        _check_report(options.report)
    print("Training on 1,297 handwritten digits, then fitting four estimators …", flush=True)
    result = run_demo(options.out, report=options.report, progress=not options.quiet)
    print(describe(result))
    print(f"\nThe most and least certain test digits: {options.out}")
    if options.report is not None:
        print(f"The report, for a browser: {options.report}")


def python(options: argparse.Namespace) -> str:
    """The Python that the command stands for."""
    report = "" if options.report is None else f", report=Path({str(options.report)!r})"
    return program(
        "from pathlib import Path",
        "from deltabars.recipes.demo import describe, run_demo",
        f"\nresult = run_demo(Path({str(options.out)!r}){report})",
        "print(describe(result))",
    )


def _check_report(path: Path) -> None:
    if not path.parent.is_dir():
        raise DeltaBarsError(f"--report: expected a folder that exists, got {path.parent}.")
    if path.suffix != ".html":
        raise DeltaBarsError(
            f"--report: expected a file name that ends in .html, got {path.name!r}."
        )
