"""What attach() gives back: adapters of one's own, detaching and attaching again, and memory that is accounted for."""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.ranks import on_ranks
from support.sim_programs import device_group, on_device
from support.stream_programs import sim_device
from support.training import Mlp, assert_same_params, backward, batches, iterate, overlapped, pair
from zerolap_conformance.ranks import run_ranks
from zerolap_cpu_gloo import CpuGlooAdapter
from zerolap_sim import build

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


@on_ranks(2)
def test_an_adapter_can_be_given_by_instance_or_by_name() -> None:
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    mine = Counting()
    zerolap.attach(ddp, _zero(ddp), adapter=mine)
    for x in batches(3):
        backward(ddp, x)
    assert mine.num_scatters > 3, mine.num_scatters
    by_name = DDP(Mlp())
    zerolap.attach(by_name, _zero(by_name), adapter="cpu_gloo")
    backward(by_name, next(batches(1)))


# --- detaching --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("master_weights", [False, True])
@on_ranks(2)
def test_an_optimizer_goes_on_where_it_was_when_attached_again(master_weights: bool) -> None:
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


@on_ranks(2)
def test_ddp_averages_gradients_again_after_detaching() -> None:
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


class FailsOnce(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ArithmeticError("deliberate")


@on_ranks(2)
def test_what_has_failed_can_be_detached() -> None:
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), FailsOnce, overlap_with_ddp=True, **ADAMW)
    handle = zerolap.attach(ddp, zero)
    with pytest.raises(RuntimeError, match="deliberate"):
        backward(ddp, next(batches(1)))
    handle.detach()
    assert not handle.is_attached


def _num_open() -> tuple[int, int, int]:
    """Threads, files and sockets, and keys in the store."""
    store = dist.distributed_c10d._get_default_store()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), store.num_keys()


def _settled(before: tuple[int, int, int]) -> tuple[int, int, int]:
    """What is open, a little later: a thread that has ended takes a moment to be gone."""
    dist.barrier()  # rank 0 removes keys
    deadline = time.monotonic() + 10
    while (now := _num_open()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    return now


WAYS: list[dict[str, Any]] = [
    {"schedule": schedule, "gather": gather}
    for schedule in ("interleaved", "after_backward", "on_step")
    for gather in ("eager", "lazy")
] + [{"schedule": "auto"}]


@on_ranks(2)
def test_nothing_is_left_open_by_50_cycles_of_attaching_and_detaching() -> None:
    num_cycles = 50
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    zero = _zero(ddp)
    backward(ddp, next(batches(1)))
    gc.collect()
    gc.disable()  # nothing may need it
    dist.barrier()
    before = _num_open()
    resident = []
    for cycle in range(num_cycles):
        way = WAYS[cycle % len(WAYS)]
        handle = zerolap.attach(ddp, zero, **way)
        for x in batches(2):
            iterate(ddp, zero, x)
        assert _num_open() > before
        handle.detach()
        assert handle.stats().num_updates == 2, "the handle is held, and still knows"
        now = _settled(before)
        assert now == before, f"{way}, cycle {cycle}: {now} open, {before} before"
        resident.append(_resident()[0])
    grown = (resident[-1] - resident[num_cycles // 2]) / num_cycles
    assert grown < 2**17, f"{grown:.0f} bytes a cycle are kept"


def _own_hook(state: Any, bucket):  # type: ignore[no-untyped-def]
    return allreduce_hook(None, bucket)


def _attach_and_detach_on_streams(num_cycles: int) -> list[int]:
    """Threads after each cycle on the simulated device."""
    group, device = device_group(), sim_device()
    ddp = DDP(Mlp().to(device), process_group=group, bucket_cap_mb=0.004)
    zero = zerolap.ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, process_group=group, overlap_with_ddp=True, **ADAMW
    )
    num_threads = []
    for cycle in range(num_cycles):
        handle = zerolap.attach(ddp, zero, **WAYS[cycle % len(WAYS)])
        for x in batches(2):
            iterate(ddp, zero, x.to(device))
        handle.detach()
        del handle
        torch.accelerator.synchronize()
        dist.barrier()
        num_threads.append(len(os.listdir("/proc/self/task")))
    return num_threads


def test_20_cycles_on_streams_leave_no_more_threads_than_the_first_few() -> None:
    """Streams are never given back, as on devices, but what runs them is."""
    build.build()  # outside the time limits of the ranks
    for num_threads, reports in run_ranks(2, on_device, _attach_and_detach_on_streams, 20):
        assert reports == []
        assert max(num_threads[5:]) <= max(num_threads[:5]) + 4, num_threads


@pytest.mark.parametrize("way", ["attached", "masters", "hook"])
@on_ranks(2)
def test_nothing_is_left_open_when_ddp_and_optimizer_are_dropped(way: str) -> None:
    gc.collect()
    gc.disable()
    before = _num_open()
    for _ in range(3):
        ddp = DDP(Mlp(), bucket_cap_mb=0.004)
        if way == "hook":
            zero = overlapped(ddp, ddp.parameters(), torch.optim.SGD, hook=_own_hook, lr=0.1)
        else:
            zero = _zero(ddp)
            zerolap.attach(ddp, zero, gather="lazy", master_weights=way == "masters")
        for x in batches(3):
            iterate(ddp, zero, x)
        assert _num_open() > before
        ddp.zero_grad()
        del ddp, zero
        assert _settled(before) == before


@on_ranks(2)
def test_an_optimizer_that_was_dropped_is_kept_by_the_hook() -> None:
    oracle, ours = pair()
    plain = torch.optim.SGD(oracle.parameters(), lr=0.1)
    overlapped(ours, ours.parameters(), torch.optim.SGD, lr=0.1)  # and dropped: updates are made in backward
    gc.collect()
    for i, x in enumerate(batches(4)):
        iterate(oracle, plain, x)
        ours.zero_grad()
        backward(ours, x)
        assert_same_params(ours, oracle, i)


# --- after detaching --------------------------------------------------------------------------------------------------


@on_ranks(2, group_timeout=20)
def test_a_handle_that_was_detached_answers_at_once() -> None:
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    zero = _zero(ddp)
    handle = zerolap.attach(ddp, zero, schedule="after_backward", gather="lazy", master_weights=True)
    assert "<zerolap.Handle: attached; schedule='after_backward', gather='lazy'" in repr(handle)
    for x in batches(2):
        iterate(ddp, zero, x)
    handle.audit()
    assert "adapter='cpu_gloo', 2 ranks, 3 buckets>" in repr(handle), repr(handle)
    with handle.trace() as trace:
        iterate(ddp, zero, next(batches(1)))
    handle.detach()
    start = time.monotonic()
    handle.finish()
    handle.refresh_masters()
    handle.detach()
    assert (handle.stats().num_updates, handle.schedule, handle.gather) == (3, "after_backward", "lazy")
    assert handle.is_tuned
    assert "detached" in repr(handle)
    assert trace.spans
    with pytest.raises(RuntimeError, match="there is nothing to audit by: this was detached"):
        handle.audit()
    with pytest.raises(RuntimeError, match="there is nothing to trace: this was detached"):
        handle.trace()
    for fn in (zero.step, lambda: zero.clip_grad_norm_(1.0), lambda: zerolap.GradScaler("cpu").step(zero)):
        with pytest.raises(RuntimeError, match="no hook was made for this optimizer"):
            fn()
    assert time.monotonic() - start < 10


def test_a_lane_that_was_closed_refuses_at_once_and_has_ended_its_thread() -> None:
    lane = zerolap.ThreadLane("test")
    thread = lane.submit(threading.current_thread).wait()
    with pytest.raises(ArithmeticError, match="deliberate"):  # not a RuntimeError about a callback
        zerolap.ThreadLane("another").run(_fail)
    lane.close()
    assert not thread.is_alive()
    with pytest.raises(zerolap.ZerolapError, match="this lane is closed"):
        lane.run(lambda: None)
    with pytest.raises(RuntimeError, match="this lane is closed"):
        lane.submit(lambda: None).wait()


def _fail() -> None:
    raise ArithmeticError("deliberate")


# --- in another process -----------------------------------------------------------------------------------------------


def _in_child(fn: Callable[[], object]) -> str:
    """What a forked child of this process gets from a function, within some seconds."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = f"returned {fn()}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        is_ready = bool(select.select([pipe], [], [], 10)[0])
        said = pipe.read().decode() if is_ready else "nothing within 10 s"
    if not is_ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return said


class Slow(CpuGlooAdapter):
    """The last gathers take until they are told to end."""

    may_end = threading.Event()
    num_gathers = 0

    def all_gather(self, *args: Any, **kwargs: Any) -> zerolap.Pending:
        pending = super().all_gather(*args, **kwargs)
        return zerolap.Pending([pending], tensors=(), what="a slow gather", finish=self._end)

    def _end(self) -> None:
        Slow.num_gathers += 1
        if Slow.num_gathers > 6:
            assert self.may_end.wait(100)


@on_ranks(2, group_timeout=30)
def test_a_forked_child_is_told_that_it_has_no_part_in_training() -> None:
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    zero = _zero(ddp)
    handle = zerolap.attach(ddp, zero, gather="lazy", schedule="on_step", adapter=Slow())
    for x in batches(2):
        iterate(ddp, zero, x)
    x = next(batches(1))
    said = [
        _in_child(lambda: sum(p.sum() for p in ddp.module.parameters())),
        _in_child(lambda: ddp.module.state_dict()),
        _in_child(lambda: ddp.module(x)),
        _in_child(zero.step),
        _in_child(handle.audit),
        _in_child(handle.finish),
        _in_child(lambda: backward(ddp, x)),
    ]
    Slow.may_end.set()
    handle.finish()
    read = _in_child(lambda: float(sum(p.double().sum() for p in ddp.module.parameters())))
    assert read == f"returned {float(sum(p.double().sum() for p in ddp.module.parameters()))}", read
    alone = zerolap.ZeroRedundancyOptimizer(Mlp().parameters(), torch.optim.SGD, lr=0.1)
    said += [_in_child(alone.step), _in_child(alone.consolidate_state_dict)]
    iterate(ddp, zero, x)  # the parent goes on
    for sentence in said:
        assert sentence.startswith("ZerolapError: this process was forked"), said


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


@pytest.mark.parametrize("shares_memory", [False, True], ids=["messages", "shared-memory"])
@pytest.mark.parametrize(("schedule", "gather"), [("interleaved", "eager"), ("on_step", "lazy")])
@on_ranks(2)
def test_peak_memory_is_within_one_bucket_of_the_plan(schedule: str, gather: str, shares_memory: bool) -> None:
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
    attach = zerolap.attach  # imported now: its code is no part of what training takes
    gc.collect()
    before, _ = _resident()
    _reset_peak()
    adapter = CpuGlooAdapter(shares_memory=shares_memory)
    handle = attach(ddp, zero, schedule=schedule, gather=gather, adapter=adapter)  # type: ignore[arg-type]
    for _ in range(5):
        zero.zero_grad()
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
    grown, planned, bucket = (peak - before) / MB, planned / MB, bucket / MB
    seen = f"grew by {grown:.1f} MB; planned {planned:.1f} MB, a bucket has {bucket:.1f} MB"
    print(seen)
    assert 0.9 * planned < grown < planned + bucket, seen
