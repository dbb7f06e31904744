"""The peers: found or not, and called as their documentation says, at their best settings."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.plain import Data, chunks

_INSTALL = {
    "sklearn": "pip install scikit-learn",
    "scipy": "pip install scipy",
    "curvlinops": "pip install --no-deps -r peers.txt",
    "transformers": "pip install transformers",
    "laplace": "pip install --no-deps -r peers.txt",
}


@dataclass(frozen=True)
class Peers:
    """The modules that were asked for, by name; and a line for each that is absent."""

    modules: dict[str, Any]
    absent: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether all are there."""
        return not self.absent


def find_peers(*names: str) -> Peers:
    """Import peers by module name (dots allowed)."""
    modules, absent = {}, []
    for name in names:
        try:
            modules[name] = importlib.import_module(name)
        except ImportError as error:
            package = name.partition(".")[0]
            absent.append(f"{name} is absent ({error}): {_INSTALL[package]}, or make bench")
    return Peers(modules, tuple(absent))


@dataclass(frozen=True)
class Solved:
    """Eigenpairs as a peer gives them: values (K,) descending, rows (K, P), products."""

    values: Tensor
    vectors: Tensor
    products: int


def curvlinops_eigsh(
    peers: Peers, model: nn.Module, data: Data, rank: int, l2: float, tolerance: float
) -> Solved:
    """Return the largest Hessian pairs by curvlinops' products and SciPy's `eigsh`.

    ARPACK's tolerance is relative to each value, so that it bounds ‖Aq − λq‖ / max(1, λ) by the
    same number. The probe for deterministic data is left out, and ARPACK's own default basis kept:
    larger ones took more products here.
    """
    linalg = peers.modules["scipy.sparse.linalg"]
    operator = peers.modules["curvlinops"].HessianLinearOperator(
        model,
        nn.CrossEntropyLoss(reduction="mean"),
        list(model.parameters()),
        list(chunks(data)),
        check_deterministic=False,
    )
    inner = operator.to_scipy()
    counted, count = _counted(inner.matvec)
    matrix = linalg.LinearOperator(shape=inner.shape, dtype=np.float32, matvec=counted)
    start = np.random.default_rng(0).standard_normal(inner.shape[0]).astype(np.float32)
    values, columns = linalg.eigsh(matrix, k=rank, which="LA", tol=tolerance, v0=start)
    rows = torch.from_numpy(np.ascontiguousarray(columns[:, ::-1].T))
    return Solved(torch.from_numpy(values[::-1].copy()).double() + l2, rows, count())


def incremental_pca(peers: Peers, rows: Tensor, rank: int, batch: int) -> Tensor:
    """Return the largest eigenvalues (K,) of the centred (1/N)·RᵀR, by IncrementalPCA."""
    decomposition = peers.modules["sklearn.decomposition"]
    found = decomposition.IncrementalPCA(n_components=rank, batch_size=batch).fit(rows.numpy())
    return torch.from_numpy(found.singular_values_).double().square() / len(rows)


def laplace_posterior(peers: Peers, model: nn.Module, data: Data, l2: float) -> Any:
    """laplace-torch's posterior over all weights, with the full GGN, fitted.

    Of its backends the one by BackPACK: its default takes Jacobians of whole batches, whose cost
    grows with the square of the batch, and predicts five times slower at its best.
    """
    dataset = torch.utils.data.TensorDataset(*data)
    posterior = peers.modules["laplace"].Laplace(
        copy.deepcopy(model),  # it writes attributes into the model
        "classification",
        subset_of_weights="all",
        hessian_structure="full",
        # Its precision is Σ JᵀSJ + prior·I, which is N times our GGN.
        prior_precision=l2 * len(dataset),
        backend=peers.modules["laplace.curvature.backpack"].BackPackGGN,
    )
    posterior.fit(torch.utils.data.DataLoader(dataset, batch_size=256))
    return posterior


def laplace_logit_std(posterior: Any, images: Tensor, batch: int) -> Tensor:
    """Return the standard deviations (B, C) of the logits by its linearised predictive."""
    parts = []
    for some in images.split(batch):
        _, covariance = posterior._glm_predictive_distribution(some)
        parts.append(covariance.detach().diagonal(dim1=1, dim2=2).sqrt())
    return torch.cat(parts)


def _counted(function: Callable[[Any], Any]) -> tuple[Callable[[Any], Any], Callable[[], int]]:
    calls = 0

    def counted(vector: Any) -> Any:
        nonlocal calls
        calls += 1
        return function(vector)

    return counted, lambda: calls
