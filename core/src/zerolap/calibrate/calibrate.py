"""Calibration: measure a model and this machine on real ranks, for a few seconds, and make a forecast's parameters of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zerolap._torch import GradBucket
from zerolap.backend.base import Adapter, Moment
from zerolap.backend.registry import resolve_adapter
from zerolap.calibrate.measure import (
    Exchanges,
    barrier,
    host_seconds,
    reduce_nothing,
    step_seconds,
    time_contended,
    time_exchanges,
)
from zerolap.calibrate.model_params import describe, shared_out, with_options
from zerolap.forecast.forecast import Compute, Link
from zerolap.runtime.peers import all_gather_json

_NUM_WARM = 3  # iterations in which DDP finds its buckets, and memory is taken
_NUM_TIMED = 12
_CLEAR = 0.05  # of the time of computing: what moving bytes adds to it is measured if it is more than that


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a short run on real ranks has shown. All wait for the slowest, so seconds are those of the slowest of each iteration."""

    forward: float
    backward: float  # with DDP's own work, without communication
    used_at: tuple[float, ...]  # of each parameter: shares of forward
    ready_at: tuple[float, ...]  # of backward
    buckets: tuple[tuple[int, ...], ...]  # parameters by index, in DDP's order
    step_seconds_per_element: float
    exchanges: tuple[tuple[float, float], ...]  # bytes each way and seconds, nothing else running
    cpu_seconds_per_byte: float = 0.0  # of this process, for what it sends and receives
    host_seconds_per_bucket: float = 0.0


def calibrate(measured: Measured, *, cores: float = 1.0) -> tuple[Link, Compute]:
    """The link and the compute that explain what was measured, if a rank has ``cores`` cores for everything."""
    sizes = sorted(measured.exchanges)
    if len({num_bytes for num_bytes, _ in sizes}) < 3:
        raise ValueError(f"a link is known by three exchanges of different size at least, got {sizes}")
    (few, shortest), *_, (fewer, shorter), (many, longest) = sizes
    # The rate is that between two large ones: what a wire takes before it begins to limit is then left out of account.
    per_byte = max((longest - shorter) / (many - fewer), 1e-15)
    return (
        Link(bytes_per_second=1 / per_byte, latency=max(0.0, shortest - few * per_byte)),
        Compute(
            forward=measured.forward,
            backward=measured.backward,
            step_seconds_per_element=measured.step_seconds_per_element,
            host_seconds_per_bucket=measured.host_seconds_per_bucket,
            cpu_seconds_per_byte=measured.cpu_seconds_per_byte,
            cores=cores,
        ),
    )


def measure(
    module: nn.Module,
    forward: Callable[[nn.Module], Tensor],
    *,
    optimizer_class: type[Optimizer] | Sequence[type[Optimizer]],
    optimizer_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    bucket_cap_mb: float | None = None,
    adapter: Adapter | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Measured:
    """Measure on all ranks of ``group`` together; ``forward`` computes the loss of a batch with the module it is given. Two optimizers
    share the parameters as ``shared_out`` says.

    Takes some tens of iterations, and as many exchanges of buckets. Gradients are used; parameters stay as they are.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("torch.distributed is not initialized; call init_process_group() first")
    params = [param for param in module.parameters() if param.requires_grad]
    if not params:
        raise ValueError("the module has no parameter to train")
    chosen = resolve_adapter(adapter, device_type=params[0].device.type)
    ddp = DistributedDataParallel(
        module, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True, process_group=group
    )
    profile = _profile(ddp, forward, adapter=chosen, group=group)
    optimizers = with_options(optimizer_class, optimizer_options)
    numbers = [described.optimizer for described in shared_out(describe(module), len(optimizers))]
    largest = max(sum(params[i].nbytes for i in bucket) for bucket in profile.buckets)
    exchanges = Exchanges(chosen, group, device=params[0].device, bucket_bytes=largest)
    sizes, cpu_seconds_per_byte = time_exchanges(exchanges)
    host = 0.0
    if chosen.capabilities.futures_complete_at_enqueue:
        cpu_seconds_per_byte = 0.0  # the device moves bytes by itself
    else:
        host = host_seconds(chosen, group)
        iteration = profile.forward + profile.backward
        num_bytes, seconds = sizes[-1]
        if cpu_seconds_per_byte * num_bytes / seconds > _CLEAR:

            def iterate() -> None:
                module.zero_grad()
                forward(ddp).backward()  # type: ignore[no-untyped-call]  # torch's

            # No less than this process has used by itself: caches and interrupts only add to it.
            contended = time_contended(exchanges, iterate, seconds=iteration, rate=num_bytes / seconds)
            cpu_seconds_per_byte = max(cpu_seconds_per_byte, contended)
    exchanges.close()
    return Measured(
        forward=profile.forward,
        backward=profile.backward,
        used_at=profile.used_at,
        ready_at=profile.ready_at,
        buckets=profile.buckets,
        step_seconds_per_element=step_seconds(list(zip(params, numbers, strict=True)), optimizers, chosen, group),
        exchanges=sizes,
        cpu_seconds_per_byte=cpu_seconds_per_byte,
        host_seconds_per_bucket=host,
    )


class _ModelTimes(NamedTuple):
    forward: float
    backward: float
    used_at: tuple[float, ...]
    ready_at: tuple[float, ...]
    buckets: tuple[tuple[int, ...], ...]


class _Marks(NamedTuple):
    """When what happened in one iteration; moments as the adapter takes them."""

    start: Moment
    between: Moment
    end: Moment
    used: dict[nn.Module, Moment]
    ready: dict[int, Moment]  # by bucket


def _profile(
    ddp: DistributedDataParallel, forward: Callable[[nn.Module], Tensor], *, adapter: Adapter, group: dist.ProcessGroup
) -> _ModelTimes:
    """Iterate under a DDP that reduces nothing: what is left is computing, and DDP's own work."""
    module: nn.Module = ddp.module
    params = [param for param in module.parameters() if param.requires_grad]
    index_of: dict[Tensor, int] = {param: index for index, param in enumerate(params)}
    used: dict[nn.Module, Moment] = {}
    ready: dict[int, Moment] = {}
    buckets: dict[int, tuple[int, ...]] = {}

    def note_used(child: nn.Module, args: object) -> None:
        used.setdefault(child, adapter.moment())

    def note_ready(bucket: GradBucket) -> None:
        ready[bucket.index()] = adapter.moment()
        buckets[bucket.index()] = tuple(index_of[param] for param in bucket.parameters())

    reduce_nothing(ddp, note_ready)
    hooks = [child.register_forward_pre_hook(note_used) for child in module.modules()]
    iterations: list[_Marks] = []
    for _ in range(_NUM_WARM + _NUM_TIMED):
        module.zero_grad()
        used.clear()
        ready.clear()
        barrier(group)
        start = adapter.moment()
        loss = forward(ddp)
        between = adapter.moment()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        iterations.append(_Marks(start, between, adapter.moment(), dict(used), dict(ready)))
        adapter.synchronize()
    for hook in hooks:
        hook.remove()
    timed, since = iterations[_NUM_WARM:], adapter.seconds_between

    def shares(moments: list[tuple[Moment, Moment, Moment]]) -> float:
        found = [since(start, moment) / (since(start, end) or 1.0) for start, moment, end in moments]
        return min(1.0, statistics.median(found)) if found else 0.0

    called = _called_for(module, params, timed[-1].used)
    ready_at = {b: shares([(m.between, m.ready[b], m.end) for m in timed]) for b in buckets}
    bucket_of = {index: bucket for bucket, indices in buckets.items() for index in indices}
    mine = [
        [[since(m.start, m.between), since(m.between, m.end)] for m in timed],
        [shares([(m.start, m.used[child], m.between) for m in timed if child in m.used]) for child in called],
        [ready_at.get(bucket_of.get(i, -1), 1.0) for i in range(len(params))],
    ]
    said = all_gather_json(mine, group=group, what="comparing times of forward and backward")
    slowest = [max(taken, key=sum) for taken in zip(*(each[0] for each in said), strict=True)]
    return _ModelTimes(
        statistics.median(seconds for seconds, _ in slowest),
        statistics.median(seconds for _, seconds in slowest),
        tuple(statistics.mean(of_ranks) for of_ranks in zip(*(each[1] for each in said), strict=True)),
        tuple(statistics.mean(of_ranks) for of_ranks in zip(*(each[2] for each in said), strict=True)),
        tuple(indices for _, indices in sorted(buckets.items())),
    )


def _called_for(module: nn.Module, params: Sequence[Tensor], used: Mapping[nn.Module, Moment]) -> list[nn.Module]:
    """The module whose forward uses each parameter: its own, or if that is never called the nearest around it."""
    innermost: dict[Tensor, nn.Module] = {}

    def visit(child: nn.Module, caller: nn.Module) -> None:
        caller = child if child in used else caller
        for param in child.parameters(recurse=False):
            innermost.setdefault(param, caller)
        for inner in child.children():
            visit(inner, caller)

    visit(module, module)
    return [innermost[param] for param in params]
