"""A training loader's examples in order: each once, none left out."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from deltabars.errors import DataError
from deltabars.integrations.callbacks import check_repeats, sequential

TRAIN = torch.randn(61, 4, generator=torch.Generator().manual_seed(0)), torch.arange(61) % 3


def read(loader):
    return torch.cat([batch[0] for batch in loader])


WHOLE = TensorDataset(*TRAIN)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batch_size": 7, "shuffle": True, "drop_last": True}, TRAIN[0]),
        ({"batch_sampler": BatchSampler(RandomSampler(WHOLE), 9, True)}, TRAIN[0]),
        ({"batch_size": 5, "sampler": SubsetRandomSampler([3, 1, 8])}, TRAIN[0][[3, 1, 8]]),
        ({"batch_size": 5, "sampler": SequentialSampler(WHOLE)}, TRAIN[0]),
    ],
)
def test_examples_come_in_order(options, expected):
    again = sequential(DataLoader(WHOLE, **options))
    assert torch.equal(read(again), expected)
    assert torch.equal(read(again), expected)
    check_repeats(again)


def test_batches_that_a_dataset_makes_itself_stay_as_they_are():
    made = [(TRAIN[0][:30], TRAIN[1][:30]), (TRAIN[0][30:], TRAIN[1][30:])]
    again = sequential(DataLoader(made, batch_size=None, shuffle=False))
    assert torch.equal(read(again), TRAIN[0])


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"sampler": WeightedRandomSampler(torch.ones(61), 61)}, "WeightedRandomSampler"),
        ({"sampler": RandomSampler(WHOLE, replacement=True)}, "RandomSampler"),
        ({"sampler": RandomSampler(WHOLE, num_samples=7)}, "RandomSampler"),
        ({"batch_sampler": [[1, 2], [3]]}, "list"),
    ],
)
def test_what_does_not_tell_its_examples_is_refused(options, kind):
    with pytest.raises(DataError, match=f"got a {kind}. Give the training data with data="):
        sequential(DataLoader(WHOLE, **options))


def test_several_training_loaders_are_refused():
    with pytest.raises(DataError, match="one training DataLoader, got dict"):
        sequential({"a": DataLoader(WHOLE), "b": DataLoader(WHOLE)})
