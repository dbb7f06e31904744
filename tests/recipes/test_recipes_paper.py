"""The paper's network, its weights, and MNIST's files as they are downloaded."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
import torch

from deltabars.errors import BadValueError, DataError, ModelError
from deltabars.recipes.images import read_idx, read_mnist
from deltabars.recipes.paper import PaperNetwork, load_weights, paper_network

IMAGES = np.arange(3 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(3, 28, 28)
LABELS = np.array([7, 0, 9], dtype=np.uint8)


def idx_bytes(array, magic=b"\x00\x00\x08"):
    return magic + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + bytes(array)


def write(path, content, zipped):
    path.write_bytes(gzip.compress(content) if zipped else content)
    return path


def write_mnist(folder, zipped, part="train"):
    end = ".gz" if zipped else ""
    write(folder / f"{part}-images-idx3-ubyte{end}", idx_bytes(IMAGES), zipped)
    write(folder / f"{part}-labels-idx1-ubyte{end}", idx_bytes(LABELS), zipped)


class TestNetwork:
    def test_size_and_names(self):
        network = PaperNetwork()
        assert sum(weight.numel() for weight in network.parameters()) == 93_322
        assert [name for name, _ in network.named_children()] == [
            "conv1", "conv2", "conv3", "fc1", "fc2",
        ]  # fmt: skip
        assert network(torch.zeros(2, 1, 28, 28)).shape == (2, 10)

    def test_seed_decides_the_weights_and_the_caller_s_is_kept(self):
        torch.manual_seed(5)
        expected = torch.rand(1)
        torch.manual_seed(5)
        one, same, other = paper_network(0), paper_network(0), paper_network(1)
        assert torch.equal(torch.rand(1), expected)
        assert torch.equal(one.fc2.weight, same.fc2.weight)
        assert not torch.equal(one.fc2.weight, other.fc2.weight)


class TestWeights:
    def save(self, path, **changes):
        arrays = {name: value.numpy() for name, value in paper_network(3).state_dict().items()}
        np.savez(path, **(arrays | changes))
        return path

    def test_round_trip(self, tmp_path):
        network = load_weights(self.save(tmp_path / "w.npz"))
        assert not network.training
        for name, value in paper_network(3).state_dict().items():
            assert torch.equal(network.state_dict()[name], value)

    def test_missing(self, tmp_path):
        with pytest.raises(ModelError, match=r"none\.npz, which does not exist"):
            load_weights(tmp_path / "none.npz")

    def test_truncated(self, tmp_path):
        path = self.save(tmp_path / "w.npz")
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(ModelError, match="truncated or is none"):
            load_weights(path)

    @pytest.mark.parametrize("change", [{"fc2.bias": np.zeros(3)}, {"fc3.bias": np.zeros(3)}])
    def test_other_arrays(self, tmp_path, change):
        with pytest.raises(ModelError, match=f"of '{next(iter(change))}', for one"):
            load_weights(self.save(tmp_path / "w.npz", **change))


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzipped"])
class TestIdx:
    def test_items(self, tmp_path, zipped):
        path = write(tmp_path / "x", idx_bytes(IMAGES), zipped)
        assert torch.equal(read_idx(path), torch.from_numpy(IMAGES))
        assert torch.equal(read_idx(path, 2), torch.from_numpy(IMAGES[:2]))

    @pytest.mark.parametrize("length", [0, 3, 9, 100])
    def test_truncated(self, tmp_path, zipped, length):
        path = write(tmp_path / "x", idx_bytes(IMAGES)[:length], zipped)
        with pytest.raises(DataError, match=r"idx file: expected .*, got .*x"):
            read_idx(path)

    def test_too_long(self, tmp_path, zipped):
        path = write(tmp_path / "x", idx_bytes(LABELS) + b"!", zipped)
        with pytest.raises(DataError, match="expected 3 bytes after the header, got more"):
            read_idx(path)

    def test_wrong_magic(self, tmp_path, zipped):
        path = write(tmp_path / "x", idx_bytes(LABELS, b"\x00\x00\x0d"), zipped)
        with pytest.raises(DataError, match="got 00 00 0d 01"):
            read_idx(path)

    def test_fewer_than_asked_for(self, tmp_path, zipped):
        path = write(tmp_path / "x", idx_bytes(LABELS), zipped)
        with pytest.raises(DataError, match="expected 4 items or more, got 3"):
            read_idx(path, 4)

    def test_mnist(self, tmp_path, zipped):
        write_mnist(tmp_path, zipped)
        images, labels = read_mnist(tmp_path)
        assert images.shape == (3, 1, 28, 28)
        assert images.dtype == torch.float32
        assert torch.equal((images[:, 0] * 255).round().byte(), torch.from_numpy(IMAGES))
        assert labels.tolist() == [7, 0, 9]
        assert len(read_mnist(tmp_path, count=1)[1]) == 1


def test_gzip_file_that_is_cut_off(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(idx_bytes(IMAGES))[:-20])
    with pytest.raises(DataError, match="cut short"):
        read_idx(path)


def test_missing_file(tmp_path):
    with pytest.raises(DataError, match="got nothing there"):
        read_idx(tmp_path / "x")
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte or .*\.gz in the folder"):
        read_mnist(tmp_path)


def test_images_and_labels_must_belong_together(tmp_path):
    write_mnist(tmp_path, False)
    write(tmp_path / "train-labels-idx1-ubyte", idx_bytes(LABELS[:2]), False)
    with pytest.raises(DataError, match="n images of two dimensions and n labels"):
        read_mnist(tmp_path)


def test_unknown_part(tmp_path):
    with pytest.raises(BadValueError, match="part: expected one of"):
        read_mnist(tmp_path, "t10k")
