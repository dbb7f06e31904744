"""Bad input to the commands: one clear line, exit code 1, and nothing left behind."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from deltabars.cli.entry import main
from deltabars.cli.runs import Run
from deltabars.cli.sources.data import NamedData
from deltabars.cli.sources.models import NamedModel
from deltabars.errors import BadValueError
from tests.scans import command, environment, only_line
from tests.workshop import contents


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to be in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def picture(path: Path, height: int = 8, width: int = 8, mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (width, height)).save(path)


def ten_classes(folder: Path, height: int = 8) -> Path:
    for k in range(10):
        picture(folder / str(k) / "0.png", height)
    return folder


def prepare(kind: str, workshop) -> None:
    """Files of the current folder that something is wrong with."""
    here = Path()
    if kind == "wrong names":
        save_file({"net.0.weight": torch.zeros(2)}, "w.safetensors")
    elif kind == "wrong shapes":
        state = workshop.model.state_dict()
        save_file({**state, "1.bias": torch.zeros(7)}, "w.safetensors")
    elif kind == "no tensors":
        torch.save({"state_dict": {"a": 1}}, "w.pt")
    elif kind == "code":
        torch.save(workshop.model, "w.pt")
    elif kind == "broken weights":
        Path("w.safetensors").write_bytes(b"\x10\0\0")
    elif kind == "empty":
        (here / "data").mkdir()
    elif kind == "flat":
        picture(here / "data" / "a.png")
    elif kind == "mixed sizes":
        picture(ten_classes(here / "data") / "4" / "b.png", 9, 8)
    elif kind == "not an image":
        (ten_classes(here / "data") / "3" / "b.png").write_text("no picture")
    elif kind == "truncated":
        path = ten_classes(here / "data") / "3" / "b.png"
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8), np.uint8)).save(path)
        path.write_bytes(path.read_bytes()[:60])
    elif kind == "sixteen bits":
        picture(ten_classes(here / "data") / "3" / "b.png", mode="I;16")
    elif kind == "huge":
        picture(ten_classes(here / "data") / "3" / "b.png", 10_000, 10_000, "1")
    elif kind == "beside":
        picture(ten_classes(here / "data") / "loose.png")
    elif kind == "few classes":
        picture(here / "data" / "0" / "a.png")
    elif kind == "one output":
        picture(here / "data" / "cat" / "a.png")
        picture(here / "data" / "dog" / "a.png")
        Path("net.py").write_text(
            "from torch import nn\n\ndef make():\n"
            "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 1))\n"
        )
        Path("w.safetensors").write_bytes(b"")
        state = workshop.model.state_dict()
        state["3.weight"], state["3.bias"] = torch.zeros(1, 6), torch.zeros(1)
        save_file(state, "w.safetensors")
    elif kind == "other size":
        ten_classes(here / "data", 12)
    elif kind == "existing":
        (here / "run").mkdir()
        (here / "run" / "thesis.txt").write_text("mine")
    elif kind == "unknown key":
        Path("c.toml").write_text('estimater = "opg"\n')
    elif kind == "key of another":
        Path("c.toml").write_text("most-certain = true\n")
    elif kind == "no TOML":
        Path("c.toml").write_text("estimator = opg\n")
    elif kind == "no flag":
        Path("c.toml").write_text("gray = 1\n")
    elif kind == "own error":
        Path("net.py").write_text("def make():\n    values = [1]\n    return values[3]\n")
    elif kind == "own end":
        Path("net.py").write_text("import sys\nsys.exit(2)\n")
    elif kind == "own syntax":
        Path("net.py").write_text("def make(:\n")
    elif kind == "own import":
        Path("net.py").write_text("import no_such_package\n")


FIT = [
    ("", ("--model", "none.py:make"), "none.py, which does not exist"),
    ("", ("--model", "no_such_module:make"), "a module that Python finds"),
    ("", ("--model", "net"), "package.module:object or path/to/file.py:object"),
    ("", ("--model", "{net}:mkae"), "an object 'mkae'"),
    ("", ("--model", "{net}:number"), "which is a int"),
    ("", ("--model-args", '{"wide": 3}'), "TypeError: make() got an unexpected keyword"),
    ("own error", ("--model", "net.py:make"), "IndexError: list index out of range ("),
    ("own error", ("--model", "net.py:make"), "net.py, line 3). --debug"),
    ("own end", ("--model", "net.py:make"), "net.py:make, which ends the program (exit code 2)"),
    ("own syntax", ("--model", "net.py:make"), "SyntaxError"),
    ("own import", ("--model", "net.py:make"), "No module named 'no_such_package'"),
    ("", ("--weights", "none.safetensors"), "none.safetensors, which does not exist"),
    ("", ("--weights", "{net}"), "ends in .safetensors, .pt or .pth, got net.py"),
    ("wrong names", ("--weights", "w.safetensors"), "without '1.weight' and 3 more, with an "),
    ("wrong names", ("--weights", "w.safetensors"), "with an unknown 'net.0.weight'. Names"),
    ("wrong shapes", ("--weights", "w.safetensors"), "'1.bias' of shape (6,), got (7,)"),
    ("no tensors", ("--weights", "w.pt"), "a state dict in w.pt"),
    ("code", ("--weights", "w.pt"), "would run code when read"),
    ("broken weights", ("--weights", "w.safetensors"), "broken or is none"),
    ("", ("--data", "nowhere"), "nowhere, which does not exist"),
    ("", ("--data", "{net}"), "which is a file of another kind"),
    ("", ("--data", "{net}:make"), "--gray: expected data of the kind folder with it"),
    ("empty", ("--data", "data"), "got none"),
    ("flat", ("--data", "data"), "got no sub-folders"),
    ("mixed sizes", ("--data", "data"), "8×8 first and 9×8 in data/4/b.png. Resize"),
    ("not an image", ("--data", "data"), "data/3/b.png, which is broken or is none"),
    ("truncated", ("--data", "data"), "data/3/b.png, which is broken"),
    ("sixteen bits", ("--data", "data"), "is broken or is none (its mode is I;16"),
    ("huge", ("--data", "data"), "data/3/b.png, which is broken or is none (Image size"),
    ("beside", ("--data", "data"), "got both: loose.png beside 0/"),
    ("few classes", ("--data", "data"), "got 1 in data for outputs of shape (10,)"),
    (
        "one output",
        ("--data", "data", "--model", "net.py:make", "--weights", "w.safetensors"),
        "Is it a yes/no question? Then give --loss bce",
    ),
    ("other size", ("--data", "data"), "pictures (1, 1, 12, 8), got one that does not"),
    ("", ("--mean", "1", "2"), "--mean: expected one number, or one for each of 1 channels, got 2"),
    ("", ("--std", "0"), "--std: expected numbers above zero"),
    ("", ("--size", "0"), "--size: expected whole numbers from 1 on"),
    ("", ("--size", "1", "2", "3"), "--size: expected one or two"),
    ("", ("--crop",), "--crop: expected --size with it"),
    ("", ("--part", "test"), "--part: expected data of the kind mnist or cifar10"),
    ("", ("--l2", "0"), "l2"),
    ("", ("--l2", "-1"), "or PATTERN=NUMBER …, got -1.0."),
    ("", ("--l2", "much"), "--l2: expected a number"),
    ("", ("--l2", "=1"), "--l2: expected a number"),
    ("", ("--rank", "0"), "rank"),
    ("", ("--tolerance", "0.1"), "tolerance"),
    ("", ("--params", "nothing*"), "nothing*"),
    ("", ("--device", "warp"), "--device: expected cpu, cuda or cuda:N, got 'warp'."),
    ("", ("--device", "gpu"), "--device: expected cpu, cuda or cuda:N, got 'gpu'."),
    ("", ("--device", "mps"), "got 'mps' (mps has no float64, which is needed)."),
    ("existing", (), "It is no RUN"),
    ("existing", ("--overwrite",), "It is no RUN"),
    ("", ("--out", "/proc/run"), "/proc"),  # where not even the superuser may write
    ("", ("--out", "no/run"), "--out: expected a folder that exists"),
    ("unknown key", ("--config", "c.toml"), "got 'estimater'. The nearest one is 'estimator'"),
    ("key of another", ("--config", "c.toml"), "one of `deltabars rank`: put it below [rank]."),
    ("no TOML", ("--config", "c.toml"), "--config: expected TOML, got c.toml"),
    ("no flag", ("--config", "c.toml"), "expected gray = true or false"),
    ("", ("--config", "none.toml"), "none.toml: No such file"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "said"), FIT)
def test_fit_refuses(kind, options, said, workshop, place, capsys):
    prepare(kind, workshop)
    before = contents(place)
    given = [option.replace("{net}", str(workshop.folder / "net.py")) for option in options]
    code = main(["fit", *workshop.options, "--out", "run", "--quiet", *given])
    assert code == 1
    assert said in only_line(capsys)
    assert contents(place) == before


EARLY = [
    ("--l2", "0"), ("--l2", "*=-1"), ("--l2", "none*=1"), ("--rank", "0"), ("--rank", "461"),
    ("--rank", "auto", "--tolerance", "0"), ("--tolerance", "0.1"), ("--seed", "-1"),
    ("--batch-size", "0"), ("--residual-tolerance", "0"), ("--max-products", "0"),
    ("--smallest", "1"), ("--params", "nothing*"), ("--max-seconds", "0"), ("--device", "gpu"),
    ("--solver", "incremental", "--estimator", "hessian"), ("--label-smoothing", "2"),
    ("--pos-weight", "1"), ("--loss", "mse", "--noise", "0"), ("--class-weights", "nan", "1"),
]  # fmt: skip
TOUCHING = """\
def pair():
    open("read", "w").close()
    raise ValueError("these data must not be read")
"""


@pytest.mark.parametrize("options", EARLY)
def test_values_are_checked_before_data_are_read(options, workshop, place, capsys):
    Path("data.py").write_text(TOUCHING)
    given = [word for word in workshop.options if word != "--gray"]
    code = main(["fit", *given, "--data", "data.py:pair", "--out", "run", "--quiet", *options])
    assert code == 1
    assert "must not be read" not in only_line(capsys)
    assert contents(place) == {"data.py"}


@pytest.mark.parametrize("command", ["predict", "rank", "report"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rank", "31"), "rank"),
        (("--estimator", "ggn"), "estimator"),
        (("--classes", "best"), "'top5'"),
        (("--classes", "12"), "classes"),
        (("--batch-size", "0"), "--batch-size"),
    ],
)
def test_what_a_fit_cannot_give_is_refused_before_data_are_read(
    command, options, said, workshop, place, capsys
):
    Path("data.py").write_text(TOUCHING)
    out = ("--out", "page.html") if command == "report" else ()
    given = ["--data", "data.py:pair", "--device", "cpu", "--quiet", *out, *options]
    assert main([command, str(workshop.run), *given]) == 1
    assert said in only_line(capsys)
    assert contents(place) == {"data.py"}


def test_a_table_that_is_there_is_replaced_only_when_asked(workshop, place, capsys):
    shutil.copytree(workshop.run, "run")
    asked = ["predict", "run", "--data", str(workshop.folder / "flat"), "--quiet", "--out"]
    Path("a.csv").write_text("mine")
    assert main([*asked, "a.csv"]) == 1
    assert "expected a file that does not exist, got a.csv. Give --overwrite" in only_line(capsys)
    assert Path("a.csv").read_text() == "mine"
    assert main([*asked, "a.csv", "--overwrite"]) == 0
    assert Path("a.csv").read_text().startswith("input,")
    capsys.readouterr()
    assert main([*asked, "a/", "--overwrite"]) == 1
    assert "expected a FILE as --out with it, got the folder a/" in only_line(capsys)


RUN = [
    (("predict", "none", "--data", "{test}"), "none, which does not exist"),
    (("predict", "{folder}", "--data", "{test}"), "has no run.json"),
    (("predict", "{run}", "--data", "classes"), "the difference: 0, 1, 2, 3, 4"),
    (("predict", "{run}", "--data", "large"), "expected torch.float32 (B, 1, 8, 8)"),
    (("predict", "{run}", "--data", "{test}", "--out", "x.xls"), "one of .csv, .jsonl, .parquet"),
    (("predict", "{run}", "--data", "{test}", "--out", "no/x.csv"), "a folder that exists"),
    (("predict", "{run}", "--data", "{test}", "--out", "classes.csv"), "got the folder"),
    (("predict", "{run}", "--data", "{test}", "--block-size", "5"), "a folder as --out with it"),
    (("predict", "{run}", "--data", "{test}", "--out", "no/out/"), "a folder that exists"),
    (("predict", "{run}", "--data", "{test}", "--estimator", "ggn"), "estimator"),
    (("predict", "{run}", "--data", "{test}", "--rank", "31"), "rank"),
    (("predict", "{run}", "--data", "{test}", "--classes", "best"), "'top5'"),
    (("predict", "{run}", "--data", "{test}", "--classes", "1", "b"), "--classes: expected"),
    (("predict", "{run}", "--data", "{test}", "--weights", "w.pt"), "fitted to other weights"),
    (("rank", "{run}", "--data", "{flat}", "--wrong"), "expected data with targets"),
    (("rank", "{run}", "--data", "{flat}", "--by", "target"), "expected class numbers as targets"),
    (("rank", "{run}", "--count", "0"), "--count: expected a whole number from 1 on, got 0"),
    (("spectrum", "{run}", "--out", "x.doc"), "one of .png, .pdf, .svg"),
    (("spectrum", "{run}", "--values", "x.doc"), "--values: expected a file name"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), RUN)
def test_commands_on_a_run_refuse(arguments, said, workshop, place, capsys):
    ten_classes(place / "classes")
    (place / "classes.csv").mkdir()
    picture(place / "large" / "a.png", 9, 9)
    torch.save({name: value + 1 for name, value in workshop.model.state_dict().items()}, "w.pt")
    run = place / "run"
    run.mkdir()
    for name in ("fit.deltabars", "run.json"):
        shutil.copy(workshop.run / name, run)
    folder = workshop.folder
    paths = {"run": run, "folder": folder, "test": folder / "test", "flat": folder / "flat"}
    before = contents(place)
    code = main([*(text.format(**paths) for text in arguments), "--quiet"])
    assert code == 1
    assert said in only_line(capsys)
    left = contents(place) - before  # the predictions that rank has made are kept
    assert all(name.startswith("run/predictions") and "draft" not in name for name in left)


@pytest.mark.parametrize("count", [3, 11])
@pytest.mark.parametrize("kind", ["npz", "dataset"])
def test_names_of_classes_are_as_many_as_outputs(kind, count, workshop, place, capsys):
    """Refused before anything long, at the fit and at a prediction with a fit without names."""
    names = [f"class {number}" for number in range(count)]
    np.savez("data.npz", images=workshop.train[0].numpy(), labels=workshop.train[1], classes=names)
    Path("data.py").write_text(
        "import numpy, torch\n\n\nclass Data(torch.utils.data.TensorDataset):\n"
        f"    classes = {names}\n\n\ndef make():\n    arrays = numpy.load('data.npz')\n"
        "    parts = [torch.from_numpy(arrays[name]) for name in ('images', 'labels')]\n"
        "    return torch.utils.data.DataLoader(Data(*parts), batch_size=7)\n"
    )
    data = "data.npz" if kind == "npz" else "data.py:make"
    options = [*workshop.options]
    options[options.index("--data") + 1] = data
    options.remove("--gray")
    assert main(["fit", *options, "--out", "run", "--quiet"]) == 1
    assert f"a class name for each output of the model, got {count}" in only_line(capsys)
    assert not Path("run").exists()
    np.savez("plain.npz", images=workshop.train[0].numpy(), labels=workshop.train[1])
    options[options.index("--data") + 1] = "plain.npz"
    assert main(["fit", *options, "--out", "run", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["predict", "run", "--data", data, "--quiet"]) == 1
    assert f"a class name for each of the 10 outputs, got {count}" in only_line(capsys)
    with pytest.raises(BadValueError, match=f"10 outputs, got {count}"):
        Run.create("other", workshop.fit(), NamedModel("a:b"), NamedData("c.npz"), tuple(names))


def test_an_altered_run_is_refused(workshop, place, capsys):
    shutil.copytree(workshop.run, "run")
    for content in ("{", "[]", "{}", '{"model": {"spec": 1, "thing": 2}}'):
        Path("run/run.json").write_text(content)
        assert main(["spectrum", "run"]) == 1
        assert "run.json is altered" in only_line(capsys)


def test_a_full_disk_at_the_end_leaves_nothing(workshop, place, capsys):
    """No file may be longer than two kilobytes, as if the disk were full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        code = main(["fit", *workshop.options, "--out", "run", "--quiet"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    assert f"Cannot write {place / 'run' / 'fit.deltabars'}: File too large" in only_line(capsys)
    assert contents(place) == set()


def test_debug_shows_the_traceback(workshop, place, capsys):
    prepare("own error", workshop)
    options = [*workshop.options, "--model", "net.py:make", "--out", "run", "--debug"]
    assert main(["fit", *options]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "values[3]" in error


def answers_to_ctrl_c():
    """In a process to be: whatever runs the tests may have it ignored, or blocked."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def test_ctrl_c_in_the_middle_of_a_fit(workshop, place):
    """A real process, interrupted while it computes eigenpairs that take minutes."""
    Path("net.py").write_text(
        "from torch import nn\n\ndef make():\n"
        "    layers = nn.Linear(64, 600), nn.Tanh(), nn.Linear(600, 10)\n"
        "    return nn.Sequential(nn.Flatten(), *layers)\n"
    )
    options = [*workshop.options, "--model", "net.py:make", "--estimator", "hessian"]
    options[2:4] = ["--untrained"]  # in place of the weights
    before = contents(place)
    process = subprocess.Popen(
        command("fit", *options, "--rank", 3000, "--out", "run"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        preexec_fn=answers_to_ctrl_c,
    )  # fmt: skip
    assert process.stderr is not None
    first = process.stderr.readline()
    assert "200 examples" in first, first + process.stderr.read()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert error.splitlines()[-1] == "deltabars: interrupted"
    assert "Traceback" not in error
    assert contents(place) == before
