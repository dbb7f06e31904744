"""floor and product: what plain PyTorch takes, and one Hessian product in units of it."""

from __future__ import annotations

from statistics import median

import torch

from benchmarks import plain
from benchmarks.context import Bench, release
from benchmarks.goals import goal
from benchmarks.results import Measure, Record
from benchmarks.timing import interleaved, stopwatch
from deltabars.curvature.hessian import HessianOperator
from deltabars.runtime.precision import full_precision


def run_floor(bench: Bench) -> Record:
    """Time the plain forward pass and the plain gradient over all images."""
    model, data = bench.subject.model, bench.subject.train(bench.size.images)
    with full_precision(bench.device):
        seconds = interleaved(
            {
                "forward": lambda: plain.forward(model, data[0]),
                "gradient": lambda: plain.full_gradient(model, data),
                "chunked": lambda: plain.chunked_gradient(model, data),
            },
            bench.device,
            bench.size.repeats,
        )
    count = len(data[1])
    return Record(
        "floor",
        (
            Measure(f"forward pass, N = {count:,}", seconds["forward"]),
            Measure(f"gradient at once, N = {count:,}", seconds["gradient"]),
            Measure(f"gradient in chunks, N = {count:,}", seconds["chunked"]),
        ),
        raw={"images": count, "seconds": seconds},
    )


def run_product(bench: Bench) -> Record:
    """Time one Hessian product beside the plain gradient, and compare it with float64."""
    first, seconds = _product_seconds(bench)
    release(bench.device)
    product, gradient = median(seconds["product"]), median(seconds["gradient"])
    measures = [
        Measure("first product (it caches)", (first,), first / gradient, "grad"),
        Measure(
            "product / gradient at once",
            seconds["product"],
            product / gradient,
            "grad",
            accuracy=_error_of_product(bench),
            accuracy_of="error",
            goal=goal(bench.size.name, "product"),
        ),
    ]
    others = {"chunked": "in chunks", "tf32": "with TF32"}
    measures += [
        Measure(
            f"product / gradient {text}",
            seconds["product"],
            product / median(seconds[name]),
            "grad",
        )
        for name, text in others.items()
        if name in seconds
    ]
    raw = {"images": bench.size.images, "first": first, "seconds": seconds}
    return Record("product", tuple(measures), raw=raw)


def _product_seconds(bench: Bench) -> tuple[float, dict[str, tuple[float, ...]]]:
    """Return the seconds of the first product, and of further ones and of gradients in turns."""
    size, model = bench.size, bench.subject.model
    data = bench.subject.train(size.images)
    operator = HessianOperator(bench.problem(size.images))
    vector = _unit_vector(operator)

    def product() -> torch.Tensor:
        return operator.matmat(vector)

    def gradient() -> None:
        plain.full_gradient(model, data)

    _, first = stopwatch(product, bench.device)
    with full_precision(bench.device):
        seconds = interleaved(
            {
                "product": product,
                "gradient": gradient,
                "chunked": lambda: plain.chunked_gradient(model, data),
            },
            bench.device,
            size.repeats,
        )
    if bench.device.type == "cuda":  # torch's own choice there: TF32 in convolutions
        seconds |= interleaved({"tf32": gradient}, bench.device, size.repeats)
    return first, seconds


def _error_of_product(bench: Bench) -> float:
    """‖Hv − (Hv in float64)‖ / ‖(Hv in float64)‖ on the first images."""
    count = bench.size.product_check
    ours = HessianOperator(bench.problem(count))
    vector = _unit_vector(ours)
    single = ours.matmat(vector).double()
    del ours
    double = HessianOperator(bench.problem(count, torch.float64)).matmat(vector.double())
    return float((single - double).norm() / double.norm())


def _unit_vector(operator: HessianOperator) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(1, operator.shape[0], generator=generator)
    return (vector / vector.norm()).to(operator.device, operator.dtype)
