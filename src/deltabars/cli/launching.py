"""Commands that torchrun has started several times: one process group, and one that speaks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import timedelta
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist

from deltabars.cli.options import compute_device
from deltabars.errors import BadValueError, ProcessError, first_line
from deltabars.runtime.distributed import current_group

TIMEOUT = 600.0  # seconds
_SET = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def add_launch(parser: argparse.ArgumentParser) -> None:
    """--rank-timeout; the command may be started by torchrun."""
    parser.add_argument(
        "--rank-timeout",
        type=float,
        default=TIMEOUT,
        metavar="SECONDS",
        help=f"under torchrun: how long to wait for another process (default: {TIMEOUT:.0f})",
    )
    parser.set_defaults(is_for_ranks=True)


@contextmanager
def launched(options: argparse.Namespace) -> Iterator[None]:
    """Join the process group that torchrun has prepared, if it has; only the first rank speaks.

    Raises:
        BadValueError: the command is for one process, or there are not enough GPUs.
        ProcessError: the other processes do not come, or another one fails.
    """
    if _count() == 1 or dist.is_initialized():
        yield
        return
    if not getattr(options, "is_for_ranks", False):
        raise BadValueError(
            "torchrun: expected `fit` or `predict`, which several processes can share, got another "
            f"command in {_count()} of them. Start it without torchrun."
        )
    _join(options)
    try:
        if current_group().is_first:
            yield
        else:
            options.quiet = True
            with redirect_stdout(StringIO()):
                yield
    finally:
        with suppress(RuntimeError):  # of a group that has lost a member
            dist.destroy_process_group()


def _join(options: argparse.Namespace) -> None:
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
            f"Ranks: expected {_count()} processes to meet within {timeout:g} s, got an error "
            f"({first_line(error).rstrip('.')}). Start all of them with torchrun."
        ) from error


def _own_gpu(options: argparse.Namespace) -> torch.device:
    """The GPU of this process among those of its machine, which "cuda" means from now on."""
    local, there = _number("LOCAL_RANK"), torch.cuda.device_count()
    if torch.device(options.device or "cuda").index is not None:
        raise BadValueError(
            f"--device: expected cuda or cpu under torchrun, which gives each process a GPU of its "
            f"own, got {options.device!r}."
        )
    if local >= there:
        raise BadValueError(
            f"torchrun: expected a GPU for each process of a machine, got {there} for process "
            f"{local} (the first is 0). Start fewer, or give --device cpu."
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _count() -> int:
    """How many processes a launcher has started; 1 without one."""
    if not all(os.environ.get(name) for name in _SET):
        return 1
    return _number("WORLD_SIZE")


def _number(name: str) -> int:
    text = os.environ.get(name, "0")
    if not text.isdecimal():
        raise BadValueError(f"{name}: expected a whole number from the launcher, got {text!r}.")
    return int(text)
