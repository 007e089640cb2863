"""Tier 4: slow ranks, failing ranks, and time."""

from __future__ import annotations

import os
import random
import time
from itertools import count

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import zerolap
from zerolap import Adapter
from zerolap._torch import store_of
from zerolap_conformance.overlap import BUCKET_MB, Model, _attached, _compare, _iterate
from zerolap_conformance.requirements import requirement
from zerolap_conformance.support import device_of, world


@requirement("STR-1", "Ranks that are slow at random times change nothing.", tier=4)
def bears_slow_ranks(adapter: Adapter) -> None:
    dice = random.Random(dist.get_rank())

    def iterate(model: DistributedDataParallel, optimizer: object, x: torch.Tensor, step: int) -> None:
        if isinstance(optimizer, zerolap.ZeroRedundancyOptimizer):
            time.sleep(dice.choice([0, 0, 0.02, 0.5]))
        _iterate(model, optimizer, x, step)

    for schedule, gather in (("interleaved", "lazy"), ("on_step", "eager")):
        _compare(adapter, _attached(adapter, schedule=schedule, gather=gather), iterate=iterate)


@requirement(
    "STR-2",
    "A rank that fails ends all ranks with an error, in bounded time.",
    tier=4,
    min_ranks=2,
    seconds=90,
    fails_device=True,
)
def ends_together(adapter: Adapter) -> None:
    device = device_of(adapter)
    ddp = DistributedDataParallel(Model().to(device), bucket_cap_mb=BUCKET_MB)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), Failing, overlap_with_ddp=True, lr=0.1)
    zerolap.attach(ddp, zero, adapter=adapter)
    # A collective may take as long as the group's timeout, and it may be the second that fails.
    allowed = 2 * adapter.timeout(world()).total_seconds() + 20
    start, seen = time.monotonic(), None
    try:
        for _ in range(30):
            ddp(torch.ones(2, 31, device=device)).sum().backward()
            zero.step()
            adapter.synchronize()
    except Exception as error:
        seen = error
    seconds = time.monotonic() - start
    _meet_by_store(allowed)
    assert seen is not None, "a rank failed, and this one did not notice"
    assert seconds < allowed, f"it took {seconds:.0f} s, {allowed:.0f} are allowed"


def _meet_by_store(seconds: float) -> None:
    """Wait until all ranks are here, by the store: nothing else may work any more, and some come later than others."""
    store, deadline = store_of(world()), time.monotonic() + seconds
    store.add("conformance-over", 1)
    while store.add("conformance-over", 0) < dist.get_world_size():
        assert time.monotonic() < deadline, "another rank did not end"
        time.sleep(0.05)


class Failing(torch.optim.SGD):
    """Fails on the last rank, after some steps."""

    num_steps = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        Failing.num_steps += 1
        if Failing.num_steps > 20 and dist.get_rank() == dist.get_world_size() - 1:
            raise ArithmeticError("deliberate")
        super().step()


@requirement("STR-3", "Training goes on for a while and stays equal to the oracle.", tier=4, seconds=3600)
def endures(adapter: Adapter) -> None:
    deadline = time.monotonic() + 60 * float(os.environ.get("ZEROLAP_SOAK_MINUTES", "0.1"))
    for num_rounds in count(1):
        for schedule, gather in (("interleaved", "lazy"), ("after_backward", "eager"), ("on_step", "lazy")):
            _compare(adapter, _attached(adapter, schedule=schedule, gather=gather))
        is_over = torch.tensor([time.monotonic() > deadline], dtype=torch.int32, device=device_of(adapter))
        dist.all_reduce(is_over, op=dist.ReduceOp.MAX)  # ranks stop together
        if is_over.item() and num_rounds >= 5:
            return
