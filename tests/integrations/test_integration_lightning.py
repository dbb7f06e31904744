"""The callback, with the real Lightning under both of its names, on a CPU."""

from __future__ import annotations

import csv
import importlib
import math

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import deltabars
from deltabars.errors import BadValueError, DataError, ModelWarning
from tests.networks import minimise

# Lightning's own advice.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:.* directory .* exists and is not empty"),
]

L2 = 0.05
NAMES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def examples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    noise = torch.randn(count, generator=generator)
    return inputs, ((inputs.sum(1) + noise) > 0).long() + (inputs[:, 0] > 1).long()


TRAIN, VALIDATION, TEST = examples(61, 0), examples(40, 1), examples(35, 2)


def loader(data, **options):
    return DataLoader(TensorDataset(*data), batch_size=16, **options)


@pytest.fixture(params=NAMES)
def library(request):
    return importlib.import_module(NAMES[request.param])


@pytest.fixture
def lightning():
    return importlib.import_module("lightning.pytorch")


def callback_of(library):
    where = library.__name__.split(".")[0]
    return importlib.import_module(f"deltabars.integrations.{where}").DeltaBarsCallback


def module_of(library, real=False):
    """A LightningModule that is at an optimum from the start: training leaves it there."""

    class Module(library.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1 if real else 3))

        def forward(self, x):
            return self.net(x)

        def loss(self, batch):
            outputs = self(batch[0])
            if real:
                return (outputs[:, 0] - batch[1]).square().mean()
            return nn.functional.cross_entropy(outputs, batch[1])

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val_loss", self.loss(batch))

        def test_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("test_loss", self.loss(batch))

        def predict_step(self, batch, batch_idx):
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


def by_hand(fit, data):
    """The four numbers, without torchmetrics."""
    out = fit.predict(data[0])
    wrong = out.label != data[1]
    return {
        "score": float(out.score.mean()),
        "score_right": float(out.score[~wrong].mean()),
        "score_wrong": float(out.score[wrong].mean()),
        "error_auroc": roc_auc_score(wrong.numpy(), out.score.numpy()),
    }


def named(stage, numbers, last=""):
    return {f"deltabars/{stage}/{name}{last}": value for name, value in numbers.items()}


def test_training_to_prediction(library, tmp_path):
    module = module_of(library)
    path = tmp_path / "new" / "fit.deltabars"
    callback = callback_of(library)(l2=L2, rank=20, save_to=path)
    trainer = trainer_of(library, tmp_path, callback)
    trainer.fit(module, loader(TRAIN, shuffle=True, drop_last=True), loader(VALIDATION))
    same = deltabars.fit(module, TRAIN, l2=L2, rank=20, progress=False)
    assert callback.fit_.num_examples == len(TRAIN[0])  # the ragged batch too
    expected = same.predict(TEST[0])
    torch.testing.assert_close(callback.fit_.predict(TEST[0]).std, expected.std)
    torch.testing.assert_close(deltabars.load(path, module).predict(TEST[0]).std, expected.std)

    answer = named("val", by_hand(same, VALIDATION))
    assert callback.scores_ == pytest.approx(answer, rel=1e-5)
    with open(tmp_path / "log" / "version_0" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    for name, value in answer.items():
        (logged,) = [row[name] for row in rows if row.get(name)]
        assert float(logged) == pytest.approx(value, rel=1e-5)

    (results,) = trainer.test(module, loader(TEST), verbose=False)
    answer = named("test", by_hand(same, TEST))
    assert {name: results[name] for name in answer} == pytest.approx(answer, rel=1e-5)
    (results,) = trainer.validate(module, loader(TEST), verbose=False)
    answer = named("val", by_hand(same, TEST))
    assert {name: results[name] for name in answer} == pytest.approx(answer, rel=1e-5)

    outputs = trainer.predict(module, loader(TEST))
    (prediction,) = callback.predictions_
    torch.testing.assert_close(prediction.mean, torch.cat(outputs).softmax(1))
    torch.testing.assert_close(prediction.std, expected.std)


def test_an_attribute_a_function_and_data_of_ones_own(lightning, tmp_path):
    module = module_of(lightning)
    fits = []
    for network in ("net", lambda module: module.net):
        callback = callback_of(lightning)(
            l2=L2, network=network, data=TRAIN, estimator="ggn", params=["2.*"]
        )
        trainer_of(lightning, tmp_path, callback).fit(module, loader(TRAIN))
        fits.append(callback.fit_)
        assert callback.scores_ == {}  # there is no validation set
    same = deltabars.fit(module.net, TRAIN, l2=L2, estimator="ggn", params=["2.*"], progress=False)
    for fit in fits:
        torch.testing.assert_close(fit.predict(TEST[0]).std, same.predict(TEST[0]).std)
    for network in ("missing", lambda module: 3):
        callback = callback_of(lightning)(l2=L2, network=network)
        with pytest.raises(BadValueError, match="network: expected the name"):
            trainer_of(lightning, tmp_path, callback).fit(module, loader(TRAIN))


def test_several_loaders_have_names_of_their_own(lightning, tmp_path):
    module = module_of(lightning)
    callback = callback_of(lightning)(l2=L2)
    trainer = trainer_of(lightning, tmp_path, callback)
    trainer.fit(module, loader(TRAIN), [loader(VALIDATION), loader(TEST)])
    expected = named("val", by_hand(callback.fit_, VALIDATION), "/dataloader_idx_0")
    expected |= named("val", by_hand(callback.fit_, TEST), "/dataloader_idx_1")
    assert callback.scores_ == pytest.approx(expected, rel=1e-5)


def test_other_weights_are_not_scored(lightning, tmp_path):
    module = module_of(lightning)
    callback = callback_of(lightning)(l2=L2)
    trainer = trainer_of(lightning, tmp_path, callback)
    trainer.fit(module, loader(TRAIN))
    with torch.no_grad():
        module.net[0].bias.add_(0.1)
    with pytest.warns(ModelWarning, match="expected the weights that were fitted"):
        (results,) = trainer.test(module, loader(TEST), verbose=False)
    assert list(results) == ["test_loss"]


def test_before_a_fit_nothing_is_scored(lightning, tmp_path):
    callback = callback_of(lightning)(l2=L2)
    trainer = trainer_of(lightning, tmp_path, callback)
    (results,) = trainer.test(module_of(lightning), loader(TEST), verbose=False)
    assert list(results) == ["test_loss"]
    trainer.predict(module_of(lightning), loader(TEST))
    assert callback.predictions_ == []


@pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
def test_regression_has_a_mean_score_alone(lightning, tmp_path):
    module = module_of(lightning, real=True)
    real = (TRAIN[0], TRAIN[0].sin().sum(1))
    data = (real[0], real[1][:, None])
    callback = callback_of(lightning)(l2=L2, likelihood="gaussian", data=data)
    trainer_of(lightning, tmp_path, callback).fit(module, loader(real), loader(real))
    score = float(callback.fit_.predict(real[0]).score.mean())
    assert callback.scores_ == pytest.approx({"deltabars/val/score": score})


def test_a_trial_run_fits_nothing(lightning, tmp_path):
    callback = callback_of(lightning)(l2=L2)
    trainer = trainer_of(lightning, tmp_path, callback, fast_dev_run=True, logger=False)
    trainer.fit(module_of(lightning), loader(TRAIN), loader(VALIDATION))
    assert callback.fit_ is None


class Trembling(Dataset):
    """Random augmentation."""

    def __len__(self):
        return 30

    def __getitem__(self, i):
        return TRAIN[0][i] + 0.1 * torch.randn(4), TRAIN[1][i]


def test_augmentation_is_refused_before_the_training(lightning, tmp_path):
    module = module_of(lightning)
    trainer = trainer_of(lightning, tmp_path, callback_of(lightning)(l2=L2))
    with pytest.raises(DataError, match="Give the training data without it with data="):
        trainer.fit(module, DataLoader(Trembling(), batch_size=8))
    assert trainer.global_step == 0


def test_without_a_wrong_prediction_there_is_no_area(lightning, tmp_path):
    module = module_of(lightning)
    right = Subset(
        TensorDataset(*TRAIN), (module(TRAIN[0]).argmax(1) == TRAIN[1]).nonzero()[:, 0].tolist()
    )
    callback = callback_of(lightning)(l2=L2)
    trainer_of(lightning, tmp_path, callback).fit(
        module, loader(TRAIN), DataLoader(right, batch_size=8)
    )
    assert math.isnan(callback.scores_["deltabars/val/score_wrong"])
    assert math.isnan(callback.scores_["deltabars/val/error_auroc"])
    assert callback.scores_["deltabars/val/score"] > 0
