"""What checks share: where a rank's device is, groups of their own, and comparisons that say what was expected and seen."""

from __future__ import annotations

import math
import os
import threading
import time
import uuid
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap import Adapter
from zerolap.runtime.peers import all_gather_json
from zerolap_conformance.requirements import NotDeclaredError


def device_of(adapter: Adapter) -> torch.device:
    return adapter.device(int(os.environ.get("LOCAL_RANK", dist.get_rank())))


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def own_group(adapter: Adapter, like: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """A new group that the adapter has opened, connected."""
    like = like or world()
    name = all_gather_json(uuid.uuid4().hex, group=like, what="agreeing on a name")[0]
    group = adapter.open_group(like, name=f"zerolap-conformance-{name}")
    all_gather_json(None, group=group, what="connecting a group")
    return group


def expect(seen: object, expected: object, what: str) -> None:
    assert seen == expected, f"{what}: expected {expected!r}, seen {seen!r}"


def expect_equal(seen: Tensor, expected: Tensor, what: str) -> None:
    """Bitwise: -0.0 is not 0.0, and a NaN is equal to itself."""
    seen, expected = seen.detach().cpu(), expected.detach().cpu()
    if seen.shape != expected.shape or seen.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: expected {expected.dtype} of shape {tuple(expected.shape)}, seen {seen.dtype} of {tuple(seen.shape)}"
        )
    wrong = (bits_of(seen) != bits_of(expected)).flatten()
    if not wrong.any():
        return
    place = int(wrong.nonzero()[0])
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {seen.numel()} elements differ; at {place} expected "
        f"{expected.flatten()[place].item()!r}, seen {seen.flatten()[place].item()!r}"
    )


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """The same memory as whole numbers."""
    return tensor.contiguous().view(_BITS[tensor.element_size()]) if tensor.is_floating_point() else tensor


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


ELSEWHERE_SECONDS = 100


class Slow:
    """Notes what takes far too long. The host may have been kept busy by somebody else: once or twice, or all the time."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def note(self, seconds: float, what: str) -> None:
        crowd = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 1.0
        if seconds > 0.25 * max(1.0, crowd):
            self._found.append(f"{what}: {seconds:.2f} s")
        assert len(self._found) <= 2, f"slow: {'; '.join(self._found)}"


def come_late(group: dist.ProcessGroup, turn: int, *, seconds: float = 0.02) -> None:
    """One rank after the other comes late by this much, so that the others' collectives are under way for as long."""
    if group.rank() == turn % group.size():
        time.sleep(seconds)


def small_numbers(size: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, different on every rank and at every place, so that sums are exact in every dtype."""
    return ((torch.arange(size) + 3 * rank) % 7).to(dtype)


def elsewhere(adapter: Adapter, fn: Callable[[], None]) -> None:
    """On a thread that is not the main one, as autograd's is not."""
    caught: list[BaseException] = []

    def work() -> None:
        try:
            if adapter.device_type != "cpu":
                torch.accelerator.set_device_index(device_of(adapter).index or 0)
            fn()
        except BaseException as error:  # raised by whoever waits
            caught.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(ELSEWHERE_SECONDS)
    assert not thread.is_alive(), f"what runs on another thread has not ended after {ELSEWHERE_SECONDS} s"
    if caught:
        raise caught[0]


def occupy(device: torch.device, seconds: float) -> None:
    """Let what comes next on this device, or on this thread of the host, come later."""
    if not seconds:
        return
    if device.type == "cpu":
        time.sleep(seconds)  # the other threads may go on
    else:
        busy(device, seconds)


def expect_clock(adapter: Adapter) -> None:
    """NotDeclaredError if the adapter says that it measures no time: ``seconds_between`` raises NotImplementedError then."""
    start = adapter.moment()
    adapter.synchronize()
    try:
        adapter.seconds_between(start, adapter.moment())
    except NotImplementedError as error:
        raise NotDeclaredError(f"the device does not measure time, so traces have none of it: {error}") from error
