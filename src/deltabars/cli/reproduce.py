"""`deltabars reproduce`: the paper's networks, table and figures."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from deltabars.cli.launching import compute_device
from deltabars.cli.options import COUNTS
from deltabars.cli.subject import sayer
from deltabars.errors import BadValueError
from deltabars.recipes.paper import RECIPES, SMALL, Recipe, Size, blank_network, load_weights
from deltabars.recipes.pictures import reproduce
from deltabars.recipes.reproduction import Options
from deltabars.recipes.summary import beside_published

_NONE_OR_SEVERAL = ("bootstrap", "samples")
_SEEDS = 2**31


def run(options: argparse.Namespace) -> None:
    """Run the reproduction and print its numbers beside the paper's."""
    recipe = RECIPES[options.experiment]
    size, suffix = _size(options, recipe), "-small" if options.small else ""
    out = options.out or Path(f"reproduction-{options.experiment}{suffix}")
    if not 0 <= options.seed < _SEEDS:
        raise BadValueError(
            f"--seed: expected a whole number from 0 to {_SEEDS - 1}, got {options.seed}."
        )
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


def _size(options: argparse.Namespace, recipe: Recipe) -> Size:
    """Return the paper's size or the small one, with the numbers that were given instead."""
    size = SMALL if options.small else recipe.size
    most = sum(parameter.numel() for parameter in blank_network(recipe).parameters())
    for name in COUNTS:
        key = name.replace("-", "_")
        value = getattr(options, key)
        if value is None:
            continue
        several = name in _NONE_OR_SEVERAL
        expected = "0 or a whole number from 2 on" if several else "a whole number from 1 on"
        if value < 0 or value == (1 if several else 0):
            raise BadValueError(f"--{name}: expected {expected}, got {value}.")
        if name.endswith("rank") and value > most:
            raise BadValueError(f"--{name}: expected at most the {most} parameters, got {value}.")
        size = replace(size, **{key: value})
    return size
