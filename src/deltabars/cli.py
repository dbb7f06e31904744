"""The command line: `deltabars COMMAND …`.

Exit codes: 0, it worked; 1, it failed, with one line on stderr that says why; 2, wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import deltabars
from deltabars.errors import DeltaBarsError

_PICTURES = (".png", ".pdf", ".svg")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except DeltaBarsError as error:
        print(f"deltabars: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("deltabars: interrupted", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deltabars",
        description="Error bars for the predictions of trained PyTorch networks.",
    )
    parser.add_argument("--version", action="version", version=deltabars.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train on handwritten digits and put error bars on the predictions",
        description="Train a small network on scikit-learn's handwritten digits (no download), "
        "fit the hessian, opg, sandwich and ggn estimators, print what they say, and draw the "
        "most and least certain digits. Takes about half a minute on two cores.",
        epilog="example: deltabars demo --out digits.png",
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("deltabars-demo.png"),
        metavar="FILE",
        help="where the picture goes (default: %(default)s)",
    )
    demo.add_argument("--quiet", action="store_true", help="no progress")
    demo.set_defaults(run=_demo)
    return parser


def _demo(options: argparse.Namespace) -> None:
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
    print("Training on 1,297 handwritten digits, then fitting four estimators …", flush=True)
    result = run_demo(options.out, progress=not options.quiet)
    print(describe(result))
    print(f"\nThe most and least certain test digits: {options.out}")
