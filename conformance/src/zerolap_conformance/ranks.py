"""Run a function on real ranks: one process each, on loopback, with a time limit that prints all stacks."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerolap import Adapter, load_adapter
from zerolap._torch import COMPILER_MODULES

# A fork server has imported what takes long, and started no threads: a rank is there in milliseconds, and starts clean.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        *COMPILER_MODULES,  # an optimizer's first step imports them, in a second
        "torch.distributed.checkpoint",
        "torch.distributed.optim",
        "torch.nn.parallel",
        "zerolap",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a rank ended: with a value, or with the text of its error. ``seconds`` is how long it took."""

    value: Any = None
    error: str | None = None
    seconds: float = 0.0


def make_adapter(given: str) -> Adapter:
    """The installed adapter of this name, or what "module:attribute" makes when it is called."""
    module, is_path, attribute = given.partition(":")
    if not is_path:
        return load_adapter(given)
    made = getattr(importlib.import_module(module), attribute)()
    if not isinstance(made, Adapter):
        raise TypeError(f"{given} makes a {type(made).__name__}, not a zerolap.Adapter")
    return made


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, limit: float = 120, **kwargs: Any) -> list[Any]:
    """Call ``fn(*args)`` on every rank and return the values in rank order; any rank's error fails the test."""
    outcomes = try_ranks(world_size, fn, *args, limit=limit, **kwargs)
    errors = [f"--- rank {rank} ---\n{o.error}" for rank, o in enumerate(outcomes) if o.error is not None]
    assert not errors, "\n".join(errors)
    return [outcome.value for outcome in outcomes]


def try_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    limit: float = 120,
    group_timeout: float = 60,
    adapter: str | None = None,
    **kwargs: Any,
) -> list[Outcome]:
    """Like ``run_ranks``, but hand the errors to the caller. A rank over the time limit ends with its stacks.

    With ``adapter``, the name of one or a "module:attribute" that makes one, ranks use its device and backend, and the function
    gets the adapter, made on the rank, as its first argument.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world_size):
            ours, theirs = _SERVER.Pipe(duplex=False)
            process = _SERVER.Process(
                target=_run_rank,
                args=(rank, world_size, folder, limit, group_timeout, adapter, theirs, fn, args, kwargs),
                daemon=True,
            )
            process.start()
            theirs.close()
            ranks.append((process, ours))
        deadline = time.monotonic() + limit + 15
        outcomes = []
        for rank, (process, connection) in enumerate(ranks):
            outcome = None
            if connection.poll(max(0.0, deadline - time.monotonic())):
                with suppress(EOFError):  # it died without a word: the exit code and its stderr tell below
                    outcome = connection.recv()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            said = Path(folder, f"stderr{rank}").read_text(errors="replace")[-8000:]
            outcomes.append(outcome or Outcome(error=f"ended with exit code {process.exitcode}\n{said}"))
        return outcomes


def _run_rank(
    rank: int,
    world_size: int,
    folder: str,
    limit: float,
    group_timeout: float,
    adapter: str | None,
    connection: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    log = open(Path(folder, f"stderr{rank}"), "w")  # noqa: SIM115 - lives as long as the process
    os.dup2(log.fileno(), 2)
    os.dup2(log.fileno(), 1)  # where Gloo speaks in torch 2.7 and 2.8; what the caller prints may be JSON
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit, exit=True)
    torch.set_num_threads(1)
    start = time.monotonic()
    try:
        backend = "gloo"
        if adapter is not None:
            made = make_adapter(adapter)
            args = (made, *args)
            why = made.why_unavailable()
            if why is not None:
                raise LookupError(f"adapter {made.name!r} cannot be used here: {why}")
            if made.device_type != "cpu":
                backend = f"cpu:gloo,{made.device_type}:{made.backend}"
                torch.accelerator.set_device_index(made.device(rank).index or 0)
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout),
        )
        value = fn(*args, **kwargs)
        dist.all_reduce(torch.zeros(1))  # a barrier on the host, whatever has become of the device
        outcome = Outcome(value=value, seconds=time.monotonic() - start)
    except BaseException:
        outcome = Outcome(error=traceback.format_exc(), seconds=time.monotonic() - start)
    connection.send(outcome)
    connection.close()
    sys.stderr.flush()
    os._exit(0)  # no destructors: what is tested has happened, and a failed rank's peers may be gone
