"""`deltabars bench`: time, memory and accuracy beside those of the peers."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from deltabars.bench.runner import WORKS, run_bench, write_json
from deltabars.bench.sizes import GPU, SMALL
from deltabars.bench.sources import Sources
from deltabars.commands.lines import sayer
from deltabars.commands.python import program
from deltabars.errors import DeltaBarsError

_DESCRIPTION = """\
Measure deltabars and its peers on the same work in the same run: plain PyTorch (the floor),
curvlinops with SciPy's eigsh, scikit-learn's IncrementalPCA, laplace-torch. Prints the accuracy of
each beside its time, how cost grows with P, N and K, and what a ResNet and a vision transformer
take from training to error bars. A peer that is not installed is a line
that says so. Needs no download: without --mnist the images are made of scikit-learn's digits. The
small size takes under five minutes on two cores.
"""
_EPILOG = """\
examples:
  deltabars bench --json bench.json
  deltabars bench --only hessian opg
  deltabars bench --gpu --only architectures --mnist mnist/ --cifar10 cifar-10-batches-bin/
  deltabars bench --gpu --mnist mnist/ --weights lenet.npz --published eigenvalues.npz
"""


def register(commands: Any) -> None:
    """Add the command to the parser's."""
    bench = commands.add_parser(
        "bench",
        help="measure time, memory and accuracy beside those of the peers",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = bench.add_argument
    add("--gpu", action="store_true", help="the size for one GPU: N = 60,000, K up to 1,500")
    add("--mnist", type=Path, metavar="FOLDER", help="MNIST's idx files, plain or gzipped")
    add("--cifar10", type=Path, metavar="FOLDER", help="CIFAR-10's binary batches, for ResNet-18")
    add("--weights", type=Path, metavar="FILE", help="trained weights of the paper's network, .npz")
    add(
        "--published", type=Path, metavar="FILE", help="published eigenvalues to compare with, .npz"
    )
    add("--only", nargs="+", choices=WORKS, metavar="WORK", help=f"some of {', '.join(WORKS)}")
    add("--cache", type=Path, metavar="FOLDER", help="keep eigenpairs there, for later runs")
    add("--json", type=Path, metavar="FILE", help="write all numbers there too")
    add("--quiet", action="store_true", help="no progress")
    bench.set_defaults(run=run, python=python)


def run(options: argparse.Namespace) -> None:
    """Run the works and print the table."""
    if options.json is not None and not options.json.parent.is_dir():
        raise DeltaBarsError(f"--json: expected a folder that exists, got {options.json.parent}.")
    sources = Sources(
        options.mnist, options.weights, options.published, options.cache, options.cifar10
    )
    report = run_bench(
        GPU if options.gpu else SMALL,
        sources,
        options.only,
        show=partial(print, flush=True),
        say=sayer(options.quiet),
    )
    if options.json is not None:
        write_json(options.json, report)
        print(f"\nAll numbers: {options.json}")


def python(options: argparse.Namespace) -> str:
    """The Python that the command stands for."""
    size = "GPU" if options.gpu else "SMALL"
    paths = [
        "None" if path is None else f"Path({str(path)!r})"
        for path in (
            options.mnist, options.weights, options.published, options.cache, options.cifar10
        )
    ]  # fmt: skip
    return program(
        "from pathlib import Path",
        "from deltabars.bench.runner import run_bench, write_json",
        f"from deltabars.bench.sizes import {size}",
        "from deltabars.bench.sources import Sources",
        f"\nsources = Sources({', '.join(paths)})",
        f"report = run_bench({size}, sources, {options.only!r}, show=print, say=print)",
        f"write_json(Path({str(options.json)!r}), report)" if options.json is not None else "",
    )
