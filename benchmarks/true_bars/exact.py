"""What is exact, and what are 100 pairs worth? All of a small network in dense float64.

`python -m benchmarks.true_bars.exact NAME … --data FOLDER --runs FOLDER --out FILE` takes networks
that `benchmarks.true_bars.train` trained, forms the GGN and G₀ from plain autograd, and compares
the exact sampling spread with the replicas, at two λ: where directions are weighed by what the data
determine of them, as `fit` does, and where all of them count alike, as in MacKay's equation.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import deltabars
from benchmarks.true_bars.material import Material
from benchmarks.true_bars.outputs import load_outputs
from benchmarks.true_bars.subjects import SUBJECTS, Subject
from deltabars.fitting.checking import agreement
from deltabars.fitting.replicas import scatter_of

_INPUTS = 300  # test inputs
_AT_ONCE = 50  # examples
_STEPS = 200  # of a bisection


@dataclass(frozen=True)
class Dense:
    """A classifier's GGN in its eigenvectors, float64, without λ."""

    values: Tensor  # μ, (P,)
    meat: Tensor  # QᵀG₀Q, (P, P)
    weights: Tensor  # Qᵀω̂, (P,)
    along: Tensor  # F Q of the test inputs, (n·C, P)
    count: int  # N

    @classmethod
    def of(cls, network: nn.Module, data: Material) -> Dense:
        """Form it from the training examples."""
        rows = _Rows(network)
        curvature = meat = None
        for inputs, targets in zip(
            data.train_inputs.split(_AT_ONCE), data.train_targets.split(_AT_ONCE), strict=True
        ):
            jacobian, p = rows(inputs)  # (n, C, P), (n, C)
            spread = p.diag_embed() - p[:, :, None] * p[:, None]
            values, turned = torch.linalg.eigh(spread)
            root = turned * values.clamp(min=0).sqrt()[:, None]
            flat = (root.mT @ jacobian).flatten(0, 1)
            pull = p - nn.functional.one_hot(targets, p.shape[1])
            gradients = torch.einsum("nc,ncp->np", pull, jacobian)
            if curvature is None or meat is None:
                curvature, meat = (flat.new_zeros(flat.shape[1], flat.shape[1]) for _ in range(2))
            curvature.addmm_(flat.T, flat)
            meat.addmm_(gradients.T, gradients)
        assert curvature is not None
        assert meat is not None
        count = len(data.train_inputs)
        values, vectors = torch.linalg.eigh(curvature.div_(count))
        tested = []
        for inputs in data.test_inputs[:_INPUTS].split(_AT_ONCE):
            jacobian, p = rows(inputs)
            spread = p.diag_embed() - p[:, :, None] * p[:, None]
            tested.append((spread @ jacobian).flatten(0, 1) @ vectors)
        meat = vectors.T @ meat.div_(count) @ vectors
        point = torch.cat([value.flatten() for value in rows.weights.values()])
        return cls(values.clamp(min=0), meat, vectors.T @ point, torch.cat(tested), count)

    def std(self, level: float) -> Tensor:
        """Return the exact sampling bars (n·C,)."""
        solved = self.along / (self.values + level)
        return ((solved @ self.meat) * solved).sum(1).div(self.count).clamp(min=0).sqrt()

    def level(self, weigh: Callable[[Tensor], Tensor]) -> float:
        """Solve Nλ Σ w(f)ω² = Σ w(f)f, f = μ/(μ + λ), for λ."""
        low, high = math.log(1e-12), math.log(1e6)
        for _ in range(_STEPS):
            level = math.exp((low + high) / 2)
            share = self.values / (self.values + level)
            weight = weigh(share)
            left = self.count * level * float((weight * self.weights.square()).sum())
            low, high = (
                (math.log(level), high)
                if left < float((weight * share).sum())
                else (low, math.log(level))
            )
        return math.exp(low)


class _Rows:
    """Jacobians of the logits by all weights, and probabilities, in float64."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network.double().eval()
        self.weights = {name: value.detach() for name, value in network.named_parameters()}

        def outputs(weights: dict[str, Tensor], example: Tensor) -> Tensor:
            found: Tensor = functional_call(self._network, weights, (example[None],))[0]
            return found

        self._derive = vmap(jacrev(outputs), (None, 0))

    def __call__(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Jacobians (n, C, P) and the probabilities (n, C)."""
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        parts = self._derive(self.weights, inputs)
        with torch.no_grad():
            p = self._network(inputs).softmax(1)
        return torch.cat([parts[name].flatten(2) for name in self.weights], 2), p


def study(subject: Subject, data: Material, runs: Path) -> dict[str, Any]:
    """Compare the bars of a network with its replicas, exactly and as `fit` has them."""
    network = subject.make()
    network.load_state_dict(torch.load(runs / "network.pt", weights_only=True))
    network.eval()
    train = data.train_inputs, data.train_targets
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = deltabars.fit(network, train, likelihood=subject.likelihood, progress=False)
        test = data.test_inputs[:_INPUTS]
        ours = fit.predict(test, spread="sampling", moderation=None).std.double().flatten()
    means = load_outputs(runs / "outputs.npz")["test"][1:, :_INPUTS].softmax(-1)
    scatter, half = scatter_of(means).flatten(), len(means) // 2
    dense = Dense.of(network, data)
    found: dict[str, Any] = {
        "title": subject.title, "parameters": len(dense.values), "examples": dense.count,
        "rank": fit.rank, "inputs": len(test), "replicas": len(means), "fit": _compared(
            float(fit.level), ours, scatter),
    }  # fmt: skip
    for name, weigh in (("weighed", lambda f: f), ("alike", torch.ones_like)):
        level = dense.level(weigh)
        found[name] = _compared(level, dense.std(level), scatter)
    halves = scatter_of(means[:half]).flatten(), scatter_of(means[half:]).flatten()
    found["halves"] = vars(agreement(*halves))
    return found


def _compared(level: float, std: Tensor, scatter: Tensor) -> dict[str, float]:
    return {"l2": level, **vars(agreement(std, scatter))}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the table of the page."""
    titles = ["network", "P", "λ of fit", "bars of fit", "λ, all pairs", "exact bars",
              "λ, all alike", "exact bars", "R² of half the replicas on the others"]  # fmt: skip
    lines = [titles, ["---"] * len(titles)]
    for each in sorted(found.values(), key=lambda known: -_distance(known)):
        cells = [each["title"], f"{each['parameters']:,}"]
        for name in ("fit", "weighed", "alike"):
            known = each[name]
            cells += [f"{known['l2']:.2g}", f"{known['slope']:.2f} ({known['r_squared']:.2f})"]
        lines.append([*cells, f"{each['halves']['r_squared']:.2f}"])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _distance(known: dict[str, Any]) -> float:
    return abs(math.log(known["weighed"]["slope"]))


def main() -> None:
    """Study some subjects, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.true_bars.exact")
    parser.add_argument("names", nargs="*", help="classifiers of up to some 6,000 weights")
    parser.add_argument("--data", type=Path, help="the folder of `prepare`")
    parser.add_argument("--runs", type=Path, help="the folder of `train`")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file; what it has stays")
    given = parser.parse_args()
    found = json.loads(given.out.read_text()) if given.out.is_file() else {}
    for name in given.names:
        started = time.perf_counter()
        subject = SUBJECTS[name]
        found[name] = study(subject, subject.load(given.data), given.runs / name)
        given.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
