"""What attach() gives back: adapters of one's own, detaching and attaching again, and memory that is accounted for."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from training import Mlp, assert_same_params, backward, batches, iterate, pair
from zerolap_conformance.ranks import run_ranks
from zerolap_cpu_gloo import CpuGlooAdapter

ADAMW = {"lr": 0.01, "fused": False}


def _zero(ddp: DDP, **options: Any) -> zerolap.ZeroRedundancyOptimizer:
    return zerolap.ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **(ADAMW | options)
    )


# --- adapters ---------------------------------------------------------------------------------------------------------


class Counting(CpuGlooAdapter):
    """An adapter that is registered nowhere."""

    name = "counting"

    def __init__(self) -> None:
        super().__init__()
        self.num_scatters = 0

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> zerolap.Pending:
        self.num_scatters += 1
        return super().reduce_scatter(*args, **kwargs)


def _own_adapter() -> None:
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    mine = Counting()
    zerolap.attach(ddp, _zero(ddp), adapter=mine)
    for x in batches(3):
        backward(ddp, x)
    assert mine.num_scatters > 3, mine.num_scatters
    by_name = DDP(Mlp())
    zerolap.attach(by_name, _zero(by_name), adapter="cpu_gloo")
    backward(by_name, next(batches(1)))


def test_an_adapter_can_be_given_by_instance_or_by_name() -> None:
    run_ranks(2, _own_adapter)


# --- detaching --------------------------------------------------------------------------------------------------------


def _attach_again(master_weights: bool) -> None:
    oracle, ours = pair()
    plain, zero = torch.optim.AdamW(oracle.parameters(), **ADAMW), _zero(ours)
    ways = [("interleaved", "lazy"), ("on_step", "eager"), ("after_backward", "lazy"), ("interleaved", "eager")]
    for place, (schedule, gather) in enumerate(ways):
        handle = zerolap.attach(ours, zero, schedule=schedule, gather=gather, master_weights=master_weights)  # type: ignore[arg-type]
        assert handle.is_attached
        for i, x in enumerate(batches(3)):
            iterate(oracle, plain, x + place)
            iterate(ours, zero, x + place)
            handle.finish()
            assert_same_params(ours, oracle, f"{schedule}, {gather}, iteration {i}")
        handle.detach()
        handle.detach()
        assert not handle.is_attached
        assert type(next(iter(ours.module.modules()))._parameters) is dict
    zero.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        for index, state in plain.state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(zero.state_dict()["state"][index][key], value), (index, key)


@pytest.mark.parametrize("master_weights", [False, True])
def test_an_optimizer_goes_on_where_it_was_when_attached_again(master_weights: bool) -> None:
    run_ranks(2, _attach_again, master_weights)


def _back_to_ddp() -> None:
    """Detached, DDP is what it was: another optimizer can use its gradients."""
    oracle, ours = pair()
    zero = _zero(ours)
    handle = zerolap.attach(ours, zero)
    plain = torch.optim.AdamW(oracle.parameters(), **ADAMW)
    for x in batches(3):
        iterate(oracle, plain, x)
        iterate(ours, zero, x)
    handle.detach()
    with pytest.raises(RuntimeError, match=r"no hook was made for this optimizer; call zerolap.attach"):
        zero.step()
    for i, x in enumerate(batches(3)):
        for model in (oracle, ours):
            model.zero_grad()
            backward(model, x)
        for a, b in zip(ours.parameters(), oracle.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), i  # type: ignore[arg-type]


def test_ddp_averages_gradients_again_after_detaching() -> None:
    run_ranks(2, _back_to_ddp)


class FailsOnce(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ArithmeticError("deliberate")


def _detach_after_failure() -> None:
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), FailsOnce, overlap_with_ddp=True, **ADAMW)
    handle = zerolap.attach(ddp, zero)
    with pytest.raises(RuntimeError, match="deliberate"):
        backward(ddp, next(batches(1)))
    handle.detach()
    assert not handle.is_attached


def test_what_has_failed_can_be_detached() -> None:
    run_ranks(2, _detach_after_failure)


def _num_open() -> tuple[int, int]:
    gc.collect()
    threads = sum(thread.name.startswith("zerolap") for thread in threading.enumerate())
    return threads, len(os.listdir("/proc/self/fd"))


def _attach_and_detach(num: int) -> None:
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    zero = _zero(ddp)
    seen = []
    for i in range(num):
        handle = zerolap.attach(ddp, zero, gather="lazy")
        backward(ddp, next(batches(1)))
        handle.detach()
        del handle
        if i % 10 == 9:
            deadline = time.monotonic() + 10
            while (now := _num_open()) > (seen[0] if seen else (0, 1000)) and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(now)
    assert seen[-1] <= seen[0], f"threads and files open after every 10th cycle: {seen}"


def test_nothing_is_left_open_by_100_cycles_of_attaching_and_detaching() -> None:
    run_ranks(2, _attach_and_detach, 100)


# --- memory -----------------------------------------------------------------------------------------------------------

MB = 2**20
_M_MMAP_THRESHOLD = -3  # from malloc.h


def _resident() -> tuple[int, int]:
    """Bytes of memory this process has now, and the most it had since the peak was reset."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, peak = (int(status[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _memory(schedule: Any, gather: Any, shares_memory: bool) -> tuple[float, float, float]:
    # Large blocks from the system and back to it, so that what is resident is what is in use.
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16) == 1
    width, num_layers, bucket_mb = 1024, 24, 8
    ddp = DDP(
        nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers))),
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=True,
    )
    zero = _zero(ddp, fused=True)
    x = torch.randn(1, width)
    backward(ddp, x)  # gradients, and DDP's own buckets
    backward(ddp, x)
    gc.collect()
    before, _ = _resident()
    _reset_peak()
    adapter = CpuGlooAdapter(shares_memory=shares_memory)
    handle = zerolap.attach(ddp, zero, schedule=schedule, gather=gather, adapter=adapter)
    for _ in range(5):
        backward(ddp, x)
        zero.step()
    handle.finish()
    _, peak = _resident()
    numel, n = sum(p.numel() for p in ddp.parameters()), dist.get_world_size()
    bucket = 4 * numel / handle.stats().num_buckets
    # In single precision: two states and the reduced gradients of the shard, and one bucket's memory for what is received, or
    # one for gradients and one for parameters that are shared; the other rank's are resident here, too. One for what finds no room.
    # Parameters only move to other memory.
    planned = 3 * 4 * numel / n + bucket * (5 if shares_memory else 1)
    return (peak - before) / MB, planned / MB, bucket / MB


@pytest.mark.parametrize("shares_memory", [False, True], ids=["messages", "shared-memory"])
@pytest.mark.parametrize(("schedule", "gather"), [("interleaved", "eager"), ("on_step", "lazy")])
def test_peak_memory_is_within_one_bucket_of_the_plan(schedule: str, gather: str, shares_memory: bool) -> None:
    for grown, planned, bucket in run_ranks(2, _memory, schedule, gather, shares_memory):
        seen = f"grew by {grown:.1f} MB; planned {planned:.1f} MB, a bucket has {bucket:.1f} MB"
        assert 0.9 * planned < grown < planned + bucket, seen
