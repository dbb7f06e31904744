"""How large the works are: one size for two cores, one for a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Network:
    """A network of `architectures`.

    Attributes:
        shape: what its constructor is given; empty for the network as it is known.
        images, test_images: how many to train and to fit on, and to predict.
        epochs: of training, and `closing`: of which there are more in eval mode behind them.
        batch: how many images a step of training takes.
        rank: K.
    """

    shape: dict[str, Any]
    images: int
    test_images: int
    epochs: int
    closing: int
    batch: int
    rank: int


@dataclass(frozen=True)
class Size:
    """Every number that a work depends on, so that a run can be repeated or shrunk.

    Attributes:
        name: `"small"` or `"gpu"`: whose goals the figures are held to.
        device: where to compute.
        repeats: of the short measurements, interleaved; of a whole fit `fit_repeats`.
        train_images, test_images: how many there are to take from.
        training_steps: of Adam, where the weights are not read from a file.
        images: N of floor and product; `product_check` of them for the float64 product.
        hessian_images, hessian_ranks: N, and K of `hessian` and `hessian1500`.
        checked_pairs: how many Hessian pairs have their residuals measured afterwards.
        opg_images, opg_rank, opg_batch: N, K, and the rows IncrementalPCA takes at a time.
        opg_exact: whether N×N Gram matrices are affordable.
        peers: whether peers are run at all.
        predict_images, predict_rank, predict_fit_images: on the paper's network.
        digits_images, digits_fit_images, digits_steps, digits_ranks: on the small network that
            laplace-torch can hold: images to predict and to fit, steps of L-BFGS, K.
        growth_images, growth_width, growth_rank: the first points, doubled twice.
        memory_images, memory_width, memory_rank: of the fits whose memory is measured.
        resnet, vit: the networks of `architectures`.
        published_images, published_rank: None where the published spectra are out of reach.
    """

    name: str
    device: str
    repeats: int
    fit_repeats: int
    train_images: int
    test_images: int
    training_steps: int
    images: int
    product_check: int
    hessian_images: int
    hessian_ranks: tuple[int, ...]
    checked_pairs: int
    opg_images: int
    opg_rank: int
    opg_batch: int
    opg_exact: bool
    peers: bool
    predict_images: int
    predict_rank: int
    predict_fit_images: int
    digits_images: int
    digits_fit_images: int
    digits_steps: int
    digits_ranks: tuple[int, ...]
    growth_images: int
    growth_width: int
    growth_rank: int
    memory_images: int
    memory_width: int
    memory_rank: int
    resnet: Network
    vit: Network
    published_images: int | None
    published_rank: int | None


SMALL = Size(
    name="small",
    device="cpu",
    repeats=5,
    fit_repeats=1,
    train_images=2048,
    test_images=200,
    training_steps=400,
    images=1000,
    product_check=1000,
    hessian_images=1000,
    hessian_ranks=(20,),
    checked_pairs=10,
    opg_images=2000,
    opg_rank=100,
    opg_batch=200,
    opg_exact=True,
    peers=True,
    predict_images=100,
    predict_rank=100,
    predict_fit_images=500,
    digits_images=500,
    digits_fit_images=1297,
    digits_steps=100,
    digits_ranks=(150, 400, 600, 1898),
    growth_images=256,
    growth_width=64,
    growth_rank=8,
    memory_images=512,
    memory_width=64,
    memory_rank=100,
    resnet=Network(
        {"width": 4, "blocks": (1, 1, 1)},
        images=400,
        test_images=200,
        epochs=10,
        closing=3,
        batch=32,
        rank=20,
    ),
    vit=Network(
        {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        },
        images=400,
        test_images=200,
        epochs=40,
        closing=0,
        batch=32,
        rank=10,
    ),
    published_images=None,
    published_rank=None,
)

GPU = Size(
    name="gpu",
    device="cuda",
    repeats=5,
    fit_repeats=3,
    train_images=60_000,
    test_images=10_000,
    training_steps=1000,
    images=60_000,
    product_check=4096,
    hessian_images=60_000,
    hessian_ranks=(600, 1500),
    checked_pairs=16,
    opg_images=60_000,
    opg_rank=1500,
    opg_batch=2048,
    opg_exact=False,
    peers=False,
    predict_images=10_000,
    predict_rank=1500,
    predict_fit_images=60_000,
    digits_images=0,
    digits_fit_images=0,
    digits_steps=0,
    digits_ranks=(),
    growth_images=15_000,
    growth_width=128,
    growth_rank=32,
    memory_images=8192,
    memory_width=512,
    memory_rank=300,
    resnet=Network(
        {}, images=50_000, test_images=10_000, epochs=20, closing=5, batch=128, rank=200
    ),
    vit=Network(
        {
            "hidden_size": 128,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "intermediate_size": 256,
        },
        images=60_000,
        test_images=10_000,
        epochs=10,
        closing=0,
        batch=256,
        rank=200,
    ),
    published_images=60_000,
    published_rank=600,
)
