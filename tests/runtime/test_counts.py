"""What an update costs, counted: bytes, collectives, copies and calls of Python functions do not depend on how busy a machine is."""

from __future__ import annotations

import collections
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile

import zerolap
import zerolap_cpu_gloo
from support.ranks import on_ranks
from zerolap_conformance.ranks import run_ranks
from zerolap_cpu_gloo import CpuGlooAdapter

WIDTH, NUM_LAYERS, BUCKET_MB = 256, 24, 1
NUM_UPDATES = 5
# Where the sources of the two packages are. Not by their names, which may be part of the path to anything: a clone has one.
OURS = tuple(f"{Path(str(package.__file__)).parent}{os.sep}" for package in (zerolap, zerolap_cpu_gloo))
WAYS = [(schedule, gather) for schedule in ("interleaved", "after_backward", "on_step") for gather in ("eager", "lazy")]

# Calls of zerolap's own Python functions for a bucket of eight parameters, on all threads, list comprehensions included; 95 and
# 139 when this was written, and 26 more with shared memory. A lazy gather looks at every parameter that forward reaches.
MOST_CALLS = {"eager": 100, "lazy": 145}
MOST_CALLS_TO_SHARE = 30
# Of the time of DDP + fused AdamW, where everything is on one machine: about 1. Twice that would be a mistake, not noise.
MOST_TIME = 2.0


class Counting(CpuGlooAdapter):
    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Any:
        self.counts["reduce-scatter"] += 1
        return super().reduce_scatter(*args, **kwargs)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        self.counts["all-gather"] += 1
        return super().all_gather(*args, **kwargs)

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        self.counts["all-reduce"] += 1
        return super().all_reduce(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        self.counts["broadcast"] += 1
        return super().broadcast(*args, **kwargs)


def _model() -> DDP:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
    return DDP(nn.Sequential(*layers), bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)


def _attached(schedule: str, gather: str, adapter: Any = None) -> tuple[DDP, Any, zerolap.Handle]:
    ddp = _model()
    optimizer = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3, overlap_with_ddp=True)
    return ddp, optimizer, zerolap.attach(ddp, optimizer, schedule=schedule, gather=gather, adapter=adapter)  # type: ignore[arg-type]


def _train(ddp: DDP, optimizer: Any, num_updates: int) -> None:
    batch = torch.ones(4, WIDTH)
    for _ in range(num_updates):
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()


def _collectives(schedule: str, gather: str) -> tuple[dict[str, int], int, int, int]:
    adapter = Counting()
    ddp, optimizer, handle = _attached(schedule, gather, adapter)
    _train(ddp, optimizer, 3)
    handle.finish()
    adapter.counts.clear()
    before = handle.stats()
    _train(ddp, optimizer, NUM_UPDATES)
    handle.finish()
    after = handle.stats()
    return (
        dict(adapter.counts),
        after.num_buckets,
        after.sent_bytes - before.sent_bytes,
        sum(param.nbytes for param in ddp.parameters()),
    )


@pytest.mark.parametrize(("schedule", "gather"), WAYS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_an_update_takes_two_collectives_a_bucket_and_no_more_bytes_than_it_must(
    schedule: str, gather: str, num_ranks: int
) -> None:
    for counts, num_buckets, num_bytes, param_bytes in run_ranks(num_ranks, _collectives, schedule, gather):
        assert num_buckets > 4
        assert counts == {"reduce-scatter": NUM_UPDATES * num_buckets, "all-gather": NUM_UPDATES * num_buckets}
        assert num_bytes == pytest.approx(NUM_UPDATES * 2 * param_bytes * (num_ranks - 1) / num_ranks, rel=1e-3)


@pytest.mark.parametrize("shares_memory", [False, True], ids=["messages", "shared-memory"])
@pytest.mark.parametrize(("schedule", "gather"), [("interleaved", "eager"), ("on_step", "lazy")])
@on_ranks(2)
def test_nothing_is_copied_that_plain_ddp_does_not_copy(schedule: str, gather: str, shares_memory: bool) -> None:
    plain = _model()
    ddp, optimizer, handle = _attached(schedule, gather, CpuGlooAdapter(shares_memory=shares_memory))
    counts = []  # how often each operation was run in some updates, with DDP + fused AdamW and attached
    for model, its_optimizer in ((plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)), (ddp, optimizer)):
        _train(model, its_optimizer, 3)
        handle.finish()
        every_thread = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread, acc_events=True) as profiler:
            _train(model, its_optimizer, NUM_UPDATES)
            handle.finish()
        counts.append({event.key: event.count for event in profiler.key_averages()})
    # What the kernel copies for messages is not seen here. In shared memory it is: gradients go in and are added up where they are,
    # parameters go in and out.
    num_shared = 3 if shares_memory else 0
    plain, ours, num_buckets = counts[0], counts[1], handle.stats().num_buckets
    allowed = {"aten::copy_": NUM_UPDATES * num_buckets * num_shared}
    for copying in ("aten::copy_", "aten::cat", "aten::clone", "aten::_foreach_copy_"):
        assert ours.get(copying, 0) <= plain.get(copying, 0) + allowed.get(copying, 0), copying
    for once_a_bucket in ("aten::_fused_adamw_", "aten::add"):
        assert 0 < ours[once_a_bucket] <= NUM_UPDATES * num_buckets + plain.get(once_a_bucket, 0), once_a_bucket


def _calls(schedule: str, gather: str, shares_memory: bool) -> float:
    """Functions of zerolap's that are called for a bucket, by all threads."""
    seen = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal seen
        if event == "call" and is_on and frame.f_code.co_filename.startswith(OURS):
            seen += 1

    is_on = False
    threading.setprofile(count)  # for the lane, which starts later
    ddp, optimizer, handle = _attached(schedule, gather, CpuGlooAdapter(shares_memory=shares_memory))
    threading.setprofile(None)
    _train(ddp, optimizer, 6)  # the first updates are watched for parameters that are read too late
    handle.finish()
    is_on = True
    sys.setprofile(count)
    _train(ddp, optimizer, NUM_UPDATES)
    handle.finish()
    sys.setprofile(None)
    is_on = False
    return seen / NUM_UPDATES / handle.stats().num_buckets


@pytest.mark.parametrize("shares_memory", [False, True], ids=["messages", "shared-memory"])
@pytest.mark.parametrize(("schedule", "gather"), WAYS)
def test_a_bucket_calls_few_python_functions(schedule: str, gather: str, shares_memory: bool) -> None:
    calls = max(run_ranks(2, _calls, schedule, gather, shares_memory))
    print(f"{schedule} {gather}: {calls:.1f} calls of Python functions a bucket")
    assert calls <= MOST_CALLS[gather] + (MOST_CALLS_TO_SHARE if shares_memory else 0)


def _ratio() -> float:
    torch.set_num_threads(1)
    plain = _model()
    both = [
        (plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)),
        _attached("after_backward", "eager")[:2],
    ]
    ratios = []
    for _ in range(8):
        taken = []
        for ddp, optimizer in both:
            dist.barrier()
            start = time.perf_counter()
            _train(ddp, optimizer, 4)
            taken.append(time.perf_counter() - start)
        ratios.append(taken[1] / taken[0])
    return statistics.median(ratios)


def test_a_step_takes_about_the_time_of_plain_ddp_where_there_is_nothing_to_hide() -> None:
    ratio = max(run_ranks(2, _ratio))
    print(f"{ratio:.2f} of the time of DDP + fused AdamW")
    assert ratio < MOST_TIME
