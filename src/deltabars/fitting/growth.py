"""`rank="auto"`: compute eigenpairs until the error bars of a probe are exact enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deltabars.covariance.estimators import ESTIMATORS, build_covariance
from deltabars.curvature.base import CurvatureOperator
from deltabars.curvature.pullback import Pullback
from deltabars.eigen.pairs import OUT_OF_TIME, STOPPED, EigenPairs
from deltabars.errors import ConvergenceWarning, DataError, option, warn
from deltabars.fitting.state import DEFAULT_TOLERANCE
from deltabars.likelihoods.categorical import Categorical
from deltabars.likelihoods.gaussian import Gaussian
from deltabars.prediction.scoring import read_inputs
from deltabars.problem.data import Batch, fingerprint_of
from deltabars.problem.network import model_errors
from deltabars.problem.problem import Problem
from deltabars.runtime.vectors import ShardedVectors, whole

_DRAWN_MARGIN = 0.6  # on new inputs errors were up to 1.6 times those of a probe of the data
_MOST_INPUTS = 32  # of a probe that is drawn from the data
_MOST_ROWS = 1024  # of F
# Of the tolerance, that the opg part of a sandwich must reach before its Hessian is begun.
_OPG_SHARE = 0.25
_AT_FLOOR = 1e-9  # relative: an eigenvalue that is λ but for rounding


@dataclass(frozen=True)
class Probe:
    """Inputs whose error bars decide how many eigenpairs are computed."""

    problem: Problem
    rows: Tensor  # F of the inputs, (n·C, p): the columns of this process
    squares: Tensor  # ‖f‖² of its rows, (n, C)
    fingerprint: int
    left_out: int  # inputs whose bars are zero
    tolerance: float  # for the score's error relative to the score, of every input
    margin: float  # the share of it to aim at: below 1 for training examples

    @classmethod
    def take(cls, problem: Problem, inputs: Any, tolerance: float | None, seed: int) -> Probe:
        """Make a probe of the given inputs; of examples drawn from the data if there are none."""
        group = problem.group
        count = max(1, _MOST_ROWS // problem.num_outputs)
        if inputs is None:
            batches = drawn(problem, min(count, _MOST_INPUTS, problem.num_examples), seed)
        else:
            batch = next(read_inputs(inputs, problem.data.signature, problem.network), None)
            if batch is None:
                raise DataError("probe: expected at least one input, got none.")
            part = batch.rows(slice(group.rank, count, group.size))
            batches = [part] if len(part) else []
        pullback, cotangents = Pullback(problem.network), problem.likelihood.mean_jacobian
        empty = problem.network.point.new_zeros(0, problem.num_outputs, problem.num_parameters)
        with problem.network.evaluation(), model_errors():
            found = [pullback.rows(batch.inputs, cotangents) for batch in batches]
        rows = torch.cat([empty, *found])
        squares = rows.double().square().sum(-1)
        moves = squares.sum(-1) > 0  # others, where a softmax is saturated, have bars of zero
        left_out = sum(group.gather_objects(int((~moves).sum())))
        rows, squares = rows[moves], squares[moves]
        squares = torch.cat(group.gather_objects(squares.cpu())).to(rows.device)
        if not len(squares):
            raise DataError(
                "probe: expected inputs whose predictions depend on the parameters, got none that "
                "does: their error bars are zero."
            )
        return cls(
            problem,
            group.exchange_rows(rows.flatten(0, 1), problem.spaces.whole.columns),
            squares,
            sum(group.gather_objects(fingerprint_of(batches))) % 2**64,
            left_out,
            DEFAULT_TOLERANCE if tolerance is None else tolerance,
            _DRAWN_MARGIN if inputs is None else 1.0,
        )

    def growth(
        self, operator: CurvatureOperator, matrix: str, estimator: str, solved: Mapping[str, Any]
    ) -> ProbeGrowth:
        """Return what decides on the pairs of one matrix; a sandwich's Hessian has G's, too."""
        spaces, problem = operator.spaces, self.problem
        rows, size = spaces.select(self.rows), spaces.reached.size
        target = self.margin * self.tolerance
        pairs = solved.get("opg") if matrix == "hessian" else None
        if pairs is None:
            if estimator == "sandwich":
                target *= _OPG_SHARE
            # What is orthogonal to all rows of R has the eigenvalue λ. (The roots of a softmax's
            # curvature sum to zero.)
            is_softmax = isinstance(problem.likelihood, Categorical)
            each = {"opg": 1, "ggn": problem.num_outputs - is_softmax}.get(matrix)
            most = None if each is None else each * problem.num_examples
            return ProbeGrowth(self, matrix, target, rows, size, informative=most)
        vectors = pairs.vectors
        own = vectors.part if isinstance(vectors, ShardedVectors) else whole(vectors)
        known = spaces.select(own)
        rows, seen = torch.cat([rows, known]), spaces.reached.inner(rows, known)
        return ProbeGrowth(self, "sandwich", target, rows, size, pairs.values, seen)


@dataclass
class ProbeGrowth:
    """Decide whether eigenpairs are enough for a probe (see `eigen.basis.Growth`)."""

    probe: Probe
    estimator: str  # whose error bars are computed
    tolerance: float  # for the largest relative error of a score
    rows: Tensor  # of F, and of the eigenvectors of G for a sandwich; reached columns
    size: int  # P', how many directions there are
    opg_values: Tensor | None = None  # of G, for a sandwich; so the projections
    opg_projections: Tensor | None = None
    informative: int | None = None  # how many eigenvalues can be above λ, where that is known
    least: float | None = None  # the smallest eigenvalue of a Hessian, where it is known
    error: float = field(default=float("inf"), init=False)  # at the last check
    is_exhausted: bool = field(default=False, init=False)  # whether all above λ were there

    @property
    def most(self) -> int:
        """How many pairs can add anything: those above λ, and one that is λ."""
        return self.size if self.informative is None else min(self.size, self.informative + 1)

    @property
    def aim(self) -> str:
        """The error reached, and the one wanted, for the progress bar."""
        there = f"{self.error:.2g}" if self.error < float("inf") else "not known yet"
        return f"error of a score {there} (wanted {self.tolerance:.2g})"

    def settled(self, values: Tensor) -> Tensor:
        """Return the eigenvalues, with those that can only be λ exactly that, despite rounding."""
        values = values.clone()
        if self.informative is not None:
            values[self.informative :] = self.probe.problem.l2
        return values

    def useful(self, values: Tensor) -> int:
        """Count the eigenvalues that add anything: those above λ, and one that is λ."""
        above = int((values > self.probe.problem.l2 * (1 + _AT_FLOOR)).sum())
        return above + self._at_floor(values[above : above + 1])

    def _at_floor(self, value: Tensor) -> bool:
        level = self.probe.problem.l2
        return bool(((value - level).abs() <= _AT_FLOOR * level).any())

    def is_enough(self, values: Tensor, projections: Tensor) -> bool:
        """Return whether every score is within the tolerance, or no pair can add anything.

        Pairs of a Hessian below λ cannot: all of them are its tail. Nor can those after one at λ.
        """
        values = self.settled(values)
        above = max(1, self.useful(values))
        self.is_exhausted = above < len(values) or self._at_floor(values[-1:])
        values, projections = values[:above], projections[:, :above]
        if not bool(values[0] > 0):
            return False
        first, count = ESTIMATORS[self.estimator][0], self.probe.squares.numel()
        spectra, seen, overlap = {first: values}, {first: projections[:count]}, None
        if self.opg_values is not None and self.opg_projections is not None:
            spectra["opg"], seen["opg"] = self.opg_values, self.opg_projections
            overlap = projections[count:].T  # Q_Hᵀ Q_G
        problem, squares = self.probe.problem, self.probe.squares
        noise = problem.likelihood.target_noise
        if isinstance(problem.likelihood, Gaussian) and noise is None:  # that of all residuals
            noise = float((2 * problem.mean_loss / problem.num_outputs) ** 0.5)
        if noise and "opg" in spectra:
            spectra["opg"] = spectra["opg"] / noise**2 + (1 - 1 / noise**2) * problem.l2
        covariance = build_covariance(
            self.estimator,
            spectra,
            rank=max(map(len, spectra.values())),
            l2=problem.l2,
            num_parameters=problem.num_parameters,
            num_examples=problem.num_examples,
            overlap=overlap,
            least_hessian=self.least,
        )
        shaped = {name: part.view(*squares.shape, -1) for name, part in seen.items()}
        score = covariance.spread(squares, shaped).score("rigorous")
        self.error = float((score.error / score.value).max())
        return self.error <= self.tolerance or self.is_exhausted

    def looked(self) -> Tensor:
        """Return the result of the last check, for a checkpoint."""
        return torch.tensor([self.error, self.is_exhausted], dtype=torch.float64)

    def look_back(self, looked: Tensor) -> None:
        """Restore the result of the last check."""
        self.error, self.is_exhausted = float(looked[0]), bool(looked[1])

    def outcome(self, pairs: EigenPairs) -> dict[str, Any]:
        """Return what was reached, and why no more was computed; warn where it is too little."""
        asked, stopped = self.tolerance / self.probe.margin, "memory budget"
        if self.error <= self.tolerance:
            stopped = "tolerance"
        elif STOPPED in pairs.statistics:
            stopped = str(pairs.statistics[STOPPED])
        elif self.is_exhausted or len(pairs) >= self.size:
            stopped = "spectrum"
        if not self.error <= asked:
            why = {
                "spectrum": "which are all above λ.",
                "memory budget": "with which the memory budget is used up; give a larger "
                f"{option('memory_budget')}.",
                OUT_OF_TIME: f"when {option('max_seconds')} were over; give more, a larger "
                f"{option('tolerance')}, or a {option('checkpoint')}, from which the same call "
                "resumes.",
            }[stopped]
            warn(
                f"{option('rank', 'auto')}: expected scores within {asked:.3g} of themselves, got "
                f"{self.error:.3g} with {len(pairs)} eigenpairs, {why} The error bounds of "
                "predictions show how far they can be trusted.",
                ConvergenceWarning,
            )
        return {
            "stopped_by": stopped,
            "tolerance": asked,
            "target": self.tolerance,
            "probe": "given" if self.probe.margin == 1 else "training examples",
            "relative_score_error": self.error,
            "probe_inputs": len(self.probe.squares),
            "probe_inputs_left_out": self.probe.left_out,
        }


def drawn(problem: Problem, count: int, seed: int) -> list[Batch]:
    """Draw some of the examples without replacement. Cost: one pass over the data."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(problem.num_examples, generator=generator)[:count].sort().values
    chosen = problem.data.own(chosen)
    parts, done = [], 0
    for chunk in problem.chunks():
        here = chosen[(chosen >= done) & (chosen < done + len(chunk))] - done
        if len(here):
            parts.append(chunk.rows(here.to(problem.device)))
        done += len(chunk)
    return parts
