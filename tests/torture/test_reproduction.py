"""`deltabars reproduce mnist --small` on scikit-learn's digits, trained as it is documented.

Further networks, trained by the same code for as long, are left to the quick run.
"""

from __future__ import annotations

import numpy as np
import pytest

from deltabars.recipes.paper import paper_network
from tests.scans import SMALLER, Run, deltabars

ESTIMATORS = ("hessian", "opg", "sandwich")


@pytest.fixture(scope="module")
def run(scans, tmp_path_factory):
    out = tmp_path_factory.mktemp("small") / "out"
    done = deltabars(
        "reproduce", "mnist", "--data", scans, "--small", "--out", out, "--quiet",
        "--initialisations", 1, "--bootstrap", 0,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Run(scans, out, done)


def test_it_converges_without_a_warning(run):
    assert run.done.stderr == ""
    training = run.results["training"]
    assert training["train_accuracy"] > 0.98
    assert training["test_accuracy"] > 0.95
    assert training["cost"] < 0.4  # it starts at 2.4
    assert training["gradient_norm"] < 0.2


def test_spectra(run):
    results = run.results
    for name in ("hessian", "opg"):
        values = results["eigenvalues"][name]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)
        assert values[-1] > 0.01  # λ
        assert results["solvers"][name]["largest_residual_by_recurrence"] <= 1e-5 * values[0]
        assert results["solvers"][name]["measured_residual_rms"] <= 1e-5 * values[0]


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_wrong_predictions_have_higher_scores(run, part, estimator):
    scores = run.results["scores"][part][estimator]
    if scores["false_positives"] is None:
        assert run.results["training"][f"{part}_accuracy"] == 1
    else:
        assert scores["false_positives"] > 2 * scores["true_positives"]  # 3.5 and more was seen


def test_estimators_are_nearly_proportional(run):
    """The paper's finding: R² near 1 and an intercept near 0, here of 200 images and K = 20."""
    for line in run.results["regressions"]["test"].values():
        assert line["r2"] > 0.9  # 0.977 and more was seen
        assert abs(line["intercept"]) < 0.01
        assert 0.5 < line["slope"] < 2


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_close_to_the_weights_the_sampler_agrees_with_the_delta_method(run, estimator):
    """At a tenth of the scatter the network is nearly linear in its weights.

    What is left is chance: the std of 20 draws is off by 1/√(2·19) = 16%, and the images share the
    draws. (Seen: correlations from 0.91 to 0.94, slopes from 1.09 to 1.19.)
    """
    found = run.results["samples"][estimator]
    assert found["full_rank_tenth"]["networks"] == 20
    assert found["full_rank_tenth"]["correlation"] > 0.85
    assert 0.7 < found["full_rank_tenth"]["slope"] < 1.3
    assert found["full_rank_tenth"]["mean_accuracy"] > 0.9
    # The whole scatter, (λN)^-½ = 0.3 of each weight, is far out of where a network is linear.
    assert found["full_rank"]["correlation"] < 0.5


def test_a_saturated_network_has_no_scores_but_results(scans, tmp_path):
    """With weights from N(0, 1) most softmaxes are 0 or 1: no derivative, and a score of zero; no
    line can be laid through them.
    """
    weights = {name: value.numpy() for name, value in paper_network(0).state_dict().items()}
    np.savez(tmp_path / "untrained.npz", **weights)
    done = deltabars(
        "reproduce", "mnist", "--data", scans, *SMALLER, "--out", tmp_path / "out", "--rank", 2,
        "--weights", tmp_path / "untrained.npz", "--initialisations", 1, "--bootstrap", 0,
        "--samples", 0, "--quiet",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = Run(scans, tmp_path / "out", done).results
    for scores in results["scores"]["test"].values():
        assert scores["true_positives"] == 0
        assert scores["mean_relative_error"] > 0  # of those that have a score
    for scores in results["scores"]["train"].values():
        assert scores["mean_relative_error"] is None
    for line in results["regressions"]["train"].values():
        assert line == {"r2": None, "intercept": None, "slope": None}
    assert "train: hessian → opg, r2                     –     0.997           –" in done.stdout
