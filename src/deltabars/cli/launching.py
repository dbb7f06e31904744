"""Where a command runs: its device, and the process group where torchrun has started several."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from datetime import timedelta
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist

from deltabars.cli.options import COMMANDS
from deltabars.errors import BadValueError, ProcessError, first_line

_SET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def launched(options: argparse.Namespace) -> Iterator[None]:
    """Join the process group that torchrun has prepared, if any; only the first process prints."""
    count = _number("WORLD_SIZE") if all(os.environ.get(name) for name in _SET) else 1
    if count == 1 or dist.is_initialized():
        yield
        return
    if not COMMANDS[options.command].shared:
        raise BadValueError(
            f"torchrun: expected `fit` or `predict`, got `{options.command}` in {count} processes. "
            "Start it without torchrun."
        )
    timeout = options.rank_timeout
    if not 0 < timeout < float("inf"):
        raise BadValueError(f"--rank-timeout: expected seconds above zero, got {timeout!r}.")
    more: dict[str, Any] = {"backend": "gloo"}
    if compute_device(options.device).type == "cuda":
        more = {"backend": "cpu:gloo,cuda:nccl", "device_id": _own_gpu(options)}
    try:
        dist.init_process_group(timeout=timedelta(seconds=timeout), **more)
    except (RuntimeError, ValueError) as error:
        raise ProcessError(
            f"Processes: expected {count} to meet within {timeout:g} s, got an error "
            f"({first_line(error).rstrip('.')}). Start all of them with torchrun."
        ) from error
    try:
        options.quiet = options.quiet or dist.get_rank() > 0
        with redirect_stdout(StringIO()) if dist.get_rank() > 0 else nullcontext():
            yield
    finally:
        with suppress(RuntimeError):  # of a group that has lost a member
            dist.destroy_process_group()


def compute_device(asked: str | None) -> torch.device:
    """Return the device that was asked for; without one, cuda where there is one, else the CPU."""
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("float64 is needed, which others do not have")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = f"{asked!r} ({first_line(error).rstrip('.')})"
        raise BadValueError(f"--device: expected cpu, cuda or cuda:N, got {why}.") from error
    return device


def _own_gpu(options: argparse.Namespace) -> torch.device:
    """Return the GPU of this process among those of its machine, which "cuda" then means."""
    local, there = _number("LOCAL_RANK"), torch.cuda.device_count()
    if local >= there or torch.device(options.device or "cuda").index is not None:
        raise BadValueError(
            f"--device: expected cpu, or cuda and a GPU for each process of a machine, got "
            f"{options.device} and {there} GPUs for process {local} (the first is 0)."
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _number(name: str) -> int:
    if not (text := os.environ.get(name, "0")).isdecimal():
        raise BadValueError(f"{name}: expected a whole number from the launcher, got {text!r}.")
    return int(text)
