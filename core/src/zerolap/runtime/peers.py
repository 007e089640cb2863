"""Plain data between ranks: gathered, compared, and refused together. Nothing a peer sends is executed: it is JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap._torch import Store, device_for_objects
from zerolap.errors import CollectiveError, ZerolapError
from zerolap.runtime.failure_report import LAST_WORDS

# Collectives are methods of the group, not functions of torch.distributed: those know registered groups only, and hide what went
# wrong in any other behind an error of their own.

_FORGET_SECONDS = 2.0


def all_gather_json(value: object, *, group: dist.ProcessGroup, what: str) -> list[Any]:
    """Every rank's ``value``, in rank order."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    device = torch.device(device_for_objects(group))
    try:
        sizes = all_gather(torch.tensor([data.numel()], device=device), group)
        longest = max(int(size.item()) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        gathered = all_gather(padded.to(device), group)
    except Exception as error:
        raise CollectiveError(f"rank {dist.get_rank()}: {what} failed: {error}") from error
    return [
        json.loads(bytes(part[: int(size.item())].cpu().tolist())) for part, size in zip(gathered, sizes, strict=True)
    ]


def refuse_together(check: Callable[[], object], *, group: dist.ProcessGroup, what: str) -> Any:
    """Run ``check`` on every rank; if it raises on any, raise on all. Returns what it returned.

    Without this, one rank would leave with a clear error and the others would wait for it until their timeout.
    """
    mine: Exception | None = None
    result: object = None
    try:
        result = check()
    except Exception as error:
        mine = error
    try:
        said = all_gather_json(None if mine is None else f"{type(mine).__name__}: {mine}", group=group, what=what)
    except CollectiveError:
        if mine is None:
            raise
    if mine is not None:
        raise mine
    refusals = [f"rank {rank}: {message}" for rank, message in enumerate(said) if message is not None]
    if refusals:
        raise ZerolapError(f"{what} was refused on another rank. " + "; ".join(refusals))
    return result


def forget_keys(store: Store, prefix: str) -> None:
    """Remove the keys that begin with ``prefix`` from a store, except last words, which other ranks may still ask for."""
    # On a thread of its own: a store in a rank that was stopped never answers, whatever the time limit.
    thread = threading.Thread(target=_forget_keys, args=(store, prefix), name="zerolap-keys", daemon=True)
    thread.start()
    thread.join(_FORGET_SECONDS)


def _forget_keys(store: Store, prefix: str) -> None:
    with suppress(RuntimeError, AttributeError):  # gone with the rank that kept it, or it cannot tell: then they stay
        for key in store.list_keys():
            _, found, rest = key.partition(prefix)
            if found and f"/{LAST_WORDS}/" not in rest:
                store.delete_key(prefix + rest)


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's ``tensor``, all of one shape, in rank order."""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    group.allgather(parts, tensor).wait()
    return parts
