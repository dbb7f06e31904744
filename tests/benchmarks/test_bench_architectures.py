"""The work `architectures` of the benchmark at a tiny size."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import plain
from benchmarks.peak import ProcessMeter
from benchmarks.runner import run_bench
from benchmarks.sources import Sources
from benchmarks.subject import upscaled_digits, wide_network
from deltabars.cli.entry import main
from deltabars.errors import DataError
from tests.benchmarks.test_bench import TINY_GPU, TINY_SMALL

QUALITY = {
    "P", "N", "K", "training accuracy", "test accuracy", "relative gradient", "mean std",
    "AUROC by score", "AUROC by 1 − maximum",
}  # fmt: skip


def run(size, sources=None):
    shown, said = [], []
    report = run_bench(
        size, sources or Sources(), ["architectures"], show=shown.append, say=said.append
    )
    return report["records"][0], " ".join("\n".join(shown).split()), said


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory):
    """CIFAR-10 of noise, as few images a batch as the tiny sizes take."""
    folder = tmp_path_factory.mktemp("cifar10")
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    for seed, name in enumerate(names):
        records = np.random.default_rng(seed).integers(0, 256, (8, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def check(found, said, *names):
    assert list(found["raw"]) == list(names)
    for name in names:
        raw = dict(found["raw"][name])
        check_storage(raw.pop("storage"))
        assert set(raw) == QUALITY
        measures = [m for m in found["measures"] if m["what"].startswith(f"{name}: ")]
        texts = [measure["what"].partition(": ")[2] for measure in measures]
        assert {"training", "fit, K=3", "4 images"} <= set(texts)
        if ProcessMeter.works():
            units = [m["unit"] for m in measures if "peak" in m["what"]]
            assert units == ["GiB", "K·P", "GiB"]
        (fit,) = (m for m in measures if "fit, K" in m["what"])
        assert fit["products"] == 0  # so few parameters that G itself is formed
        assert (fit["accuracy_of"], fit["accuracy"] < 1e-4) == ("residual", True)
        (predicted,) = (m for m in measures if "images" in m["what"])
        assert predicted["accuracy_of"] == "std"
        assert predicted["accuracy"] < 1e-3  # float32 against float64
        for measure in measures:
            assert any(line.startswith(measure["what"]) for line in said)
        assert any(line.startswith(f"{name}: ") and "mean std" in line for line in said)


def check_storage(found):
    assert found["images"] == 4
    for name, loss in (("float32", 1e-6), ("bfloat16", 2**-8), ("float16", 2**-11)):
        part = found[name]
        assert part["files"] > 2
        assert part["bytes"] > 0
        assert part["largest change of score"] <= loss
        assert part["loss"]["opg"]["dtype"] == name
        assert part["loss"]["opg"].get("norm", 0) <= 1.01 * loss
        assert part["largest score outside the interval"] <= 0
        assert {"Spearman of scores", "AUROC by score", "median score_error / score"} <= set(part)
        for kind in ("offloaded", "small device"):
            assert part[kind]["seconds"] > 0
            assert part[kind]["load seconds"] > 0
    assert found["float32"]["bytes"] > found["bfloat16"]["bytes"]


class TestArchitectures:
    def test_without_files(self):
        pytest.importorskip("transformers", reason="transformers cannot be imported here")
        found, _, said = run(TINY_SMALL)
        check(found, said, "ViT", "narrow ResNet")

    def test_cifar10(self, cifar10, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformers", None)
        found, shown, said = run(TINY_SMALL, Sources(cifar10=cifar10))
        check(found, said, "narrow ResNet")
        assert "ViT left out: transformers is absent" in shown

    def test_nothing_to_run(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformers", None)
        found, shown, said = run(TINY_GPU)
        assert not found["measures"]
        assert "ResNet-18 left out: needs --cifar10" in shown
        assert "ResNet-18 left out: needs --cifar10" in said

    def test_folder_without_cifar10(self, tmp_path):
        with pytest.raises(DataError, match="CIFAR-10: expected a binary batch"):
            run(TINY_SMALL, Sources(cifar10=tmp_path))

    def test_wrong_folder_is_one_line(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(bench, "SMALL", TINY_SMALL)
        options = ["--only", "architectures", "--quiet", "--cifar10", str(tmp_path)]
        assert main(["bench", *options]) == 1
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1
        assert "CIFAR-10: expected a binary batch" in shown


def test_opg_std_is_that_of_the_matrix():
    """Against (Q diag(λ) Qᵀ + λ̃(I − QQᵀ))⁻¹, written out."""
    images, *_ = upscaled_digits(2, 1)
    model = wide_network(1)
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(805, 3, generator=generator, dtype=torch.float64)
    basis, values = torch.linalg.qr(columns).Q.T, torch.tensor([3.0, 2.0, 0.5])
    found = plain.opg_std(model, lambda m, x: m(x), images, (values, basis), 0.1, 7)
    tail = 2 / (1 / 0.1 + 1 / 0.5)
    matrix = basis.T @ torch.diag(values.double() - tail) @ basis + tail * torch.eye(805)
    both = {"hessian": (values, basis), "opg": (values, basis)}
    others = plain.low_rank_stds(model, images, both, 0.1, 7)["opg"]
    torch.testing.assert_close(found, others)
    rows = torch.autograd.functional.jacobian(
        lambda flat: torch.func.functional_call(
            model.double(), _unflat(model, flat), (images.double(),)
        ).softmax(1),
        torch.cat([weight.detach().double().reshape(-1) for weight in model.parameters()]),
    )
    exact = torch.einsum("bcp,pq,bcq->bc", rows, torch.linalg.inv(matrix), rows) / 7
    torch.testing.assert_close(found, exact.sqrt())


def _unflat(model, flat):
    sizes = [weight.numel() for weight in model.parameters()]
    named = zip(model.named_parameters(), flat.split(sizes), strict=True)
    return {name: part.view_as(weight) for (name, weight), part in named}
