"""Images as they are downloaded (MNIST's idx files, CIFAR-10's batches), and files of weights."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch

from deltabars.errors import BadValueError, DataError, ModelError
from deltabars.recipes.images import read_cifar10, read_idx, read_mnist
from deltabars.recipes.paper import load_weights, paper_network
from tests.scans import idx_bytes

IMAGES = np.arange(3 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(3, 28, 28)
LABELS = np.array([7, 0, 9], dtype=np.uint8)
BATCHES = [f"data_batch_{number}.bin" for number in range(1, 6)]
SIZES = (2, 1, 3, 1, 2)  # images of each training batch


def write(path, content, zipped=False):
    path.write_bytes(gzip.compress(content) if zipped else content)
    return path


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzipped"])
class TestIdx:
    @pytest.mark.parametrize(
        ("content", "count", "match"),
        [
            (b"", None, "got an empty file"),
            (idx_bytes(IMAGES)[:100], None, "expected 2352 bytes after the header"),
            (idx_bytes(LABELS) + b"!", None, "expected 3 bytes after the header, got more"),
            (idx_bytes(LABELS, b"\x00\x00\x0d"), None, "got 00 00 0d 01"),
            (idx_bytes(LABELS), 4, "expected 4 items or more, got 3"),
        ],
    )
    def test_broken(self, tmp_path, zipped, content, count, match):
        path = write(tmp_path / "x", content, zipped)
        with pytest.raises(DataError, match=match):
            read_idx(path, count)

    def test_mnist(self, tmp_path, zipped):
        end = ".gz" if zipped else ""
        write(tmp_path / f"train-images-idx3-ubyte{end}", idx_bytes(IMAGES), zipped)
        write(tmp_path / f"train-labels-idx1-ubyte{end}", idx_bytes(LABELS), zipped)
        images, labels = read_mnist(tmp_path)
        assert images.shape == (3, 1, 28, 28)
        assert images.dtype == torch.float32
        assert torch.equal((images[:, 0] * 255).round().byte(), torch.from_numpy(IMAGES))
        assert labels.tolist() == [7, 0, 9]
        assert len(read_mnist(tmp_path, count=1)[1]) == 1
        for part, match in ((LABELS[:2], "n images of two"), (LABELS + 1, "from 0 to 9, got 10")):
            write(tmp_path / f"train-labels-idx1-ubyte{end}", idx_bytes(part), zipped)
            with pytest.raises(DataError, match=match):
                read_mnist(tmp_path)


def test_missing_and_cut_files(tmp_path):
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte or .*\.gz in the folder"):
        read_mnist(tmp_path)
    for read in (read_mnist, read_cifar10):
        with pytest.raises(BadValueError, match=r"part: expected one of .*, got 'validation'"):
            read(tmp_path, "validation")


def make_records(count, seed):
    records = np.random.default_rng(seed).integers(0, 256, (count, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    return records


def expected(records):
    """Pixels and labels byte by byte: a label, then 1,024 of red, of green, of blue, by rows."""
    starts = [[1 + channel * 1024 + row * 32 for row in range(32)] for channel in range(3)]
    images = [[[r[s : s + 32] / 255 for s in rows] for rows in starts] for r in records]
    return np.array(images), records[:, 0].tolist()


class TestCifar10:
    @pytest.fixture
    def folder(self, tmp_path):
        for seed, (name, count) in enumerate(zip(BATCHES, SIZES, strict=True)):
            (tmp_path / name).write_bytes(make_records(count, seed).tobytes())
        (tmp_path / "test_batch.bin").write_bytes(make_records(4, 9).tobytes())
        return tmp_path

    def test_images_are_those_of_the_batches_in_order(self, folder):
        training = np.concatenate([make_records(n, seed) for seed, n in enumerate(SIZES)])
        for part, records in (("train", training), ("test", make_records(4, 9))):
            images, labels = read_cifar10(folder, part)
            pixels, classes = expected(records)
            assert (images.dtype, labels.dtype) == (torch.float32, torch.long)
            assert labels.tolist() == classes
            # Half a unit in the last place of float32 below 1.
            np.testing.assert_allclose(images.double().numpy(), pixels, rtol=0, atol=2**-25)
            with pytest.raises(DataError, match="expected 10 items or more, got"):
                read_cifar10(folder, part, 10)
            assert torch.equal(read_cifar10(folder, part, 3)[0], images[:3])

    @pytest.mark.parametrize(
        ("content", "match"),
        [
            (None, r"binary batch at .*batch_4\.bin, got nothing there"),
            (b"", r"got 0 bytes in .*batch_4\.bin"),
            (b"\x0a" + bytes(3072), r"classes from 0 to 9, got 10 in .*batch_4\.bin"),
        ],
    )
    def test_bad_files(self, folder, content, match):
        path = folder / BATCHES[3]
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match=match):
            read_cifar10(folder)


def test_files_of_weights(tmp_path):
    path, state = tmp_path / "w.npz", paper_network(3).state_dict()
    arrays = {name: value.numpy() for name, value in state.items()}
    np.savez(path, **arrays)
    found = load_weights(path).state_dict()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match="truncated or is none"):
        load_weights(path)
    for name, wrong in (
        ("fc2.bias", np.zeros(3)),
        ("fc2.bias", 1j * np.ones(10)),
        ("x", np.ones(3)),
    ):
        np.savez(path, **(arrays | {name: wrong}))
        with pytest.raises(ModelError, match=f"of '{name}', for one"):
            load_weights(path)
