"""`deltabars spectrum`: the eigenvalues of a fit, as a table and as a figure."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltabars.cli.fit import interval_of, summary
from deltabars.cli.options import add_output, add_run, program
from deltabars.cli.predicting import fit_lines, load_fit, open_run
from deltabars.cli.tables import Columns, check_ending, write_table
from deltabars.errors import BadValueError
from deltabars.fitting.fitted import DeltaFit
from deltabars.storage.writing import check_can_write, write_whole

_DESCRIPTION = """\
Show the spectrum of a fit: the number of eigenpairs K, how far the last eigenvalue λ_K is above λ,
how many parameters the data determine, and the eigenvalues with their residuals.
"""
_EPILOG = """\
examples:
  deltabars spectrum run
  deltabars spectrum run --out spectrum.png --values eigenvalues.csv
"""
_PICTURES = (".png", ".pdf", ".svg")
_SHOWN = 12


def register(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "spectrum",
        help="the eigenvalues of a fit",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run(parser)
    add = parser.add_argument
    add("--out", type=Path, metavar="FIGURE", help="a figure: .png, .pdf or .svg")
    add("--values", type=Path, metavar="FILE", help="all eigenvalues: .csv, .jsonl or .parquet")
    add_output(parser)
    parser.set_defaults(run=run, python=python)


def run(options: argparse.Namespace) -> None:
    """Print the spectrum, draw it and write it."""
    if options.out is not None:
        if options.out.suffix.lower() not in _PICTURES:
            raise BadValueError(
                f"--out: expected a file name that ends in one of {', '.join(_PICTURES)}, got "
                f"{options.out.name!r}."
            )
        check_can_write(options.out, "--out")
    if options.values is not None:
        check_ending(options.values, "--values")
        check_can_write(options.values, "--values")
    fit = load_fit(open_run(options), options)
    if options.out is not None:
        from deltabars.report.spectra import save_fit_spectra

        write_whole(options.out, lambda draft: save_fit_spectra(draft, fit))
    columns = columns_of_spectra(fit)
    if options.values is not None:
        write_table(options.values, [columns])
    if options.json:
        values = {
            name: [float(value) for value in pairs.values] for name, pairs in fit.spectra.items()
        }
        print(json.dumps({**summary(fit), "values": values}))
        return
    for line in _lines(fit):
        print(line)
    for path in (options.out, options.values):
        if path is not None:
            print(f"Written: {path}")


def python(options: argparse.Namespace) -> str:
    """The Python that the command stands for."""
    drawing = "from deltabars.report.spectra import save_fit_spectra"
    return program(
        *fit_lines(options, drawing if options.out else ""),
        "print(fit)",
        "print(fit.effective_parameters, fit.effective_parameters_interval)",
        "for name, pairs in fit.spectra.items():\n    print(name, pairs.values.tolist())",
        f"save_fit_spectra({str(options.out)!r}, fit)" if options.out else "",
    )


def columns_of_spectra(fit: DeltaFit) -> Columns:
    """All eigenvalues as a table: matrix, index from 1 on, value, residual."""
    pairs = fit.spectra
    values = torch.cat([found.values.cpu() for found in pairs.values()])
    return {
        "matrix": np.array(
            [name for name, found in pairs.items() for _ in range(len(found))], dtype=object
        ),
        "index": np.concatenate([np.arange(1, len(found) + 1) for found in pairs.values()]),
        "value": values.numpy(),
        "residual": torch.cat([found.residuals.cpu() for found in pairs.values()]).numpy(),
    }


def _lines(fit: DeltaFit) -> list[str]:
    lines = [
        f"estimator             {fit.estimator}",
        f"examples N            {fit.num_examples:,}",
        f"parameters P          {fit.num_parameters:,}",
        f"eigenpairs K          {fit.rank:,}",
        f"λ in the eigenvalues  {fit.level:g}",
        *([] if fit.noise is None else [f"noise σ               {fit.noise:g}"]),
    ]
    for name, pairs in fit.spectra.items():
        last = float(pairs.values[-1])
        lines.append(f"λ_K of {name:14} {last:.6g} ({last / fit.level:.4g} times λ)")
    interval = interval_of(fit)
    ends = "" if interval is None else "; in all between {:.1f} and {:.1f}".format(*interval)
    lines.append(f"effective parameters  {fit.effective_parameters:.1f} in the K pairs{ends}")
    for name, pairs in fit.spectra.items():
        lines += ["", f"{name:10} {'k':>7} {'eigenvalue':>14} {'residual':>10}"]
        for k in _some(len(pairs)):
            value, residual = float(pairs.values[k]), float(pairs.residuals[k])
            lines.append(f"{'':10} {k + 1:7,} {value:14.6g} {residual:10.1e}")
    return lines


def _some(count: int) -> list[int]:
    """Some places from the first to the last: all where they are few, else ever farther apart."""
    if count <= _SHOWN:
        return list(range(count))
    spaced = np.geomspace(1, count, _SHOWN).round().astype(int)
    return sorted({int(k) - 1 for k in spaced})
