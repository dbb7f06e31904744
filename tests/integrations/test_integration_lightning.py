"""The callback, with the real Lightning under both of its names, on a CPU."""

from __future__ import annotations

import importlib
import json
import math
import warnings

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

import deltabars
from deltabars.errors import BadValueError, DataError, ModelWarning
from deltabars.integrations.lightning import sequential
from tests.launches import ended, launch_all
from tests.networks import minimise

pytestmark = pytest.mark.filterwarnings(  # Lightning's own advice
    "ignore:.*does not have many workers", "ignore:.*isinstance.treespec, LeafSpec",
    "ignore:You defined a `validation_step` but have no", "ignore:.* directory .* is not empty",
)  # fmt: skip

L2 = 0.05


def examples(count, seed):
    inputs = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))
    return inputs[:, :4], (inputs.sum(1) > 0).long() + (inputs[:, 0] > 1).long()


TRAIN, VALIDATION, TEST = examples(61, 0), examples(40, 1), examples(35, 2)
WHOLE = TensorDataset(*TRAIN)


def loader(data, kind=TensorDataset, **options):
    return DataLoader(kind(*data), batch_size=16, **options)


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def library(request):
    return importlib.import_module(request.param)


@pytest.fixture
def lightning():
    return importlib.import_module("lightning.pytorch")


def callback_of(library, **options):
    where = library.__name__.split(".")[0]
    made = importlib.import_module(f"deltabars.integrations.{where}").DeltaBarsCallback
    return made(**{"l2": L2, **options})


def module_of(library, real=False):
    """A LightningModule that is at an optimum from the start: training leaves it there."""

    class Module(library.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1 if real else 3))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx, dataloader_idx=0):
            outputs = self(batch[0])
            if real:
                return (outputs[:, 0] - batch[1]).square().mean()
            return nn.functional.cross_entropy(outputs, batch[1])

        def validation_step(self, *batch):
            self.log("loss", self.training_step(*batch))

        test_step = validation_step

        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return self(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    module = Module()
    if not real:
        minimise(module, lambda: nn.functional.cross_entropy(module(TRAIN[0]), TRAIN[1]), L2)
    return module


def trainer_of(library, folder, *callbacks, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    loggers = importlib.import_module(f"{library.__name__}.loggers")
    logger = loggers.CSVLogger(folder, name="log", version=0)
    chosen = {"max_epochs": 1, "logger": logger, "log_every_n_steps": 1, **quiet, **options}
    return library.Trainer(default_root_dir=folder, callbacks=list(callbacks), **chosen)


def by_hand(fit, data, stage="val", last=""):
    """The four numbers, without torchmetrics, by the names that they are logged under."""
    out = fit.predict(data[0])
    wrong, names = out.label != data[1], ("score", "score_right", "score_wrong", "error_auroc")
    means = [float(out.score[which].mean()) for which in (slice(None), ~wrong, wrong)]
    values = zip(names, [*means, roc_auc_score(wrong.numpy(), out.score.numpy())], strict=True)
    found = {f"deltabars/{stage}/{name}{last}": value for name, value in values}
    return pytest.approx(found, rel=1e-5)


def test_training_to_prediction(library, tmp_path):
    module = module_of(library)
    path = tmp_path / "new" / "fit.deltabars"
    callback = callback_of(library, rank=20, save_to=path)
    trainer = trainer_of(library, tmp_path, callback)
    trainer.fit(module, loader(TRAIN, shuffle=True, drop_last=True), loader(VALIDATION))
    same = deltabars.fit(module, TRAIN, l2=L2, rank=20, progress=False)
    assert callback.fit_.num_examples == len(TRAIN[0])  # the ragged batch too
    expected = same.predict(TEST[0])
    torch.testing.assert_close(callback.fit_.predict(TEST[0]).std, expected.std)
    torch.testing.assert_close(deltabars.load(path, module).predict(TEST[0]).std, expected.std)

    assert callback.scores_ == by_hand(same, VALIDATION)
    logged = (tmp_path / "log" / "version_0" / "metrics.csv").read_text()
    assert all(name in logged for name in callback.scores_)
    for stage, run in (("test", trainer.test), ("val", trainer.validate)):
        (results,) = run(module, loader(TEST), verbose=False)
        assert results.pop("loss") > 0
        assert results == by_hand(same, TEST, stage)

    trainer.predict(module, loader(TEST))
    (prediction,) = callback.predictions_
    torch.testing.assert_close(prediction.std, expected.std)


def test_an_attribute_and_data_of_ones_own(lightning, tmp_path):
    module = module_of(lightning)
    options = {"estimator": "ggn", "params": ["2.*"]}
    callback = callback_of(lightning, network="net", data=TRAIN, **options)
    trainer_of(lightning, tmp_path, callback).fit(module, loader(TRAIN))
    same = deltabars.fit(module.net, TRAIN, l2=L2, progress=False, **options)
    torch.testing.assert_close(callback.fit_.predict(TEST[0]).std, same.predict(TEST[0]).std)


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
def test_the_level_of_the_data_and_the_sampling_spread(lightning, tmp_path):
    module = module_of(lightning)
    made = importlib.import_module("deltabars.integrations.lightning").DeltaBarsCallback
    callback = made(spread="sampling")
    trainer = trainer_of(lightning, tmp_path, callback)
    trainer.fit(module, loader(TRAIN), loader(VALIDATION))
    same = deltabars.fit(module, TRAIN, progress=False)
    assert (callback.fit_.l2, callback.fit_.estimator) == (pytest.approx(same.l2), "ggn")
    score = same.predict(VALIDATION[0], spread="sampling").score
    found = callback.scores_["deltabars/val/score"]
    assert found == pytest.approx(float(score.mean()), rel=1e-4)
    trainer.predict(module, loader(TEST))
    expected = same.predict(TEST[0], spread="sampling").std
    torch.testing.assert_close(callback.predictions_[0].std, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(BadValueError, match="spread: expected one of"):
        made(spread="wide")


def test_several_loaders_have_names_of_their_own(lightning, tmp_path):
    module = module_of(lightning)
    right = (module(TRAIN[0]).argmax(1) == TRAIN[1]).nonzero()[:, 0].tolist()
    callback = callback_of(lightning)
    trainer = trainer_of(lightning, tmp_path, callback)
    others = DataLoader(Subset(WHOLE, right), batch_size=8)
    trainer.fit(module, loader(TRAIN), [loader(VALIDATION), others])
    last, found = "/dataloader_idx_0", callback.scores_
    mine = {name: value for name, value in found.items() if name.endswith(last)}
    assert mine == by_hand(callback.fit_, VALIDATION, last=last)
    # Without a wrong prediction there is no area.
    assert math.isnan(found["deltabars/val/error_auroc/dataloader_idx_1"])
    trainer.predict(module, [loader(VALIDATION), loader(TEST)])
    assert [len(each) for each in callback.predictions_] == [40, 35]


def test_without_a_fit_of_these_weights_nothing_is_scored(lightning, tmp_path):
    module = module_of(lightning)
    callback = callback_of(lightning)
    trainer = trainer_of(lightning, tmp_path, callback)
    assert list(trainer.test(module, loader(TEST), verbose=False)[0]) == ["loss"]
    trainer.fit(module, loader(TRAIN))
    with torch.no_grad():
        module.net[0].bias.add_(0.1)
    with pytest.warns(ModelWarning, match="expected the weights that were fitted"):
        (results,) = trainer.test(module, loader(TEST), verbose=False)
    assert list(results) == ["loss"]


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
def test_regression_has_a_mean_score_alone(lightning, tmp_path):
    module = module_of(lightning, real=True)
    real = (TRAIN[0], TRAIN[0].sin().sum(1))
    callback = callback_of(lightning, likelihood="gaussian")
    trainer_of(lightning, tmp_path, callback).fit(module, loader(real), loader(real))
    score = float(callback.fit_.predict(real[0]).score.mean())
    assert callback.scores_ == pytest.approx({"deltabars/val/score": score})


class Augmented(TensorDataset):
    def __getitem__(self, i):
        return TRAIN[0][i] + 0.1 * torch.randn(4), TRAIN[1][i]


def test_augmentation_is_refused_before_the_training(lightning, tmp_path):
    trainer = trainer_of(lightning, tmp_path, callback_of(lightning))
    with pytest.raises(DataError, match="Give the training data without it with data="):
        trainer.fit(module_of(lightning), loader(TRAIN, kind=Augmented))
    assert trainer.global_step == 0


def test_examples_come_in_order():
    parts = [(TRAIN[0][:30], TRAIN[1][:30]), (TRAIN[0][30:], TRAIN[1][30:])]
    for given in (
        DataLoader(WHOLE, batch_size=7, shuffle=True, drop_last=True),
        DataLoader(parts, batch_size=None),  # batches that a dataset makes itself
    ):
        assert torch.equal(torch.cat([batch[0] for batch in sequential(given)]), TRAIN[0])
    weighted = DataLoader(WHOLE, sampler=WeightedRandomSampler(torch.ones(61), 61))
    for given in (weighted, DataLoader(WHOLE, batch_sampler=[[1, 2], [3]]), {"a": weighted}):
        with pytest.raises(DataError, match="Give the training data with data="):
            sequential(given)


def train(rank, folder):
    """Train, fit and test on one of two processes."""
    warnings.simplefilter("ignore")
    library = importlib.import_module("lightning.pytorch")
    callback = callback_of(library, rank=20, save_to=folder / "fit.deltabars")
    options = {"devices": 2, "strategy": "ddp", "logger": False, "enable_checkpointing": False}
    trainer = trainer_of(library, folder, callback, **options)
    module = module_of(library)
    trainer.fit(module, loader(TRAIN, shuffle=True), loader(VALIDATION))
    trainer.test(module, loader(VALIDATION), verbose=False)
    found = {"scores": callback.scores_, "N": callback.fit_.num_examples}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    return 0


def test_two_processes_score_what_one_does(lightning, tmp_path):
    said, elastic = tmp_path / "said", {"TORCHELASTIC_RUN_ID": "one"}
    processes = launch_all(2, lambda rank: train(rank, tmp_path), said, elastic)
    assert ended(processes) == [0, 0], (tmp_path / "said.0").read_text()
    alone = deltabars.load(tmp_path / "fit.deltabars", module_of(lightning))
    answer = by_hand(alone, VALIDATION, "test")
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["N"] == len(TRAIN[0])  # each has all of the data, not its share
        assert found["scores"] == answer
