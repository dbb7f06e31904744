"""A fit owns a private copy of the model: what happens to the user's later changes nothing."""

from __future__ import annotations

import threading
import types
import warnings
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import deltabars
from deltabars.errors import ModelError

INPUTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = (INPUTS, torch.arange(24) % 3)
UNSEEN = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.b(self.first(x).tanh())

    def first(self, x):
        return self.a(x)


class Holding(Net):
    """Locks, generators, plain tensors, tensors with a graph, settings, parts in containers."""

    def __init__(self):
        super().__init__()
        self.lock, self.numbers = threading.Lock(), (each for each in "ab")
        self.shift, self.graph = torch.ones(6).double(), self.a.weight.double() * 2
        self.settings = types.SimpleNamespace(factors=[1.5], layers={"first": [self.a]})

    def first(self, x):
        with self.lock:
            self.seen = self.settings.layers["first"][0](x) + self.graph.detach()[:, 0]
        return (self.seen + self.shift) * self.settings.factors[0]


def closures():
    net = Net()
    net.first = lambda x: 2 * net.a(x)
    net.a.register_forward_hook(lambda module, args, output: output * net.b.bias.mean())
    net.b.forward = partial(lambda module, x: F.linear(x, module.weight, module.bias), net.b)
    return net


def tied():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    net[2].weight = net[0].weight
    return net


def changed(net, change):
    change(net)
    return net


MODELS = {
    "plain": Net,
    "holding": Holding,
    "closures": closures,
    "tied": tied,
    "pruned": lambda: changed(Net(), lambda net: prune.l1_unstructured(net.a, "weight", 0.5)),
    "weight norm": lambda: changed(Net(), lambda net: parametrizations.weight_norm(net.a)),
    "spectral norm": lambda: changed(Net(), lambda net: parametrizations.spectral_norm(net.a)),
    "compiled": lambda: torch.compile(Net(), backend="eager"),
    "compiled within": lambda: changed(
        Net(), lambda net: setattr(net, "a", torch.compile(net.a, backend="eager"))
    ),
    "recurrent": lambda: Recurrent(),
    "traced": lambda: torch.fx.symbolic_trace(Net()),
}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.b(self.a(x.view(-1, 2, 2))[0][:, -1])


def train_on(net):
    with torch.no_grad():
        for value in [*net.parameters(), *net.buffers()]:
            value.add_(0.3)
    net.train()


def prune_it(net):
    layer = next(each for each in net.modules() if isinstance(each, nn.Linear))
    if not parametrize.is_parametrized(layer) and not prune.is_pruned(layer):
        prune.l1_unstructured(layer, "weight", 0.5)


def wrap(net):
    for name, layer in list(net.named_children()):
        setattr(net, name, nn.Sequential(layer, nn.Dropout()))


def normalise(net):
    for layer in [each for each in net.modules() if isinstance(each, nn.Linear)]:
        if parametrize.is_parametrized(layer):
            parametrize.remove_parametrizations(layer, "weight")
        elif not prune.is_pruned(layer):
            parametrizations.weight_norm(layer)


def hook(net):
    for module in net.modules():
        module.register_forward_hook(lambda module, args, output: None)
        module.register_forward_pre_hook(lambda module, args: tuple(2 * x for x in args))


def set_attributes(net):
    if isinstance(net, Holding):
        net.shift.zero_()
        net.settings.factors[0] = 9.0


def fit(model, data=DATA, **options):
    settings = {"l2": 0.1, "rank": 6, "progress": False, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=deltabars.errors.OptimumWarning)
        warnings.filterwarnings("ignore", category=deltabars.errors.SpectrumWarning)
        return deltabars.fit(model, data, **settings)


def build(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[kind]() if isinstance(kind, str) else kind()
        return model.double().eval()


@pytest.mark.parametrize("kind", MODELS)
def test_whatever_is_done_later_changes_nothing(kind):
    model = build(kind)
    done = fit(model)
    before = done.predict(UNSEEN)
    torch.testing.assert_close(before.mean, model(UNSEEN).softmax(1), rtol=0, atol=1e-12)
    derivatives = torch.stack([
        torch.cat([part.flatten() for part in torch.autograd.grad(
            output, list(model.parameters()), retain_graph=True, materialize_grads=True)])
        for output in model(UNSEEN).flatten()
    ])  # fmt: skip
    with done.network.evaluation():
        rows = done.pullback.rows(UNSEEN, lambda z: torch.eye(3).to(z).expand(len(z), -1, -1))
    torch.testing.assert_close(rows.flatten(0, 1), derivatives, rtol=0, atol=1e-12)
    changes = [train_on, prune_it, normalise, hook, set_attributes, wrap]
    for change in changes:
        change(model)
        after = done.predict(UNSEEN)
        assert torch.equal(after.mean, before.mean), change.__name__
        assert torch.equal(after.std, before.std), change.__name__


@pytest.mark.parametrize("kind", ["plain", "compiled", "weight norm"])
def test_a_loaded_fit_owns_its_model_too(kind, tmp_path):
    model = build(kind)
    done = fit(model)
    done.save(tmp_path / "a")
    again = deltabars.load(tmp_path / "a", model)
    before = done.predict(UNSEEN)
    for change in (train_on, normalise, wrap):
        change(model)
        assert torch.equal(again.predict(UNSEEN).std, before.std)


@pytest.mark.parametrize("kind", ["compiled", "compiled within"])
@pytest.mark.parametrize("way", ["into a compiled one", "out of one"])
def test_compiled_models_are_those_that_were_compiled(kind, way, tmp_path):
    plain, compiled = build("plain"), build(kind)
    first, second = (plain, compiled) if way == "into a compiled one" else (compiled, plain)
    done = fit(first, params=["a.*"])
    done.save(tmp_path / "a")
    again = deltabars.load(tmp_path / "a", second)
    assert again.network.parameters.names == ("a.weight", "a.bias")
    assert torch.equal(again.predict(UNSEEN).std, done.predict(UNSEEN).std)


def test_a_copy_takes_no_memory_for_parameters():
    network = fit(build("plain")).network
    for name, value in network.model.named_parameters():
        assert value.data_ptr() == network.trained[name].data_ptr()


@pytest.fixture
def left_alone():
    """A module that says whether anything of it is ever others than its own."""
    model = build("plain").train()
    own = {name: id(value) for name, value in model.named_parameters()}
    stop, wrong, calls = threading.Event(), [], []

    def look():
        optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
        while not stop.is_set():
            found = {name: id(value) for name, value in model.named_parameters()}
            if found != own or not all(module.training for module in model.modules()):
                wrong.append(found)
            try:
                optimiser.zero_grad()
                F.cross_entropy(model(INPUTS), DATA[1]).backward()
                optimiser.step()
                calls.append(1)
            except Exception as error:
                wrong.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    yield model, wrong, calls
    stop.set()
    thread.join()


@pytest.mark.parametrize("estimator", ["opg", "hessian"])
def test_a_thread_that_trains_the_model_sees_nothing_of_a_fit(left_alone, estimator, tmp_path):
    model, wrong, calls = left_alone
    done = fit(build("plain"))
    done.save(tmp_path / "a")
    for _ in range(3):
        found = fit(model, estimator=estimator)
        for _ in range(10):
            found.predict(UNSEEN)
        deltabars.load(tmp_path / "a", model, check_weights=False).predict(UNSEEN)
    assert len(calls) > 10
    assert not wrong


KEPT: dict[str, nn.Module] = {}


class ByGlobal(nn.Module):
    """Calls a part of itself by a name that a copy cannot know."""

    def __init__(self):
        super().__init__()
        self.inner = KEPT["net"] = Net()

    def forward(self, x):
        return KEPT["net"](x)


class ByWeakKey(Net):
    def __init__(self):
        super().__init__()
        self.factors = weakref.WeakKeyDictionary({self.a: 2.0})

    def first(self, x):
        return self.a(x) * self.factors.get(self.a, 1.0)


class ByReference(Net):
    def __init__(self):
        super().__init__()
        self.me = weakref.ref(self.a)

    def first(self, x):
        return self.me()(x)


class Listed(Net):
    def __init__(self):
        super().__init__()
        self.weights = [self.a.weight]

    def first(self, x):
        return F.linear(x, self.weights[0])


class Refusing(Net):
    def __deepcopy__(self, memo):
        raise RuntimeError("never")


@pytest.mark.parametrize("kind", [ByGlobal, ByWeakKey, ByReference, Listed, Refusing])
def test_a_model_that_cannot_be_copied_is_refused(kind, tmp_path):
    with pytest.raises(ModelError, match=r"expected one that (uses its parameters|copy\.deepcopy)"):
        fit(build(kind))
    done = fit(build("plain"))
    done.save(tmp_path / "a")
    if kind is not ByGlobal:  # whose parameters have other names
        with pytest.raises(ModelError, match="expected one that"):
            deltabars.load(tmp_path / "a", build(kind))


def rarely(source):
    """A model in which a block is left out in one of twenty calls."""

    class Rare(Net):
        def first(self, x):
            return self.a(x) * (source() > 0.05)

    return build(Rare)


GENERATOR = torch.Generator()
SOURCES = {
    "torch": lambda: torch.rand(()),
    "a generator": lambda: torch.rand((), generator=GENERATOR),
    "python": lambda: __import__("random").random(),
    "numpy": lambda: __import__("numpy").random.rand(),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_block_that_is_rarely_left_out_is_noticed(source):
    for _ in range(4):
        with pytest.raises(ModelError, match="same outputs for the same inputs"):
            fit(rarely(SOURCES[source]), batch_size=4)


def test_numbers_that_are_drawn_and_not_used_are_no_matter():
    class Drawing(Net):
        def first(self, x):
            torch.rand(3)
            return self.a(x)

    found = fit(build(Drawing)).predict(UNSEEN)
    assert torch.equal(found.std, fit(build("plain")).predict(UNSEEN).std)
