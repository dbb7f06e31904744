"""The commands as a user's shell runs them: real processes, and a real bash that completes."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import termios
import time
from pathlib import Path
from select import select

import pytest

from deltabars.cli.entry import main
from tests.scans import command, environment, only_line
from tests.workshop import TEST

COMMANDS = (
    "demo", "fit", "predict", "rank", "spectrum", "report", "reproduce", "bench", "completion",
)  # fmt: skip
_COMPLETE = """\
source "$1"
COMP_WORDS=("${@:2}")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_deltabars
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The script for bash, from a real process."""
    done = subprocess.run(command("completion", "bash"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path = tmp_path_factory.mktemp("completion") / "deltabars.bash"
    path.write_text(done.stdout)
    return path


def complete(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    done = subprocess.run(
        ["bash", "-c", _COMPLETE, "bash", script, *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


class TestCompletion:
    def test_bash_takes_the_script(self, script):
        done = subprocess.run(
            ["bash", "-c", f"source {script}; complete -p deltabars"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "-F _deltabars deltabars" in done.stdout

    def test_commands_options_and_values(self, script):
        assert complete(script, "deltabars", "") == list(COMMANDS)
        assert complete(script, "deltabars", "re") == ["report", "reproduce"]
        assert complete(script, "deltabars", "fit", "--mo") == ["--model", "--model-args"]
        assert complete(script, "deltabars", "fit", "--estimator", "s") == ["sandwich"]
        assert complete(script, "deltabars", "rank", "run", "--by", "t") == ["target"]
        assert complete(script, "deltabars", "completion", "z") == ["zsh"]
        assert complete(script, "deltabars", "fit", "--data", "tr") == []  # left to file names

    def test_zsh_goes_by_bash(self, script, capsys):
        assert main(["completion", "zsh"]) == 0
        text = capsys.readouterr().out
        assert text.endswith(script.read_text())
        assert "bashcompinit" in text

    @pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
    def test_zsh_takes_the_script(self, tmp_path, capsys):
        assert main(["completion", "zsh"]) == 0
        (tmp_path / "s.zsh").write_text(capsys.readouterr().out)
        done = subprocess.run(
            ["zsh", "-f", "-c", f"source {tmp_path / 's.zsh'}; whence -w _deltabars"],
            capture_output=True, text=True, env=os.environ | {"HOME": str(tmp_path)},
        )  # fmt: skip
        assert "function" in done.stdout, done.stderr


def test_every_command_in_a_process_of_its_own(workshop, tmp_path):
    """From a model, weights and pictures to a table, with relative paths and plain lines."""
    for name in ("train", "test", "net.py", "net.safetensors"):
        (tmp_path / name).symlink_to(workshop.folder / name)
    programs = (
        "fit --model net.py:make --weights net.safetensors --data train --gray --l2 0.01 --out run",
        "predict run --data test --out test.csv --json",
        "rank run --count 3",
        "spectrum run",
    )
    outputs = []
    for program in programs:
        done = subprocess.run(
            command(*program.split()), capture_output=True, text=True, cwd=tmp_path,
            env=environment(),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "\r" not in done.stderr  # no bar where there is no terminal
        outputs.append(done.stdout)
    assert "RUN: run" in outputs[0]
    assert json.loads(outputs[1])["inputs"] == TEST
    assert len((tmp_path / "test.csv").read_text().splitlines()) == TEST + 1
    lines = outputs[2].splitlines()
    assert sum("0." in line and " ± " in line for line in lines) == 3, outputs[2]
    assert any(line.startswith(("bars", "ranking only", "meaningless")) for line in lines)
    assert "effective parameters" in outputs[3]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_that_lacks_characters_is_no_failure(workshop, tmp_path, monkeypatch, encoding):
    """Real streams that raise for λ, a bar on a terminal among them."""
    shutil.copytree(workshop.folder / "train", tmp_path / "λ")
    (tmp_path / "λ" / "digit 9").rename(tmp_path / "λ" / "digit ψ")
    options = [*workshop.options, "--data", "λ"]
    monkeypatch.chdir(tmp_path)
    reader, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    said = b""
    with open(terminal, "w", encoding=encoding, errors="strict") as error, out:
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", error)
        assert main(["fit", *options, "--out", "run"]) == 0
        assert main(["rank", "run", "--per-class", "--count", "1"]) == 0
        assert main(["spectrum", "run", "--values", "no/λ.csv"]) == 1
        while select([reader], [], [], 0)[0]:
            said += os.read(reader, 1 << 16)
        out.flush()
        shown = out.buffer.getvalue().decode(encoding)
    os.close(reader)
    letter = "λ" if encoding == "utf-8" else "lambda"
    assert f", {letter} = 0.01" in shown
    assert ("digit ψ" if encoding == "utf-8" else "digit \\u03c8") in shown
    assert ("±" if encoding != "ascii" else "+/-") in shown
    assert b"Reading the data" in said
    assert b"Traceback" not in said


def test_a_reader_that_has_seen_enough_is_no_error(workshop):
    """`deltabars spectrum run --json | head -c 1`."""
    with subprocess.Popen(
        command("spectrum", workshop.run, "--json"), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=environment(),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"deltabars {name}" in text
    assert "example" in text
    assert "--config" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ("fit",),
        ("fit", "--rank", "many"),
        ("fit", "--memory-budget", "lots"),
        ("fit", "--model-args", "[1]"),
        ("predict", "run"),
        ("rank", "run", "--by", "taste"),
        ("completion", "fish"),
        ("fit", "--conf", "x.toml"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    assert f"(usage: deltabars {arguments[0]} --help)" in only_line(capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo",),
        ("bench", "--only", "opg", "--json", "x.json"),
        ("reproduce", "mnist", "--data", "mnist", "--small", "--weights", "w.npz"),
        ("completion", "bash"),
    ],
)
def test_the_other_commands_print_python_that_compiles(arguments, capsys):
    assert main([*arguments, "--print-python"]) == 0
    python = capsys.readouterr().out
    imports = [line for line in python.splitlines() if line.startswith(("import", "from"))]
    exec("\n".join(imports), {})
    compile(python, "printed", "exec")


def test_the_printed_python_of_completion_prints_the_script(script, capsys):
    assert main(["completion", "bash", "--print-python"]) == 0
    exec(compile(capsys.readouterr().out, "printed", "exec"), {})
    assert capsys.readouterr().out == script.read_text()


@pytest.mark.parametrize("seconds", [0.1, 0.4, 0.8])
def test_ctrl_c_while_torch_is_imported(seconds):
    process = subprocess.Popen(
        command("spectrum", "--help"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert "Traceback" not in error
    assert error in ("", "deltabars: interrupted\n")
