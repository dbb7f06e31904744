"""Independent answers in float64: dense matrices by plain autograd, dense inverses, dense sums.

Nothing here uses deltabars, `torch.func` transforms or low-rank algebra.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LOSSES = {
    "categorical": lambda z, y: functional.cross_entropy(z, y, reduction="none"),
    "bernoulli": lambda z, y: functional.binary_cross_entropy_with_logits(
        z, y.to(z.dtype), reduction="none"
    ).sum(1),
    "gaussian": lambda z, y: 0.5 * (z - y).square().sum(1),
}
MEANS = {
    "categorical": lambda z: z.softmax(1),
    "bernoulli": lambda z: z.sigmoid(),
    "gaussian": lambda z: z,
}


class Oracle:
    """Dense matrices of a model's cost at its weights, for the named parameters."""

    def __init__(self, model, inputs, targets, l2, names=None, likelihood="categorical", loss=None):
        self.model = model.eval()
        self.inputs, self.targets, self.l2 = inputs, targets, l2
        self.names = list(names or dict(model.named_parameters()))
        self.likelihood = likelihood
        self.loss = loss or LOSSES[likelihood]  # (z, y) -> (B,)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        self.shapes = [shapes[name] for name in self.names]
        values = dict(model.named_parameters())
        self.point = torch.cat([values[name].detach().reshape(-1) for name in self.names])
        self.size = self.point.numel()
        self.count = targets.shape[0]

    def outputs(self, vector: Tensor, inputs: Tensor) -> Tensor:
        parts, start = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            parts[name] = vector[start : start + shape.numel()].reshape(shape)
            start += shape.numel()
        given = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        result = torch.func.functional_call(self.model, parts, *given)
        return getattr(result, "logits", result)

    def losses(self, vector: Tensor) -> Tensor:
        return self.loss(self.outputs(vector, self.inputs), self.targets)

    def eye(self) -> Tensor:
        return torch.eye(self.size, dtype=self.point.dtype)

    def gradient(self) -> Tensor:
        rows = self.gradients()
        return rows.mean(0) + self.l2 * self.point

    def gradients(self) -> Tensor:
        return torch.autograd.functional.jacobian(self.losses, self.point)  # (N, P)

    def hessian(self) -> Tensor:
        mean = torch.autograd.functional.hessian(lambda w: self.losses(w).mean(), self.point)
        return mean + self.l2 * self.eye()

    def opg(self) -> Tensor:
        total = torch.zeros(self.size, self.size, dtype=self.point.dtype)
        for row in self.gradients():
            total += torch.outer(row, row)
        return total / self.count + self.l2 * self.eye()

    def jacobian(self, inputs: Tensor) -> Tensor:
        return torch.autograd.functional.jacobian(lambda w: self.outputs(w, inputs), self.point)

    def ggn(self) -> Tensor:
        total = torch.zeros(self.size, self.size, dtype=self.point.dtype)
        outputs = self.outputs(self.point, self.inputs).detach()
        for n, rows in enumerate(self.jacobian(self.inputs)):
            loss = lambda z, n=n: self.loss(z[None], self.targets[n : n + 1])[0]  # noqa: E731
            curvature = torch.autograd.functional.hessian(loss, outputs[n])
            total += rows.T @ curvature @ rows
        return total / self.count + self.l2 * self.eye()

    def matrix(self, name: str) -> Tensor:
        return {"hessian": self.hessian, "opg": self.opg, "ggn": self.ggn}[name]()

    def meat(self) -> Tensor:
        """G₀: the mean of gₙgₙᵀ, without λ."""
        rows = self.gradients()
        return rows.T @ rows / self.count

    def bread(self, estimator: str) -> Tensor:
        """B of B⁻¹G₀B⁻¹: the matrix of the estimator, or the Hessian of a sandwich; with λ."""
        return self.matrix("hessian" if estimator == "sandwich" else estimator)

    def influences(self, estimator: str, inputs: Tensor, space: str = "probability") -> Tensor:
        """fᵀB⁻¹gₙ of each row f of F and each training example n, (B, C, N)."""
        inverse = torch.linalg.inv(self.bread(estimator))
        return self.sensitivity(inputs, space) @ inverse @ self.gradients().T

    def parameter_covariance(self, estimator: str, spread: str = "posterior") -> Tensor:
        if spread == "sampling":
            inverse = torch.linalg.inv(self.bread(estimator))
            return inverse @ self.meat() @ inverse / self.count
        if estimator == "sandwich":
            inverse = torch.linalg.inv(self.hessian())
            return inverse @ self.opg() @ inverse / self.count
        return torch.linalg.inv(self.matrix(estimator)) / self.count

    def sensitivity(self, inputs: Tensor, space: str) -> Tensor:
        """F (B, C, P) by differentiating the mean map itself."""
        mean = MEANS[self.likelihood] if space == "probability" else lambda z: z
        return torch.autograd.functional.jacobian(
            lambda w: mean(self.outputs(w, inputs)), self.point
        )

    def covariance(self, estimator, inputs, space="probability", spread="posterior") -> Tensor:
        """F Σ Fᵀ (B, C, C)."""
        rows = self.sensitivity(inputs, space)
        return rows @ self.parameter_covariance(estimator, spread) @ rows.mT

    def std(self, estimator, inputs, space="probability", spread="posterior") -> Tensor:
        whole = self.covariance(estimator, inputs, space, spread)
        return whole.diagonal(dim1=1, dim2=2).sqrt()
