"""Models within what trains them on several processes."""

from __future__ import annotations

import sys
from typing import Any

import torch

from deltabars.errors import ModelError

_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
_FSDP = "torch.distributed.fsdp"


def plain_model(model: Any) -> torch.nn.Module:
    """The module within those that train it on several processes.

    Raises:
        ModelError: it is no module, or each process has a part of its parameters alone.
    """
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    while isinstance(model, _WRAPPERS):
        model = model.module
    kinds = [_kind("torch.distributed.tensor", "DTensor"), _kind(_FSDP, "FullyShardedDataParallel")]
    sharded = tuple(kind for kind in kinds if kind is not None)
    parts = [*model.modules(), *model.parameters(), *model.buffers()]
    found = next((part for part in parts if isinstance(part, sharded)), None)
    if found is not None:
        raise ModelError(
            f"model: expected whole parameters on every process, got {type(found).__name__}, which "
            "has a part of them on each. Load a full state dict into a plain model: "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
            "torch.distributed.checkpoint.state_dict."
        )
    return model


def _kind(module: str, name: str) -> type | None:
    """A class of torch, where its module is in use; None where it is not."""
    return getattr(sys.modules.get(module), name, None)
