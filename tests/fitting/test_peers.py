"""deltabars against the field's own libraries: curvlinops, laplace-torch, SciPy, scikit-learn."""

from __future__ import annotations

import copy
import warnings
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import deltabars
from deltabars import Problem, eigen
from deltabars.curvature.ggn import GGNOperator
from deltabars.curvature.hessian import HessianOperator
from deltabars.curvature.opg import OPGOperator
from deltabars.fitting.tuning import log_evidence
from deltabars.likelihoods.gaussian import Gaussian
from tests.networks import make_case

KINDS = ("dense", "convolutional")
OPERATORS = {"hessian": HessianOperator, "ggn": GGNOperator, "opg": OPGOperator}
RANK = 6
BATCH = 16  # of 29 examples: the last batch is ragged

trained = cache(make_case)


@pytest.fixture(scope="module", params=KINDS)
def case(request):
    return trained(request.param)


@pytest.fixture(scope="module", autouse=True)
def forward_derivatives():
    """Torch warns of itself when forward derivatives are first used, whoever uses them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script`")
        torch.func.jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))


def import_peer(name):
    """The module, or a skip. A peer's own warnings at import are not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name}, the peer to compare with, is absent")


def curvlinops_operator(case, matrix):
    """curvlinops' operator of the mean loss: λ is not in it."""
    name = {"hessian": "Hessian", "ggn": "GGN", "opg": "EF"}[matrix]
    kind = getattr(import_peer("curvlinops"), f"{name}LinearOperator")
    data = list(zip(case.inputs.split(BATCH), case.targets.split(BATCH), strict=True))
    return kind(case.model, nn.CrossEntropyLoss(), list(case.model.parameters()), data)


def eye(size):
    return torch.eye(size, dtype=torch.float64)


def dense_form(operator):
    return (operator @ eye(operator.shape[1])).detach()


def assert_close(found, expected, rtol=0.0, atol=1e-10):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def deltabars_operator(case, matrix):
    return OPERATORS[matrix](Problem(case.model, case.data, l2=case.l2))


def largest(matrix, rank=RANK):
    return torch.linalg.eigvalsh(matrix).flip(0)[:rank]


def assert_eigenpairs(pairs, matrix, tolerance):
    """The values are the largest ones, the rows orthonormal, and A q = λ q."""
    rank = len(pairs)
    assert_close(pairs.values, largest(matrix, rank), atol=tolerance)
    scaled = pairs.values[:, None] * pairs.vectors
    assert_close(pairs.vectors @ matrix, scaled, atol=tolerance)
    assert_close(pairs.vectors @ pairs.vectors.T, eye(rank), atol=tolerance)


class TestCurvlinops:
    @pytest.mark.parametrize("matrix", OPERATORS)
    @pytest.mark.parametrize("kind", [*KINDS, "rectified"])
    def test_matrices_agree(self, kind, matrix):
        case = trained(kind)
        theirs = dense_form(curvlinops_operator(case, matrix))
        theirs += case.l2 * eye(len(theirs))
        # Entries are of the order of one and less: float64 sums of 29 terms in two orders.
        assert_close(deltabars_operator(case, matrix).to_dense(), theirs)

    @pytest.mark.parametrize("matrix", OPERATORS)
    @pytest.mark.parametrize("solve", [eigen.lanczos, eigen.block_krylov])
    def test_solvers_take_its_operators(self, case, matrix, solve):
        operator = curvlinops_operator(case, matrix)
        pairs = solve(operator, RANK)
        # The solver stops at residuals of 1e-10 times the largest value, which is under 100.
        assert_eigenpairs(pairs, dense_form(operator), 1e-8)


class TestSciPy:
    @pytest.mark.parametrize("matrix", OPERATORS)
    def test_eigsh_takes_our_operators(self, case, matrix):
        linalg = import_peer("scipy.sparse.linalg")
        operator = deltabars_operator(case, matrix).to_scipy()
        start = np.random.default_rng(0).standard_normal(operator.shape[0])
        values, columns = linalg.eigsh(operator, k=RANK, which="LA", v0=start)
        exact = case.oracle.matrix(matrix)
        # eigsh works to machine precision; the oracle sums in another order.
        np.testing.assert_allclose(values[::-1], largest(exact), rtol=0, atol=1e-10)
        np.testing.assert_allclose(exact.numpy() @ columns, columns * values, rtol=0, atol=1e-10)
        expected = exact.numpy() @ start
        for found in (operator.matvec(start), operator.rmatvec(start), operator @ start):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)

    @pytest.mark.parametrize("form", ["scipy", "numpy", "torch"])
    @pytest.mark.parametrize("solve", [eigen.lanczos, eigen.block_krylov, eigen.arpack])
    def test_solvers_take_plain_matrices(self, case, form, solve):
        linalg = import_peer("scipy.sparse.linalg")
        exact = case.oracle.hessian()
        given = exact if form == "torch" else exact.numpy()
        given = linalg.aslinearoperator(given) if form == "scipy" else given
        # The solvers stop at residuals of 1e-10 times the largest value, which is under 100.
        assert_eigenpairs(solve(given, RANK), exact, 1e-8)


@pytest.mark.usefixtures("float64_default")
class TestLaplaceTorch:
    @pytest.fixture
    def float64_default(self):
        """laplace-torch's curvlinops backend multiplies an identity of torch's default type."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(before)

    def their_posterior(self, case, prior, noise=None):
        laplace = import_peer("laplace")
        data = torch.utils.data.TensorDataset(*case.data)
        posterior = laplace.Laplace(
            copy.deepcopy(case.model),  # it writes attributes into the model
            "classification" if noise is None else "regression",
            subset_of_weights="all",
            hessian_structure="full",
            # Its precision is Σ JᵀSJ/σ² + prior·I, which is N/σ² times our GGN.
            prior_precision=prior * len(data) / (noise or 1.0) ** 2,
            backend=import_peer("laplace.curvature.curvlinops").CurvlinopsGGN,
            **({} if noise is None else {"sigma_noise": noise}),
        )
        posterior.fit(torch.utils.data.DataLoader(data, batch_size=BATCH))
        return posterior

    def our_fit(self, case, l2, **options):
        options = {"estimator": "ggn", "rank": case.oracle.size, "progress": False, **options}
        return deltabars.fit(case.model, case.data, l2=l2, **options)

    def test_logit_covariance_agrees(self, case):
        posterior = self.their_posterior(case, case.l2)
        mean, covariance = posterior._glm_predictive_distribution(case.unseen)
        out = self.our_fit(case, case.l2).predict(case.unseen, space="logit", covariance=True)
        # The same forward pass, up to the batch it runs in.
        assert_close(out.mean, mean)
        # Two float64 inverses of a matrix with a condition number under a hundred.
        assert_close(out.covariance, covariance, 1e-9, 1e-11)
        assert_close(out.variance, covariance.diagonal(dim1=1, dim2=2), 1e-9, 1e-11)

    def test_log_marginal_likelihood_agrees(self, case):
        fit, posterior = self.our_fit(case, case.l2), self.their_posterior(case, case.l2)
        for level in (case.l2, 0.001, 0.3):
            theirs = posterior.log_marginal_likelihood(
                torch.tensor(level * len(case.targets), dtype=torch.float64)
            )
            ours = log_evidence(fit, torch.tensor([level]))[0]
            assert float(ours) == pytest.approx(float(theirs), rel=1e-6)

    def test_a_prior_for_each_layer_agrees(self, case):
        """Its layers are tensors of parameters."""
        names = [name for name, _ in case.model.named_parameters()]
        l2 = {name: case.l2 * (0.8 + 0.1 * place) for place, name in enumerate(names)}
        prior = torch.tensor(list(l2.values()), dtype=torch.float64)
        posterior = self.their_posterior(case, prior)
        _, covariance = posterior._glm_predictive_distribution(case.unseen)
        fit = self.our_fit(case, l2)
        out = fit.predict(case.unseen, space="logit", covariance=True)
        assert_close(out.covariance, covariance, 1e-8)
        ours = float(log_evidence(fit, torch.tensor([1.0]))[0])
        assert ours == pytest.approx(float(posterior.log_marginal_likelihood()), rel=1e-6)

    @pytest.mark.parametrize("noise", [0.4, 3.0])
    def test_regression_agrees(self, noise):
        case = trained("dense", likelihood="gaussian")
        posterior = self.their_posterior(case, case.l2, noise)
        mean, covariance = posterior(case.unseen)
        fit = self.our_fit(case, case.l2, likelihood=Gaussian(noise))
        out = fit.predict(case.unseen, covariance=True)
        # As above: one forward pass, two inverses.
        assert_close(out.mean, mean)
        assert_close(out.covariance, covariance, 1e-9, 1e-11)
        total = (covariance.diagonal(dim1=1, dim2=2) + noise**2).sqrt()
        assert_close(out.total_std, total, 1e-9, 0)
        ours = float(log_evidence(fit, torch.tensor([case.l2]))[0])
        assert ours == pytest.approx(float(posterior.log_marginal_likelihood()), rel=1e-6)


class TestIncrementalSVD:
    @pytest.fixture
    def rows(self, case):
        return case.oracle.gradients()

    @pytest.mark.parametrize("rank", [2, 5])
    def test_centred_is_incremental_pca(self, rows, rank):
        decomposition = import_peer("sklearn.decomposition")
        theirs = decomposition.IncrementalPCA(n_components=rank)
        for block in rows.split(BATCH):
            theirs.partial_fit(block.numpy())
        ours = eigen.incremental_svd(rows.split(BATCH), rank, centred=True)
        count = len(rows)
        # The same recurrence in float64; values are of the order of one and less. scikit-learn
        # divides by n − 1, deltabars by n.
        expected = torch.from_numpy(theirs.explained_variance_) * (count - 1) / count
        assert_close(ours.values, expected, atol=1e-8)
        singular = torch.from_numpy(theirs.singular_values_)
        assert_close((count * ours.values).sqrt(), singular, atol=1e-8)
        overlaps = ours.vectors @ torch.from_numpy(theirs.components_).T
        assert_close(overlaps.abs(), eye(rank), atol=1e-8)  # up to the sign of each component

    @pytest.mark.parametrize("rank", [1, 3, 10, None])
    def test_truncation_loses_at_most_what_it_reports(self, rows, rank):
        pairs = eigen.incremental_svd(rows.split(BATCH), rank or min(rows.shape))
        exact = rows.T @ rows / len(rows)
        lost = largest(exact, len(pairs)) - pairs.values
        rounding = 1e-12  # of sums in float64
        assert (lost >= -rounding).all()
        assert (lost <= pairs.statistics["discarded_energy"] + rounding).all()
        if rank is None:  # nothing was cut
            assert_eigenpairs(pairs, exact, 1e-10)
        else:
            assert lost.max() > 1e-6  # the cut is felt: else this test shows nothing
