"""`deltabars reproduce`: the paper's networks, table and figures."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from deltabars.cli.options import Code, call, compute_device, program, sayer
from deltabars.errors import BadValueError
from deltabars.recipes.paper import RECIPES, SMALL, Recipe, Size, blank_network, load_weights
from deltabars.recipes.summary import beside_published

_DESCRIPTION = """\
Train the paper's network, fit the hessian, opg and sandwich estimators at the paper's K, put error
bars on all training and test images, and write results.json and every figure of the paper. Each
stage is kept in OUT/stages: run the same command again to resume a run that was stopped. The paper's size is for a
GPU; --small takes about two minutes on two cores.
"""
_EPILOG = """\
DIR holds the files as they are downloaded: for mnist the four idx files, plain or gzipped
(train-images-idx3-ubyte, …); for cifar10 the binary version (data_batch_1.bin … test_batch.bin).

examples:
  deltabars reproduce mnist --data mnist/ --small
  deltabars reproduce mnist --data mnist/ --out results/mnist
  deltabars reproduce cifar10 --data cifar-10-batches-bin/ --bootstrap 16
"""
_COUNTS = {
    "train-images": "the first so many training images",
    "test-images": "likewise of the test images",
    "rank": "K, the number of eigenpairs",
    "steps": "training steps",
    "initialisations": "networks in the spread of the spectra, the main one included",
    "hessians": "of how many of them the spectrum of H is computed",
    "hessian-rank": "how many eigenvalues of it, of all but the main network (default: K)",
    "bootstrap": "bootstrap replicates, with fixed and as many with varying initial weights",
    "samples": "networks drawn by the sampler",
}
_NONE_OR_SEVERAL = ("bootstrap", "samples")
_SEEDS = 2**31
_RANKS = ("rank", "hessian-rank")


def register(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "reproduce",
        help="the paper's networks, table and figures",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("experiment", choices=list(RECIPES), help="which of the paper's two")
    add("--data", type=Path, required=True, metavar="DIR", help="the downloaded files")
    add("--out", type=Path, metavar="OUT", help="default: reproduction-EXPERIMENT[-small]")
    add("--small", action="store_true", help="a taste: 600 images, 20 eigenpairs, few networks")
    add("--weights", type=Path, metavar="FILE", help="trained weights, .npz, instead of training")
    add("--seed", type=int, default=0, help="of everything that is drawn (default: 0)")
    for name, text in _COUNTS.items():
        add(f"--{name}", type=int, metavar="N", help=text)
    add("--device", help="default: cuda where there is one, else cpu")
    add("--any-order", action="store_true", help="do not insist on the same bits in every run")
    add("--fresh", action="store_true", help="throw kept stages away first")
    add("--quiet", action="store_true", help="no progress")
    parser.set_defaults(run=run, python=python)


def run(options: argparse.Namespace) -> None:
    """Run the reproduction and print its numbers beside the paper's."""
    from deltabars.recipes.pictures import reproduce
    from deltabars.recipes.reproduction import Options

    recipe = RECIPES[options.experiment]
    size = _size(options, recipe)
    if not 0 <= options.seed < _SEEDS:
        raise BadValueError(
            f"--seed: expected a whole number from 0 to {_SEEDS - 1}, got {options.seed}."
        )
    out = _out(options)
    if not options.data.is_dir():
        raise BadValueError(f"--data: expected a folder, got {options.data}, which is none.")
    chosen = Options(
        data=options.data,
        out=out,
        seed=options.seed,
        weights=None if options.weights is None else load_weights(options.weights, recipe),
        device=compute_device(options.device),
        deterministic=not options.any_order,
        fresh=options.fresh,
        progress=not options.quiet,
    )
    results = reproduce(recipe, size, chosen, sayer(options.quiet))
    print(beside_published(recipe.name, results))
    if options.small:
        print("\nThe paper's numbers are of the whole data set; a small run only shows the way.")
    print(f"\nAll numbers: {out / 'results.json'}; the figures are beside it.")


def python(options: argparse.Namespace) -> str:
    """The Python that the command stands for."""
    recipe = RECIPES[options.experiment]
    name = options.experiment.upper()
    weights = "None"
    if options.weights is not None:
        weights = f"load_weights(Path({str(options.weights)!r}), {name})"
    arguments = {
        "data": f"Path({str(options.data)!r})",
        "out": f"Path({str(_out(options))!r})",
        "seed": options.seed,
        "weights": weights,
        "device": f"torch.device({str(compute_device(options.device))!r})",
        "deterministic": not options.any_order,
        "fresh": options.fresh,
        "progress": True,
    }
    return program(
        "from pathlib import Path",
        "import torch",
        f"from deltabars.recipes.paper import {name}, Size, load_weights",
        "from deltabars.recipes.pictures import reproduce",
        "from deltabars.recipes.reproduction import Options",
        f"\nsize = {_size(options, recipe)!r}",
        "options = " + call("Options", **{key: Code(value) for key, value in arguments.items()}),
        f"results = reproduce({name}, size, options, print)",
    )


def _out(options: argparse.Namespace) -> Path:
    suffix = "-small" if options.small else ""
    return options.out or Path(f"reproduction-{options.experiment}{suffix}")


def _size(options: argparse.Namespace, recipe: Recipe) -> Size:
    """The paper's size or the small one, with the numbers that were given instead."""
    size = SMALL if options.small else recipe.size
    most = sum(parameter.numel() for parameter in blank_network(recipe).parameters())
    for name in _COUNTS:
        key = name.replace("-", "_")
        value = getattr(options, key)
        if value is None:
            continue
        least = 0 if name in _NONE_OR_SEVERAL else 1
        if value < least:
            raise BadValueError(f"--{name}: expected a whole number from {least} on, got {value}.")
        if name in _NONE_OR_SEVERAL and value == 1:
            raise BadValueError(
                f"--{name}: expected 0 or a whole number from 2 on, got 1, which has no std."
            )
        if name in _RANKS and value > most:
            raise BadValueError(f"--{name}: expected at most the {most} parameters, got {value}.")
        size = replace(size, **{key: value})
    return size
