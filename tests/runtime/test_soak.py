"""No hang in long runs: many iterations of many buckets, by hooks and natively, and ranks that are out of step with each other."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.training import HOOK_MAKERS, overlapped
from zerolap_conformance.ranks import run_ranks

WAYS: list[Any] = [
    *HOOK_MAKERS,
    {"schedule": "interleaved", "gather": "lazy"},
    {"schedule": "on_step", "gather": "eager"},
]


def _train(which: int, num_iterations: int) -> tuple[int, float]:
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(40))), bucket_cap_mb=0.0002)
    options = {"lr": 1e-3, "momentum": 0.9}
    if isinstance(WAYS[which], dict):
        zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, **options)
        zerolap.attach(ddp, zero, **WAYS[which])
    else:
        zero = overlapped(ddp, ddp.parameters(), torch.optim.SGD, hook_maker=WAYS[which], shard_buckets=True, **options)
    late = dist.get_rank() == num_iterations % dist.get_world_size()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for i in range(num_iterations):
        if late and i % 50 == 0:
            time.sleep(0.02)  # not to make a test pass: one rank arrives late, as ranks do
        zero.zero_grad()
        ddp(x).square().sum().backward()
        zero.step()
    return len(zero._engine.layout), sum(p.double().sum().item() for p in ddp.parameters())


def _soak(world_size: int, which: int, num_iterations: int) -> None:
    results = run_ranks(world_size, _train, which, num_iterations, limit=1500, group_timeout=120)
    assert results[0][0] == 40
    assert all(result == results[0] for result in results), "the ranks' parameters differ"


@pytest.mark.parametrize("which", range(len(WAYS)))
def test_some_iterations_of_40_buckets(which: int) -> None:
    _soak(2, which, 30)


@pytest.mark.soak
@pytest.mark.parametrize("which", range(len(WAYS)))
@pytest.mark.parametrize("world_size", [2, 4])
def test_two_thousand_iterations_of_40_buckets(world_size: int, which: int) -> None:
    _soak(world_size, which, 2000)
