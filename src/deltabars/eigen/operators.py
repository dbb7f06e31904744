"""Matrices as the solvers see them: a shape, and products with rows of vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deltabars.errors import BadValueError, option
from deltabars.runtime.vectors import Space


class Products:
    """Count the products with a matrix that is given by a function of rows."""

    def __init__(
        self,
        size: int,
        function: Callable[[Tensor], Tensor],
        device: torch.device,
        dtype: torch.dtype,
        space: Space | None = None,
    ) -> None:
        self.space = space or Space(size)
        self.shape = (size, size)
        self.device = device
        self.dtype = dtype
        self.products = 0
        self._function = function

    def matmat(self, vectors: Tensor) -> Tensor:
        self.products += vectors.shape[0]
        result = self._function(vectors)
        return check_finite(result)


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


def as_products(matrix: Any) -> Products:
    """Wrap any symmetric matrix as products with rows.

    Args:
        matrix: a tensor or array (P, P); an object with `shape` and `matmat` (rows); a SciPy
            LinearOperator or sparse matrix; or an object with `shape` and `@` on columns (a
            curvlinops operator). Its `dtype` and `device` are those of the vectors; without, they
            are float64 on the CPU. One with a `space` works on the columns of this process.
    """
    shape = tuple(getattr(matrix, "shape", ()))
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
        raise BadValueError(f"Matrix: expected a square one, got shape {shape}.")
    single = str(getattr(matrix, "dtype", "")).endswith(("float32", "float16"))
    dtype = torch.float32 if single else torch.float64
    own = getattr(matrix, "device", None)
    device = own if isinstance(own, torch.device) else torch.device("cpu")
    function = _row_function(matrix, device, dtype)
    return Products(int(shape[0]), function, device, dtype, getattr(matrix, "space", None))


def _row_function(
    matrix: Any, device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    if isinstance(matrix, Tensor) or hasattr(matrix, "__array__"):
        fixed = torch.as_tensor(matrix).detach().to(device, dtype)
        return lambda rows: rows @ fixed.T
    if hasattr(matrix, "rmatvec") or hasattr(matrix, "tocsr"):  # SciPy: NumPy columns
        return lambda rows: (
            torch.as_tensor(matrix @ rows.T.cpu().numpy()).T.to(device, dtype).contiguous()
        )
    if hasattr(matrix, "matmat"):
        return lambda rows: matrix.matmat(rows)
    if hasattr(matrix, "__matmul__"):
        return lambda rows: (matrix @ rows.T).T.contiguous()
    raise BadValueError(
        f"Matrix: expected an object with matmat or @, got {type(matrix).__name__}."
    )
