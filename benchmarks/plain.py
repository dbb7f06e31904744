"""The same quantities by plain PyTorch, with nothing of deltabars: the floor, and the check."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

Data = tuple[Tensor, Tensor]  # images (n, …) and classes (n,)
Pairs = tuple[Tensor, Tensor]  # eigenvalues (K,), descending, and eigenvectors (K, P)

_CHUNK = {"cpu": 256}  # examples; as deltabars' own, which were chosen by measurement
_CHUNK_ELSEWHERE = 2048
_VECTORS = 16  # eigenvectors that are in float64 at a time


def forward(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits of all images at once."""
    with torch.no_grad():
        logits: Tensor = model(images)
    return logits


def full_gradient(model: nn.Module, data: Data) -> None:
    """Compute the gradient of the mean loss over all examples at once, into `.grad`."""
    images, labels = data
    with torch.enable_grad():
        functional.cross_entropy(model(images), labels).backward()
    model.zero_grad()


def chunked_gradient(model: nn.Module, data: Data) -> None:
    """Return the same gradient, summed over chunks that stay in a CPU's cache."""
    count = len(data[1])
    with torch.enable_grad():
        for images, labels in chunks(data):
            loss = functional.cross_entropy(model(images), labels, reduction="sum") / count
            loss.backward()
    model.zero_grad()


def gradient_rows(model: nn.Module, data: Data) -> Iterator[Tensor]:
    """Return the gradient of each example, in blocks (n, P), by `vmap(grad)`."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def one_loss(at: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, at, (image[None],))
        return functional.cross_entropy(logits, label[None])

    gradients = torch.func.vmap(torch.func.grad(one_loss), in_dims=(None, 0, 0))
    for images, labels in chunks(data):
        parts = gradients(weights, images, labels)
        yield torch.cat([part.flatten(1) for part in parts.values()], 1)


def opg_products(model: nn.Module, data: Data, vectors: Tensor, l2: float) -> Tensor:
    """((1/N)·Σ gₙgₙᵀ + λI)·v for each row v of `vectors` (b, P), summed in float64."""
    total = torch.zeros_like(vectors, dtype=torch.float64)
    for rows in gradient_rows(model, data):
        total += (vectors @ rows.T) @ rows
    return total / len(data[1]) + l2 * vectors


def hessian_products(model: nn.Module, data: Data, vectors: Tensor, l2: float) -> Tensor:
    """(∇²(mean loss) + λI)·v for each row v of `vectors` (b, P), by two backward passes."""
    weights = list(model.parameters())
    total = torch.zeros_like(vectors, dtype=torch.float64)
    for images, labels in chunks(data):
        with torch.enable_grad():
            loss = functional.cross_entropy(model(images), labels, reduction="sum")
            parts = torch.autograd.grad(loss, weights, create_graph=True)
            gradient = torch.cat([part.reshape(-1) for part in parts])
        for vector, products in zip(vectors, total, strict=True):
            along = torch.autograd.grad(gradient, weights, vector, retain_graph=True)
            products += torch.cat([part.reshape(-1) for part in along])
    return total / len(data[1]) + l2 * vectors


def exact_logit_std(model: nn.Module, data: Data, images: Tensor, l2: float) -> Tensor:
    """Return the standard deviations (B, C) of logits by the whole GGN, inverted in float64.

    √diag(J (Σ JₙᵀSₙJₙ + NλI)⁻¹ Jᵀ), with Sₙ = diag(p) − ppᵀ. Memory: P² numbers.
    """
    model = copy.deepcopy(model).double()
    precision = torch.zeros(0)
    for some, _ in chunks((data[0].double(), data[1])):
        logits, rows = _logit_jacobian(model, some)
        shares = logits.softmax(1)
        inner = torch.diag_embed(shares) - shares[:, :, None] * shares[:, None]
        part = torch.einsum("ncp,ncd,ndq->pq", rows, inner, rows)
        precision = part if not precision.numel() else precision + part
    precision.diagonal().add_(len(data[1]) * l2)
    factor = torch.linalg.cholesky(precision)
    _, rows = _logit_jacobian(model, images.double())
    whitened = torch.linalg.solve_triangular(factor, rows.flatten(0, 1).T, upper=False)
    return whitened.square().sum(0).sqrt().view(rows.shape[:2])


def low_rank_stds(
    model: nn.Module, images: Tensor, pairs: Mapping[str, Pairs], l2: float, count: int
) -> dict[str, Tensor]:
    """Return the stds (B, C) of probabilities from eigenpairs of H and G, in float64.

    By the matrices themselves: H⁻¹/N, G⁻¹/N and H⁻¹GH⁻¹/N, with the eigenvalues that are not given
    set to λ̃ = 2/(1/λ + 1/λ_K). Memory: B·C·P numbers.
    """
    logits, rows = _logit_jacobian(copy.deepcopy(model).double(), images.double())
    shares = logits.softmax(1)
    inner = torch.diag_embed(shares) - shares[:, :, None] * shares[:, None]
    rows = inner @ rows  # F (B, C, P)

    def times(name: str, vectors: Tensor, power: int) -> Tensor:
        values, basis = pairs[name]
        values, basis = values[values > 0].double(), basis[values > 0].double()
        tail = 2 / (1 / l2 + 1 / float(values[-1]))
        inside = vectors @ basis.T
        return (inside * (values**power - tail**power)) @ basis + tail**power * vectors

    solved = times("hessian", rows, -1)
    variances = {
        "hessian": (rows * solved).sum(-1),
        "opg": (rows * times("opg", rows, -1)).sum(-1),
        "sandwich": (solved * times("opg", solved, 1)).sum(-1),
    }
    return {name: (variance / count).sqrt() for name, variance in variances.items()}


def opg_std(
    model: nn.Module,
    logits: Callable[[nn.Module, Tensor], Tensor],
    images: Tensor,
    pairs: Pairs,
    l2: float,
    count: int,
) -> Tensor:
    """Return the stds (B, C) of probabilities from eigenpairs of G, for large networks.

    √(F G⁻¹ Fᵀ / N) as in `low_rank_stds`, by one gradient of one probability after the other in
    float64. Memory: C·P numbers, and some eigenvectors at a time.
    """
    model = copy.deepcopy(model).double()
    weights = list(model.parameters())
    values, basis = pairs[0].double(), pairs[1]
    tail = 2 / (1 / l2 + 1 / float(values[-1]))
    variances = []
    for image in images.double():
        with torch.enable_grad():
            shares = logits(model, image[None])[0].softmax(0)
            rows = torch.stack([_flat_gradient(share, weights) for share in shares])  # (C, P)
        inside = torch.cat([rows @ some.double().T for some in basis.split(_VECTORS)], 1)
        outside = rows.square().sum(1) - inside.square().sum(1)
        variances.append(inside.square() @ (1 / values) + outside / tail)
    return (torch.stack(variances) / count).sqrt()


def _flat_gradient(value: Tensor, weights: list[nn.Parameter]) -> Tensor:
    parts = torch.autograd.grad(value, weights, retain_graph=True, materialize_grads=True)
    return torch.cat([part.reshape(-1) for part in parts])


def _logit_jacobian(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def logits(at: dict[str, Tensor], image: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(model, at, (image[None],))[0]
        return output

    parts = torch.func.vmap(torch.func.jacrev(logits), in_dims=(None, 0))(weights, images)
    rows = torch.cat([part.flatten(2) for part in parts.values()], 2)  # (B, C, P)
    return forward(model, images), rows


def residuals(values: Tensor, vectors: Tensor, products: Tensor) -> Tensor:
    """‖Aq − λq‖ / max(1, λ) of each pair, from the products A q (b, P)."""
    values = values.double()
    rest = products - values[:, None] * vectors
    return rest.norm(dim=1) / values.clamp(min=1.0)


def chunks(data: Data) -> Iterator[Data]:
    """Return the examples, as many at a time as suits the device."""
    size = _CHUNK.get(data[0].device.type, _CHUNK_ELSEWHERE)
    yield from zip(data[0].split(size), data[1].split(size), strict=True)
