"""Are the bars true? The table of docs/true-bars.md.

`python -m benchmarks.true_bars NAME … --data FOLDER --runs FOLDER --out results/true-bars` fits the
networks that `benchmarks.true_bars.train` trained, and compares their bars with the scatter of
their replicas. `python -m benchmarks.true_bars --table results/true-bars` prints the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import deltabars
from benchmarks.true_bars.material import Material
from benchmarks.true_bars.outputs import load_outputs
from benchmarks.true_bars.subjects import SUBJECTS, Subject
from deltabars.fitting.checking import Agreement, agreement
from deltabars.fitting.replicas import calibrated_by, scatter_of

_FEW, _MORE = 2, 5  # replicas that a user may have


def study(subject: Subject, data: Material, runs: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Fit a network with nothing but its data, and compare it with its replicas."""
    device = options.pop("device")
    network = subject.make()
    network.load_state_dict(torch.load(runs / "network.pt", weights_only=True))
    network.to(device).eval()
    train = data.train_inputs.to(device), data.train_targets.to(device)
    likelihood = subject.likelihood
    started = time.perf_counter()
    fit = deltabars.fit(network, train, likelihood=likelihood, progress=False, **options)
    seconds = time.perf_counter() - started
    means = _means(fit, load_outputs(runs / "outputs.npz"))
    test = data.test_inputs.to(device)
    own = means["test"][1:]
    pairs = _parted(len(own), _FEW)
    levels = [calibrated_by(fit, own[pair], test).calibration["sampling"] for pair, _ in pairs]
    found: dict[str, Any] = {
        "title": subject.title, "l2_of_training": subject.l2, "estimator": fit.estimator,
        "parameters": fit.num_parameters, "examples": fit.num_examples, "rank": fit.rank,
        "replicas": len(own), "l2": fit.diagnostics["l2"], "noise": fit.noise,
        "temperature": fit.temperature, "gradient_to_noise": fit.diagnostics["gradient_to_noise"],
        "seconds_fit": seconds, "options": {k: str(v) for k, v in options.items()},
    }  # fmt: skip
    for part in ("test", "foreign"):
        inputs, said = getattr(data, f"{part}_inputs").to(device), means[part][1:]
        scatter = scatter_of(said)
        posterior, seconds_posterior = _timed(fit, inputs, "posterior")
        sampling, seconds_sampling = _timed(fit, inputs, "sampling")
        bars = sampling.std.cpu()
        rows = {
            "posterior, auto": agreement(posterior.std.cpu(), scatter),
            "sampling, auto": agreement(bars, scatter),
        }
        if subject.l2 is not None:
            moved = fit.with_l2(fit_level(fit, subject.l2, data))
            rows["posterior, training"] = agreement(
                moved.predict(inputs, moderation=None).std.cpu(), scatter
            )
        calibrated = [
            agreement(level.factor * bars, scatter_of(said[rest]))
            for level, (_, rest) in zip(levels, pairs, strict=True)
        ]
        numbers = {name: vars(each) for name, each in rows.items()}
        numbers["calibrated by two"] = _averaged(calibrated)
        for name, count in (("two alone", _FEW), ("five alone", _MORE)):
            alone = [
                agreement(scatter_of(said[some]), scatter_of(said[rest]))
                for some, rest in _parted(len(said), count)
            ]
            numbers[name] = _averaged(alone)
        shift = (said.mean(0) - means[part][0]).square().mean().sqrt()
        found[part] = {
            "agreement": numbers,
            "inputs": len(said[0]), "seconds_posterior": seconds_posterior,
            "seconds_sampling": seconds_sampling,
            "mean_shift": float(shift / scatter.square().mean().sqrt()),
            "judgement": str(sampling.judgement), "level": sampling.judgement.level,
            "tail_share": float(sampling.tail_share.double().mean()),
            "interval": float((sampling.score_error / sampling.score).median()),
        }  # fmt: skip
    found["calibration"] = {
        "factors": [each.factor for each in levels],
        "standard_errors": [each.standard_error for each in levels],
    }
    if fit.likelihood.discrete:
        found["log_loss"] = _losses(fit, data, device)
    return found


def _parted(count: int, size: int) -> list[tuple[list[int], list[int]]]:
    """Return groups of so many replicas, none in two of them, each beside all the others."""
    starts = range(0, count - size + 1, size)
    groups = [list(range(start, start + size)) for start in starts]
    return [(group, [k for k in range(count) if k not in group]) for group in groups]


def _averaged(found: list[Agreement]) -> dict[str, float]:
    """Return the mean of what several groups of replicas give, and the ends of their slopes."""
    mean = {name: statistics.fmean(vars(each)[name] for each in found) for name in vars(found[0])}
    slopes = [each.slope for each in found]
    return mean | {"least_slope": min(slopes), "largest_slope": max(slopes)}


def fit_level(fit: deltabars.DeltaFit, l2: float, data: Material) -> float:
    """Return the training's λ of the cost that the fit's likelihood has (half of mean squares)."""
    return l2 / 2 if fit.noise is not None else l2


def _means(fit: deltabars.DeltaFit, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {part: fit.likelihood.mean(each) for part, each in outputs.items()}


def _timed(fit: deltabars.DeltaFit, inputs: Tensor, spread: str) -> tuple[Any, float]:
    fit.predict(inputs[:16], spread=spread)
    started = time.perf_counter()
    found = fit.predict(inputs, spread=spread, moderation=None, progress=False)
    if found.std.is_cuda:
        torch.cuda.synchronize()
    return found, time.perf_counter() - started


def _losses(fit: deltabars.DeltaFit, data: Material, device: Any) -> dict[str, float]:
    """Return mean −log p of the test labels: plain, moderated, and tuned on validation data."""
    test, labels = data.test_inputs.to(device), data.test_targets
    held = data.validation_inputs.to(device), data.validation_targets.to(device)
    out, logits = fit.predict(test), fit.predict(test, space="logit", moderation=None).mean
    held_logits = fit.predict(held[0], space="logit", moderation=None).mean
    tried = torch.logspace(-0.7, 0.7, 281, dtype=torch.float64)
    each = [_loss((held_logits.double() / t).softmax(1), held[1]) for t in tried.tolist()]
    temperature = float(tried[min(range(len(each)), key=each.__getitem__)])
    tuned = fit.tune_l2([held], method="validation").fit
    return {
        "softmax": _loss(out.mean, labels),
        "moderated": _loss(out.moderated, labels),
        "temperature scaling": _loss((logits.double() / temperature).softmax(1), labels),
        "moderated, tuned": _loss(tuned.predict(test).moderated, labels),
        "scaling temperature": temperature, "tuned temperature": tuned.temperature,
        "tuned l2": float(tuned.level),
        "accuracy": float((out.label.cpu() == labels).double().mean()),
    }  # fmt: skip


def _loss(means: Tensor, labels: Tensor) -> float:
    chosen = means.double().cpu().gather(1, labels.cpu()[:, None])
    return -float(chosen.clamp(min=1e-30).log().mean())


_COLUMNS = (
    ("posterior, training", "(a) posterior, λ of the training"),
    ("posterior, auto", "(b) posterior, auto"),
    ("sampling, auto", "(c) sampling, auto"),
    ("calibrated by two", "(d) calibrated by two"),
    ("two alone", "(e) two alone"),
    ("five alone", "five alone"),
)


def tables(folder: Path) -> str:
    """Return the tables of the page, from the files of the study."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    order = sorted(found, key=lambda name: -_distance(found[name]))
    lines = []
    for part in ("test", "foreign"):
        titles = ["network", *(title for _, title in _COLUMNS)]
        lines += [f"{part} inputs:", "", _row(titles), _row(["---"] * len(titles))]
        for name in order:
            known = found[name][part]["agreement"]
            cells = [_cell(known.get(key)) for key, _ in _COLUMNS]
            lines.append(_row([found[name]["title"], *cells]))
        lines.append("")
    titles = ["network", "softmax", "moderated", "temperature scaling", "moderated, tuned"]
    lines += ["log loss:", "", _row(titles), _row(["---"] * len(titles))]
    for name in order:
        if "log_loss" in found[name]:
            known = found[name]["log_loss"]
            lines.append(_row([found[name]["title"], *(f"{known[t]:.4f}" for t in titles[1:])]))
    titles = ["network", "P", "N", "λ by the evidence", "gradient / noise", "two replicas: factor",
              "± said", "± seen", "verdict"]  # fmt: skip
    lines += ["", "the fits:", "", _row(titles), _row(["---"] * len(titles))]
    for name in order:
        lines.append(_row(_facts(found[name])))
    return "\n".join(lines)


def _facts(known: dict[str, Any]) -> list[str]:
    level, ratio = known["l2"], known["gradient_to_noise"]
    factors = torch.tensor(known["calibration"]["factors"], dtype=torch.float64)
    said = float(torch.tensor(known["calibration"]["standard_errors"]).mean() / factors.mean())
    interval = (
        f"{level['evidence']:.2g} ({level['evidence_low']:.2g} to {level['evidence_high']:.2g})"
    )
    return [
        known["title"], f"{known['parameters']:,}", f"{known['examples']:,}", interval,
        f"{ratio:.2f}", f"{float(factors.mean()):.2f}", f"{said:.0%}",
        f"{float(factors.std() / factors.mean()):.0%}", known["test"]["level"],
    ]  # fmt: skip


def _distance(known: dict[str, Any]) -> float:
    return abs(math.log(known["test"]["agreement"]["sampling, auto"]["slope"]))


def _cell(known: dict[str, float] | None) -> str:
    if known is None:
        return "–"
    return f"{known['slope']:.2f} ({known['r_squared']:.2f}, {known['spearman']:.2f})"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Run the study of some subjects, or print its tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.true_bars")
    parser.add_argument("names", nargs="*", help=", ".join(SUBJECTS))
    parser.add_argument("--data", type=Path, help="the folder of `prepare`")
    parser.add_argument("--runs", type=Path, help="the folder of `train`")
    parser.add_argument("--out", type=Path, help="where NAME.json goes")
    parser.add_argument("--table", type=Path, help="print the tables of a folder, and end")
    parser.add_argument("--rank", type=int, help="K (default: as fit's)")
    parser.add_argument("--max-seconds", type=float, help="of a fit")
    parser.add_argument("--residual-tolerance", type=float, help="of its eigenpairs")
    parser.add_argument("--estimator", help="default: fit's, with nothing else given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    if given.table is not None:
        print(tables(given.table))
        return
    asked = {"rank": given.rank, "max_seconds": given.max_seconds, "estimator": given.estimator}
    asked["residual_tolerance"] = given.residual_tolerance
    options = {name: value for name, value in asked.items() if value is not None}
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.names:
        started = time.perf_counter()
        subject = SUBJECTS[name]
        result = study(
            subject,
            subject.load(given.data),
            given.runs / name,
            {"device": given.device, **options},
        )
        (given.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        known = result["test"]["agreement"]
        shown = ", ".join(f"{key} {_cell(known.get(key))}" for key, _ in _COLUMNS)
        print(f"{name} ({time.perf_counter() - started:.0f} s): {shown}", flush=True)
        print(f"  {result.get('log_loss')}", flush=True)


if __name__ == "__main__":
    main()
