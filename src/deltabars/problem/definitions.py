"""Operations of torch by their formulas, which have derivatives of every kind.

torch computes an LSTM, a GRU or an RNN in one call, which `vmap` does not support and which on a
GPU has no second derivatives, and in eval mode no first ones either. Written as dense layers and
activations it has all of them, and those by the weights for all examples at once.

    RNN    h' = act(a + b)                     a = W_ih x + b_ih     b = W_hh h + b_hh
    LSTM   c' = σ(f)∘c + σ(i)∘tanh(g)          (i, f, g, o) = a + b
           h' = σ(o)∘tanh(c')                  and then W_hr h', where the layer projects
    GRU    n  = tanh(a_n + σ(a_r + b_r)∘b_n)   h' = (1 − u)∘n + u∘h with u = σ(a_u + b_u)

Bags are sums of embeddings, padding is a constant, and bilinear layers and weight norms are their
formulas. Each function takes the arguments of torch's own, and returns what that returns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]  # (h,) or (h, c), each (B, H)
# From a (B, G·H), the state, and the weight and bias of the step to the next state.
Step = Callable[[Tensor, State, Tensor, Tensor | None], State]


def _rnn(activation: Callable[[Tensor], Tensor]) -> Step:
    def step(a: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
        return (activation(a + F.linear(state[0], weight, bias)),)

    return step


def _lstm(a: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    h, c = state
    i, f, g, o = (a + F.linear(h, weight, bias)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(a: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    (h,) = state
    a_r, a_u, a_n = a.chunk(3, -1)
    b_r, b_u, b_n = F.linear(h, weight, bias).chunk(3, -1)
    n = (a_n + (a_r + b_r).sigmoid() * b_n).tanh()
    u = (a_u + b_u).sigmoid()
    return ((1 - u) * n + u * h,)


def _cell(step: Step, inputs: Tensor, state: Any, *weights: Any) -> Any:
    """Compute one step, as `torch.lstm_cell` and its like take it."""
    w_ih, w_hh, b_ih, b_hh = (*weights, None, None)[:4]
    states = tuple(state) if isinstance(state, list | tuple) else (state,)
    new = step(F.linear(inputs, w_ih, b_ih), states, w_hh, b_hh)
    return new[0] if len(new) == 1 else new


def _recurrent(whole: Any, step: Step, *args: Any) -> Any:
    """Compute all steps of all layers, as `torch.lstm` and its like take them.

    Packed sequences and dropout take the whole; on a GPU not cuDNN's, which lacks derivatives.
    """
    packed = isinstance(args[3], list | tuple)  # (data, batch sizes, state, weights, …)
    if packed or (args[5] > 0 and args[6]):
        with torch.backends.cudnn.flags(enabled=False):
            return whole(*args)
    inputs, start, weights, has_biases, num_layers, _, _, bidirectional, batch_first = args
    starts = tuple(start) if isinstance(start, list | tuple) else (start,)
    ways = 2 if bidirectional else 1
    each = len(weights) // (num_layers * ways)
    x = inputs if batch_first else inputs.transpose(0, 1)  # (B, T, I): examples come first
    ends: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for way in range(ways):
            index = layer * ways + way
            w_ih, w_hh, *rest = weights[index * each : (index + 1) * each]
            b_ih, b_hh = rest[:2] if has_biases else (None, None)
            projection = rest[-1] if each == (5 if has_biases else 3) else None
            state = tuple(part[index] for part in starts)
            turn = -1 if way else 1
            seen: list[Tensor] = []
            for a in F.linear(x, w_ih, b_ih).unbind(1)[::turn]:
                state = step(a, state, w_hh, b_hh)
                if projection is not None:
                    state = (F.linear(state[0], projection), *state[1:])
                seen.append(state[0])
            ends.append(state)
            outputs.append(torch.stack(seen[::turn], 1))  # (B, T, H)
        x = torch.cat(outputs, -1) if ways == 2 else outputs[0]
    last = [torch.stack(part) for part in zip(*ends, strict=True)]  # (layers, B, H)
    return (x if batch_first else x.transpose(0, 1), *last)


def _embedding(input: Tensor, weight: Tensor, padding_idx: int | None, **options: Any) -> Tensor:
    """Look up rows with their true derivatives, which neither are sparse nor depend on the batch.

    The row of the padding is a constant: torch's backward derivatives say so, its forward ones
    do not, and Hessian products take both.
    """
    rows = F.embedding(input, weight, None, options["max_norm"], options["norm_type"])
    if padding_idx is None:
        return rows
    return rows.detach().where((input == padding_idx % len(weight))[..., None], rows)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Sum embeddings of bags of one size, (B, L): torch's own has no second derivatives."""
    if input.ndim != 2 or mode == "max":
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, False, mode, False, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    rows = F.embedding(input, weight, None, max_norm, norm_type)  # (B, L, D)
    counted = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        counted = input != padding_idx % len(weight)
    scales = counted.to(rows.dtype) if per_sample_weights is None else counted * per_sample_weights
    total = (rows * scales[..., None]).sum(1)
    return total / counted.sum(1, keepdim=True).clamp(min=1) if mode == "mean" else total


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return product if bias is None else product + bias


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


DEFINITIONS: dict[Any, Callable[..., Any]] = {
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    F.bilinear: _bilinear,
    torch._weight_norm: _weight_norm,
    torch.lstm: partial(_recurrent, torch.lstm, _lstm),
    torch.gru: partial(_recurrent, torch.gru, _gru),
    torch.rnn_tanh: partial(_recurrent, torch.rnn_tanh, _rnn(torch.tanh)),
    torch.rnn_relu: partial(_recurrent, torch.rnn_relu, _rnn(torch.relu)),
    torch.lstm_cell: partial(_cell, _lstm),
    torch.gru_cell: partial(_cell, _gru),
    torch.rnn_tanh_cell: partial(_cell, _rnn(torch.tanh)),
    torch.rnn_relu_cell: partial(_cell, _rnn(torch.relu)),
}
