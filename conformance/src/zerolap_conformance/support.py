"""What checks share: where a rank's device is, groups of their own, and comparisons that say what was expected and seen."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap import Adapter
from zerolap.runtime.peers import all_gather_json


def device_of(adapter: Adapter) -> torch.device:
    return adapter.device(int(os.environ.get("LOCAL_RANK", dist.get_rank())))


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def own_group(adapter: Adapter, like: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """A new group that the adapter has opened, connected."""
    like = like or world()
    name = all_gather_json(uuid.uuid4().hex, group=like, what="agreeing on a name")[0]
    group = adapter.open_group(like, name=f"conformance-{name}")
    all_gather_json(None, group=group, what="connecting a group")
    return group


def expect(seen: object, expected: object, what: str) -> None:
    assert seen == expected, f"{what}: expected {expected!r}, seen {seen!r}"


def expect_equal(seen: Tensor, expected: Tensor, what: str) -> None:
    """Bitwise."""
    seen, expected = seen.detach().cpu(), expected.detach().cpu()
    if seen.shape == expected.shape and seen.dtype == expected.dtype and torch.equal(seen, expected):
        return
    if seen.shape != expected.shape or seen.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: expected {expected.dtype} of shape {tuple(expected.shape)}, seen {seen.dtype} of {tuple(seen.shape)}"
        )
    wrong = (seen != expected).nonzero().flatten().tolist()
    place = wrong[0]
    raise AssertionError(
        f"{what}: {len(wrong)} of {seen.numel()} elements differ; at {place} expected {expected.flatten()[place].item()!r}, "
        f"seen {seen.flatten()[place].item()!r}"
    )


def expect_close(seen: Tensor, expected: Tensor, what: str, *, tolerance: float) -> None:
    difference = (
        (seen.detach().cpu().double() - expected.detach().cpu().double()).abs().max().item() if seen.numel() else 0.0
    )
    assert difference <= tolerance, f"{what}: differs by {difference:.3g}, allowed is {tolerance:.3g}"


def expect_error(call: Callable[[], object], words: str, what: str) -> None:
    seen: Exception | None = None
    try:
        call()
    except Exception as error:
        seen = error
    assert words in str(seen), f"{what}: expected an error with {words!r}, seen {seen!r}"


def busy(device: torch.device, seconds: float = 0.05) -> Tensor:
    """Give the device something to do for about so long by its own clock; returns what depends on all of it.

    The host is done with it long before the device is, where the device has streams: what does not wait comes too early.
    """
    factor, each = _product(device)
    x = factor
    for _ in range(math.ceil(seconds / each)):
        x = x @ factor
    return x


@cache
def _product(device: torch.device) -> tuple[Tensor, float]:
    """A matrix whose square takes the device far longer than the host needs to ask for it, and how long that is."""
    size = 128
    while True:
        x = torch.full((size, size), 1 / size, device=device)
        (x @ x).sum().item()
        seconds = math.inf
        for _ in range(8):
            start = time.perf_counter()
            (x @ x @ x @ x @ x).sum().item()
            seconds = min(seconds, (time.perf_counter() - start) / 4)
        if seconds >= 0.001 or size >= 8192:
            return x, seconds
        size *= 2


def come_late(group: dist.ProcessGroup, turn: int, *, seconds: float = 0.02) -> None:
    """One rank after the other comes late by this much, so that the others' collectives are under way for as long."""
    if group.rank() == turn % group.size():
        time.sleep(seconds)


def small_numbers(size: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, different on every rank and at every place, so that sums are exact in every dtype."""
    return ((torch.arange(size) + 3 * rank) % 7).to(dtype)
