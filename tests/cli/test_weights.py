"""Files of weights: read as torch reads them, without its unpickler, within bounded memory."""

from __future__ import annotations

import argparse
import io
import json
import os
import struct
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import deltabars
from deltabars.cli.sources.models import NamedModel
from deltabars.cli.sources.weights import read_weights
from deltabars.errors import CorruptFileError, DeltaBarsError, ModelError
from deltabars.storage.reading import parse_json
from tests.hostile import in_child
from tests.networks import dense

MIB = 1 << 20
KINDS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.uint16,
)  # fmt: skip


def every_kind() -> dict[str, torch.Tensor]:
    """Tensors of every kind: views, shared, transposed, empty, without dimensions, parameters."""
    whole = torch.arange(60.0).reshape(5, 12)
    found = {str(kind): (torch.arange(7) % 2).to(kind) for kind in KINDS}
    return found | {
        "whole": whole, "row": whole[2], "column": whole[:, 3], "transposed": whole.T,
        "expanded": torch.ones(1).expand(3, 4), "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.5), "parameter": nn.Parameter(torch.ones(2)),
        "buffer": nn.Buffer(torch.ones(3)), "channels": torch.rand(2, 3, 4, 5).to(
            memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j]).conj(), "negative": torch.tensor([1 + 2j]).conj().imag,
    }  # fmt: skip


class TestAsTorchReadsThem:
    @pytest.mark.parametrize("options", [
        {}, {"_use_new_zipfile_serialization": False}, {"pickle_protocol": 4},
        {"pickle_protocol": 5},
    ])  # fmt: skip
    def test_every_kind(self, options, tmp_path):
        state = every_kind()
        if "_use_new_zipfile_serialization" in options:  # which it could not write either
            state = {name: value for name, value in state.items() if "8_e4" not in name}
            state.pop("torch.uint16")
        torch.save(state, tmp_path / "a.pt", **options)
        found = read_weights(tmp_path / "a.pt")
        expected = torch.load(tmp_path / "a.pt", weights_only=False)
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert found[name].dtype == value.dtype, name
            assert found[name].stride() == value.stride(), name
            kind = torch.float32 if value.dtype == torch.float8_e4m3fn else value.dtype
            assert torch.equal(found[name].to(kind), value.to(kind)), name
        assert found["row"].data_ptr() == found["whole"][2].data_ptr()

    @pytest.mark.parametrize("legacy", [False, True])
    def test_state_dicts_of_modules(self, legacy, tmp_path):
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.LSTM(3, 4))
        options = {"_use_new_zipfile_serialization": not legacy}
        torch.save(model.state_dict(), tmp_path / "a.bin", **options)
        found = read_weights(tmp_path / "a.bin")
        assert list(found) == list(model.state_dict())
        assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())

    @pytest.mark.parametrize(
        "key", ["state_dict", "model_state_dict", "model", "module", "weights", None]
    )
    def test_checkpoints_with_other_things(self, key, tmp_path):
        """Hyperparameters of any class, optimisers and schedules are beside the weights."""

        model = dense()
        optimiser = torch.optim.Adam(model.parameters())
        model(torch.rand(2, 4)).sum().backward()
        optimiser.step()
        other = {
            "epoch": 3, "optimizer_states": [optimiser.state_dict()], "none": None,
            "hyper_parameters": argparse.Namespace(width=5, path=io.BytesIO()),
            "classes": {"cat", "dog"}, "bytes": b"abc", "best": np.float64(0.5),
            "frozen": frozenset({1}),
            "range": range(3), "error": ValueError("x"), "config": OrderedDict(a=[1, (2, 3.5)]),
            "torch": torch.torch_version.TorchVersion("2.11"), "device": torch.device("cpu"),
            "activation": nn.ReLU(), "dtype": torch.float32, "size": torch.Size([1, 2]),
            "deep": {1: {"model": {2: 3}}},
        }  # fmt: skip
        state = OrderedDict(model.state_dict())
        whole = {**other, key: state} if key else {**other, "model": {"state_dict": state}}
        for number, options in enumerate(({}, {"_use_new_zipfile_serialization": False})):
            torch.save(whole, tmp_path / f"{number}.ckpt", **options)
            found = read_weights(tmp_path / f"{number}.ckpt")
            assert list(found) == list(state)
            assert all(torch.equal(found[name], value) for name, value in state.items())


class TestNames:
    """What wrappers put before or into the names of weights."""

    def given(self, names, tmp_path, capsys, **more):
        model = dense()
        state = {name: value + 1 for name, value in model.state_dict().items()}
        torch.save({**{names(name): value for name, value in state.items()}, **more},
                   tmp_path / "a.ckpt")  # fmt: skip
        found = NamedModel("tests.networks:dense", str(tmp_path / "a.ckpt")).load().state_dict()
        assert all(torch.equal(found[name], value) for name, value in state.items())
        return capsys.readouterr().err

    @pytest.mark.parametrize("prefix", [
        "module.", "model.", "net.", "_orig_mod.", "module._orig_mod.", "model.net.", "any.thing.",
        "_orig_mod.module.model.",
    ])  # fmt: skip
    def test_prefixes(self, prefix, tmp_path, capsys):
        said = self.given(lambda name: prefix + name, tmp_path, capsys)
        assert said.count("\n") == 1
        assert prefix.split(".")[-2] in said
        assert "is taken off 4 names" in said

    def test_wrappers_within(self, tmp_path, capsys):
        said = self.given(lambda name: name.replace("0.", "0._orig_mod."), tmp_path, capsys)
        assert "'_orig_mod.' is taken off 4 names" in said

    def test_names_that_agree_need_no_notice(self, tmp_path, capsys):
        assert self.given(str, tmp_path, capsys) == ""

    def test_others_beside_them(self, tmp_path, capsys):
        """Of a loss, a metric, or an average of the weights."""
        other = {"loss.weight": torch.ones(3), "ema.0.weight": torch.ones(5, 4)}
        said = self.given(lambda name: f"net.{name}", tmp_path, capsys, **other)
        assert "and 2 others are left out" in said
        with pytest.raises(ModelError, match="unknown"):  # `ours` might be anything
            self.given(lambda name: f"ours.{name}", tmp_path, capsys, **other)
        with pytest.raises(ModelError, match="unknown"):
            self.given(str, tmp_path, capsys, **other)

    def test_two_sets_of_them(self, tmp_path, capsys):
        again = {f"model.{name}": value for name, value in dense().state_dict().items()}
        with pytest.raises(ModelError, match=r"got 2, under 'model\.' and 'net\.'"):
            self.given(lambda name: f"net.{name}", tmp_path, capsys, **again)

    def test_a_model_that_is_compiled(self, tmp_path):
        state = {name: value + 1 for name, value in dense().state_dict().items()}
        torch.save(state, tmp_path / "a.pt")
        path = tmp_path / "net.py"
        path.write_text(
            "from torch import nn\nfrom tests.networks import dense\n\n\n"
            "class Compiled(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self._orig_mod = dense()\n"
        )
        found = NamedModel(f"{path}:Compiled", str(tmp_path / "a.pt")).load()
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


def tensor(count: int, size: int, key: str = "0") -> bytes:
    """Steps that leave a tensor (size,) of a storage of `count` numbers."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu")
    storage += b"\x8a\x08" + struct.pack("<q", count) + b"tQ"
    shape = b"\x8a\x08" + struct.pack("<q", size) + b"\x85"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + shape + b"K\x01\x85\x89}tR"
    )


def nested(depth: int) -> bytes:
    """Calls that double a text so often, of which torch's own reader makes 1.7 GB."""
    body = b"C\x14" + b"x" * 20
    for _ in range(depth):
        body = b"h\x00" + body + text("hex_codec") + b"\x86R"
    return b"\x80\x02c_codecs\nencode\nq\x000" + body + b"."


FILES = {
    "calls in one another": zipped(nested(26)),
    "calls in one another, legacy": nested(26),
    "an archive behind a pickle": b"\x80\x02cbuiltins\nbytearray\n\x8a\x08"
    + struct.pack("<q", 6 << 30) + b"\x85R." + zipped(b"\x80\x02}."),
    "a storage beyond its record": zipped(
        b"\x80\x02}" + text("a") + tensor(1 << 20, 1 << 20) + b"s.", **{"data/0": b"\0\0\0\0"}
    ),
    "a tensor beyond its storage": zipped(
        b"\x80\x02}" + text("a") + tensor(1, 1 << 40) + b"s.", **{"data/0": b"\0\0\0\0"}
    ),
    "a negative size": zipped(
        b"\x80\x02}" + text("a") + tensor(-1, -1) + b"s.", **{"data/0": b"\0\0\0\0"}
    ),
    "many dicts": zipped(b"\x80\x02" + b"}" * (10 * MIB) + b"."),
    "many sets": zipped(b"\x80\x04" + b"\x8f" * (10 * MIB) + b"."),
    "many marks": zipped(b"\x80\x04" + b"(" * (10 * MIB) + b"."),
    "many that are remembered": zipped(b"\x80\x04" + b"}\x94" * (5 * MIB) + b"."),
    "a far memo": zipped(b"\x80\x02}r\xff\xff\xff\x7f."),
    "a long text": zipped(b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"."),
    "a long frame": zipped(b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"."),
    "a long array": zipped(b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"."),
    "a circle": zipped(b"\x80\x02}q\x00" + text("model") + b"h\x00s."),
    "doubled tuples": zipped(b"\x80\x02)" + b"2\x86" * 200 + b"."),
    "a doubled key": zipped(b"\x80\x02})" + b"2\x86" * 200 + b"Ns."),
    "a large number": zipped(b"\x80\x02L" + b"9" * MIB + b"L\n."),
    "the attributes of a function": zipped(
        b"\x80\x02ctorch._utils\n_rebuild_parameter\nN}" + text("call") + b"Ns\x86b."
    ),
    "a persistent text": zipped(b"\x80\x02Pa\n."),
    "an extension": zipped(b"\x80\x02\x82\x01."),
    "nothing": zipped(b""),
    "no pickle": zipped(b"\x80\x02}.").replace(b"data.pkl", b"date.pkl"),
}  # fmt: skip


class TestBounds:
    @pytest.mark.parametrize("name", FILES)
    def test_refused_in_little_memory(self, name, tmp_path):
        path = tmp_path / "a.pt"
        path.write_bytes(FILES[name])

        def work():
            try:
                read_weights(path)
            except ModelError as error:
                return 0, 1, [] if "\n" not in str(error) else [str(error)]
            return 1, 0, ["it was read"]

        found = in_child(work)
        assert found.wrong == []
        assert found.peak < 10 * len(FILES[name]) + 48 * MIB

    def test_a_legacy_file_whose_storages_are_longer(self, tmp_path):
        torch.save({"a": torch.ones(9)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
        good = (tmp_path / "a.pt").read_bytes()
        at = good.index(b"cpu")
        for old, new in ((b"K\t", b"K\x0a"), (b"K\t", b"K\x08"), (b"K\t", b"J\xff\xff\xff\x7f")):
            (tmp_path / "b.pt").write_bytes(good[:at] + good[at:].replace(old, new, 1))
            with pytest.raises(ModelError, match=r"broken or none"):
                read_weights(tmp_path / "b.pt")
        (tmp_path / "b.pt").write_bytes(good[:-4])
        with pytest.raises(ModelError, match=r"it is truncated"):
            read_weights(tmp_path / "b.pt")

    def test_records_that_overlap_or_are_packed(self, tmp_path):
        torch.save({"a": torch.zeros(100_000)}, tmp_path / "a.pt")
        with (
            zipfile.ZipFile(tmp_path / "a.pt") as whole,
            zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as packed,
        ):
            for member in whole.infolist():
                packed.writestr(member.filename, whole.read(member))
        content = zipped(b"\x80\x02}.", a=b"x" * 10_000, b="")
        # The record b, said to be as long as a, and to begin where that does.
        center = bytearray(content[content.index(b"PK\1\2") :])
        entries = center.split(b"PK\1\2")[1:]
        entries[-1] = (
            entries[-2].replace(b"a/a", b"a/b") + entries[-1][entries[-1].index(b"PK\5") :]
        )
        forged = content[: content.index(b"PK\1\2")] + b"".join(b"PK\1\2" + e for e in entries)
        (tmp_path / "c.pt").write_bytes(forged)
        for name in ("b.pt", "c.pt"):
            with pytest.raises(ModelError, match=r"overlap|packed"):
                read_weights(tmp_path / name)

    @pytest.mark.parametrize("kind", ["safetensors", "deltabars"])
    def test_long_headers(self, kind, tmp_path):
        """59 MiB of JSON would take 1.6 GB."""
        path = tmp_path / f"a.{kind}"
        many = b"{" + b",".join(b'"%07d":[]' % number for number in range(1_500_000)) + b"}"
        for text in (many, many[: 4 * MIB - 10] + b"0]}", b'{"a":"' + b"x" * (18 * MIB) + b'"}'):
            path.write_bytes(struct.pack("<Q", len(text)) + text)

            def work():
                try:
                    if kind == "deltabars":
                        deltabars.load(path, nn.Linear(1, 1))
                    else:
                        read_weights(path)
                except DeltaBarsError:
                    return 0, 1, []
                return 1, 0, ["it was read"]

            found = in_child(work)
            assert found.wrong == []
            assert found.peak < 96 * MIB
        with pytest.raises(ValueError, match="more than 1,048,576 values"):
            parse_json(many)

    def test_long_headers_that_tensors_need_are_read(self, tmp_path):
        state = {f"layers.{number}.weight": torch.zeros(1) for number in range(50_000)}
        save_file(state, tmp_path / "a.safetensors")
        assert struct.unpack("<Q", (tmp_path / "a.safetensors").read_bytes()[:8])[0] > 3 * MIB
        assert len(read_weights(tmp_path / "a.safetensors")) == 50_000
        torch.save(dict(list(state.items())[:5000]), tmp_path / "a.pt")
        assert len(read_weights(tmp_path / "a.pt")) == 5000

    def test_a_header_of_a_fit_that_is_too_long(self, tmp_path):
        text = json.dumps({"__metadata__": {"deltabars": "[" + "{}," * 2_000_000 + "{}]"}}).encode()
        (tmp_path / "a").write_bytes(struct.pack("<Q", len(text)) + text)
        with pytest.raises(CorruptFileError, match="is not a deltabars file"):
            deltabars.load(tmp_path / "a", nn.Linear(1, 1))

    def test_nothing_of_a_pickle_is_imported(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "evil7.py").write_text("open('executed', 'w')\nclass A: pass\n")
        call = b"\x80\x02cevil7\nA\n)\x81}b."
        for name, content in (("a.ckpt", zipped(call)), ("b.ckpt", call)):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ModelError, match=r"evil7\.A, which would run|does not begin"):
                read_weights(tmp_path / name)
        assert not os.path.exists("executed")
