"""`python -m benchmarks`: time, memory and accuracy beside those of the peers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.runner import WORKS, run_bench, write_json
from benchmarks.sizes import GPU, SMALL
from benchmarks.sources import Sources
from deltabars.cli.subject import sayer
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
  python -m benchmarks --json bench.json
  python -m benchmarks --only hessian opg
  python -m benchmarks --gpu --only architectures --mnist mnist/ --cifar10 cifar-10-batches-bin/
  python -m benchmarks --gpu --mnist mnist/ --weights lenet.npz --published eigenvalues.npz
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options, run the works, print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
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
    try:
        _run(parser.parse_args(arguments))
    except DeltaBarsError as error:
        sys.exit(f"benchmarks: {error}")


def _run(options: argparse.Namespace) -> None:
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


if __name__ == "__main__":
    main()
