"""What is in results/: it meets what the paper prints, and docs/paper.md says what is in it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from deltabars.recipes.summary import PUBLISHED, published_regressions

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "paper.md").read_text()
RUNS = ("mnist", "mnist-reference", "cifar10")
FIGURES = (
    "spectra", "uncertainty", "rankings", "estimators", "surfaces", "foreign", "ensembles",
)  # fmt: skip
SIZES = {"mnist": (93_322, 1_500), "cifar10": (122_570, 2_500)}  # P, K
RESULTS = {run: json.loads((ROOT / "results" / run / "results.json").read_text()) for run in RUNS}
OWN = ("mnist", "cifar10")  # that docs/paper.md shows in full


@pytest.fixture(params=RUNS)
def run(request):
    return request.param


@pytest.fixture
def results(run):
    return RESULTS[run]


def test_of_the_paper_s_size(run, results):
    size, rank = SIZES[results["recipe"]]
    assert results["size"] == "paper"
    assert results["settings"]["parameters"] == size
    assert results["settings"]["rank"] == rank
    assert [len(results["eigenvalues"][name]) for name in ("hessian", "opg")] == [rank] * 2
    text = (ROOT / "results" / run / "results.json").read_text()
    assert not any(folder in text for folder in ("/tmp", "/home", "/work"))
    for name in FIGURES:
        path = ROOT / "results" / run / f"{name}.png"
        assert path.read_bytes().startswith(b"\x89PNG")
        assert run not in OWN or f"../results/{run}/{name}.png" in DOCS


def test_training(run, results):
    ours, published = results["training"], PUBLISHED[results["recipe"]]
    copies = run == "cifar10"  # of its images are JPEG
    for name in ("train_accuracy", "test_accuracy"):
        assert ours[name] == pytest.approx(published[name], abs=0.03 if copies else 0.004)
    assert ours["cost"] == pytest.approx(published["cost"], abs=0.02)
    assert ours["gradient_norm"] <= (0.05 if copies else 0.03)
    for value in ours.values():
        assert f"| {value:.4f} |" in DOCS


def test_regressions(run, results):
    for part, pair, paper in published_regressions(results["recipe"]):
        ours = results["regressions"][part][pair]
        # The reference weights are those of the published table's network.
        close = run == "mnist-reference" and part == "test"
        slope = 0.01 if close else 0.1 if run == "cifar10" else 0.05
        assert ours["r2"] == pytest.approx(paper["r2"], abs=0.003 if close else 0.005)
        assert ours["slope"] == pytest.approx(paper["slope"], abs=slope)
        assert ours["intercept"] == pytest.approx(0, abs=5e-4)  # printed as 0.000
        numbers = (round(ours[name], 4) + 0.0 for name in ("r2", "intercept", "slope"))
        assert ", ".join(f"{number:.4f}" for number in numbers) in DOCS


def test_scores(run, results):
    times = 1.3 if run == "cifar10" else 5
    for part, title in (("train", "training"), ("test", "test")):
        for name, scores in results["scores"][part].items():
            assert scores["false_positives"] > times * scores["true_positives"]
            means = [scores[group] for group in ("mean", "true_positives", "false_positives")]
            row = f"{title}: {name} | " + " | ".join(f"{mean:.4f}" for mean in means)
            assert run not in OWN or row in DOCS


def test_foreign_image(run, results):
    found = results["foreign"]
    copies = run == "cifar10"
    index = found["ranks"].index(667 if copies else 600)
    settled = pytest.approx(found["full"][-1], rel=0.03 if copies else 0.01)
    assert found["full"][index] == settled
    assert found["low_rank"][index] < 0.9 * found["low_rank"][-1]  # not settled
    assert found["low_rank"][-1] < found["full"][-1]
    if not copies:  # the network of CIFAR-10 is sure of it
        assert found["full"][-1] > max(found["highest_training_scores"])
    if run in OWN:
        for name in ("full", "low_rank"):
            assert f"{found[name][index]:.4f}" in DOCS
            assert f"{found[name][-1]:.4f}" in DOCS


def test_samplers(run, results):
    for name, samplers in results["samples"].items():
        # The std over 100 networks has a relative error of 7 %, shared by nearby images.
        assert samplers["full_rank_tenth"]["slope"] == pytest.approx(1, abs=0.07)
        assert samplers["full_rank_tenth"]["correlation"] > 0.99
        cells = [
            f"{each['correlation']:.3f}, {each['slope']:.3f}; {each['mean_accuracy']:.3f}"
            for each in samplers.values()
        ]
        assert run not in OWN or f"| {name} | {' | '.join(cells)} |" in DOCS


def test_published_eigenvalues():
    """The reference weights have published eigenvalues: H's agree to five digits."""
    path = ROOT.parent / "shared" / "data" / "reference" / "eigenvalues_k600.npz"
    if not path.is_file():
        pytest.skip("the published eigenvalues are not here")
    found = RESULTS["mnist-reference"]["eigenvalues"]["hessian"][:600]
    np.testing.assert_allclose(found, np.load(path)["hessian"], rtol=5e-5)


def test_documentation_of_the_bootstrap():
    for name, found in RESULTS["mnist"]["bootstrap"].items():
        cells = [
            f"{each['correlation']:.3f}, {each['slope']:.3f}" for each in found["against"].values()
        ]
        cells += [f"{found['mean_accuracy']:.4f}", f"{found['seconds']:.0f}"]
        assert f"| {name} | {' | '.join(cells)} |" in DOCS
        assert found["networks"] == 16


def test_documentation_of_the_initialisations():
    found = RESULTS["mnist"]["initialisations"]
    assert (len(found["opg"]), len(found["hessian"])) == (16, 4)
    for index, digits in ((0, ".2f"), (9, ".3f"), (99, ".4f"), (599, ".5f"), (1499, ".5f")):
        values = [each[index] for each in found["opg"]]
        mean, spread = statistics.mean(values), statistics.stdev(values)
        cells = f"{mean:{digits}} | {min(values):{digits}} to {max(values):{digits}}"
        assert f"| {index + 1:,} | {cells} | {100 * spread / mean:.2g} % |" in DOCS
    assert f"from {min(found['cost']):.4f} to {max(found['cost']):.4f}" in DOCS
    for index, digits in ((0, ".2f"), (599, ".4f")):
        *first, last = (f"{each[index]:{digits}}" for each in found["hessian"])
        assert f"{', '.join(first)} and {last}" in DOCS


def test_documentation_of_the_spectra():
    rows: list[list[str]] = [[], [], [], [], []]
    for each in RESULTS.values():
        hessian, opg, tail = each["eigenvalues"].values()
        counts = each["effective_parameters"]
        rows[0].append(f"{hessian[0]:.2f}; {opg[0]:.2f}")
        rows[1].append(f"{hessian[-1]:.5f}; {opg[-1]:.5f}")
        rows[2].append(f"−{-tail[0]:.4f}")
        rows[3].append(f"{sum(v < 0 for v in tail)}; {sum(v < 0.01 for v in tail):,}")
        rows[4].append(f"{counts['hessian']:.0f}; {counts['opg']:.0f}")
    for cells in rows:
        assert f"| {' | '.join(cells)} |" in DOCS
