"""The Lightning callback on two real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as library
import pytest

import deltabars
from tests.test_integration_lightning import TRAIN, VALIDATION, by_hand, module_of, named

TWO_PROCESSES = """
import json, pathlib, sys
import lightning.pytorch as library
from tests.test_integration_lightning import L2, TRAIN, VALIDATION, callback_of, loader, module_of

folder = pathlib.Path(sys.argv[1])
callback = callback_of(library)(l2=L2, rank=20, save_to=folder / "fit.deltabars")
trainer = library.Trainer(
    callbacks=[callback], max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
)
module = module_of(library)
trainer.fit(module, loader(TRAIN, shuffle=True), loader(VALIDATION))
tested = trainer.test(module, loader(VALIDATION), verbose=False)[0]
found = {"scores": callback.scores_, "tested": tested, "N": callback.fit_.num_examples}
(folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))
"""


def test_two_processes_score_what_one_does(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(TWO_PROCESSES)
    root = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    module = module_of(library)
    alone = deltabars.load(tmp_path / "fit.deltabars", module)
    numbers = by_hand(alone, VALIDATION)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["N"] == len(TRAIN[0])  # each has all of the data, not its share
        answer = named("test", numbers)
        assert found["scores"] == pytest.approx(answer, rel=1e-5)
        assert {name: found["tested"][name] for name in answer} == pytest.approx(answer, rel=1e-5)
