"""Bad input to the commands: one clear line, exit code 1 or 2, and nothing left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from deltabars.cli.entry import main
from deltabars.errors import printable
from tests.scans import only_line
from tests.workshop import contents


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to be in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def picture(path: str, height: int = 8, width: int = 8, mode: str = "L") -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (width, height)).save(path)


def ten_classes(height: int = 8, folder: str = "data") -> None:
    for k in range(10):
        picture(f"{folder}/{k}/0.png", height)


def truncated() -> None:
    path = Path("data/3/b.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:60])


# What is wrong with files of the current folder: texts to write, or something to do.
WRONG = {
    "": {},
    "wrong names": lambda model: save_file({"net.0.weight": torch.zeros(2)}, "w.safetensors"),
    "wrong shapes": lambda model: save_file(
        {**model.state_dict(), "1.bias": torch.zeros(7)}, "w.safetensors"
    ),
    "code": lambda model: torch.save(model, "w.pt"),
    "empty": lambda model: Path("data").mkdir(),
    "flat": lambda model: picture("data/a.png"),
    "mixed sizes": lambda model: (ten_classes(), picture("data/4/b.png", 9, 8)),
    "truncated": lambda model: (ten_classes(), truncated()),
    "huge": lambda model: (ten_classes(), picture("data/3/b.png", 10_000, 10_000, "1")),
    "beside": lambda model: (ten_classes(), picture("data/loose.png")),
    "few classes": lambda model: picture("data/0/a.png"),
    "other size": lambda model: ten_classes(12),
    "existing": {"run/thesis.txt": "mine"},
    "unknown key": {"c.toml": 'estimater = "opg"\n'},
    "no flag": {"c.toml": "gray = 1\n"},
    "own error": {"net.py": "def make():\n    values = [1]\n    return values[3]\n"},
    "own end": {"net.py": "import sys\nsys.exit(2)\n"},
}
FIT = [
    ("", ("--model", "none.py:make"), "none.py, which does not exist"),
    ("", ("--model", "no_such_module:make"), "a module that Python finds"),
    ("", ("--model", "net"), "package.module:object or path/to/file.py:object"),
    ("", ("--model", "{net}:mkae"), "an object 'mkae'"),
    ("", ("--model-args", '{"wide": 3}'), "TypeError: make() got an unexpected keyword"),
    ("own error", ("--model", "net.py:make"), "net.py, line 3). --debug"),
    ("own end", ("--model", "net.py:make"), "net.py:make, which ends the program (exit code 2)"),
    ("", ("--weights", "none.safetensors"), "none.safetensors, which does not exist"),
    ("wrong names", ("--weights", "w.safetensors"), "without '1.weight'"),
    ("wrong shapes", ("--weights", "w.safetensors"), "'1.bias' of shape (6,)"),
    ("code", ("--weights", "w.pt"), "would run code when read"),
    ("", ("--data", "nowhere"), "nowhere, which does not exist"),
    ("", ("--data", "{net}:make"), "--gray: expected data of the kind folder with it"),
    ("empty", ("--data", "data"), "got none"),
    ("flat", ("--data", "data"), "got no sub-folders"),
    ("mixed sizes", ("--data", "data"), "8×8 first and 9×8 in data/4/b.png. Resize"),
    ("truncated", ("--data", "data"), "data/3/b.png, which is broken"),
    ("huge", ("--data", "data"), "data/3/b.png, which is broken or is none (Image size"),
    ("beside", ("--data", "data"), "got both: loose.png beside 0/"),
    ("few classes", ("--data", "data"), "got 1 in data for outputs of shape (10,)"),
    ("other size", ("--data", "data"), "pictures (1, 1, 12, 8), got one that does not"),
    ("", ("--mean", "1", "2"), "--mean: expected one number, or one for each of 1 channels, got 2"),
    ("", ("--std", "0"), "--std: expected numbers above zero"),
    ("", ("--size", "1", "2", "3"), "--size: expected one or two"),
    ("", ("--crop",), "--crop: expected --size with it"),
    ("", ("--part", "test"), "--part: expected data of the kind mnist or cifar10"),
    ("", ("--l2", "-1"), "PATTERN=NUMBER …, or auto, got -1.0."),
    ("", ("--l2", "automatic"), "--l2: expected a number, PATTERN=NUMBER …, or auto, got"),
    ("", ("--l2", "auto", "*=1"), "or auto, got 'auto *=1'"),
    ("", ("--device", "warp"), "--device: expected cpu, cuda or cuda:N, got 'warp' ("),
    ("existing", ("--overwrite",), "It is no RUN"),
    ("", ("--out", "/proc/run"), "/proc"),  # where not even the superuser may write
    ("", ("--out", "no/run"), "--out: expected a folder that exists"),
    ("unknown key", ("--config", "c.toml"), "got 'estimater'. The nearest one is 'estimator'"),
    ("no flag", ("--config", "c.toml"), "expected gray = true or false"),
    ("", ("--config", "none.toml"), "none.toml: No such file"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "said"), FIT)
def test_fit_refuses(kind, options, said, workshop, place, capsys):
    wrong = WRONG[kind]
    for name, text in {} if callable(wrong) else wrong.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    if callable(wrong):
        wrong(workshop.model)
    before = contents(place)
    given = [option.replace("{net}", str(workshop.folder / "net.py")) for option in options]
    assert main(["fit", *workshop.options, "--out", "run", "--quiet", *given]) == 1
    assert said in only_line(capsys)
    assert contents(place) == before


TOUCHING = """\
def pair():
    open("read", "w").close()
    raise ValueError("these data must not be read")
"""
EARLY = [
    *(("fit", options) for options in (
        "--l2 0", "--l2 none*=1", "--rank 0", "--rank 461", "--rank auto --tolerance 0",
        "--seed -1", "--tolerance 0.1", "--batch-size 0", "--residual-tolerance 0",
        "--max-products 0", "--smallest 1", "--params none*", "--max-seconds 0", "--pos-weight 1",
        "--solver incremental --estimator hessian",
    )),
    ("predict", "--rank 31"), ("predict", "--batch-size 0"), ("rank", "--estimator ggn"),
    ("rank", "--count 0"), ("rank", "--out x.xls"), ("report", "--classes 12"),
    ("report", "--rows 0"), ("report", "--out x.pdf"),
    *(("check", f"{options} --replicas a.pt b.pt") for options in (
        "--out x.pdf.html", "--calibrate no/new",
    )),
    ("check", "--replicas a.pt"),
    *(("check", f"{options} --train data.py:pair") for options in (
        "--count 1", "--seed -1", "--folder no/where",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("command", "options"), EARLY)
def test_values_are_checked_before_data_are_read(command, options, workshop, place, capsys):
    options = options.split()
    Path("data.py").write_text(TOUCHING)
    first = {
        "fit": [*(word for word in workshop.options if word != "--gray"), "--out", "new"],
        "report": [str(workshop.run), "--out", "page.html"],
    }.get(command, [str(workshop.run)])
    assert main([command, *first, "--data", "data.py:pair", "--quiet", *options]) == 1
    line = only_line(capsys)
    assert "must not be read" not in line
    assert any(option in line for option in options[::2])
    assert contents(place) == {"data.py"}


TRAIN = """\
import torch

word = "a text"
nothing = lambda sample: None
other = lambda sample: torch.nn.Linear(2, 3)


def fails(sample):
    raise RuntimeError("no luck")
"""
RUN = [
    ("predict none --data {test}", "none, which does not exist"),
    ("predict {folder} --data {test}", "has no run.json"),
    ("predict run --data classes", "the difference: 0, 1, 2, 3, 4"),
    ("predict run --data large", "expected torch.float32 (B, 1, 8, 8)"),
    ("predict run --data {test} --out classes.csv", "got the folder"),
    ("predict run --data {test} --out a.csv", "got a.csv. Give --overwrite"),
    ("predict run --data {test} --out a/ --overwrite", "expected a FILE as"),
    ("predict run --data {test} --block-size 5", "a folder as --out with it"),
    ("predict run --data {test} --out no/out/", "a folder that exists"),
    ("predict run --data {test} --classes 1 b", "--classes: expected"),
    ("predict run --data {test} --weights w.pt", "fitted to other weights"),
    ("rank run --data {flat} --wrong", "expected data with targets"),
    ("rank run --data {flat} --by target", "expected class numbers as targets"),
    ("check run --data {test} --replicas none.pt w.pt", "--replicas: expected a file, got none.pt"),
    ("check run --data {test} --replicas w.pt a.csv", "expected a file that ends in"),
    ("check run --data {test} --replicas w.pt code.pt", "--replicas: expected a state dict"),
    ("check run --data {test} --replicas w.pt other.pt", "--replicas: expected the names of"),
    ("check run --data {test} --replicas w.pt w.pt --calibrate classes", "--calibrate: expected"),
    ("check run --data large --replicas w.pt w.pt", "expected torch.float32 (B, 1, 8, 8)"),
    ("check run --data {test} --train none.py:f", "--train: expected a Python file, got none.py"),
    ("check run --data {test} --train train.py:word", "--train: expected a function, got"),
    (
        "check run --data {test} --train train.py:nothing",
        "train.py:nothing: expected a module, a state dict",
    ),
    ("check run --data {test} --train train.py:other", "(the first difference: '1.weight')"),
    ("check run --data {test} --train train.py:fails", "RuntimeError: no luck ("),
    ("check run --data {test} --train train.py:other --folder classes", "a new or empty folder"),
    ("spectrum run --out x.doc", "one of .png, .pdf, .svg"),
    ("spectrum run --values x.doc", "--values: expected a file name"),
    ("demo --report x.pdf", "--report: expected a file name that ends in one of .html"),
]


@pytest.mark.parametrize(("arguments", "said"), RUN)
def test_commands_on_a_run_refuse(arguments, said, workshop, place, capsys):
    ten_classes(folder="classes")
    Path("classes.csv").mkdir()
    Path("a.csv").write_text("mine")
    picture("large/a.png", 9, 9)
    torch.save({name: value + 1 for name, value in workshop.model.state_dict().items()}, "w.pt")
    torch.save(torch.nn.Linear(2, 3).state_dict(), "other.pt")
    torch.save(workshop.model, "code.pt")
    Path("train.py").write_text(TRAIN)
    shutil.copytree(workshop.run, "run")
    folder = workshop.folder
    paths = {"folder": folder, "test": folder / "test", "flat": folder / "flat"}
    before = contents(place)
    assert main([*arguments.format(**paths).split(), "--quiet"]) == 1
    assert said in only_line(capsys)
    # The predictions that rank has made are kept, and what says of which fit a check is.
    left = contents(place) - before - {"run/check", "run/check/check.json"}
    assert all(name.startswith("run/predictions") and "draft" not in name for name in left)
    assert Path("a.csv").read_text() == "mine"


@pytest.mark.parametrize("line", [
    "nonsense", "--quiet demo", "demo --nonsense", "demo --out", "fit", "fit --rank many",
    "fit --memory-budget lots", "fit --model-args [1]", "fit --conf x.toml", "predict run",
    "rank run --by taste", "fit --estimator best", "predict run --data x --spread wide",
    "check run --replicas a b", "check run --inputs x", "check run --inputs x --spread no",
    "check run --inputs x --train a:b --replicas c d",
    "check run --inputs x --replicas a b --count 3",
])  # fmt: skip
def test_wrong_usage_is_exit_code_2_and_one_line(line, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    first = line.split()[0]
    usage = (
        f"deltabars {first}"
        if first in ("demo", "fit", "predict", "rank", "check")
        else "deltabars"
    )
    assert f"(usage: {usage} --help)" in only_line(capsys)


def test_names_of_classes_are_as_many_as_outputs(workshop, place, capsys):
    """Refused before anything long, at the fit and at a prediction with a fit without names."""
    count, names = 3, ("a", "b", "c")
    arrays = {"images": workshop.train[0].numpy(), "labels": workshop.train[1].numpy()}
    np.savez("named.npz", **arrays, classes=names)
    np.savez("plain.npz", **arrays)
    options = [word for word in workshop.options if word != "--gray"]
    assert main(["fit", *options, "--data", "named.npz", "--out", "run", "--quiet"]) == 1
    assert f"a class name for each output of the model, got {count}" in only_line(capsys)
    assert main(["fit", *options, "--data", "plain.npz", "--out", "run", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["predict", "run", "--data", "named.npz", "--quiet"]) == 1
    assert f"a class name for each of the 10 outputs, got {count}" in only_line(capsys)


def test_an_altered_run_is_refused(workshop, place, capsys):
    shutil.copytree(workshop.run, "run")
    content = json.loads(Path("run/run.json").read_text())
    for altered in ("{", "[]", "{}", json.dumps(content | {"outputs": 0})):
        Path("run/run.json").write_text(altered)
        assert main(["spectrum", "run"]) == 1
        assert "run.json is altered" in only_line(capsys)
    Path("run/run.json").write_text(json.dumps(content | {"format": 2}))
    assert main(["spectrum", "run"]) == 1
    assert "of a newer deltabars" in only_line(capsys)


class TestNamesOnATerminal:
    BAD = "\x1b[2Jgone\nforged\r\u202eexe\x9b1m\x07"
    SHOWN = r"\u001b[2Jgone\nforged\r\u202eexe\u009b1m\u0007"

    def test_all_that_commands_print(self, workshop, place, capsys):
        images = (workshop.train[0][:, 0] * 255).round().to(torch.uint8).numpy()
        names = [f"{number} {self.BAD}" for number in range(10)]
        np.savez(f"train{self.BAD}.npz", x=images, y=workshop.train[1], classes=names)
        Path(f"broken{self.BAD}.npz").write_text("no")
        Path(f"own{self.BAD}.py").write_text("def make():\n    raise OSError('\\x1b[2J')\n")
        options = [word for word in workshop.options if word != "--gray"]
        for code, arguments in (
            (0, ("fit", *options, "--data", f"train{self.BAD}.npz", "--out", "run")),
            (0, ("rank", "run")),
            (0, ("report", "run", "--out", "a.html")),
            (1, ("rank", f"no{self.BAD}")),
            (1, ("predict", "run", "--data", f"no{self.BAD}", "--debug")),
            (1, ("predict", "run", "--data", f"broken{self.BAD}.npz")),
            (1, ("predict", "run", "--data", f"own{self.BAD}.py:make")),
        ):
            assert main(list(arguments)) == code
            out, err = capsys.readouterr()
            for text in (out, err):
                assert text.replace("\n", "").isprintable(), text
                assert not any(line.startswith("forged") for line in text.splitlines())
            assert self.SHOWN in out + err
            assert ("Traceback" in err) == ("--debug" in arguments)
        assert main(["rank", "run", "--json", "--quiet"]) == 0
        row = json.loads(capsys.readouterr().out)["rows"][0]
        assert row["label_name"].endswith(self.BAD)  # JSON reads the escapes
        assert printable("größe ✓ 画像 \\ 'a'") == "größe ✓ 画像 \\ 'a'"
