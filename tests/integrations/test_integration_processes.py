"""The Lightning callback on two real processes, as torchrun starts them."""

from __future__ import annotations

import json
import warnings

import lightning.pytorch as library
import pytest

import deltabars
from tests.integrations.test_integration_lightning import (
    L2,
    TRAIN,
    VALIDATION,
    by_hand,
    callback_of,
    loader,
    module_of,
    named,
)
from tests.launches import ended, launch_all


def train(rank, folder):
    """Train, fit and test on one of two processes."""
    warnings.simplefilter("ignore")
    callback = callback_of(library)(l2=L2, rank=20, save_to=folder / "fit.deltabars")
    trainer = library.Trainer(
        callbacks=[callback], max_epochs=1, accelerator="cpu", devices=2, strategy="ddp",
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    module = module_of(library)
    trainer.fit(module, loader(TRAIN, shuffle=True), loader(VALIDATION))
    tested = trainer.test(module, loader(VALIDATION), verbose=False)[0]
    found = {"scores": callback.scores_, "tested": tested, "N": callback.fit_.num_examples}
    assert trainer.global_rank == rank
    (folder / f"{rank}.json").write_text(json.dumps(found))
    return 0


def test_two_processes_score_what_one_does(tmp_path):
    said, elastic = tmp_path / "said", {"TORCHELASTIC_RUN_ID": "one"}
    processes = launch_all(2, lambda rank: train(rank, tmp_path), said, elastic)
    assert ended(processes) == [0, 0], (tmp_path / "said.0").read_text()
    module = module_of(library)
    alone = deltabars.load(tmp_path / "fit.deltabars", module)
    numbers = by_hand(alone, VALIDATION)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["N"] == len(TRAIN[0])  # each has all of the data, not its share
        answer = named("test", numbers)
        assert found["scores"] == pytest.approx(answer, rel=1e-5)
        assert {name: found["tested"][name] for name in answer} == pytest.approx(answer, rel=1e-5)
