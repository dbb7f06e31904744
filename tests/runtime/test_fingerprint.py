"""One digest for values of every kind."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
import torch

from deltabars.runtime.fingerprint import fingerprint

LARGE = torch.arange(12, dtype=torch.float32).view(3, 4)

EQUAL = {
    "numbers": (1, 1.0, np.int64(1), np.float32(1.0)),
    "signed zeros": (0, 0.0, -0.0),
    "sequences": ([1, "a"], (1, "a"), [np.int8(1), np.str_("a")], np.array([1, "a"], dtype=object)),
    "mappings": ({"a": 1, "b": [2]}, {"b": (2.0,), "a": 1}),
    "sets": ({3, 1, 2}, frozenset([1, 2, 3])),
    "tensors": (
        LARGE, LARGE.T.contiguous().T, LARGE.numpy(), np.asfortranarray(LARGE.numpy()),
        LARGE.clone().requires_grad_(), LARGE.numpy().astype(">f4"),
        torch.cat([LARGE, LARGE], 1)[:, :4], torch.nn.Parameter(LARGE),
    ),
    "one number": (torch.ones(4)[::3][:1], torch.ones(1), np.ones(1, "f4")),
    "conjugates": (torch.tensor([1 + 1j]).conj(), torch.tensor([1 - 1j])),
}  # fmt: skip
DIFFERENT = [
    (), (None,), (True,), (False,), (0,), (1,), (0.5,), (0.25,), (float("inf"),), (float("nan"),),
    (1j,), (10**30,), ("",), ("1",), (b"1",), ("a", "b"), ("ab",), (["a", "b"],), ([["a"], "b"],),
    ([["a", "b"]],), ([],), ({},), (set(),), ({"a", "b"},), ({"a": "b"},), ({"b": "a"},), ("None",),
    ({1: 2},), ({"1": 2},), (LARGE,), (LARGE.T,), (LARGE.flatten(),), (LARGE.double(),),
    (LARGE + 0.0,) * 2, (LARGE - 1,), (LARGE.bfloat16(),), (LARGE.half(),), (torch.zeros(0),),
    (torch.zeros(0, 2),), (torch.zeros(()),), (torch.zeros((), dtype=torch.bool),), ("\udcff",),
    (torch.float32,), ("torch.float32",), (torch.device("cpu"),),
]  # fmt: skip


@pytest.mark.parametrize("values", EQUAL.values(), ids=EQUAL)
def test_equal_values_have_one_digest(values):
    assert len({fingerprint(value) for value in values}) == 1
    assert len({fingerprint({"a": [value]}, 3) for value in values}) == 1


def test_different_values_have_different_digests():
    digests = [fingerprint(*values) for values in DIFFERENT]
    alike = [
        (DIFFERENT[a], DIFFERENT[b])
        for a, b in combinations(range(len(digests)), 2)
        if digests[a] == digests[b]
    ]
    assert not alike


def test_it_is_the_same_in_every_process_and_version():
    """Files hold digests: this one must never change."""
    program = (
        "import torch\nfrom deltabars.runtime.fingerprint import fingerprint\n"
        "print(fingerprint({'b': {1, 'a', 2.5}, 'a': torch.arange(3)}, b'c'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "9af42ade5fbcc52c14bb80d9b384a848"


def test_other_kinds_are_refused():
    with pytest.raises(TypeError, match=r"expected numbers, .* got object"):
        fingerprint({"a": [object()]})
