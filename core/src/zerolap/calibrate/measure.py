"""What is timed on real ranks besides the model: exchanges of buckets, alone and while a model computes, updates, and host work."""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zerolap._torch import GradBucket, devices_with_fused_kernels
from zerolap.api.attach import attach
from zerolap.api.optimizer import ZeroRedundancyOptimizer
from zerolap.backend.base import Adapter
from zerolap.backend.parts import Parts
from zerolap.forecast.workload import MB
from zerolap.runtime.peers import all_gather_json
from zerolap.runtime.shard_optimizer import WITH_FUSED
from zerolap.runtime.update_cost import update_cost
from zerolap.schedule.balance import COST_PER_ELEMENT

_NUM_TIMED = 5
_NUM_PIPELINED = 5  # buckets under way at once
_COLD_BYTES = 64 * MB  # more than caches hold: in training, what is sent was not touched for a while
_MAX_STEPPED = 2**23  # elements, for the same reason no less than this
_TINY_LAYERS = 16
_CONTENDED_SECONDS = 0.4


def barrier(group: dist.ProcessGroup) -> None:
    group.barrier().wait()


def reduce_nothing(ddp: DistributedDataParallel, note: Callable[[GradBucket], object]) -> None:
    """Let ``ddp`` hand its buckets to ``note``, and take its own gradients for reduced ones."""

    def hook(state: object, bucket: GradBucket) -> Future[Tensor]:
        note(bucket)
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    # DDP compares annotations, and here they are strings.
    hook.__annotations__ = {"bucket": GradBucket, "return": Future[Tensor]}
    ddp.register_comm_hook(None, hook)


class Exchanges:
    """Buckets to exchange in a group of our own, as the engine does: reduce-scatter, scaled to the mean, and all-gather."""

    def __init__(self, adapter: Adapter, group: dist.ProcessGroup, *, device: torch.device, bucket_bytes: int) -> None:
        name = all_gather_json(uuid.uuid4().hex, group=group, what="measuring exchanges")[0]
        self.adapter = adapter
        self.group = adapter.open_group(group, name=f"zerolap-measure-{name}")
        all_gather_json(None, group=self.group, what="connecting a group to measure with")
        self.numel = max(bucket_bytes // 4, 16 * group.size())  # of a bucket
        num_buckets = max(_NUM_PIPELINED, -(-_COLD_BYTES // bucket_bytes))
        self._memory = [torch.ones(self.numel, device=device) for _ in range(min(num_buckets, 64))]
        self._next = 0

    def bytes_of(self, numel: int) -> float:
        """Each way, of one exchange."""
        return 4 * numel * (self.group.size() - 1) / self.group.size()

    def run(self, num_buckets: int, *, is_gather: bool, numel: int | None = None) -> None:
        """Exchange ``num_buckets`` buckets, all in flight at once."""
        size, rank, pending = self.group.size(), self.group.rank(), []
        for tag in range(num_buckets):
            memory = self._memory[self._next][:numel]
            self._next = (self._next + 1) % len(self._memory)
            ends = [len(memory) * i // size for i in range(size + 1)]
            parts = Parts.cut(memory, ends)
            if is_gather:
                pending.append(self.adapter.all_gather(parts, group=self.group, tag=tag, what="measured all-gather"))
            else:
                into = torch.empty_like(parts.tensors[rank])
                what = "measured reduce-scatter"
                started = self.adapter.reduce_scatter(parts, into=into, group=self.group, tag=tag, what=what)
                pending.append(started)
        for each in pending:
            each.wait()

    def close(self) -> None:
        self.adapter.close_group(self.group)


def time_exchanges(exchanges: Exchanges) -> tuple[tuple[tuple[float, float], ...], float]:
    """Bytes each way and seconds of next to nothing, of a bucket and of several, and this process's CPU time per byte."""
    adapter, group = exchanges.adapter, exchanges.group
    found, cost = [], 0.0
    for numel, num_buckets in ((16 * group.size(), 1), (exchanges.numel, 1), (exchanges.numel, _NUM_PIPELINED)):
        taken: list[list[tuple[float, float]]] = [[], []]
        for _ in range(_NUM_TIMED):
            for is_gather in (False, True):
                barrier(group)
                start, start_cpu = adapter.moment(), time.process_time()
                exchanges.run(num_buckets, is_gather=is_gather, numel=numel)
                seconds = adapter.seconds_between(start, adapter.moment())
                taken[is_gather].append((seconds, time.process_time() - start_cpu))
        moved = num_buckets * exchanges.bytes_of(numel)
        # The least: a link is as fast as it is, and everything else that this machine does only adds to it.
        seconds, cpu = (sum(min(each[i] for each in kind) for kind in taken) / 2 for i in (0, 1))
        found.append((moved, seconds))
        cost = cpu / moved
    said = all_gather_json([found, cost], group=group, what="comparing times of exchanges")
    sizes = tuple((moved, max(each[0][i][1] for each in said)) for i, (moved, _) in enumerate(found))
    return sizes, max(each[1] for each in said)


def time_contended(exchanges: Exchanges, iterate: Callable[[], None], *, seconds: float, rate: float) -> float:
    """By how many seconds a byte that is sent and received holds up computing, on the cores that do both.

    An iteration takes ``seconds`` by itself, exchanges alone run at ``rate``.
    """
    group = exchanges.group
    num_iterations = max(2, round(_CONTENDED_SECONDS / seconds))
    bucket_bytes = exchanges.bytes_of(exchanges.numel)
    # Exchanges that get half a core take twice as long; they shall end while the model still computes.
    num_rounds = max(1, int(0.4 * num_iterations * seconds * rate / (4 * bucket_bytes)))

    def exchange() -> None:
        for _ in range(num_rounds):
            for is_gather in (False, True):
                exchanges.run(2, is_gather=is_gather)

    extra = []
    for _ in range(_NUM_TIMED):
        taken = []
        for is_contended in (False, True):
            thread = threading.Thread(target=exchange)
            barrier(group)
            start = time.perf_counter()
            if is_contended:
                thread.start()
            for _ in range(num_iterations):
                iterate()
            taken.append(time.perf_counter() - start)
            if is_contended:
                thread.join()
        extra.append(taken[1] - taken[0])
    said = all_gather_json(statistics.median(extra), group=group, what="comparing times of computing while exchanging")
    return max(0.0, float(statistics.mean(said))) / (4 * num_rounds * bucket_bytes)


def step_seconds(
    params: Sequence[tuple[Tensor, int]],
    optimizers: Sequence[tuple[type[Optimizer], Mapping[str, Any]]],
    adapter: Adapter,
    group: dist.ProcessGroup,
) -> float:
    """Of an element of whatever treats every element by itself: each optimizer steps copies of some of its parameters.

    ``params`` come with the number of their optimizer.
    """
    seconds = work = 0.0
    for number, (by, options) in enumerate(optimizers):
        mine = [param for param, of in params if of == number]
        if mine:
            seconds += _seconds_of_update(copies := _some_copies(mine), by, options, adapter, group)
            work += sum(update_cost(by, tuple(each.shape)) for each in copies) / COST_PER_ELEMENT
    return float(max(all_gather_json(seconds / max(work, 1), group=group, what="comparing times of updates")))


def _some_copies(params: Sequence[Tensor]) -> list[nn.Parameter]:
    copies: list[nn.Parameter] = []
    for param in params:
        copies.append(nn.Parameter(param.detach().clone()))
        copies[-1].grad = torch.ones_like(param)
        if sum(each.numel() for each in copies) >= _MAX_STEPPED:
            break
    return copies


def _seconds_of_update(
    params: list[nn.Parameter],
    by: type[Optimizer],
    options: Mapping[str, Any],
    adapter: Adapter,
    group: dist.ProcessGroup,
) -> float:
    is_known = by in WITH_FUSED and params[0].device.type in devices_with_fused_kernels()
    if is_known and not {"fused", "foreach"} & set(options):
        options = {**options, "fused": True}  # as attach does
    optimizer = by(params, **options)
    taken = []
    for _ in range(_NUM_TIMED + 1):
        barrier(group)
        start = adapter.moment()
        optimizer.step()
        taken.append(adapter.seconds_between(start, adapter.moment()))
    return statistics.median(taken[1:])


def host_seconds(adapter: Adapter, group: dist.ProcessGroup) -> float:
    """What a bucket costs this process beside its elements and bytes: that of buckets with next to nothing in them."""

    def cpu_seconds(is_attached: bool) -> float:
        module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(_TINY_LAYERS))).to(adapter.device(0))
        cap = sum(param.nbytes for param in module[0].parameters()) / MB
        ddp = DistributedDataParallel(module, bucket_cap_mb=cap, gradient_as_bucket_view=True, process_group=group)
        detach: Callable[[], None] | None = None
        if is_attached:
            zero = ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.AdamW, process_group=group, overlap_with_ddp=True
            )
            detach = attach(ddp, zero, adapter=adapter).detach
        else:
            reduce_nothing(ddp, lambda bucket: None)
        start = 0.0
        for number in range(3 * _NUM_TIMED):
            if number == _NUM_TIMED:
                start = time.process_time()
            module.zero_grad()
            ddp(torch.ones(1, 8, device=adapter.device(0))).sum().backward()
        taken = time.process_time() - start
        if detach is not None:
            detach()
        return taken / (2 * _NUM_TIMED * _TINY_LAYERS)

    mine = max(0.0, cpu_seconds(True) - cpu_seconds(False))
    return float(max(all_gather_json(mine, group=group, what="comparing times of tiny buckets")))
