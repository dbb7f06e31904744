"""What 16 bits do to the scores of the digits' network: `python tools/rounding_table.py`."""

from __future__ import annotations

import tempfile
import warnings

import deltabars
from deltabars.recipes.digits import L2, trained_digits

_ROWS = (
    ("opg", 20, "bfloat16"),
    ("opg", 100, "bfloat16"),
    ("opg", 100, "float16"),
    ("ggn", 400, "bfloat16"),
    ("ggn", 400, "float16"),
    ("sandwich", 100, "bfloat16"),
    ("sandwich", 100, "float16"),
)


def main() -> None:
    """Print the table of docs/scale.md."""
    warnings.simplefilter("ignore")
    digits, model, train = trained_digits()
    for estimator, rank, dtype in _ROWS:
        fit = deltabars.fit(model, train, l2=L2, estimator=estimator, rank=rank, progress=False)
        before = fit.predict(digits.test_images)
        with tempfile.TemporaryDirectory() as folder:
            fit.save(f"{folder}/fit", dtype=dtype)
            after = deltabars.load(f"{folder}/fit", model).predict(digits.test_images)
            loss = deltabars.load(f"{folder}/fit", model).diagnostics["storage"]
        change = (after.score / before.score - 1).abs()
        errors = (float((out.score_error / out.score).median()) for out in (before, after))
        print(
            f"| {estimator}, {rank} | {dtype} | {max(part['norm'] for part in loss.values()):.4f} "
            f"| {float(change.max()):.2%}; {float(change.median()):.3%} "
            f"| {'; '.join(f'{error:.2g}' for error in errors)} |"
        )


if __name__ == "__main__":
    main()
