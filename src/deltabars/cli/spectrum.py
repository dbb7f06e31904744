"""`deltabars spectrum`: the eigenvalues of a fit, as a table and as a figure."""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch

from deltabars.cli.fit import interval_of, level_line, summary
from deltabars.cli.subject import PICTURES, check_file, load_fit, open_run
from deltabars.cli.tables import ENDINGS, Columns, write_table
from deltabars.fitting.fitted import DeltaFit
from deltabars.storage.writing import write_whole

_SHOWN = 12


def run(options: argparse.Namespace) -> None:
    """Print the spectrum, draw it and write it."""
    check_file(options.out, PICTURES)
    check_file(options.values, ENDINGS, "--values")
    fit = load_fit(open_run(options), options)
    if options.out is not None:
        from deltabars.report.spectra import save_fit_spectra

        write_whole(options.out, lambda draft: save_fit_spectra(draft, fit))
    if options.values is not None:
        write_table(options.values, [_columns(fit)])
    if options.json:
        values = {name: pairs.values.tolist() for name, pairs in fit.spectra.items()}
        print(json.dumps({**summary(fit), "values": values}))
        return
    print("\n".join(_lines(fit)))
    for path in (options.out, options.values):
        if path is not None:
            print(f"Written: {path}")


def _columns(fit: DeltaFit) -> Columns:
    """Return all eigenvalues as a table: matrix, index from 1 on, value, residual."""
    pairs = fit.spectra
    return {
        "matrix": np.repeat(np.array(list(pairs), dtype=object), [len(p) for p in pairs.values()]),
        "index": np.concatenate([np.arange(1, len(found) + 1) for found in pairs.values()]),
        "value": torch.cat([found.values.cpu() for found in pairs.values()]).numpy(),
        "residual": torch.cat([found.residuals.cpu() for found in pairs.values()]).numpy(),
    }


def _lines(fit: DeltaFit) -> list[str]:
    lines = [
        f"estimator             {fit.estimator}",
        f"examples N            {fit.num_examples:,}",
        f"parameters P          {fit.num_parameters:,}",
        f"eigenpairs K          {fit.rank:,}",
        f"λ in the eigenvalues  {fit.level:g}",
        *([] if fit.diagnostics.get("l2") is None else [f"{'':22}{level_line(fit)}"]),
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
        count, spaced = len(pairs), np.geomspace(1, len(pairs), _SHOWN).round().astype(int)
        # All of a few; else some from the first to the last, ever farther apart.
        for k in range(count) if count <= _SHOWN else sorted({int(k) - 1 for k in spaced}):
            value, residual = float(pairs.values[k]), float(pairs.residuals[k])
            lines.append(f"{'':10} {k + 1:7,} {value:14.6g} {residual:10.1e}")
    return lines
