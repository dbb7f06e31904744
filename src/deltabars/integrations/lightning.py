"""The callback for Lightning: error bars at the end of the training, and scores from then on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from deltabars.covariance.estimators import SPREADS
from deltabars.errors import DataError, MissingDependencyError, ModelWarning, library, warn
from deltabars.fitting.fit import fit
from deltabars.fitting.fitted import DeltaFit
from deltabars.fitting.state import check_spread
from deltabars.integrations.torchmetrics import ScoreSummary
from deltabars.prediction.prediction import Prediction
from deltabars.problem.data import fingerprint_of, labelled
from deltabars.problem.network import weights_fingerprint
from deltabars.problem.parameters import AUTO, L2Rates
from deltabars.problem.sharding import examples_of, loader_of
from deltabars.runtime.distributed import alone

try:
    Callback: Any = library("lightning.pytorch.callbacks", "lightning").Callback
except MissingDependencyError:
    Callback = library("pytorch_lightning.callbacks", "lightning").Callback

_TRIED = 16  # examples; a coin that is thrown for each comes out alike for all once in 65,536


def sequential(loader: Any) -> DataLoader[Any]:
    """Return a loader of the same examples without shuffling or `drop_last`, or refuse it."""
    if isinstance(loader, DataLoader):
        # An iterable dataset comes in its own order; where nothing samples, in its own batches.
        is_own = isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None
        if is_own and not loader.drop_last:
            return loader
        indices = examples_of(loader)
        if indices is not None:
            return loader_of(loader, indices)
        loader = loader.batch_sampler if loader.batch_size is None else loader.sampler
    raise DataError(
        "data: expected a trainer with one training DataLoader that takes each example once an "
        f"epoch, got a {type(loader).__name__}. Give the training data with data=."
    )


def check_repeats(loader: DataLoader[Any]) -> None:
    """Refuse a map-style dataset whose first examples differ from one reading to the next."""
    data: Any = loader.dataset
    if isinstance(data, IterableDataset) or loader.batch_size is None:
        return
    some = range(min(_TRIED, len(data)))
    readings = [loader.collate_fn([data[i] for i in some]) for _ in range(2)]
    if len({fingerprint_of([labelled(reading)]) for reading in readings}) > 1:
        raise DataError(
            "data: expected training examples that are the same on every reading, got random "
            "augmentation. Give the training data without it with data=."
        )


class FitsAtTheEnd:
    """Fits error bars at the end of `trainer.fit`, and scores predictions from then on.

    The mean score of the validation set, those of its right and wrong predictions, and how well the
    score tells them apart (`deltabars/val/score`, `…/score_right`, `…/score_wrong`,
    `…/error_auroc`) go to the trainer's loggers. `trainer.validate` and `trainer.test` log the same
    for their data, and `trainer.predict` leaves predictions with error bars in `predictions_`.

    Put it after callbacks that change weights at the end of the training (weight averaging). On
    several processes each computes the whole fit.

    Args:
        l2: as for `deltabars.fit`: λ of the training, the `weight_decay` of SGD or Adam; by default
            what the evidence finds.
        data: the training data without shuffling, augmentation or `drop_last`; by default those of
            the trainer's own loader, which are refused when the training starts if they cannot be
            read in order, twice alike.
        network: the name of the module to fit in the LightningModule (`"net"`); the LightningModule
            itself, called by its `forward`, by default.
        save_to: a file to save the fit to.
        spread: of the scores and of `predictions_`: `"posterior"` or `"sampling"`, as for
            `DeltaFit.predict`.
        estimator, rank, options: the other arguments of `deltabars.fit`.

    Attributes:
        fit_: the DeltaFit, or None before it is there; one that was loaded may be put here.
        scores_: what was logged last, by name.
        predictions_: of the last `trainer.predict`, a Prediction for each of its loaders.
    """

    def __init__(
        self,
        *,
        l2: L2Rates | str = AUTO,
        estimator: str = AUTO,
        rank: int | str | None = None,
        data: Any = None,
        network: str = "",
        save_to: str | os.PathLike[str] | None = None,
        spread: str = SPREADS[0],
        **options: Any,
    ) -> None:
        super().__init__()
        self._options = {"l2": l2, "estimator": estimator, "rank": rank, **options}
        self._data, self._network, self._save_to = data, network, save_to
        check_spread(spread)  # before the training rather than after it
        self._spread = spread
        self.fit_: DeltaFit | None = None
        self.scores_: dict[str, float] = {}
        self.predictions_: list[Prediction] = []
        self._scorer: DeltaFit | None = None
        self._summaries: dict[int, ScoreSummary] = {}
        self._collected: dict[int, list[Prediction]] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """See that the data can be read in order, before the training rather than after it."""
        pl_module.get_submodule(self._network)
        if self._data is None and not trainer.fast_dev_run:
            check_repeats(sequential(trainer.train_dataloader))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Fit, save and log."""
        if trainer.fast_dev_run:
            return
        data = sequential(trainer.train_dataloader) if self._data is None else self._data
        options = {"progress": trainer.progress_bar_callback is not None, **self._options}
        with alone():  # each process has all of the data, and the fit whole
            self.fit_ = fit(pl_module.get_submodule(self._network), data, **options)
        if self._save_to is not None and trainer.is_global_zero:
            Path(self._save_to).parent.mkdir(parents=True, exist_ok=True)
            self.fit_.save(self._save_to)
        self._prepare(pl_module)
        given = trainer.val_dataloaders or []
        loaders = given if isinstance(given, list | tuple) else [given]
        for number, loader in enumerate(loaders):
            for batch in loader:
                self._score(batch, number)
        values = self._summarise("val")
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, step=trainer.global_step)

    # A validation within a training is not scored: its weights are not the last.

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Forget earlier scores."""
        if trainer.state.fn != "fit":
            self._prepare(pl_module)

    def on_test_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
        """Score a batch; given are outputs, batch, batch_idx and, of several loaders, its index."""
        if trainer.state.fn != "fit":
            self._score(given[1], *given[3:])

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the scores."""
        if trainer.state.fn != "fit":
            stage = "val" if trainer.state.fn == "validate" else "test"
            pl_module.log_dict(self._summarise(stage), sync_dist=True)

    on_validation_start = on_predict_start = on_test_start
    on_validation_batch_end, on_validation_epoch_end = on_test_batch_end, on_test_epoch_end

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
        """Predict a batch with error bars."""
        if self._scorer is not None:
            found = self._scorer.predict(given[1], spread=self._spread).to("cpu")
            self._collected.setdefault(given[3] if given[3:] else 0, []).append(found)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """Join the batches of each loader."""
        parts = [self._collected[number] for number in sorted(self._collected)]
        self.predictions_ = [Prediction.concatenate(each) for each in parts]

    def _prepare(self, pl_module: Any) -> None:
        """Forget earlier scores; score from now on if the fit is of these very weights."""
        self._scorer, self._summaries, self._collected = None, {}, {}
        if self.fit_ is None:
            return
        if weights_fingerprint(pl_module.get_submodule(self._network)) == self.fit_.weights:
            self._scorer = self.fit_.with_progress(False)  # a bar a batch is too many
            return
        warn(
            "Scores are left out: expected the weights that were fitted, got others. Give "
            "ckpt_path=None, or set fit_ to a fit of these weights.",
            ModelWarning,
        )

    def _score(self, batch: Any, number: int = 0) -> None:
        if self._scorer is None:
            return
        found = labelled(batch, self._scorer.likelihood.counted)
        if not len(found) or found.targets is None:
            return
        out = self._scorer.predict(found.inputs, spread=self._spread, moderation=None)
        summary = self._summaries.setdefault(number, ScoreSummary().to(out.score.device))
        if out.label is None or out.label.ndim > 1:  # neither right nor wrong
            summary.update(out.score, torch.zeros_like(out.score, dtype=torch.bool))
        else:
            summary.update(out, found.targets.to(out.score.device))

    def _summarise(self, stage: str) -> dict[str, float]:
        """Return the scores by the names that they are logged under."""
        self.scores_ = {}
        is_class = self._scorer is not None and self._scorer.likelihood.name == "categorical"
        for number, summary in self._summaries.items():
            last = "" if len(self._summaries) == 1 else f"/dataloader_idx_{number}"
            for name, value in summary.compute().items():
                if is_class or name == "score":
                    self.scores_[f"deltabars/{stage}/{name}{last}"] = float(value)
        return self.scores_


class DeltaBarsCallback(FitsAtTheEnd, Callback):  # type: ignore[misc]
    """Fits error bars at the end of `trainer.fit`: see `FitsAtTheEnd` for its arguments."""
