"""What is in results/: it meets what the paper prints, and docs/paper.md says what is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltabars.reproduction.published import PAIRS, PUBLISHED

ROOT = Path(__file__).parents[1]
DOCS = (ROOT / "docs" / "paper.md").read_text()
RUNS = ("mnist", "mnist-reference")
PARTS = ("train", "test")
FIGURES = (
    "spectra", "uncertainty", "surfaces", "foreign", "rankings", "estimators", "ensembles",
)  # fmt: skip


@pytest.fixture(scope="module", params=RUNS)
def run(request):
    return request.param


@pytest.fixture(scope="module")
def results(run):
    return json.loads((ROOT / "results" / run / "results.json").read_text())


def lines(results):
    """Each regression with its published one: (ours, R², slope)."""
    for part in PARTS:
        for (x, y), (r2, _, slope) in zip(PAIRS, PUBLISHED["mnist"].regressions[part], strict=True):
            yield part, results["regressions"][part][f"{x}_{y}"], r2, slope


def test_of_the_paper_s_size(results):
    assert results["size"] == "paper"
    assert results["settings"]["parameters"] == 93_322
    assert results["settings"]["rank"] == 1_500
    assert [len(results["eigenvalues"][name]) for name in ("hessian", "opg")] == [1_500] * 2


def test_training(results):
    ours, published = results["training"], PUBLISHED["mnist"].training
    for name in ("train_accuracy", "test_accuracy"):
        assert ours[name] == pytest.approx(published[name], abs=0.004)
    assert ours["cost"] == pytest.approx(published["cost"], abs=0.02)
    assert ours["gradient_norm"] <= 0.03


def test_regressions(run, results):
    for part, ours, r2, slope in lines(results):
        # The reference weights are those of the published table's network.
        close = run == "mnist-reference" and part == "test"
        assert ours["r2"] == pytest.approx(r2, abs=0.003 if close else 0.005)
        assert ours["slope"] == pytest.approx(slope, abs=0.01 if close else 0.05)
        assert ours["intercept"] == pytest.approx(0, abs=5e-4)  # printed as 0.000


def test_false_positives_have_the_higher_scores(results):
    for part in PARTS:
        for scores in results["scores"][part].values():
            assert scores["false_positives"] > 5 * scores["true_positives"]


def test_foreign_image(results):
    found = results["foreign"]
    at_600 = found["ranks"].index(600)
    assert found["full"][at_600] == pytest.approx(found["full"][-1], rel=0.01)  # settled
    assert found["low_rank"][at_600] < 0.9 * found["low_rank"][-1]  # not settled
    assert found["low_rank"][-1] < found["full"][-1]
    assert found["full"][-1] > max(found["highest_training_scores"])


def test_sampler_agrees_with_the_delta_method_near_the_trained_weights(results):
    for samplers in results["samples"].values():
        # The std over 100 networks has a relative error of 7 %, shared by nearby images.
        assert samplers["full_rank_tenth"]["slope"] == pytest.approx(1, abs=0.07)
        assert samplers["full_rank_tenth"]["correlation"] > 0.99


def test_published_eigenvalues(run, results):
    """The reference weights have published eigenvalues: H's agree to five digits."""
    path = ROOT.parent / "shared" / "data" / "reference" / "eigenvalues_k600.npz"
    if run != "mnist-reference" or not path.is_file():
        pytest.skip("the published eigenvalues are of the reference weights")
    import numpy as np

    published = np.load(path)["hessian"]
    np.testing.assert_allclose(results["eigenvalues"]["hessian"][:600], published, rtol=5e-5)


def test_figures_are_there(run):
    for name in FIGURES:
        path = ROOT / "results" / run / f"{name}.png"
        assert path.read_bytes().startswith(b"\x89PNG")
        assert f"../results/{RUNS[0]}/{name}.png" in DOCS


def test_documentation_says_the_same(results):
    for _, ours, _, _ in lines(results):
        numbers = (round(ours[name], 4) + 0.0 for name in ("r2", "intercept", "slope"))
        assert ", ".join(f"{number:.4f}" for number in numbers) in DOCS
    for value in results["training"].values():
        assert f"| {value:.4f} |" in DOCS


def test_documentation_of_scores():
    results = json.loads((ROOT / "results" / "mnist" / "results.json").read_text())
    for part in PARTS:
        for name, scores in results["scores"][part].items():
            means = [scores[group] for group in ("mean", "true_positives", "false_positives")]
            row = f"{'training' if part == 'train' else part}: {name} | " + " | ".join(
                f"{mean:.4f}" for mean in means
            )
            assert row in DOCS
    for name, samplers in results["samples"].items():
        cells = [
            f"{each['correlation']:.3f}, {each['slope']:.3f}; {each['mean_accuracy']:.3f}"
            for each in samplers.values()
        ]
        assert f"| {name} | {' | '.join(cells)} |" in DOCS


def test_documentation_of_the_foreign_image_and_the_spectra():
    runs = [json.loads((ROOT / "results" / run / "results.json").read_text()) for run in RUNS]
    found = runs[0]["foreign"]
    at_600 = found["ranks"].index(600)
    for name in ("full", "low_rank"):
        assert f"{found[name][at_600]:.4f}" in DOCS
        assert f"{found[name][-1]:.4f}" in DOCS
    spectra = [each["eigenvalues"] for each in runs]
    first = [f"{each['hessian'][0]:.2f}; {each['opg'][0]:.2f}" for each in spectra]
    last = [f"{each['hessian'][-1]:.5f}; {each['opg'][-1]:.5f}" for each in spectra]
    least = [f"−{-each['hessian_smallest'][0]:.4f}" for each in spectra]
    below = [
        f"{sum(v < 0 for v in tail)}; {sum(v < 0.01 for v in tail):,}"
        for tail in (each["hessian_smallest"] for each in spectra)
    ]
    for cells in (first, last, least, below):
        assert f"| {' | '.join(cells)} |" in DOCS
    effective = [each["effective_parameters"] for each in runs]
    cells = [f"{each['hessian']:.0f}; {each['opg']:.0f}" for each in effective]
    assert f"| {' | '.join(cells)} |" in DOCS


def test_nothing_of_a_machine_is_in_the_results(run):
    text = (ROOT / "results" / run / "results.json").read_text()
    assert "/tmp" not in text
    assert "/home" not in text
    assert "/work" not in text
