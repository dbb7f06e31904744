"""CIFAR-10's binary batches as they are unpacked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltabars.errors import BadValueError, DataError
from deltabars.recipes.images import read_cifar10

NAMES = [f"data_batch_{number}.bin" for number in range(1, 6)]
SIZES = (2, 1, 3, 1, 2)  # images of each training batch


def make_records(count, seed):
    generator = np.random.default_rng(seed)
    records = generator.integers(0, 256, (count, 3073), dtype=np.uint8)
    records[:, 0] = generator.integers(0, 10, count)
    return records


@pytest.fixture
def folder(tmp_path):
    for seed, (name, count) in enumerate(zip(NAMES, SIZES, strict=True)):
        (tmp_path / name).write_bytes(make_records(count, seed).tobytes())
    (tmp_path / "test_batch.bin").write_bytes(make_records(4, 9).tobytes())
    return tmp_path


def expected(records):
    """Pixels and labels byte by byte: a label, then 1,024 of red, of green, of blue, by rows."""
    images = np.empty((len(records), 3, 32, 32))
    for place, record in enumerate(records):
        for channel in range(3):
            for row in range(32):
                start = 1 + channel * 1024 + row * 32
                images[place, channel, row] = record[start : start + 32] / 255
    return images, records[:, 0].tolist()


def test_training_images_are_those_of_the_five_batches_in_order(folder):
    images, labels = read_cifar10(folder)
    pixels, classes = expected(np.concatenate([make_records(n, i) for i, n in enumerate(SIZES)]))
    assert images.shape == (9, 3, 32, 32)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.long
    assert labels.tolist() == classes
    # Half a unit in the last place of float32 below 1.
    np.testing.assert_allclose(images.double().numpy(), pixels, rtol=0, atol=2**-25)


def test_test_images(folder):
    images, labels = read_cifar10(folder, "test")
    pixels, classes = expected(make_records(4, 9))
    assert labels.tolist() == classes
    np.testing.assert_allclose(images.double().numpy(), pixels, rtol=0, atol=2**-25)


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_the_first_ones(folder, count):
    images, labels = read_cifar10(folder, count=count)
    whole, classes = read_cifar10(folder)
    assert torch.equal(images, whole[:count])
    assert torch.equal(labels, classes[:count])


@pytest.mark.parametrize("count", [0, -1, 10])
def test_more_than_there_are(folder, count):
    with pytest.raises(DataError, match=rf"expected {count} images or more, got 9 in"):
        read_cifar10(folder, count=count)


@pytest.mark.parametrize(("name", "part"), [(NAMES[3], "train"), ("test_batch.bin", "test")])
class TestBadFiles:
    def test_missing(self, folder, name, part):
        (folder / name).unlink()
        with pytest.raises(DataError, match=rf"binary batch at .*{name}, got nothing there"):
            read_cifar10(folder, part)

    def test_truncated(self, folder, name, part):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1])
        with pytest.raises(DataError, match=rf"got {len(content) - 1} bytes in .*{name}"):
            read_cifar10(folder, part)

    def test_empty(self, folder, name, part):
        (folder / name).write_bytes(b"")
        with pytest.raises(DataError, match=rf"got 0 bytes in .*{name}"):
            read_cifar10(folder, part)

    def test_a_class_that_is_none(self, folder, name, part):
        content = bytearray((folder / name).read_bytes())
        content[0] = 10
        (folder / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"classes from 0 to 9, got 10 in .*{name}"):
            read_cifar10(folder, part)

    def test_a_folder_in_its_place(self, folder, name, part):
        (folder / name).unlink()
        (folder / name).mkdir()
        with pytest.raises(DataError, match=rf"expected a file that can be read, got .*{name}"):
            read_cifar10(folder, part)


def test_unknown_part(folder):
    with pytest.raises(BadValueError, match=r"part: expected one of .*, got 'validation'"):
        read_cifar10(folder, "validation")
