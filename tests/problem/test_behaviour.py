"""A saved fit is refused for a model that computes something else with the same weights."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import deltabars
from deltabars.errors import CorruptFileError, ModelWarning, WeightsMismatchError
from deltabars.storage import format as storage
from tests.problem.test_private import DATA, INPUTS, Net, fit


class Tuned(Net):
    def __init__(self, mean=0.0, eps=1e-5, shift=0.0, way=torch.tanh):
        super().__init__()
        self.norm = nn.LayerNorm(6, eps=eps)
        self.register_buffer("mean", torch.full((4,), mean), persistent=False)
        self.shift, self.way = torch.full((6,), shift), way

    def forward(self, x):
        self.cache = self.norm(self.a(x - self.mean)) + self.shift
        return self.b(self.way(self.cache))


def tuned(**options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Tuned(**options).double().eval()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("fits") / "a"
    fit(tuned()).save(path)
    return path


@pytest.mark.parametrize(
    "options",
    [{"mean": 0.5}, {"eps": 1e-6}, {"shift": 0.1}, {"way": torch.sin}, {"mean": 1e-4}],
    ids=",".join,
)  # fmt: skip
def test_another_function_of_the_same_weights_is_refused(path, options):
    model = tuned(**options)
    with pytest.raises(WeightsMismatchError, match="same weights that computes something else"):
        deltabars.load(path, model)
    assert deltabars.load(path, model, check_weights=False).rank == 6


def test_the_same_function_is_taken_whatever_its_passes_left(path):
    model = tuned()
    model(INPUTS)
    for each in (model, tuned().train(), tuned().float().double()):
        found = deltabars.load(path, each)
        again = tuned().eval()
        found.save(path.with_name("b"))
        assert deltabars.load(path.with_name("b"), again).rank == 6
        model(INPUTS[:3])


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_other_threads_counts_and_types_are_no_other_function(kind, tmp_path):
    model = tuned().to(kind)
    fit(model, (INPUTS.to(kind), DATA[1]), dtype=torch.float32).save(tmp_path / "a")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert deltabars.load(tmp_path / "a", model).rank == 6
    finally:
        torch.set_num_threads(before)


class Tokens(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.rows, self.head, self.factor = nn.Embedding(7, 4), nn.Linear(4, 3), factor

    def forward(self, ids, mask):
        rows = self.rows(ids) * mask[..., None]
        return self.head(rows.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)) * self.factor


def test_inputs_are_generated_in_the_range_of_the_data(tmp_path):
    generator = torch.Generator().manual_seed(0)
    data = {
        "ids": torch.randint(0, 7, (24, 5), generator=generator),
        "mask": torch.randint(0, 2, (24, 5), generator=generator).float(),
        "labels": torch.arange(24) % 3,
    }
    torch.manual_seed(0)
    model, other = Tokens(), Tokens(factor=1.01)
    other.load_state_dict(model.state_dict())
    fit(model, data).save(tmp_path / "a")
    assert deltabars.load(tmp_path / "a", model).behaviour.ranges
    with pytest.raises(WeightsMismatchError, match="outputs of generated inputs differ"):
        deltabars.load(tmp_path / "a", other)


def test_a_fit_does_without_the_compiler_of_torch():
    program = textwrap.dedent("""
        import sys, torch, deltabars
        model, data = torch.nn.Linear(2, 2), (torch.ones(8, 2), torch.arange(8) % 2)
        deltabars.fit(model, data, l2=1.0, rank=2, progress=False).predict(data[0])
        assert "torch._dynamo" not in sys.modules
    """)
    subprocess.run([sys.executable, "-c", program], check=True)


def test_files_before_this_version_load_with_a_note(path, tmp_path):
    header, tensors = storage.read(path)
    del header["behaviour"], tensors["behaviour.outputs"]
    storage.write(tmp_path / "old", header, tensors)
    with pytest.warns(ModelWarning, match="noted the weights alone"):
        found = deltabars.load(tmp_path / "old", tuned())
    assert torch.equal(found.predict(INPUTS).std, deltabars.load(path, tuned()).predict(INPUTS).std)


@pytest.mark.parametrize(
    "change",
    [
        {"ranges": [[[1 << 40], 0, 1]]},
        {"ranges": [[[4], 0, float("inf")]]},
        {"ranges": [[[4], 0, 1]] * 2},
    ],
    ids=str,
)
def test_notes_that_no_fit_has_are_refused(path, tmp_path, change):
    header, tensors = storage.read(path)
    header["behaviour"] |= change
    storage.write(tmp_path / "b", header, tensors)
    with pytest.raises(CorruptFileError):
        deltabars.load(tmp_path / "b", tuned())
