"""`deltabars reproduce mnist --small` on scikit-learn's digits, trained as it is documented."""

from __future__ import annotations

from tests.scans import Run, deltabars


def test_the_small_size(scans, tmp_path):
    done = deltabars(
        "reproduce", "mnist", "--data", scans, "--small", "--out", tmp_path / "out", "--quiet",
        "--initialisations", 1, "--bootstrap", 0, "--samples", 0,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")  # it converges without a warning
    results = Run(scans, tmp_path / "out", done).results
    assert results["training"]["test_accuracy"] > 0.95
    assert results["training"]["gradient_norm"] < 0.2
    for line in results["regressions"]["test"].values():
        assert line["r2"] > 0.9  # the paper's finding, here of 200 images and K = 20
    for scores in results["scores"]["test"].values():
        assert scores["false_positives"] > 2 * scores["true_positives"]  # 3.5 and more was seen
