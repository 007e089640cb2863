"""Measure what the host does for one bucket on the stream path, in microseconds of Python.

    python benchmarks/host_cost.py

Streams, events and collectives do nothing here, and the update is an optimizer that does nothing: what is left is our own Python
and torch's for the same calls, on small CPU tensors. "Ours" leaves out the one operation of torch's that every bucket makes, of a
mean from a sum. Two ranks, of which the second waits while the first is measured. Beside it: what such an operation costs here in
a loop of its own, for scale (between a backward's operations it costs more), and the same on the simulated device, which queues
everything and runs nothing: there most of the time is the simulation's own. None of it is the speed of a device.

Each figure is of the quietest tenth of backwards, with the median of all in brackets: what lies between is other users' of the
machine.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
import zerolap_sim
from zerolap_conformance.ranks import run_ranks

NUM_LAYERS = 40
EVEN, ODD = (
    16,
    9,
)  # widths: with the first, ranges and alignment come out even, as with most models; with the other, not
NUM_STEPS = 200
WAYS = [(s, g) for s in ("interleaved", "after_backward", "on_step") for g in ("eager", "lazy")]


class NoUpdate(torch.optim.Optimizer):
    is_elementwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class NoStream:
    """A stream or an event that does nothing."""

    stream_id = device_index = device_type = 0

    def __init__(self, **options: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    wait_event = wait_stream

    def record_event(self) -> NoStream:
        return NoStream()


class NoGroup:
    """A group whose collectives of buckets do nothing."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

        self.rank = group.rank
        self.size = group.size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def _reduce_scatter_base(self, *args: object) -> NoGroup:
        return self

    _allgather_base = _reduce_scatter_base

    def wait(self) -> None:
        pass


class NoMemory:
    """Reduced gradients that cost nothing to scale."""

    def mul_(self, scale: float) -> NoMemory:
        return self


class NoDevice(zerolap.StreamAdapter):
    name = "nothing"
    device_type = "cpu"
    backend = "gloo"
    capabilities = zerolap.Capabilities(
        futures_complete_at_enqueue=True, exact_cut=1, has_float64=True, one_issue_order=True
    )

    def why_unavailable(self) -> None:
        pass

    def make_backend(self, spec: zerolap.GroupSpec) -> Any:
        return dist.ProcessGroupGloo(spec.store, spec.rank, spec.size, spec.timeout)


def leave_out_torch(engine: Any) -> None:
    """From now on buckets are neither scaled nor stepped, but everything around it is done."""
    for bucket in engine.installed:
        memory = NoMemory()
        bucket.shard_gradients = bucket.shard.grads_of = memory
        bucket.shard.local.bare_step = lambda: None


def measure(width: int, is_ours_only: bool, on_simulated_device: bool) -> dict[str, str]:
    """For each way: microseconds per bucket."""
    device, adapter, group = torch.device("cpu"), NoDevice(), dist.group.WORLD
    if on_simulated_device:
        zerolap_sim.install()
        zerolap_sim.configure(checker=False)
        device = torch.device(zerolap_sim.device_name(), 0)
        adapter = zerolap_sim.SimAdapter()  # type: ignore[assignment]
        group = dist.new_group(backend=f"cpu:gloo,{zerolap_sim.device_name()}:simccl")
    else:
        stream: Any = sys.modules["zerolap.backend.streams"]
        stream.torch.Stream = stream.torch.Event = NoStream
        only = NoStream()
        stream.torch.accelerator.current_stream = lambda device: only
        stream.Future = lambda devices: Future()
    found = {}
    for schedule, gather in WAYS:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(NUM_LAYERS))).to(device)
        ddp = DDP(model, process_group=group, bucket_cap_mb=4 * width * width / 2**20, gradient_as_bucket_view=True)
        optimizer = zerolap.ZeroRedundancyOptimizer(
            ddp.parameters(), NoUpdate, process_group=group, overlap_with_ddp=True, lr=0.1
        )
        handle = zerolap.attach(ddp, optimizer, schedule=schedule, gather=gather, adapter=adapter)  # type: ignore[arg-type]
        spent = 0.0

        def timed(call: Any) -> Any:
            def wrapper(*args: Any) -> Any:
                nonlocal spent
                start = time.thread_time()
                result = call(*args)
                spent += time.thread_time() - start
                return result

            return wrapper

        engine: Any = optimizer._engine
        if not on_simulated_device:
            strategy = engine.strategy  # which has started nothing yet
            strategy._group, strategy._reduce_group = NoGroup(strategy._group), NoGroup(strategy._reduce_group)
        engine.on_bucket, engine.step_called = timed(engine.on_bucket), timed(engine.step_called)
        taken = []
        x = torch.randn(2, width).to(device)
        for step in range(NUM_STEPS + 4):
            if step == 4:  # DDP's buckets have settled
                dist.barrier()
                if dist.get_rank() == 1:
                    break
                if is_ours_only:
                    leave_out_torch(engine)
                if on_simulated_device:
                    torch.accelerator.synchronize()
                    zerolap_sim.configure(execute=False)
            spent = 0.0
            ddp(x).sum().backward()
            optimizer.step()
            taken.append(spent)
        num_buckets = handle.stats().num_buckets
        quiet, *_, median, _, _, _, _ = statistics.quantiles(taken[4:] or [0.0, 0.0], n=10)
        found[f"{schedule}, {gather} ({num_buckets} buckets)"] = (
            f"{quiet / num_buckets * 1e6:.1f} ({median / num_buckets * 1e6:.1f})"
        )
        if on_simulated_device:
            torch.accelerator.synchronize()
            zerolap_sim.configure(execute=True)
        dist.barrier()
    if not on_simulated_device:
        small = torch.ones(64)
        found["a small operation"] = f"{_cost_of(lambda: small.mul_(0.5)):.1f}"
    return found


def _cost_of(call: Any, num: int = 2000) -> float:
    for _ in range(100):
        call()
    start = time.thread_time()
    for _ in range(num):
        call()
    return (time.thread_time() - start) / num * 1e6


if __name__ == "__main__":
    cases = {
        "even": (EVEN, False, False),
        "ours": (EVEN, True, False),
        "odd": (ODD, False, False),
        "simulated device": (EVEN, False, True),
    }
    columns = [run_ranks(2, measure, *case)[0] for case in cases.values()]
    print(f"{'microseconds of host time per bucket':44}" + "".join(f" {name:>16}" for name in cases))
    for way in columns[0]:
        print(f"{way:44}" + "".join(f" {column.get(way, ''):>16}" for column in columns))
