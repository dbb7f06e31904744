"""Every number of results.json, computed again in float64 from what the stages kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.func import functional_call, jvp
from torch.nn import functional

from deltabars.fitting.fitted import load
from deltabars.recipes.images import read_mnist
from deltabars.recipes.paper import SMALL, PaperNetwork, load_weights, paper_network
from deltabars.recipes.training import train
from deltabars.report.style import smooth
from tests.scans import FEW, STEPS

L2 = 0.01
RANK = 5
PAIRS = (("hessian", "opg"), ("hessian", "sandwich"), ("opg", "sandwich"))
ESTIMATORS = ("hessian", "opg", "sandwich")
PARTS = ("train", "test")


@pytest.fixture(scope="module")
def data(quick_run):
    read = {part: read_mnist(quick_run.data, part) for part in PARTS}
    return {
        part: [each[: FEW[f"{part}_images"]] for each in arrays] for part, arrays in read.items()
    }


def trained(quick_run):
    return load_weights(quick_run.out / "stages" / "weights.npz")


@pytest.fixture(scope="module")
def network(quick_run):
    """The trained network in float64."""
    return trained(quick_run).double()


@pytest.fixture(scope="module")
def fit(quick_run):
    return load(quick_run.out / "stages" / "fit.deltabars", trained(quick_run), progress=False)


@pytest.fixture(scope="module")
def probabilities(network, data):
    with torch.no_grad():
        return {part: network(data[part][0].double()).softmax(1) for part in PARTS}


def along(network, data, direction):
    """The derivative of each training image's loss (N,) along a direction, and the second
    derivative of their mean.
    """
    images, labels = data["train"]
    point = {name: value.detach() for name, value in network.named_parameters()}
    sizes = [value.numel() for value in point.values()]
    parts = zip(point.items(), direction.split(sizes), strict=True)
    tangent = {name: part.view_as(value) for (name, value), part in parts}

    def losses(weights):
        logits = functional_call(network, weights, (images.double(),))
        return functional.cross_entropy(logits, labels, reduction="none")

    def slopes(weights):
        return jvp(losses, (weights,), (tangent,))[1]

    firsts, seconds = jvp(slopes, (point,), (tangent,))
    return firsts, float(seconds.mean())


def assert_line(found, x, y):
    """Two ways of least squares in float64."""
    x, y = x.astype(np.float64).ravel(), y.astype(np.float64).ravel()
    slope, intercept = np.polyfit(x, y, 1)
    correlation = np.corrcoef(x, y)[0, 1]
    exact = {"intercept": intercept, "slope": slope}
    exact |= {"r2": correlation**2} if "r2" in found else {"correlation": correlation}
    # An intercept is a difference of numbers of size 0.1.
    assert {name: found[name] for name in exact} == pytest.approx(exact, rel=1e-8, abs=1e-10)


def test_training(quick_run, network, data, probabilities):
    found = quick_run.results["training"]
    for part in PARTS:
        right = probabilities[part].argmax(1) == data[part][1]
        assert found[f"{part}_accuracy"] == pytest.approx(float(right.double().mean()))
    images, labels = data["train"]
    weights = list(network.parameters())
    loss = functional.cross_entropy(network(images.double()), labels)
    cost = loss + 0.5 * L2 * sum(weight.square().sum() for weight in weights)
    norm = torch.nn.utils.get_total_norm(torch.autograd.grad(cost, weights))
    # float32 losses and gradients of some images, against float64.
    assert found["cost"] == pytest.approx(float(cost.detach()), rel=1e-5)
    assert found["gradient_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # of torch.func.jvp
class TestSpectra:
    def test_they_are_the_curvature_along_their_vectors(self, quick_run, fit, network, data):
        """qᵀGq = mean (gₙᵀq)² + λ and qᵀHq, by plain differentiation of the losses."""
        for name in ("hessian", "opg"):
            found = quick_run.results["eigenvalues"][name]
            assert found == sorted(found, reverse=True)
            vector = fit.spectra[name].vectors[-1].double()
            assert float(vector.norm()) == pytest.approx(1, abs=1e-5)
            first, second = along(network, data, vector / vector.norm())
            exact = second if name == "hessian" else float(first.square().mean())
            # The vectors are float32; a Rayleigh quotient is off by the square of their error, and
            # by the rounding of float32 products.
            assert found[-1] == pytest.approx(exact + L2, rel=1e-4)
            effective = sum((value - L2) / value for value in found)  # of float32 eigenvalues
            ours = quick_run.results["effective_parameters"][name]
            assert ours == pytest.approx(effective, rel=1e-6)

    def test_the_main_network_is_the_first_initialisation(self, quick_run):
        results = quick_run.results
        spread = results["initialisations"]
        assert spread["cost"][0] == results["training"]["cost"] != spread["cost"][1]
        assert spread["opg"][0] == pytest.approx(results["eigenvalues"]["opg"], rel=1e-4)
        for matrix, rank in (("opg", 5), ("hessian", 2)):
            own = quick_run.stage(f"spectrum-2-1-{matrix}-{rank}")[matrix]
            assert spread[matrix][1] == pytest.approx(own.tolist(), rel=1e-4)  # five digits


@pytest.mark.parametrize("part", PARTS)
def test_predictions(quick_run, data, probabilities, part):
    found = quick_run.stage(f"predictions-{part}")
    # Float32 logits of size 10 are off by about 1e-5.
    np.testing.assert_allclose(found["mean"], probabilities[part].numpy(), rtol=0, atol=1e-5)
    assert (found["label"] == found["mean"].argmax(1)).all()
    for x, y in PAIRS:
        ours = quick_run.results["regressions"][part][f"{x}_{y}"]
        assert_line(ours, found[f"{x}_std"], found[f"{y}_std"])
    right = (probabilities[part].argmax(1) == data[part][1]).numpy()
    assert 0 < right.sum() < len(right)
    for name in ESTIMATORS:
        score = np.sqrt((found[f"{name}_std"].astype(np.float64) ** 2).sum(1))
        ours = quick_run.results["scores"][part][name]
        groups = {"mean": score, "true_positives": score[right], "false_positives": score[~right]}
        for key, each in groups.items():  # scores are kept as float32
            assert ours[key] == pytest.approx(each.mean(), rel=1e-5)


class TestEnsembles:
    @pytest.mark.parametrize("initial", ["fixed", "varying"])
    def test_bootstraps(self, quick_run, data, initial):
        """Two networks, each on as many images, drawn with replacement."""
        arrays = quick_run.stage(f"bootstrap-2-{initial}")
        images, labels = data["train"]
        many = len(images)
        rows = torch.randint(many, (2, many), generator=torch.Generator().manual_seed(0))
        start = [paper_network(seed) for seed in ((0, 0) if initial == "fixed" else (0, 1))]
        for each in start:
            for parameter in each.parameters():
                parameter.data.mul_(0.06)
        networks = train(
            start, images, labels,
            steps=STEPS, schedule=SMALL.schedule[:1], rows=rows, progress=False,
        )  # fmt: skip
        with torch.no_grad():
            found = torch.stack([each(data["test"][0]).softmax(1).double() for each in networks])
        difference = (found[0] - found[1]).abs().numpy()
        # Float32 probabilities; of two numbers the std is their difference over √2.
        np.testing.assert_allclose(arrays["std"], difference / 2**0.5, rtol=0, atol=1e-5)
        np.testing.assert_allclose(arrays["mean"], found.mean(0).numpy(), rtol=0, atol=1e-5)
        accuracy = (found.argmax(-1) == data["test"][1]).double().mean()
        ours = quick_run.results["bootstrap"][initial]
        assert ours["mean_accuracy"] == pytest.approx(float(accuracy))
        own = quick_run.stage("predictions-test")
        for name in ESTIMATORS:
            assert_line(ours["against"][name], own[f"{name}_std"], arrays["std"])

    @pytest.mark.parametrize(
        ("sampler", "full_rank", "scatter"),
        [("low_rank", False, 1.0), ("full_rank", True, 1.0), ("full_rank_tenth", True, 0.1)],
    )
    def test_samples(self, quick_run, fit, network, data, sampler, full_rank, scatter):
        arrays = quick_run.stage(f"samples-4-opg-{sampler}")
        opg = fit.moved(estimator="opg")
        point = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
        found = []
        for row in opg.sample(4, 0, full_rank=full_rank).double():
            drawn = PaperNetwork().double()
            torch.nn.utils.vector_to_parameters(point + scatter * (row - point), drawn.parameters())
            with torch.no_grad():
                found.append(drawn(data["test"][0].double()).softmax(1))
        std = (torch.stack(found).std(0) / scatter).numpy()
        # Float32 logits; those of the whole scatter are in the hundreds.
        np.testing.assert_allclose(arrays["std"], std, rtol=0, atol=1e-3)
        ours = quick_run.results["samples"]["opg"][sampler]
        assert_line(ours, quick_run.stage("predictions-test")["opg_std"], arrays["std"])


def test_the_foreign_image(quick_run, fit):
    found, arrays = quick_run.results["foreign"], quick_run.stage("foreign")
    board = np.kron(np.indices((4, 4)).sum(0) % 2, np.ones((7, 7)))
    np.testing.assert_array_equal(arrays["image"], board[None])
    image = torch.from_numpy(board).float()[None, None]
    for name, is_full in (("full", True), ("low_rank", False)):
        options = {"estimator": "opg", "full_rank": is_full}
        scores = [float(fit.predict(image, rank=k, **options).score) for k in found["ranks"]]
        assert found[name] == pytest.approx(scores, rel=1e-4)  # float32, in another batch
    score = np.sort(quick_run.stage("predictions-train")["opg_score"])[::-1]
    assert found["highest_training_scores"] == pytest.approx(score[:10].tolist(), rel=1e-4)


def test_surfaces(quick_run):
    """At a probability, the line through all stds, weighted by how near theirs is."""
    arrays = quick_run.stage("surfaces")
    own = quick_run.stage("predictions-test")
    mean, std = (torch.from_numpy(own[name]).flatten() for name in ("mean", "opg_std"))
    exact = smooth(mean, std, torch.from_numpy(arrays["grid"]), 0.03).numpy()
    np.testing.assert_allclose(arrays["std"][-1], exact, rtol=1e-4)  # float32 stds
    assert (arrays["error"][-1] > 0).sum() > 40
