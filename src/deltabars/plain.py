"""Models within what trains them on several processes, or compiles them."""

from __future__ import annotations

import sys
from typing import Any, overload

import torch
from torch.nn.parameter import is_lazy

from deltabars.errors import ModelError

_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
_FSDP = "torch.distributed.fsdp"
_COMPILED = "_orig_mod"


def plain_model(model: Any) -> torch.nn.Module:
    """The module within those that train it on several processes, or compile it.

    Raises:
        ModelError: it is no module, has no code of Python or no weights yet, or each process has a
            part of its parameters alone.
    """
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    while (inside := as_written(model)) is not model or isinstance(model, _WRAPPERS):
        model = model.module if isinstance(model, _WRAPPERS) else inside
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ModelError(
            "model: expected a module of Python code, got one of TorchScript, whose parameters "
            "cannot be exchanged. Give the module that it was made from."
        )
    kinds = [_kind("torch.distributed.tensor", "DTensor"), _kind(_FSDP, "FullyShardedDataParallel")]
    sharded = tuple(kind for kind in kinds if kind is not None)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    empty = [name for name, value in tensors.items() if is_lazy(value) or value.is_meta]
    if empty:
        raise ModelError(
            f"model: expected weights, got {len(empty)} tensors without values ({empty[0]}"
            f"{', …' if len(empty) > 1 else ''}), on the meta device or not initialised. Load the "
            "weights first: model.to_empty(device=…) and load_state_dict(…), or one forward pass "
            "of a lazy module."
        )
    parts = [*model.modules(), *tensors.values()]
    found = next((part for part in parts if isinstance(part, sharded)), None)
    if found is not None:
        raise ModelError(
            f"model: expected whole parameters on every process, got {type(found).__name__}, which "
            "has a part of them on each. Load a full state dict into a plain model: "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
            "torch.distributed.checkpoint.state_dict."
        )
    return model


@overload
def as_written(given: str) -> str: ...
@overload
def as_written(given: torch.nn.Module) -> torch.nn.Module: ...
def as_written(given: str | torch.nn.Module) -> str | torch.nn.Module:
    """The module that was compiled, or the name of a parameter in it; others as they are."""
    if isinstance(given, str):
        return given.replace(f"{_COMPILED}.", "")
    compiled = _kind("torch._dynamo.eval_frame", "OptimizedModule")
    return getattr(given, _COMPILED) if compiled and isinstance(given, compiled) else given


def _kind(module: str, name: str) -> type | None:
    """A class of torch, where its module is in use; None where it is not."""
    return getattr(sys.modules.get(module), name, None)
