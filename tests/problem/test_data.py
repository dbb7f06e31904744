"""The same examples in any form give the same fit; a fingerprint distinguishes what is read."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import deltabars
from deltabars.problem.data import TrainingData
from tests.networks import make_case, train

# Float64, and at most the order of 29 additions differs: a few hundred units of 1e-16.
EXACT = {"rtol": 1e-12, "atol": 1e-12}
ROOMY = 1 << 30
CPU = torch.device("cpu")


class Named(nn.Module):
    """A model that is called as model(x=…), and returns a mapping."""

    def __init__(self, core):
        super().__init__()
        self.core = core

    def forward(self, x):
        return {"logits": self.core(x)}


class Halves(Named):
    """A model of two inputs."""

    def forward(self, first, second):
        return self.core(torch.cat([first, second], dim=1))


class Examples(Dataset):
    """A Dataset of whatever `example(i)` is."""

    def __init__(self, count, example):
        self.count, self.example = count, example

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return self.example(i)


class Stream(IterableDataset):
    """Examples one after the other, without a length."""

    def __init__(self, *columns):
        self.columns = columns

    def __iter__(self):
        return zip(*self.columns, strict=True)


def loader(*columns, **options):
    return DataLoader(TensorDataset(*columns), **options)


def batches(*columns, size=7):
    return list(zip(*(column.split(size) for column in columns), strict=True))


def mappings(**columns):
    names = list(columns)
    return [dict(zip(names, batch, strict=True)) for batch in batches(*columns.values())]


def halves(x):
    return x[:, :2], x[:, 2:]


POSITIONAL = {
    "dataset": TensorDataset,
    "loader of 7": lambda x, y: loader(x, y, batch_size=7),
    "shuffling loader": lambda x, y: loader(x, y, batch_size=7, shuffle=True),
    "loader of examples": lambda x, y: DataLoader(list(zip(x, y, strict=True)), batch_size=5),
    "list of batches": batches,
    "list of a pair": lambda x, y: [x, y],
    "ragged batches": lambda x, y: [(x[:1], y[:1]), (x[1:1], y[1:1]), (x[1:], y[1:])],
    "iterable dataset": Stream,
    "narrow labels": lambda x, y: (x, y.to(torch.uint8)),
    "strided tensors": lambda x, y: (x.T.contiguous().T, y.repeat_interleave(2)[::2]),
}
NAMED = {
    "mapping of tensors": lambda x, y: {"x": x, "labels": y},
    "mapping batches": lambda x, y: mappings(x=x, labels=y),
    "loader of mappings": lambda x, y: DataLoader(
        Examples(len(y), lambda i: {"x": x[i], "labels": int(y[i])}), batch_size=7
    ),
    "mapping and targets": lambda x, y: ({"x": x}, y),
}
TWO_INPUTS = {
    "tensors": lambda x, y: (*halves(x), y),
    "dataset": lambda x, y: TensorDataset(*halves(x), y),
    "list of batches": lambda x, y: batches(*halves(x), y),
    "nested tensors": lambda x, y: (halves(x), y),
    "mapping": lambda x, y: dict(zip(("first", "second", "labels"), (*halves(x), y), strict=True)),
}
FORMS = [
    *[pytest.param(lambda core: core, form, id=name) for name, form in POSITIONAL.items()],
    *[pytest.param(Named, form, id=f"named, {name}") for name, form in NAMED.items()],
    *[pytest.param(Halves, form, id=f"two inputs, {name}") for name, form in TWO_INPUTS.items()],
]
UNSEEN = {
    "pair with labels": lambda u: (u, torch.zeros(len(u), dtype=torch.long)),
    "dataset": TensorDataset,
    "loader with labels": lambda u: loader(u, torch.zeros(len(u), dtype=torch.long), batch_size=3),
    "loader of bare inputs": lambda u: DataLoader(Examples(len(u), lambda i: u[i]), batch_size=2),
}


@pytest.fixture(scope="module")
def case():
    return make_case()


def fit(case, data, wrap=lambda core: core, **options):
    settings = {"l2": case.l2, "rank": 5, "estimator": "sandwich", "progress": False, **options}
    return deltabars.fit(wrap(case.model), data, **settings)


@pytest.fixture(scope="module")
def reference(case):
    return fit(case, case.data)


def assert_same_predictions(found, expected):
    for name in ("mean", "std", "std_error", "std_low", "std_high", "score", "score_error"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), **EXACT)
    assert torch.equal(found.label, expected.label)


def assert_same_fit(found, expected, inputs, expected_inputs):
    assert found.num_examples == expected.num_examples == 29
    for matrix, pairs in expected.spectra.items():
        torch.testing.assert_close(found.spectra[matrix].values, pairs.values, **EXACT)
    assert_same_predictions(found.predict(inputs), expected.predict(expected_inputs))


def in_form(wrap, form, inputs):
    """Inputs to predict, in a form that suits the model and the form of its training data."""
    if wrap is Named:
        return {"x": inputs}
    if form is TWO_INPUTS["mapping"]:
        return dict(zip(("first", "second"), halves(inputs), strict=True))
    return halves(inputs) if wrap is Halves else inputs


@pytest.mark.parametrize(("wrap", "form"), FORMS)
def test_the_form_of_the_data_does_not_matter(case, reference, wrap, form):
    found = fit(case, form(*case.data), wrap)
    assert_same_fit(found, reference, in_form(wrap, form, case.unseen), case.unseen)


@pytest.mark.parametrize("form", ["loader of 7", "shuffling loader", "iterable dataset", "pair"])
@pytest.mark.parametrize("estimator", ["sandwich", "ggn"])
def test_data_beyond_the_memory_budget_are_streamed(case, form, estimator):
    data = POSITIONAL[form](*case.data) if form in POSITIONAL else case.data
    budget = case.inputs.nbytes  # half of it is for the data
    problem = deltabars.Problem(case.model, data, l2=case.l2, memory_budget=budget)
    assert not problem.data.in_memory
    found = fit(case, data, estimator=estimator, memory_budget=budget)
    expected = fit(case, case.data, estimator=estimator, memory_budget=ROOMY)
    assert_same_fit(found, expected, case.unseen, case.unseen)


@pytest.mark.parametrize("form", UNSEEN)
def test_inputs_to_predict_in_any_form(case, reference, form):
    found = reference.predict(UNSEEN[form](case.unseen))
    assert_same_predictions(found, reference.predict(case.unseen))


@pytest.mark.parametrize(
    "inputs",
    [
        lambda a, b: {"second": b, "first": a},
        lambda a, b: {"first": a, "labels": torch.zeros(len(a)), "second": b},
        lambda a, b: mappings(first=a, second=b),
        lambda a, b: Examples(len(a), lambda i: {"first": a[i], "second": b[i]}),
    ],
    ids=["in another order", "with labels", "batches", "dataset"],
)
def test_mappings_to_predict(case, reference, inputs):
    done = fit(case, TWO_INPUTS["mapping"](*case.data), Halves)
    found = done.predict(inputs(*halves(case.unseen)))
    assert_same_predictions(found, reference.predict(case.unseen))


def fingerprint(data, dtype=torch.float64, budget=ROOMY):
    return TrainingData(data, CPU, dtype, budget).fingerprint


@pytest.mark.parametrize(
    "form", sorted(POSITIONAL.keys() - {"narrow labels"})
)  # those are other bits
def test_the_fingerprint_depends_on_neither_order_nor_batches(case, form):
    expected = fingerprint(case.data)
    assert fingerprint(POSITIONAL[form](*case.data)) == expected
    assert fingerprint(POSITIONAL[form](*case.data), torch.float32, budget=1) == expected
    order = torch.randperm(29, generator=torch.Generator().manual_seed(0))
    assert fingerprint((case.inputs[order], case.targets[order])) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8, torch.bool], ids=str)
def test_the_fingerprint_sees_every_change(dtype):
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 2, (9, 2, 3, 3), generator=generator).to(dtype)
    labels = torch.arange(9) % 3
    others = [(images, labels.roll(1)), (images.flip(3), labels), (images[:-1], labels[:-1])]
    others.append((torch.cat([images, images[:1]]), torch.cat([labels, labels[:1]])))
    for n in range(9):
        for pixel in range(18):
            changed = images.clone().view(9, -1)
            changed[n, pixel] = 1 - changed[n, pixel].long()
            others.append((changed.view_as(images), labels))
    assert len({fingerprint((images, labels)), *map(fingerprint, others)}) == 1 + len(others)


def test_the_fingerprint_sees_the_last_bit_and_the_role_of_an_input(case):
    x, y = case.data
    nudged = x.clone()
    nudged[11, 2] = torch.nextafter(x[11, 2], torch.tensor(9.0, dtype=x.dtype))
    first, second = halves(x)
    found = [fingerprint(data) for data in ((x, y), (nudged, y), (first, second, y))]
    assert len({*found, fingerprint((second, first, y))}) == 4


def test_predict_takes_the_training_data_of_a_regression():
    """Inputs and targets of one shape: which is which is known by their places."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 30, 1, dtype=torch.float64, generator=generator)
    model = nn.Linear(1, 1).double()
    train(model, x, y, 0.1, "gaussian")
    options = {"l2": 0.1, "rank": 2, "likelihood": "gaussian", "progress": False}
    fitted = deltabars.fit(model, (x, y), **options)
    expected = fitted.predict(x).std
    assert torch.equal(fitted.predict((x, y)).std, expected)
    assert torch.equal(fitted.predict(DataLoader(TensorDataset(x, y), batch_size=30)).std, expected)
