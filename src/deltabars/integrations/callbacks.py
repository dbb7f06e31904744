"""A training loader's examples in order: each once, none left out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from deltabars.covariance.estimators import DEFAULT_ESTIMATOR
from deltabars.errors import BadValueError, DataError, ModelWarning
from deltabars.fitting.fit import fit
from deltabars.fitting.fitted import DeltaFit
from deltabars.integrations.torchmetrics import ScoreSummary
from deltabars.prediction.prediction import Prediction
from deltabars.problem.batches import labelled
from deltabars.problem.inputs import leaves
from deltabars.problem.network import fingerprint
from deltabars.problem.prior import L2
from deltabars.runtime.distributed import alone

_TRIED = 16  # examples; a coin that is thrown for each comes out alike for all once in 65,536


def sequential(loader: Any) -> DataLoader[Any]:
    """A loader of the same examples without shuffling, replacement or `drop_last`.

    Raises:
        DataError: it is not one DataLoader, or its sampler is of a kind that does not tell which
            examples are in the training.
    """
    if not isinstance(loader, DataLoader):
        raise DataError(
            f"data: expected a trainer with one training DataLoader, got {type(loader).__name__}. "
            "Give the training data with data=."
        )
    dataset: Dataset[Any] | None = loader.dataset
    size, sampler = loader.batch_size, loader.sampler
    # An iterable dataset comes in its own order, and where nothing samples, in its own batches.
    if not isinstance(dataset, IterableDataset) and loader.batch_sampler is not None:
        if size is None and type(loader.batch_sampler) is BatchSampler:
            size, sampler = loader.batch_sampler.batch_size, loader.batch_sampler.sampler
        dataset = None if size is None else _sampled(loader.dataset, sampler)
    if dataset is None:
        kind = type(sampler if size is not None else loader.batch_sampler).__name__
        raise DataError(
            f"data: expected a training DataLoader that takes each example once an epoch, got a "
            f"{kind}. Give the training data with data=."
        )
    return DataLoader(
        dataset,
        batch_size=size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


def _sampled(dataset: Dataset[Any], sampler: Any) -> Dataset[Any] | None:
    """The examples that a sampler takes, or None where it does not tell."""
    kind = type(sampler)
    if kind is SubsetRandomSampler:
        return Subset(dataset, list(sampler.indices))
    whole = kind in (SequentialSampler, DistributedSampler) or (
        kind is RandomSampler
        and not sampler.replacement
        and len(sampler) == len(sampler.data_source)
    )
    return dataset if whole else None


def check_repeats(loader: DataLoader[Any]) -> None:
    """Refuse a map-style dataset whose first examples differ from one reading to the next."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or loader.batch_size is None:
        return
    collate: Any = loader.collate_fn
    first, again = (
        labelled(collate([dataset[i] for i in islice(range(len(dataset)), _TRIED)]))
        for _ in range(2)
    )
    same = len(first) == len(again) and all(
        a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(leaves(first.inputs), leaves(again.inputs), strict=True)
    )
    if not same:
        raise DataError(
            "data: expected training examples that are the same on every reading, got different "
            "ones (random augmentation?). Give the training data without it with data=."
        )


Choice = str | Callable[[Any], nn.Module] | None


class FitsAtTheEnd:
    """Fits error bars at the end of `trainer.fit`, and scores predictions from then on.

    After the training, `fit_` is the DeltaFit. The mean score of the validation set, those of its
    right and wrong predictions, and how well the score tells them apart (`deltabars/val/score`,
    `…/score_right`, `…/score_wrong`, `…/error_auroc`) go to the trainer's loggers.
    `trainer.validate` and `trainer.test` log the same for their data (`deltabars/test/score`, …),
    and `trainer.predict` leaves the predictions with their error bars in `predictions_`.

    Put it after callbacks that change weights at the end of the training (weight averaging). On
    several processes each computes the whole fit.

    Args:
        l2: λ of the training: the `weight_decay` of SGD or Adam (see `deltabars.fit`).
        estimator, rank: as for `deltabars.fit`.
        data: the training data as they are without shuffling, augmentation or `drop_last`; by
            default those of the trainer's own loader, in order. What cannot be read in order, or
            not twice alike, is refused when the training starts.
        network: which module to fit: the name of an attribute of the LightningModule (`"net"`), or
            a function of it; the LightningModule itself, called by its `forward`, by default.
        save_to: a file to save the fit to.
        options: the other arguments of `deltabars.fit`: `params`, `likelihood`, ….

    Attributes:
        fit_: the DeltaFit, or None before it is there; one that was loaded may be put here.
        scores_: what was logged last, by name.
        predictions_: of the last `trainer.predict`, a Prediction for each of its loaders.
    """

    def __init__(
        self,
        *,
        l2: L2,
        estimator: str = DEFAULT_ESTIMATOR,
        rank: int | str | None = None,
        data: Any = None,
        network: Choice = None,
        save_to: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._options = {"l2": l2, "estimator": estimator, "rank": rank, **options}
        self._data, self._network, self._save_to = data, network, save_to
        self.fit_: DeltaFit | None = None
        self.scores_: dict[str, float] = {}
        self.predictions_: list[Prediction] = []
        self._scorer: DeltaFit | None = None
        self._summaries: dict[int, ScoreSummary] = {}
        self._collected: dict[int, list[Prediction]] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """See that the data can be read in order, before the training rather than after it."""
        self._chosen(pl_module)
        if self._data is None and not trainer.fast_dev_run:
            check_repeats(self._training_data(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Fit, save and log."""
        if trainer.fast_dev_run:
            return
        data = self._training_data(trainer)
        options = {"progress": trainer.progress_bar_callback is not None, **self._options}
        with alone():  # each process has all of the data, and the fit whole
            self.fit_ = fit(self._chosen(pl_module), data, **options)
        if self._save_to is not None and trainer.is_global_zero:
            Path(self._save_to).parent.mkdir(parents=True, exist_ok=True)
            self.fit_.save(self._save_to)
        self._prepare(pl_module)
        for place, loader in enumerate(_as_list(trainer.val_dataloaders)):
            for batch in loader:
                self._score(pl_module, batch, place)
        values = self._summarise("val")
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, step=trainer.global_step)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Get ready, unless this validation is part of a training."""
        if trainer.state.fn == "validate":
            self._prepare(pl_module)

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Score a batch."""
        if trainer.state.fn == "validate":
            self._score(pl_module, batch, dataloader_idx)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the scores."""
        if trainer.state.fn == "validate":
            pl_module.log_dict(self._summarise("val"), sync_dist=True)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Get ready."""
        self._prepare(pl_module)

    def on_test_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Score a batch."""
        self._score(pl_module, batch, dataloader_idx)

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the scores."""
        pl_module.log_dict(self._summarise("test"), sync_dist=True)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Get ready."""
        self._prepare(pl_module)

    def on_predict_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Predict a batch with error bars."""
        if self._scorer is not None:
            found = self._scorer.predict(batch).to("cpu")
            self._collected.setdefault(dataloader_idx, []).append(found)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """Join the batches of each loader."""
        self.predictions_ = [
            Prediction.concatenate(self._collected[place]) for place in sorted(self._collected)
        ]

    def _chosen(self, pl_module: Any) -> nn.Module:
        """The module to fit."""
        found = pl_module
        if isinstance(self._network, str):
            found = getattr(pl_module, self._network, None)
        elif self._network is not None:
            found = self._network(pl_module)
        if not isinstance(found, nn.Module):
            raise BadValueError(
                "network: expected the name of a module's attribute that is a torch.nn.Module, or "
                f"a function that gives one, got {self._network!r}, which gives "
                f"{type(found).__name__}."
            )
        return found

    def _training_data(self, trainer: Any) -> Any:
        return sequential(trainer.train_dataloader) if self._data is None else self._data

    def _prepare(self, pl_module: Any) -> None:
        """Forget earlier scores; without a fit of these very weights there will be none."""
        self._scorer, self._summaries, self._collected = None, {}, {}
        if self.fit_ is None:
            return
        if fingerprint(self._chosen(pl_module)) != self.fit_.weights:
            warnings.warn(
                "Scores are left out: expected the weights that were fitted, got others (a "
                "checkpoint of another epoch?). Give ckpt_path=None, or set fit_ to a fit of "
                "these weights.",
                ModelWarning,
                stacklevel=2,
            )
            return
        self._scorer = self.fit_.with_progress(False)  # a bar a batch is too many

    def _score(self, pl_module: Any, batch: Any, place: int) -> None:
        if self._scorer is None:
            return
        found = labelled(batch, self._scorer.likelihood.counted)
        if not len(found):
            return
        prediction = self._scorer.predict(found.inputs, moderation=None)
        if place not in self._summaries:
            self._summaries[place] = ScoreSummary().to(prediction.score.device)
        targets = found.targets
        if prediction.label is None or prediction.label.ndim > 1:  # neither right nor wrong
            none = torch.zeros_like(prediction.score, dtype=torch.bool)
            self._summaries[place].update(prediction.score, none)
        elif targets is not None:
            self._summaries[place].update(prediction, targets.to(prediction.score.device))

    def _summarise(self, stage: str) -> dict[str, float]:
        """The scores by the names that they are logged under."""
        values: dict[str, float] = {}
        for place, summary in self._summaries.items():
            last = "" if len(self._summaries) == 1 else f"/dataloader_idx_{place}"
            assert self._scorer is not None
            found = summary.compute()
            names = found if self._scorer.likelihood.name == "categorical" else ("score",)
            values |= {f"deltabars/{stage}/{name}{last}": float(found[name]) for name in names}
        self.scores_ = values
        return values


def _as_list(loaders: Any) -> list[Any]:
    if loaders is None:
        return []
    return list(loaders) if isinstance(loaders, list | tuple) else [loaders]
