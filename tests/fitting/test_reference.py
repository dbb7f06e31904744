"""Three solvers on the paper's MNIST network, with its reference weights and 500 images."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from deltabars import Problem, eigen
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.recipes.images import read_mnist
from deltabars.recipes.paper import L2, load_weights

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"

pytestmark = pytest.mark.skipif(
    not all((DATA / folder).is_dir() for folder in ("mnist", "reference")),
    reason=f"the reference data are absent: {DATA}",
)

COUNT = 500
RANK = {"hessian": 6, "opg": 8}


@pytest.fixture(scope="module")
def model():
    return load_weights(DATA / "reference" / "lenet_mnist_seed0.npz")


@pytest.fixture(scope="module")
def data():
    return read_mnist(DATA / "mnist", "train", COUNT)


@pytest.fixture(scope="module")
def operators(model, data):
    # Gradients of 187 MB are kept within a quarter of the budget; a chunk of 64 stays in cache.
    problem = Problem(model, data, l2=L2, memory_budget=4 << 30, chunk_size=64)
    return {"hessian": HessianOperator(problem), "opg": OPGOperator(problem)}


@pytest.fixture(scope="module")
def pairs(operators):
    return {name: solve_three_ways(operators[name], rank) for name, rank in RANK.items()}


def solve_three_ways(operator, rank):
    """Eigenpairs by solver. A Hessian product takes a second: the limits leave the Krylov solvers a
    product or two to spare; where they do not suffice they warn, and so fail the test.
    """
    # Ritz values err by the square of the residual over the gap: 1e-3 serves values to 1e-5.
    tolerance = 1e-3
    return {
        "lanczos": eigen.lanczos(operator, rank, tolerance=tolerance, max_products=2 * rank + 3),
        "block_krylov": eigen.block_krylov(
            operator, rank, block_size=2, tolerance=tolerance, max_products=2 * rank + 8
        ),
        "arpack": eigen.arpack(operator, rank, tolerance=tolerance),
    }


def double_backward_product(model, data, vector):
    """(∇²(mean loss) + λI)·v by two plain backward passes: nothing of deltabars."""
    weights = list(model.parameters())
    loss = functional.cross_entropy(model(data[0]), data[1])
    gradient = torch.autograd.grad(loss, weights, create_graph=True)
    along = torch.cat([part.reshape(-1) for part in gradient]) @ vector
    product = torch.autograd.grad(along, weights)
    return torch.cat([part.reshape(-1) for part in product]) + L2 * vector


def test_weights_and_cost_are_the_reference_s(model, data, operators):
    images, labels = read_mnist(DATA / "mnist", "test", COUNT)
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).double().mean()
        loss = functional.cross_entropy(model(data[0]), data[1]).item()
    assert accuracy > 0.96  # 0.981 on all 10,000; 500 of them vary by 0.6 %
    problem = operators["opg"].problem
    assert problem.num_parameters == 93_322
    assert problem.mean_loss == pytest.approx(loss, rel=1e-5)  # float32, chunks against a whole


@pytest.mark.parametrize("matrix", RANK)
def test_solvers_agree(pairs, matrix):
    found = pairs[matrix].values()
    for each in found:
        rows, eye = each.vectors.double(), torch.eye(len(each))
        # Some roundings of float32; sums of 93,322 terms in float32 would give 1e-5 and more.
        torch.testing.assert_close(rows @ rows.T, eye.double(), rtol=0, atol=2e-6)
    for one, other in combinations(found, 2):
        # Twice 1e-6 by the tolerance (see above) and as much by products in float32.
        torch.testing.assert_close(one.values, other.values, rtol=1e-5, atol=0)
        # Up to signs the vectors are the same ones. They err by the residual (1e-3 of a value)
        # over the gap (at least 7e-2 of it).
        torch.testing.assert_close((one.vectors @ other.vectors.T).abs(), eye, rtol=0, atol=0.02)


def test_largest_hessian_pair_is_an_eigenpair(model, data, pairs):
    largest = pairs["hessian"]["lanczos"]
    value, vector = largest.values[0].item(), largest.vectors[0]
    product = double_backward_product(model, data, vector)
    # The largest pair converges first, far below the tolerance: two products in float32 are left.
    assert (product - value * vector).norm().item() < 1e-5 * value


def test_opg_values_are_those_of_the_gram_matrix(operators, pairs):
    gram = torch.zeros(COUNT, COUNT, dtype=torch.float64)
    for columns in torch.cat(list(operators["opg"].row_blocks())).split(4096, dim=1):
        gram += (columns @ columns.T).double()
    exact = torch.linalg.eigvalsh(gram / COUNT).flip(0)[: RANK["opg"]] + L2
    for found in pairs["opg"].values():
        # As between the solvers.
        torch.testing.assert_close(found.values, exact, rtol=1e-5, atol=0)
