"""A fit owns a private copy of the model; what it computes is refused, or noted and compared."""

from __future__ import annotations

import threading
import types
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import deltabars
from deltabars.errors import CorruptFileError, ModelError, ModelWarning, WeightsMismatchError
from deltabars.storage import format as storage
from tests.architectures import Wired
from tests.conftest import cached_case
from tests.networks import make_case

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


def changed(change):
    net = Net()
    change(net)
    return net


MODELS = {
    "plain": Net,
    "holding": Holding,
    "closures": closures,
    "tied": tied,
    "pruned": lambda: changed(lambda net: prune.l1_unstructured(net.a, "weight", 0.5)),
    "weight norm": lambda: changed(lambda net: parametrizations.weight_norm(net.a)),
    "spectral norm": lambda: changed(lambda net: parametrizations.spectral_norm(net.a)),
    "compiled": lambda: torch.compile(Net(), backend="eager"),
    "compiled within": lambda: changed(
        lambda net: setattr(net, "a", torch.compile(net.a, backend="eager"))
    ),
    "traced": lambda: torch.fx.symbolic_trace(Net()),
}


def build(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[kind]() if isinstance(kind, str) else kind()
        return model.double().eval()


def fit(model, data=DATA, **options):
    settings = {"l2": 0.1, "rank": 6, "progress": False, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=deltabars.errors.OptimumWarning)
        warnings.filterwarnings("ignore", category=deltabars.errors.SpectrumWarning)
        return deltabars.fit(model, data, **settings)


def train_on(net):
    with torch.no_grad():
        for value in [*net.parameters(), *net.buffers()]:
            value.add_(0.3)
    net.train()


def reparametrize(net):
    for layer in [each for each in net.modules() if isinstance(each, nn.Linear)]:
        if parametrize.is_parametrized(layer):
            parametrize.remove_parametrizations(layer, "weight")
        elif not prune.is_pruned(layer):
            parametrizations.weight_norm(layer)


def wrap(net):
    for module in net.modules():
        module.register_forward_pre_hook(lambda module, args: tuple(2 * x for x in args))
    for name, layer in list(net.named_children()):
        setattr(net, name, nn.Sequential(layer, nn.Dropout()))
    if isinstance(net, Holding):
        net.shift.zero_()
        net.settings.factors[0] = 9.0


@pytest.mark.parametrize("kind", MODELS)
def test_whatever_is_done_later_changes_nothing(kind, tmp_path):
    model = build(kind)
    done = fit(model)
    done.save(tmp_path / "a")
    again = deltabars.load(tmp_path / "a", model)
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
    for name, value in done.network.model.named_parameters():  # it takes no memory of its own
        assert value.data_ptr() == done.network.trained[name].data_ptr()
    for change in (train_on, reparametrize, wrap):
        change(model)
        for each in (done, again):
            after = each.predict(UNSEEN)
            assert torch.equal(after.mean, before.mean), change.__name__
            assert torch.equal(after.std, before.std), change.__name__


@pytest.mark.parametrize("kind", ["compiled", "compiled within"])
@pytest.mark.parametrize("turned", [False, True])
def test_compiled_models_are_those_that_were_compiled(kind, turned, tmp_path):
    first, second = (build(each) for each in ((kind, "plain") if turned else ("plain", kind)))
    done = fit(first, params=["a.*"])
    done.save(tmp_path / "a")
    again = deltabars.load(tmp_path / "a", second)
    assert again.network.parameters.names == ("a.weight", "a.bias")
    assert torch.equal(again.predict(UNSEEN).std, done.predict(UNSEEN).std)


@pytest.mark.parametrize("estimator", ["opg", "hessian"])
def test_a_thread_that_trains_the_model_sees_nothing_of_a_fit(estimator, tmp_path):
    model = build("plain").train()
    own = {name: id(value) for name, value in model.named_parameters()}
    stop, wrong, calls = threading.Event(), [], []

    def train():
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

    fit(build("plain")).save(tmp_path / "a")
    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(3):
            found = fit(model, estimator=estimator)
            for _ in range(10):
                found.predict(UNSEEN)
            deltabars.load(tmp_path / "a", model, check_weights=False).predict(UNSEEN)
    finally:
        stop.set()
        thread.join()
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


class Listed(Net):
    def __init__(self):
        super().__init__()
        self.weights = [self.a.weight]

    def first(self, x):
        return F.linear(x, self.weights[0])


class Refusing(Net):
    def __deepcopy__(self, memo):
        raise RuntimeError("never")


@pytest.mark.parametrize("kind", [ByGlobal, Listed, Refusing])
def test_a_model_that_cannot_be_copied_is_refused(kind, tmp_path):
    with pytest.raises(ModelError, match=r"expected one that (uses its parameters|copy\.deepcopy)"):
        fit(build(kind))
    fit(build("plain")).save(tmp_path / "a")
    if kind is not ByGlobal:  # whose parameters have other names
        with pytest.raises(ModelError, match="expected one that"):
            deltabars.load(tmp_path / "a", build(kind))


GENERATOR = torch.Generator()
SOURCES = {
    "torch": lambda: torch.rand(()),
    "a generator": lambda: torch.rand((), generator=GENERATOR),
    "python": lambda: __import__("random").random(),
    "numpy": lambda: __import__("numpy").random.rand(),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_block_that_is_rarely_left_out_is_noticed(source):
    class Rare(Net):
        def first(self, x):
            return self.a(x) * (SOURCES[source]() > 0.05)

    for _ in range(4):
        with pytest.raises(ModelError, match="same outputs for the same inputs"):
            fit(build(Rare), batch_size=4)


class Detached(Net):
    def forward(self, x):
        return super().forward(x).detach()


def test_models_that_only_look_sound_are_refused():
    with pytest.raises(ModelError, match=r"derivatives that are all zero.*detach"):
        fit(build(Detached))
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    with pytest.raises(ModelError, match="not to depend on the rest of its batch"):
        fit(nn.Sequential(norm, nn.Linear(4, 3)).double())


@pytest.mark.parametrize("when", ["hook", "pre_hook"])
def test_hooks_on_gradients_neither_run_nor_get_lost(when):
    case, ran = make_case("dense"), []
    getattr(case.model[0], f"register_full_backward_{when}")(lambda *_: ran.append(1))
    out, expected = (
        fit(each.model, case.data, l2=case.l2, estimator="sandwich").predict(case.unseen)
        for each in (case, cached_case("dense"))
    )
    assert torch.equal(out.std, expected.std)
    assert not ran
    case.model(case.inputs.clone().requires_grad_()).sum().backward()
    assert ran == [1]


class Tuned(Net):
    def __init__(self, mean=0.0, eps=1e-5, shift=0.0, way=torch.tanh):
        super().__init__()
        self.norm = nn.LayerNorm(6, eps=eps)
        self.register_buffer("mean", torch.full((4,), mean), persistent=False)
        self.shift, self.way = torch.full((6,), shift), way

    def forward(self, x):
        self.cache = self.norm(self.a(x - self.mean)) + self.shift
        return self.b(self.way(self.cache))


def tuned(**options):
    return build(partial(Tuned, **options))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("fits") / "a"
    fit(tuned()).save(path)
    return path


@pytest.mark.parametrize(
    "options",
    [{"mean": 0.5}, {"eps": 1e-6}, {"shift": 0.1}, {"way": torch.sin}, {"mean": 1e-4}],
    ids=",".join,
)
def test_another_function_of_the_same_weights_is_refused(path, options):
    model = tuned(**options)
    with pytest.raises(WeightsMismatchError, match="same weights that computes something else"):
        deltabars.load(path, model)
    assert deltabars.load(path, model, check_weights=False).rank == 6


def test_the_same_function_is_taken_whatever_its_passes_left(path):
    model = tuned()
    model(INPUTS)
    for each in (model, tuned().train(), tuned().float().double()):
        deltabars.load(path, each).save(path.with_name("b"))
        assert deltabars.load(path.with_name("b"), tuned()).rank == 6
        model(INPUTS[:3])


def test_inputs_are_generated_in_the_range_of_the_data(tmp_path):
    def tokens(factor):
        def forward(net, ids, mask):
            rows = net.rows(ids) * mask[..., None]
            return net.head(rows.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)) * factor

        return Wired(forward, rows=nn.Embedding(7, 4), head=nn.Linear(4, 3))

    generator = torch.Generator().manual_seed(0)
    data = {
        "ids": torch.randint(0, 7, (24, 5), generator=generator),
        "mask": torch.randint(0, 2, (24, 5), generator=generator).float(),
        "labels": torch.arange(24) % 3,
    }
    model, other = (build(partial(tokens, factor)) for factor in (1.0, 1.01))
    fit(model, data).save(tmp_path / "a")
    assert deltabars.load(tmp_path / "a", model).rank == 6
    with pytest.raises(WeightsMismatchError, match="outputs of generated inputs differ"):
        deltabars.load(tmp_path / "a", other)


def test_files_before_this_version_load_with_a_note(path, tmp_path):
    header, tensors = storage.read(path)
    del header["behaviour"], tensors["behaviour.outputs"]
    storage.write(tmp_path / "old", header, tensors)
    with pytest.warns(ModelWarning, match="noted the weights alone"):
        found = deltabars.load(tmp_path / "old", tuned())
    assert torch.equal(found.predict(INPUTS).std, deltabars.load(path, tuned()).predict(INPUTS).std)


@pytest.mark.parametrize(
    "ranges", [[[[1 << 40], 0, 1]], [[[4], 0, float("inf")]], [[[4], 0, 1]] * 2], ids=str
)
def test_notes_that_no_fit_has_are_refused(path, tmp_path, ranges):
    header, tensors = storage.read(path)
    header["behaviour"]["ranges"] = ranges
    storage.write(tmp_path / "b", header, tensors)
    with pytest.raises(CorruptFileError):
        deltabars.load(tmp_path / "b", tuned())
