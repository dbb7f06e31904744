"""What the solvers see of a matrix: its shape and its products with rows of vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from deltabars.errors import BadValueError


@runtime_checkable
class Operator(Protocol):
    """A symmetric matrix: (b, P) -> (b, P), one vector a row."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def matmat(self, vectors: Tensor) -> Tensor: ...


class _Products:
    """A matrix given by a function of rows; counts the vectors it was asked for."""

    def __init__(
        self,
        size: int,
        function: Callable[[Tensor], Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.shape = (size, size)
        self.device = device
        self.dtype = dtype
        self.products = 0
        self._function = function

    def matmat(self, vectors: Tensor) -> Tensor:
        self.products += vectors.shape[0]
        result = self._function(vectors)
        if not bool(result.isfinite().all()):
            raise BadValueError("Products: expected finite values, got NaN or infinity.")
        return result


def as_products(
    matrix: Any, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> _Products:
    """Any symmetric matrix as products with rows.

    Args:
        matrix: a tensor or array (P, P); an object with `shape` and `matmat` (rows); a SciPy
            LinearOperator; or an object with `shape` and `@` on columns (a curvlinops operator).
        device, dtype: of the vectors, where the matrix does not tell.
    """
    shape = tuple(getattr(matrix, "shape", ()))
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
        raise BadValueError(f"Matrix: expected a square one, got shape {shape}.")
    own_dtype = getattr(matrix, "dtype", None)
    kind = dtype or (own_dtype if isinstance(own_dtype, torch.dtype) else torch.float64)
    own_device = getattr(matrix, "device", None)
    place = device or (own_device if isinstance(own_device, torch.device) else torch.device("cpu"))
    return _Products(int(shape[0]), _row_function(matrix, place, kind), place, kind)


def _row_function(
    matrix: Any, device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    if isinstance(matrix, Tensor):
        fixed = matrix.to(device, dtype)
        return lambda rows: rows @ fixed.T
    if hasattr(matrix, "__array__"):
        array = torch.as_tensor(matrix).to(device, dtype)
        return lambda rows: rows @ array.T
    if hasattr(matrix, "rmatvec"):  # SciPy's LinearOperator: NumPy columns
        return lambda rows: torch.as_tensor(matrix @ rows.T.cpu().numpy()).T.to(device, dtype)
    if hasattr(matrix, "matmat"):
        return lambda rows: matrix.matmat(rows)
    if hasattr(matrix, "__matmul__"):
        return lambda rows: (matrix @ rows.T).T
    raise BadValueError(
        f"Matrix: expected an object with matmat or @, got {type(matrix).__name__}."
    )
