"""Matrices as products with rows, and their eigenpairs: how good they are, and how they were found.

A solver takes any matrix that `Products` takes and returns `EigenPairs`. `audit` measures these
against the matrix itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from deltabars.errors import BadValueError, ConvergenceWarning, SpectrumWarning, option, warn
from deltabars.runtime.vectors import Space, Spaces, first

OnStep = Callable[[int, int], None]  # (products so far, pairs converged)
IsOver = Callable[[], bool]  # whether to stop now, with what there is

# Names in the statistics of pairs.
STOPPED, OUT_OF_TIME = "stopped_by", "max_seconds"  # the reason, where it was `is_over`
ROWS_LEFT = "rows_left"  # that an incremental SVD has not processed
LEAST_RITZ = "smallest_ritz_value"
DISCARDED = "discarded_energy"
ROUNDING = "storage_rounding"
PRODUCT_ROUNDING = "product_rounding"
SKEW = "orthogonality_norm"

_LOST = 0.05  # of an eigenvalue that is λ: more than this to rounding is warned of
# Units in the last place, of what is not known of a file's pairs: ‖A‖, and QQᵀ.
_USUAL_PRODUCT, _USUAL_SKEW = 16, 8

_FAR = 10  # times: the random signs of an audit never make that much by themselves
_USUAL, _TIMES = 4, 2  # of rounding in products: units in the last place; what was measured
_ROUNDING = 100  # units in the last place of ‖A‖ that a product with a long sum can be off by


class Products:
    """A symmetric matrix as products with rows, which are counted.

    Args:
        matrix: a tensor or array (P, P); an object with `shape` and `matmat` (rows); a SciPy
            LinearOperator or sparse matrix; or an object with `shape` and `@` on columns (a
            curvlinops operator). Its `dtype` and `device` are those of the vectors; without, they
            are float64 on the CPU. One with a `space` works on the columns of this process.
    """

    def __init__(self, matrix: Any) -> None:
        shape = tuple(getattr(matrix, "shape", ()))
        if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
            raise BadValueError(f"Matrix: expected a square one, got shape {shape}.")
        single = str(getattr(matrix, "dtype", "")).endswith(("float32", "float16"))
        self.dtype = torch.float32 if single else torch.float64
        own = getattr(matrix, "device", None)
        self.device = own if isinstance(own, torch.device) else torch.device("cpu")
        self.shape = (int(shape[0]), int(shape[0]))
        self.space: Space = getattr(matrix, "space", None) or Space(self.shape[0])
        self.products = 0
        self._function = self._row_function(matrix)

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return the products with rows (b, p)."""
        self.products += len(vectors)
        return check_finite(self._function(vectors))

    def _row_function(self, matrix: Any) -> Callable[[Tensor], Tensor]:
        if isinstance(matrix, Tensor) or hasattr(matrix, "__array__"):
            fixed = torch.as_tensor(matrix).detach().to(self.device, self.dtype)
            return lambda rows: rows @ fixed.T
        if hasattr(matrix, "rmatvec") or hasattr(matrix, "tocsr"):  # SciPy: NumPy columns

            def of_columns(rows: Tensor) -> Tensor:
                found = torch.as_tensor(matrix @ rows.T.cpu().numpy()).T
                return found.to(self.device, self.dtype).contiguous()

            return of_columns
        if hasattr(matrix, "matmat"):
            return lambda rows: matrix.matmat(rows)
        if hasattr(matrix, "__matmul__"):
            return lambda rows: (matrix @ rows.T).T.contiguous()
        raise BadValueError(
            f"Matrix: expected an object with matmat or @, got {type(matrix).__name__}."
        )


def check_finite(products: Tensor) -> Tensor:
    """Return products; refuse them where any is not finite."""
    if not bool(products.isfinite().all()):
        wider = f", or use {option('dtype', torch.float64)}"
        raise BadValueError(
            "Products: expected finite values, got NaN or infinity: squares of derivatives, or "
            f"second ones, are beyond {products.dtype}. Scale the inputs or the targets"
            f"{'' if products.dtype == torch.float64 else wider}."
        )
    return products


@dataclass(frozen=True, eq=False)
class EigenPairs:
    """The K algebraically largest eigenpairs of a symmetric matrix A.

    Attributes:
        values: the eigenvalues, descending, (K,), float64.
        vectors: the eigenvectors, orthonormal rows, (K, P): a tensor, or another of
            `runtime.vectors.Basis` where they stay in files or in the memory of the CPU, or are
            sharded over processes.
        residuals: ‖Aq − λq‖ for each pair, over `residual_scale(values)`, (K,), float64.
        smallest: eigenvalues known from the lower end of the spectrum, ascending, (m,), float64.
            They need not be next to one another unless the solver was asked for them.
        smallest_residuals: their residuals, on the same scale as `residuals`, (m,).
        statistics: how they were found: `solver`, `products`, `converged`, `tolerance`, …
    """

    values: Tensor
    vectors: Tensor | Any
    residuals: Tensor
    smallest: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    smallest_residuals: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    statistics: Mapping[str, int | float | str] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.values.shape[0]

    def __repr__(self) -> str:
        count, size = self.vectors.shape
        return (
            f"EigenPairs(K={count}, P={size}, values {float(self.values[0]):.4g} … "
            f"{float(self.values[-1]):.4g}, largest residual {float(self.residuals.max()):.2g})"
        )

    @property
    def least(self) -> float:
        """The smallest eigenvalue seen: the last one, one of `smallest`, or a Ritz value."""
        ritz = float(self.statistics.get(LEAST_RITZ, math.inf))
        return min(ritz, float(self.values[-1]), *self.smallest[:1].tolist())

    @property
    def slack(self) -> float:
        """How much too low the values can be, beyond rounding: what incremental SVD discarded."""
        return float(self.statistics.get(DISCARDED, 0.0))

    @property
    def rounding(self) -> float:
        """‖Q̃ − Q‖₂: how far rounded vectors Q̃ are from those that were computed, Q."""
        return float(self.statistics.get(ROUNDING, 0.0))

    @property
    def residual_norms(self) -> Tensor:
        """‖Aq − λq‖ of each pair, (K,); zero where a discarded part bounds them (see `slack`)."""
        if DISCARDED in self.statistics:
            return torch.zeros_like(self.residuals)
        return self.residuals * residual_scale(self.values)

    @property
    def product_rounding(self) -> float:
        """What rounding in products with A may add to the norm of a residual."""
        eps = torch.finfo(self.vectors.dtype).eps
        usual = _USUAL_PRODUCT * eps * float(self.values[0].abs())
        return float(self.statistics.get(PRODUCT_ROUNDING, usual))

    @property
    def skew(self) -> float:
        """‖QQᵀ − I‖₂ of the vectors as they were computed."""
        usual = _USUAL_SKEW * torch.finfo(self.vectors.dtype).eps
        return float(self.statistics.get(SKEW, usual))

    @property
    def exact_least(self) -> float | None:
        """The least eigenvalue, where the whole spectrum is known; a Ritz value only bounds it."""
        whole = len(self.values) + len(self.smallest) == self.vectors.shape[1]
        return self.least if whole else None

    def mapped(self, factor: float, shift: float) -> EigenPairs:
        """Return the eigenpairs of factor·A + shift·I, factor > 0."""
        values = factor * self.values + shift
        smallest = factor * self.smallest + shift
        scale = residual_scale(self.values), residual_scale(values)
        lower = residual_scale(self.smallest, self.values[:1]), residual_scale(smallest, values[:1])
        statistics = dict(self.statistics)
        if LEAST_RITZ in statistics:
            statistics[LEAST_RITZ] = factor * float(statistics[LEAST_RITZ]) + shift
        for name in {DISCARDED, PRODUCT_ROUNDING} & statistics.keys():
            statistics[name] = factor * float(statistics[name])
        return replace(
            self,
            values=values,
            residuals=factor * (self.residuals * scale[0] / scale[1]),
            smallest=smallest,
            smallest_residuals=factor * (self.smallest_residuals * (lower[0] / lower[1])),
            statistics=statistics,
        )

    def first(self, count: int) -> EigenPairs:
        """Return the `count` largest pairs; the values of the others go to `smallest`."""
        vectors = first(self.vectors, count)
        return replace(
            self,
            values=self.values[:count],
            vectors=vectors.clone() if isinstance(vectors, Tensor) else vectors,
            residuals=self.residuals[:count],
            smallest=torch.cat([self.smallest, self.values[count:].flip(0)]),
            smallest_residuals=torch.cat([self.smallest_residuals, self.residuals[count:].flip(0)]),
        )

    def to(self, device: torch.device | str) -> EigenPairs:
        """Move the pairs to a device."""
        tensors = ("values", "vectors", "residuals", "smallest", "smallest_residuals")
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in tensors}
        return replace(self, **moved)


def embed(pairs: EigenPairs, spaces: Spaces, elsewhere: float) -> EigenPairs:
    """Return the eigenpairs of a matrix (P, P) that is A at some indices and `elsewhere`·I beyond.

    As many as there are `pairs` of A; eigenvectors of the other eigenvalue are unit vectors.
    """
    space, indices, here = spaces.whole, spaces.indices, spaces.own_indices
    if indices is None:
        return pairs
    count, others = len(pairs), space.size - len(indices)
    free = torch.ones(space.size, dtype=torch.bool, device=indices.device)
    free[indices] = False
    spots = (free.nonzero()[:count, 0] - space.own.start).tolist()
    units = pairs.values.new_full((len(spots),), elsewhere)
    values, order = torch.cat([pairs.values, units]).sort(descending=True, stable=True)
    order = order[:count]
    vectors = pairs.vectors.new_zeros(count, space.width)
    for row, source in enumerate(order.tolist()):
        if source < count:
            vectors[row, here] = pairs.vectors[source]
        elif 0 <= spots[source - count] < space.width:
            vectors[row, spots[source - count]] = 1.0
    known = len(pairs.smallest)
    copies = pairs.smallest.new_full((min(others, known),), elsewhere)
    lower, rising = torch.cat([pairs.smallest, copies]).sort(stable=True)
    statistics = dict(pairs.statistics)
    if LEAST_RITZ in statistics:
        statistics[LEAST_RITZ] = min(float(statistics[LEAST_RITZ]), elsewhere)
    return EigenPairs(
        values[:count],
        vectors,
        torch.cat([pairs.residuals, torch.zeros_like(units)])[order],
        lower[:known],
        torch.cat([pairs.smallest_residuals, torch.zeros_like(copies)])[rising[:known]],
        statistics,
    )


def residual_scale(values: Tensor, largest: Tensor | None = None) -> Tensor:
    """Return the scale of residual norms: max(|λ|, 1), or max(|λ|, |λ₁|) where that is below 1.

    So a tolerance means something for small matrices. λ₁ (1,) is the first value by default.
    """
    top = (values[:1] if largest is None else largest).abs().clamp(max=1.0)
    return torch.maximum(values.abs(), top).clamp(min=torch.finfo(values.dtype).tiny)


def check_rank(rank: int, size: int) -> None:
    """Refuse a rank that is not a whole number from 1 to P."""
    if not is_whole(rank) or not 1 <= rank <= size:
        raise BadValueError(
            f"rank: expected a whole number from 1 to the number of parameters, P = {size}, got "
            f"{rank!r}."
        )


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number (NumPy's count; True and False do not)."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def default_tolerance(dtype: torch.dtype) -> float:
    """Return the residual that a solver stops at: what the type of the products allows."""
    return 1e-10 if dtype == torch.float64 else 1e-5


def residual_tolerance(dtype: torch.dtype, l2: float) -> float:
    """Return the residual to reach where eigenvalues count beside λ: 0.001·λ, within limits."""
    most, least = default_tolerance(dtype), 2 * torch.finfo(dtype).eps
    return max(least, min(most, 1e-3 * l2))


def check_tolerance(tolerance: float, dtype: torch.dtype) -> None:
    """Refuse a residual that products in this type cannot resolve."""
    least = torch.finfo(dtype).eps
    if not tolerance >= least:
        raise BadValueError(
            f"tolerance: expected a number above zero, from {least:.2g} on (the resolution of "
            f"{dtype}), got {tolerance!r}."
        )


def warn_unconverged(pairs: EigenPairs, tolerance: float) -> None:
    """Warn with how many pairs have not converged, and the largest residual."""
    bad = int((pairs.residuals > tolerance).sum())
    if bad:
        warn(
            f"Expected {len(pairs)} eigenpairs with residuals up to {tolerance:.1g}, got {bad} "
            f"that have not converged; the largest residual is {float(pairs.residuals.max()):.2g}. "
            "Allow more products, ask for fewer pairs, or accept a larger tolerance.",
            ConvergenceWarning,
        )


def warn_about_values(name: str, pairs: EigenPairs, l2: float, was_moved: bool = False) -> None:
    """Warn where eigenvalues of the named matrix cannot serve a covariance, or void its bound.

    Products are right to eps·‖A‖, an eigenvalue λ to eps·‖A‖/λ of itself, and error bars in its
    direction to about as much. Pairs that were moved were solved at another λ than `l2`.
    """
    values, dtype = pairs.values, pairs.vectors.dtype
    if was_moved:
        residuals, positive = pairs.residual_norms, values > 0
        left = float((residuals[positive].square() / values[positive]).sum() / l2) ** 0.5
        if left > _LOST:
            warn(
                f"Expected residuals of the {name} that are small beside λ = {l2:g}, got up to "
                f"{float(residuals.max()):.2g}, which widens intervals by up to "
                f"{min(left, 1.0):.0%}. The pairs were solved for another λ: fit at this l2.",
                SpectrumWarning,
            )
    eps = torch.finfo(dtype).eps
    lost = eps * float(values[0].abs()) / l2
    if lost > _LOST:
        wider = f"Use {option('dtype', torch.float64)}"
        advice = wider if dtype != torch.float64 else "Scale the inputs"
        warn(
            f"Expected a largest eigenvalue of the {name} of at most {_LOST / eps:.1g}·λ, which "
            f"{dtype} can tell λ from, got {float(values[0]):.3g} for λ = {l2:g}: rounding can "
            f"move error bars by up to {min(lost, 1.0):.0%}, which widens their intervals. "
            f"{advice}, or a larger l2.",
            SpectrumWarning,
        )
    count, negative = len(values), int((values <= 0).sum())
    below = int((values < l2 * (1 - 1e-6)).sum())
    if negative:
        warn(
            f"Expected positive eigenvalues of the {name}, got {negative} of {count} at or below "
            f"zero (down to {float(values[-1]):.3g}). They are left to the tail; "
            f"{option('rank', max(1, count - negative))} uses all that are positive.",
            SpectrumWarning,
        )
    elif below and count < pairs.vectors.shape[1]:
        warn(
            f"Expected eigenvalues of the {name} above λ = {l2:g}, got {below} of {count} below "
            f"it (down to {float(values[-1]):.3g}): the error bound does not hold for what lies "
            f"below. {option('rank', max(1, count - below))} keeps those above λ.",
            SpectrumWarning,
        )


def audit(
    matmat: Callable[[Tensor], Tensor], space: Space, pairs: EigenPairs, seed: int = 0
) -> dict[str, float]:
    """Measure pairs against the matrix itself, at the cost of one product and K²P operations.

    For y = Σ ±q with random signs, A y − Σ ±λq is the signed sum of all residual vectors, and
    its mean square is the sum of theirs. Rows are the own columns (·, p) of `space`.

    Returns:
        `orthogonality`, the largest entry of |QQᵀ − I|; `orthogonality_norm`; what rounding may add
        to ‖Aq − λq‖, `product_rounding`; its root mean square, `residual_rms`; the solver's
        `largest_residual`; and limits: some times what it promised, and the rounding of a product.
    """
    vectors = pairs.vectors
    gram = space.inner(vectors, vectors)
    gram.diagonal().sub_(1.0)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (len(pairs),), generator=generator) * 2.0 - 1.0
    signs = signs.to(vectors.device, vectors.dtype)
    rest = matmat((signs @ vectors)[None])[0] - (signs * pairs.values.to(vectors.dtype)) @ vectors
    usual = default_tolerance(vectors.dtype)
    tolerance = max(usual, float(pairs.statistics.get("tolerance", usual)))
    promised = pairs.residuals.clamp(min=tolerance) * residual_scale(pairs.values)
    norm = max(abs(float(pairs.values[0])), abs(pairs.least))
    rms = float(space.inner(rest[None], rest[None])) ** 0.5 / len(pairs) ** 0.5
    known = float((pairs.residuals * residual_scale(pairs.values)).square().mean().sqrt())
    own, finite = torch.finfo(vectors.dtype).eps, bool(gram.isfinite().all())
    # Models may have parts of their own in float32, such as norms of Hugging Face's.
    rounding = max(_ROUNDING * own, torch.finfo(torch.float32).eps) * norm
    return {
        "orthogonality": float(gram.abs().max()),
        "orthogonality_limit": _FAR * usual,
        SKEW: float(torch.linalg.eigvalsh(gram.cpu()).abs().max()) if finite else math.nan,
        PRODUCT_ROUNDING: _USUAL * own * norm + _TIMES * max(0.0, rms - known),
        "residual_rms": rms,
        "residual_limit": _FAR * float(promised.square().mean().sqrt()) + rounding,
        "largest_residual": float(pairs.residuals.max()),
    }


def warn_of_audit(name: str, found: dict[str, float]) -> None:
    """Warn where pairs of the named matrix are far from what their solver promised."""
    if not found["orthogonality"] <= found["orthogonality_limit"]:
        warn(
            f"Eigenvectors of the {name}: expected orthonormal ones, to "
            f"{found['orthogonality_limit']:.1g}, got entries of QQᵀ − I of up to "
            f"{found['orthogonality']:.2g}: error bars can be wrong by as much and more. Use "
            f"{option('solver', 'krylov')} or {option('dtype', torch.float64)}.",
            ConvergenceWarning,
        )
    if not found["residual_rms"] <= found["residual_limit"]:
        warn(
            f"Eigenpairs of the {name}: expected ‖Aq − λq‖ up to {found['residual_limit']:.2g}, "
            f"got {found['residual_rms']:.2g} (root mean square): products with the matrix are not "
            "those of one symmetric matrix, and the error bars cannot be trusted. Look in the "
            "model for derivatives of its own (autograd.Function) that are wrong or random, or "
            f"use {option('dtype', torch.float64)}.",
            ConvergenceWarning,
        )
