"""`deltabars reproduce mnist --small` on scikit-learn's digits, trained as it is documented."""

from __future__ import annotations

from tests.scans import Run, deltabars


def test_the_small_size(scans, tmp_path):
    done = deltabars(
        "reproduce", "mnist", "--data", scans, "--small", "--out", tmp_path / "out", "--quiet",
        "--initialisations", 1, "--bootstrap", 0,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # it converges without a warning
    results = Run(scans, tmp_path / "out", done).results
    training = results["training"]
    assert training["train_accuracy"] > 0.98
    assert training["test_accuracy"] > 0.95
    assert training["gradient_norm"] < 0.2
    for name in ("hessian", "opg"):
        assert results["eigenvalues"][name][-1] > 0.01  # λ
        largest = results["eigenvalues"][name][0]
        assert results["solvers"][name]["measured_residual_rms"] <= 1e-5 * largest
    for line in results["regressions"]["test"].values():
        assert line["r2"] > 0.9  # the paper's finding, here of 200 images and K = 20
        assert 0.5 < line["slope"] < 2
    for name, scores in results["scores"]["test"].items():
        assert scores["false_positives"] > 2 * scores["true_positives"]  # 3.5 and more was seen
        # At a tenth of the scatter the network is nearly linear in its weights, and what is left
        # is chance: the std of 20 draws is off by 1/√(2·19) = 16%, and images share the draws.
        near = results["samples"][name]["full_rank_tenth"]
        assert near["correlation"] > 0.85
        assert 0.7 < near["slope"] < 1.3
        # The whole scatter, (λN)^-½ = 0.3 of each weight, is far out of where it is linear.
        assert results["samples"][name]["full_rank"]["correlation"] < 0.5
