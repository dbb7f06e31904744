"""Recurrent layers step by step, as they are defined.

torch computes an LSTM, a GRU or an RNN in one call, which `vmap` does not bear and which on a GPU
has no second derivatives, and in eval mode no first ones either. Written as dense layers and
activations it has all of them, and those by the weights for all examples at once.

    RNN    h' = act(a + b)                     a = W_ih x + b_ih     b = W_hh h + b_hh
    LSTM   c' = σ(f)∘c + σ(i)∘tanh(g)          (i, f, g, o) = a + b
           h' = σ(o)∘tanh(c')                  and then W_hr h', where the layer projects
    GRU    n  = tanh(a_n + σ(a_r + b_r)∘b_n)   h' = (1 − u)∘n + u∘h with u = σ(a_u + b_u)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]  # (h,) or (h, c), each (B, H)
# From a (B, G·H), the state, and the weight and bias of the step to the next state.
Step = Callable[[Tensor, State, Tensor, Tensor | None], State]


def called_with_steps(func: Any, args: tuple[Any, ...]) -> Any:
    """What a recurrent layer or cell returns, step by step.

    Layers of packed sequences, or with dropout, stay whole; on a GPU they are not cuDNN's then,
    which lack derivatives.
    """
    if func in _CELLS:
        return _cell(_CELLS[func], *args)
    packed = isinstance(args[3], list | tuple)  # (data, batch sizes, state, weights, …)
    if packed or (args[5] > 0 and args[6]):
        with torch.backends.cudnn.flags(enabled=False):
            return func(*args)
    return _layers(_LAYERS[func], *args)


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


def _cell(
    step: Step,
    inputs: Tensor,
    state: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """One step, with the arguments and the result of `torch.lstm_cell` and its like."""
    states = tuple(state) if isinstance(state, list | tuple) else (state,)
    new = step(F.linear(inputs, w_ih, b_ih), states, w_hh, b_hh)
    return new[0] if len(new) == 1 else new


def _layers(
    step: Step,
    inputs: Tensor,
    start: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """All steps of all layers, with the arguments and the result of `torch.lstm` and its like."""
    starts = tuple(start) if isinstance(start, list | tuple) else (start,)
    ways = 2 if bidirectional else 1
    each = len(weights) // (num_layers * ways)
    x = inputs if batch_first else inputs.transpose(0, 1)  # (B, T, I): examples come first
    ends: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for way in range(ways):
            place = layer * ways + way
            own = list(weights[place * each : (place + 1) * each])
            w_ih, w_hh = own[:2]
            b_ih, b_hh = own[2:4] if has_biases else (None, None)
            projection = own[-1] if each == (5 if has_biases else 3) else None
            state = tuple(part[place] for part in starts)
            seen: list[Tensor] = []
            for a in _in_turn(F.linear(x, w_ih, b_ih), backwards=way == 1):
                state = step(a, state, w_hh, b_hh)
                if projection is not None:
                    state = (F.linear(state[0], projection), *state[1:])
                seen.append(state[0])
            ends.append(state)
            outputs.append(torch.stack(seen[::-1] if way else seen, 1))  # (B, T, H)
        x = torch.cat(outputs, -1) if ways == 2 else outputs[0]
    last = [torch.stack(part) for part in zip(*ends, strict=True)]  # (layers, B, H)
    return (x if batch_first else x.transpose(0, 1), *last)


def _in_turn(a: Tensor, backwards: bool) -> Sequence[Tensor]:
    steps = a.unbind(1)
    return steps[::-1] if backwards else steps


_LAYERS: dict[Any, Step] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: _rnn(torch.tanh),
    torch.rnn_relu: _rnn(torch.relu),
}
_CELLS: dict[Any, Step] = {
    torch.lstm_cell: _lstm,
    torch.gru_cell: _gru,
    torch.rnn_tanh_cell: _rnn(torch.tanh),
    torch.rnn_relu_cell: _rnn(torch.relu),
}
RECURRENT = {*_LAYERS, *_CELLS}
