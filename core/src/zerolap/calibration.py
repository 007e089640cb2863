"""Calibration: measure a model and this machine on real ranks, for a few seconds, and make a forecast's parameters of it."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zerolap.adapter import Adapter
from zerolap.attach import attach
from zerolap.exchange import all_gather_json
from zerolap.forecast import Compute, Link
from zerolap.optimizer import ZeroRedundancyOptimizer
from zerolap.parts import Parts
from zerolap.registry import resolve_adapter
from zerolap.shards import WITH_FUSED
from zerolap.trace import Moment
from zerolap.workload import MB

_NUM_WARM = 3  # iterations in which DDP finds its buckets, and memory is taken
_NUM_TIMED = 5
_NUM_PIPELINED = 5  # buckets under way at once
_MAX_STEPPED = 2**23  # elements: more than caches hold
_TINY_LAYERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a short run on real ranks has shown. Seconds are those of the slowest rank."""

    forward: float
    backward: float  # with DDP's own work, without communication
    used_at: tuple[float, ...]  # of each parameter: shares of forward
    ready_at: tuple[float, ...]  # of backward
    buckets: tuple[tuple[int, ...], ...]  # parameters by index, in DDP's order
    step_seconds_per_element: float
    exchanges: tuple[tuple[float, float], ...]  # bytes each way and seconds of an exchange, nothing else running
    host_seconds_per_bucket: float = 0.0
    cpu_seconds_per_byte: float = 0.0  # of this process, for what it sends and receives


def calibrate(measured: Measured, *, cores: float = 1.0) -> tuple[Link, Compute]:
    """The link and the compute that explain what was measured, if a rank has so many cores for everything."""
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
    optimizer_class: type[Optimizer],
    optimizer_options: Mapping[str, Any] | None = None,
    bucket_cap_mb: float | None = None,
    adapter: Adapter | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> Measured:
    """Measure on all ranks of ``group`` together; ``forward`` computes the loss of a batch with the module it is given.

    Takes some ten iterations, and a few exchanges of buckets. Gradients are used; parameters stay as they are.
    """
    group = group or dist.group.WORLD
    assert group is not None, "init_process_group() comes first"
    params = [param for param in module.parameters() if param.requires_grad]
    chosen = resolve_adapter(adapter, device_type=params[0].device.type)
    profile = _profile(module, forward, adapter=chosen, bucket_cap_mb=bucket_cap_mb, group=group)
    largest = max(sum(params[i].nbytes for i in bucket) for bucket in profile.buckets)
    exchanges, cpu_seconds_per_byte = _exchange(chosen, group, params[0].device, bucket_bytes=largest)
    is_host = not chosen.capabilities.futures_complete_at_enqueue
    return Measured(
        forward=profile.forward,
        backward=profile.backward,
        used_at=profile.used_at,
        ready_at=profile.ready_at,
        buckets=profile.buckets,
        step_seconds_per_element=_step_seconds(params, optimizer_class, optimizer_options or {}, chosen, group),
        exchanges=exchanges,
        host_seconds_per_bucket=_host_seconds(chosen, group) if is_host else 0.0,
        cpu_seconds_per_byte=cpu_seconds_per_byte if is_host else 0.0,
    )


class _Profile(NamedTuple):
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
    used: dict[int, Moment]  # by parameter
    ready: dict[int, Moment]  # by bucket


def _profile(
    module: nn.Module,
    forward: Callable[[nn.Module], Tensor],
    *,
    adapter: Adapter,
    bucket_cap_mb: float | None,
    group: dist.ProcessGroup,
) -> _Profile:
    """Iterate under a DDP that reduces nothing: what is left is computing, and DDP's own work."""
    ddp = DistributedDataParallel(
        module, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True, process_group=group
    )
    params = [param for param in module.parameters() if param.requires_grad]
    index_of = {param: index for index, param in enumerate(params)}
    used: dict[int, Moment] = {}
    ready: dict[int, Moment] = {}
    buckets: dict[int, tuple[int, ...]] = {}

    def note_used(child: nn.Module, args: object) -> None:
        for param in child.parameters(recurse=False):
            if param in index_of:
                used.setdefault(index_of[param], adapter.moment())

    def note_ready(bucket: GradBucket) -> None:
        ready[bucket.index()] = adapter.moment()
        buckets[bucket.index()] = tuple(index_of[param] for param in bucket.parameters())

    _reduce_nothing(ddp, note_ready)
    hooks = [child.register_forward_pre_hook(note_used) for child in module.modules()]
    iterations: list[_Marks] = []
    for _ in range(_NUM_WARM + _NUM_TIMED):
        module.zero_grad()
        used.clear()
        ready.clear()
        _meet(group)
        start = adapter.moment()
        loss = forward(ddp)
        between = adapter.moment()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        iterations.append(_Marks(start, between, adapter.moment(), dict(used), dict(ready)))
        adapter.synchronize()
    for hook in hooks:
        hook.remove()
    timed, since = iterations[_NUM_WARM:], adapter.seconds_between
    forward_seconds = statistics.median(since(each.start, each.between) for each in timed)
    backward_seconds = statistics.median(since(each.between, each.end) for each in timed)

    def share(moments: Iterable[tuple[Moment, Moment, Moment]]) -> float:
        shares = [since(start, moment) / (since(start, end) or 1.0) for start, moment, end in moments]
        return min(1.0, statistics.median(shares)) if shares else 0.0

    ready_at = {
        bucket: share((each.between, each.ready[bucket], each.end) for each in timed if bucket in each.ready)
        for bucket in buckets
    }
    bucket_of = {index: bucket for bucket, indices in buckets.items() for index in indices}
    mine = [
        forward_seconds,
        backward_seconds,
        [share((m.start, m.used[i], m.between) for m in timed if i in m.used) for i in range(len(params))],
        [ready_at.get(bucket_of.get(i, -1), 1.0) for i in range(len(params))],
    ]
    said = all_gather_json(mine, group=group, what="comparing times of forward and backward")
    return _Profile(
        max(each[0] for each in said),
        max(each[1] for each in said),
        tuple(statistics.mean(shares) for shares in zip(*(each[2] for each in said), strict=True)),
        tuple(statistics.mean(shares) for shares in zip(*(each[3] for each in said), strict=True)),
        tuple(indices for _, indices in sorted(buckets.items())),
    )


def _reduce_nothing(ddp: DistributedDataParallel, note: Callable[[GradBucket], object]) -> None:
    def hook(state: object, bucket: GradBucket) -> Future[Tensor]:
        note(bucket)
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    hook.__annotations__ = {"bucket": GradBucket, "return": Future[Tensor]}  # DDP compares them, and here they are strings
    ddp.register_comm_hook(None, hook)


def _exchange(
    adapter: Adapter, group: dist.ProcessGroup, device: torch.device, *, bucket_bytes: int
) -> tuple[tuple[tuple[float, float], ...], float]:
    """Time exchanges of nothing much, of a bucket and of several; and what they cost this process per byte."""
    name = all_gather_json(uuid.uuid4().hex, group=group, what="measuring exchanges")[0]
    own = adapter.open_group(group, name=f"zerolap-measure-{name}")
    size, rank = group.size(), group.rank()
    found, costs = [], []
    for numel, num_buckets in ((16 * size, 1), (bucket_bytes // 4, 1), (bucket_bytes // 4, _NUM_PIPELINED)):
        ends = [numel * i // size for i in range(size + 1)]
        memory = [torch.ones(numel, device=device) for _ in range(num_buckets)]
        into = torch.ones(ends[rank + 1] - ends[rank], device=device)
        moved = 4 * num_buckets * numel * (size - 1) / size
        both, cpu = [], []
        for is_gather in (False, True):
            taken = []
            for _ in range(_NUM_TIMED - 1):
                _meet(own)
                start, start_cpu = adapter.moment(), time.process_time()
                pending = [
                    adapter.all_gather(Parts.cut(each, ends), group=own, tag=tag, what="measured all-gather")
                    if is_gather
                    else adapter.reduce_scatter(
                        Parts.cut(each, ends), into=into, group=own, tag=tag, what="measured reduce-scatter"
                    )
                    for tag, each in enumerate(memory)
                ]
                for each in pending:
                    each.wait()
                taken.append((adapter.seconds_between(start, adapter.moment()), time.process_time() - start_cpu))
            both.append(statistics.median(seconds for seconds, _ in taken[1:]))
            cpu.append(statistics.median(seconds for _, seconds in taken[1:]))
        found.append((moved, statistics.mean(both)))
        costs.append(statistics.mean(cpu) / moved)
    adapter.close_group(own)
    said = all_gather_json([found, costs[-1]], group=group, what="comparing times of exchanges")
    return (
        tuple((moved, max(each[0][i][1] for each in said)) for i, (moved, _) in enumerate(found)),
        max(each[1] for each in said),
    )


def _step_seconds(
    params: Sequence[Tensor],
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    adapter: Adapter,
    group: dist.ProcessGroup,
) -> float:
    """Of the optimizer, per element: stepping some of the parameters, or copies of them."""
    copies, numel = [], 0
    for param in params:
        copies.append(nn.Parameter(param.detach().clone()))
        copies[-1].grad = torch.ones_like(param)
        numel += param.numel()
        if numel >= _MAX_STEPPED:
            break
    devices = torch.utils._foreach_utils._get_fused_kernels_supported_devices()
    if optimizer_class in WITH_FUSED and params[0].device.type in devices and not {"fused", "foreach"} & set(options):
        options = {**options, "fused": True}  # as attach does
    optimizer = optimizer_class(copies, **options)  # type: ignore[call-arg]  # the base class takes none
    taken = []
    for _ in range(_NUM_TIMED + 1):
        _meet(group)
        start = adapter.moment()
        optimizer.step()
        taken.append(adapter.seconds_between(start, adapter.moment()))
    mine = statistics.median(taken[1:]) / max(numel, 1)
    return float(max(all_gather_json(mine, group=group, what="comparing times of updates")))


def _host_seconds(adapter: Adapter, group: dist.ProcessGroup) -> float:
    """What a bucket costs this process beside its elements and bytes: that of buckets with next to nothing in them."""
    device = adapter.device(0)

    def cpu_seconds(is_attached: bool) -> float:
        module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(_TINY_LAYERS))).to(device)
        bucket_bytes = sum(param.nbytes for param in module[0].parameters())
        ddp = DistributedDataParallel(
            module, bucket_cap_mb=bucket_bytes / MB, gradient_as_bucket_view=True, process_group=group
        )
        undo: Callable[[], None] = lambda: None
        if is_attached:
            zero = ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.AdamW, process_group=group, overlap_with_ddp=True
            )
            undo = attach(ddp, zero, adapter=adapter).detach
        else:
            _reduce_nothing(ddp, lambda bucket: None)
        for number in range(_NUM_WARM + 2 * _NUM_TIMED):
            if number == _NUM_WARM:
                start = time.process_time()
            module.zero_grad()
            ddp(torch.ones(1, 8, device=device)).sum().backward()
        taken = time.process_time() - start
        undo()
        return taken / (2 * _NUM_TIMED) / _TINY_LAYERS

    mine = max(0.0, cpu_seconds(True) - cpu_seconds(False))
    return float(max(all_gather_json(mine, group=group, what="comparing times of tiny buckets")))


def _meet(group: dist.ProcessGroup) -> None:
    group.barrier().wait()
