"""Files of weights: read as torch reads them, without code, within bounded memory."""

from __future__ import annotations

import argparse
import io
import struct
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from deltabars.cli.sources.models import NamedModel, read_weights
from deltabars.errors import ModelError
from tests.hostile import in_child
from tests.networks import dense

MIB = 1 << 20
LEGACY = {"_use_new_zipfile_serialization": False}


class TestAsTorchReadsThem:
    @pytest.mark.parametrize("options", [{}, LEGACY])
    def test_tensors_of_every_kind(self, options, tmp_path):
        kinds = (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
        whole = torch.arange(60.0).reshape(5, 12)
        state = {str(kind): (torch.arange(7) % 2).to(kind) for kind in kinds} | {
            "row": whole[2], "transposed": whole.T, "empty": torch.zeros(0, 3),
            "expanded": torch.ones(1).expand(3, 4), "parameter": nn.Parameter(torch.ones(2)),
        }  # fmt: skip
        torch.save(state, tmp_path / "a.pt", **options)
        found = read_weights(tmp_path / "a.pt")
        assert list(found) == list(state)
        for name, value in state.items():
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name

    @pytest.mark.parametrize("key", ["state_dict", "model", None])
    def test_checkpoints_with_other_things(self, key, tmp_path):
        """Hyperparameters of any class, optimisers and schedules are beside the weights."""
        model = dense()
        optimiser = torch.optim.Adam(model.parameters())
        model(torch.rand(2, 4)).sum().backward()
        optimiser.step()
        plain = {"epoch": 3, "optimizer_states": [optimiser.state_dict()], "dtype": torch.float32}
        classes = {
            "hyper_parameters": argparse.Namespace(width=5, path=io.BytesIO()),
            "classes": {"cat", "dog"}, "best": np.float64(0.5), "error": ValueError("x"),
            "config": OrderedDict(a=[1, (2, 3.5)]), "activation": nn.ReLU(),
        }  # fmt: skip
        state = OrderedDict(model.state_dict())
        inside = {key: state} if key else {"model": {"state_dict": state}}
        torch.save({**plain, **classes, **inside}, tmp_path / "a.ckpt")
        torch.save({**plain, **inside}, tmp_path / "b.ckpt", **LEGACY)
        for name in ("a.ckpt", "b.ckpt"):
            found = read_weights(tmp_path / name)
            assert list(found) == list(state)
            assert all(torch.equal(found[name], value) for name, value in state.items())


class TestNames:
    """What wrappers put before or into the names of weights."""

    def given(self, names, tmp_path, capsys, **more):
        state = {name: value + 1 for name, value in dense().state_dict().items()}
        renamed = {names(name): value for name, value in state.items()}
        torch.save({**renamed, **more}, tmp_path / "a.ckpt")
        found = NamedModel("tests.networks:dense", str(tmp_path / "a.ckpt")).load().state_dict()
        assert all(torch.equal(found[name], value) for name, value in state.items())
        return capsys.readouterr().err

    @pytest.mark.parametrize("prefix", ["any.thing.", "_orig_mod.module.model."])
    def test_prefixes(self, prefix, tmp_path, capsys):
        said = self.given(lambda name: prefix + name, tmp_path, capsys)
        assert prefix.split(".")[-2] in said
        assert "is taken off 4 names" in said

    def test_wrappers_within_and_others_beside_them(self, tmp_path, capsys):
        said = self.given(lambda name: name.replace("0.", "0._orig_mod."), tmp_path, capsys)
        assert "'_orig_mod.' is taken off 4 names" in said
        assert self.given(str, tmp_path, capsys) == ""
        other = {"loss.weight": torch.ones(3), "ema.0.weight": torch.ones(5, 4)}
        said = self.given(lambda name: f"net.{name}", tmp_path, capsys, **other)
        assert "and 2 others are left out" in said
        with pytest.raises(ModelError, match="unknown"):
            self.given(str, tmp_path, capsys, **other)
        again = {f"model.{name}": value for name, value in dense().state_dict().items()}
        with pytest.raises(ModelError, match=r"got 2, under 'model\.' and 'net\.'"):
            self.given(lambda name: f"net.{name}", tmp_path, capsys, **again)

    def test_a_model_that_is_compiled(self, tmp_path):
        state = {name: value + 1 for name, value in dense().state_dict().items()}
        torch.save(state, tmp_path / "a.pt")
        path = tmp_path / "net.py"
        text = "from torch import nn\nfrom tests.networks import dense\n"
        path.write_text(text + 'make = lambda: nn.ModuleDict({"_orig_mod": dense()})\n')
        found = NamedModel(f"{path}:make", str(tmp_path / "a.pt")).load()
        assert torch.equal(next(found.parameters()), next(iter(state.values())))


def zipped(pickled: bytes, **records: bytes) -> bytes:
    """An archive as torch writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in {"data.pkl": pickled, "version": b"3\n", **records}.items():
            archive.writestr(f"a/{name}", content)
    return buffer.getvalue()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def tensor(count: int, size: int) -> bytes:
    """An archive with a tensor (size,) of a storage of `count` numbers, of which one is there."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
    storage += b"\x8a\x08" + struct.pack("<q", count) + b"tQ"
    shape = b"\x8a\x08" + struct.pack("<q", size) + b"\x85"
    made = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + shape
    made += b"K\x01\x85\x89}tR"
    return zipped(b"\x80\x02}" + text("a") + made + b"s.", **{"data/0": b"\0\0\0\0"})


def nested(depth: int) -> bytes:
    """Calls that double a text so often, of which torch's own reader makes 1.7 GB."""
    body = b"C\x14" + b"x" * 20
    for _ in range(depth):
        body = b"c_codecs\nencode\n" + body + text("hex_codec") + b"\x86R"
    return b"\x80\x02" + body + b"."


BYTES = b"\x80\x02cbuiltins\nbytearray\n\x8a\x08" + struct.pack("<q", 6 << 30) + b"\x85R."
FILES = {
    "calls in one another": zipped(nested(26)),
    "calls in one another, legacy": nested(26),
    "many bytes": zipped(BYTES),
    "an archive behind a pickle": BYTES + zipped(b"\x80\x02}."),
    "a storage beyond its record": tensor(1 << 20, 1 << 20),
    "a tensor beyond its storage": tensor(1, 1 << 40),
    "a negative size": tensor(-1, -1),
    "many dicts": zipped(b"\x80\x02" + b"}" * (10 * MIB) + b"."),
    "a far memo": zipped(b"\x80\x02}r\xff\xff\xff\x7f."),
    "a long text": zipped(b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"."),
    "a circle": zipped(b"\x80\x02}q\x00" + text("model") + b"h\x00s."),
    "a large number": zipped(b"\x80\x02L" + b"9" * MIB + b"L\n."),
    "nothing": zipped(b""),
    "no pickle": zipped(b"\x80\x02}.").replace(b"data.pkl", b"date.pkl"),
}


class TestBounds:
    def refused_within(self, bound, path):
        def work():
            try:
                read_weights(path)
            except ModelError as error:
                return 0, 1, [] if "\n" not in str(error) else [str(error)]
            return 1, 0, ["it was read"]

        found = in_child(work)
        assert found.wrong == []
        assert found.peak < bound

    @pytest.mark.parametrize("name", FILES)
    def test_refused_in_little_memory(self, name, tmp_path):
        (tmp_path / "a.pt").write_bytes(FILES[name])
        self.refused_within(10 * len(FILES[name]) + 48 * MIB, tmp_path / "a.pt")

    def test_a_legacy_file_whose_storages_are_others(self, tmp_path):
        torch.save({"a": torch.ones(9)}, tmp_path / "a.pt", **LEGACY)
        good = (tmp_path / "a.pt").read_bytes()
        at = good.index(b"cpu")
        longer = good[:at] + good[at:].replace(b"K\t", b"J\xff\xff\xff\x7f", 1)
        for content in (longer, good[:-4]):
            (tmp_path / "b.pt").write_bytes(content)
            with pytest.raises(ModelError, match="broken or is none"):
                read_weights(tmp_path / "b.pt")

    def test_long_headers(self, tmp_path):
        """59 MiB of JSON would take 1.6 GB."""
        path = tmp_path / "a.safetensors"
        many = b"{" + b",".join(b'"%07d":[]' % number for number in range(1_500_000)) + b"}"
        for text in (many, many[: 4 * MIB - 10] + b"0]}", b'{"a":"' + b"x" * (18 * MIB) + b'"}'):
            path.write_bytes(struct.pack("<Q", len(text)) + text)
            self.refused_within(96 * MIB, path)

    def test_what_tensors_need_is_read(self, tmp_path):
        state = {f"layers.{number}.weight": torch.zeros(1) for number in range(5000)}
        for name, save in (("a.safetensors", save_file), ("a.pt", torch.save)):
            save(state, tmp_path / name)
            assert len(read_weights(tmp_path / name)) == 5000
