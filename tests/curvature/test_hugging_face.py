"""Classifiers of Hugging Face, from small configurations with random weights: nothing is loaded."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

import deltabars
from tests.oracles import Oracle
from tests.problem.test_model_untouched import model_state

transformers = pytest.importorskip("transformers", reason="transformers cannot be imported here")

pytestmark = pytest.mark.filterwarnings("ignore::deltabars.errors.OptimumWarning")
# GPT-2 flattens examples and places into one dimension, and its masks look at values.
SLOW = pytest.mark.filterwarnings("ignore::deltabars.errors.ModelWarning")
TOKENS = 7
SIZES = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES["intermediate_size"] = 4
WORDS = {"vocab_size": TOKENS, "pad_token_id": 0}
TEXT = {**SIZES, **WORDS, "max_position_embeddings": 6}
KINDS = {
    "Bert": TEXT,
    "DistilBert": {
        **WORDS, "dim": 4, "n_layers": 1, "n_heads": 2, "hidden_dim": 4,
        "max_position_embeddings": 6,
    },
    "GPT2": {
        **WORDS, "n_positions": 6, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_inner": 4,
        "bos_token_id": 1, "eos_token_id": 1,
    },
    "Llama": {**TEXT, "num_key_value_heads": 1},
    "ViT": {**SIZES, "image_size": 4, "patch_size": 2, "num_channels": 1},
}  # fmt: skip


@cache
def built(kind, attention="sdpa"):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        options = {**KINDS[kind], "num_labels": 3, "attn_implementation": attention}
        config = getattr(transformers, f"{kind}Config")(**options)
        task = "Image" if kind == "ViT" else "Sequence"
        model = getattr(transformers, f"{kind}For{task}Classification")(config).double().eval()
        for weight in model.parameters():  # the initial ones are too small to tell errors by
            weight.data.normal_(0, 0.5)
    return model


def texts(count, length=5, seed=0):
    """Tokens of several lengths, padded to the longest, and what is not padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, TOKENS, (count, length), generator=generator)
    mask = (torch.arange(length) <= torch.arange(count)[:, None] % length).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def pictures(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(count, 1, 4, 4, generator=generator, dtype=torch.float64)}


def labels(count):
    return torch.arange(count) % 3


def fit(model, data, **options):
    return deltabars.fit(model, data, **{"l2": 1.0, "progress": False, **options})


@pytest.mark.parametrize("estimator", ["opg", "ggn", "hessian"])
@pytest.mark.parametrize(
    ("kind", "attention"),
    [("Bert", "sdpa"), ("Bert", "eager"), ("DistilBert", "sdpa"), ("Llama", "sdpa"),
     ("ViT", "sdpa"), ("GPT2", "eager"), pytest.param("GPT2", "sdpa", marks=SLOW)],
)  # fmt: skip
def test_matrices_and_error_bars(kind, attention, estimator):
    model = built(kind, attention)
    inputs, unseen = (
        pictures(count, seed) if kind == "ViT" else texts(count, seed=seed)
        for count, seed in ((5, 0), (3, 1))
    )
    oracle = Oracle(model, inputs, labels(5), 1.0)
    with sdpa_kernel(SDPBackend.MATH):  # the fused forms have no second derivatives
        matrix = oracle.matrix(estimator)
        least = float(torch.linalg.eigvalsh(matrix)[0])
        if least < 0.5:  # untrained: its Hessian may be anything
            oracle.l2 += math.ceil(0.5 - least)
            matrix = oracle.matrix(estimator)
        std = oracle.std(estimator, unseen)
    before = model_state(model)
    found = fit(
        model, {**inputs, "labels": labels(5)}, l2=oracle.l2, estimator=estimator, rank=len(matrix)
    )
    # Llama's norms and rotations are of float32, whatever its weights are.
    precision = {"rtol": 1e-4, "atol": 1e-5} if kind == "Llama" else {"rtol": 1e-8, "atol": 1e-9}
    torch.testing.assert_close(found.predict(unseen).std, std, **precision)
    pairs = found.spectra[estimator]
    rebuilt = (pairs.vectors.T * pairs.values) @ pairs.vectors
    torch.testing.assert_close(rebuilt, matrix, **precision)
    assert model_state(model) == before


def pad_to_the_longest(examples):
    length = max(int(example["attention_mask"].sum()) for example in examples)
    columns = {name: torch.stack([e[name] for e in examples]) for name in examples[0]}
    return {n: c if n == "labels" else c[:, :length] for n, c in columns.items()}


def dataset(count):
    columns = {**texts(count), "labels": labels(count)}
    return [{name: column[n] for name, column in columns.items()} for n in range(count)]


def whole_batches(count):
    return DataLoader(dataset(count), batch_size=4)


def batches(count):
    return DataLoader(dataset(count), batch_size=4, collate_fn=pad_to_the_longest)


@pytest.mark.parametrize("kind", ["Bert", pytest.param("GPT2", marks=SLOW)])
@pytest.mark.parametrize("source", [whole_batches, batches])
def test_every_way_to_give_the_data_gives_the_same(kind, source):
    """Also where batches are padded to lengths of their own, and the last one is ragged."""
    options = {"estimator": "sandwich", "rank": 6, "l2": 4.0}
    tensors = {**texts(11), "labels": labels(11)}
    whole = fit(built(kind), tensors, **options).predict(texts(6, seed=1))
    other = fit(built(kind), source(11), **options)
    torch.testing.assert_close(other.predict(texts(6, seed=1)).std, whole.std, rtol=1e-7, atol=0)
    if source is batches:  # other lengths are taken where the training data had several
        torch.testing.assert_close(
            other.predict(batches(11)).std, other.predict(tensors).std, rtol=1e-9, atol=1e-14
        )
