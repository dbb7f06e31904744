"""A reproduction from its first stage to its last."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from deltabars.determinism import same_bits
from deltabars.recipes.paper import Recipe
from deltabars.report.style import house_style
from deltabars.reproduction.curves import surfaces
from deltabars.reproduction.experiment import Experiment, Options
from deltabars.reproduction.pictures import draw
from deltabars.reproduction.settings import Size
from deltabars.reproduction.summary import (
    ensemble_results,
    foreign_results,
    main_results,
    spread_results,
)
from deltabars.writing import write_text

_ROW_OF_NUMBERS = re.compile(r"\[[\d\s.,e+-]+\]")


def reproduce(
    recipe: Recipe, size: Size, options: Options, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run all stages that are not there yet; write results.json and the figures.

    Returns:
        What is in results.json.
    """
    # A library that is missing for the figures is better known now than after all stages.
    with house_style(), same_bits(options.deterministic):
        experiment = Experiment(recipe, size, options, say)
        results = main_results(experiment)
        _write(options, results)  # the paper's table stands, whatever happens to the rest
        surfaces(experiment)
        results["foreign"] = foreign_results(experiment)
        results["initialisations"] = spread_results(experiment)
        results |= ensemble_results(experiment)
        _write(options, results)
        draw(experiment, say)
    return results


def _write(options: Options, results: dict[str, Any]) -> None:
    text = json.dumps(results, indent=1, allow_nan=False)
    write_text(options.out / "results.json", _ROW_OF_NUMBERS.sub(_on_one_line, text))


def _on_one_line(numbers: re.Match[str]) -> str:
    return " ".join(numbers.group().split())
