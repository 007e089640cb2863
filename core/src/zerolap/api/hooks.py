"""The DDP communication hooks that update shards inside backward. They wrap any other hook, which does the reducing."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from zerolap._public import public
from zerolap._torch import GradBucket
from zerolap.api.connect import connect_ranks, start_engine
from zerolap.api.optimizer import ZeroRedundancyOptimizer
from zerolap.api.preflight import called_together, several, unwrapped
from zerolap.backend.base import Adapter
from zerolap.backend.lanes import Waiter
from zerolap.runtime.books import Books
from zerolap.runtime.common import Hook
from zerolap.runtime.engine import DDPHook
from zerolap.runtime.exchange_strategies import WrappedHook
from zerolap.schedule.machine import Schedule
from zerolap.schedule.ownership import Policy

# These never wait inside a future's callback, so any number of their reductions may be under way at once.
_NEVER_WAIT_IN_CALLBACKS = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
)


@public
@called_together
def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer | Sequence[ZeroRedundancyOptimizer],
    shard_buckets: bool = False,
    *,
    adapter: Adapter | str | None = None,
) -> Hook:
    """Wrap a DDP communication hook so that the optimizer updates its shards once the last gradient is computed.

    The updates overlap with the reductions that are still in flight: prefer it where communication is slow. Called by all ranks of DDP's
    group together, after the optimizer is made; the result is for ``ddp.register_comm_hook``. As in torch, ``hook`` all-reduces gradients
    and parameters are broadcast: 1.5 times the bytes of ``attach``.

    Args:
        hook: What reduces a bucket's gradients, a function of ``(state, bucket)``: torch's all-reduce, fp16 or bf16 compression,
            PowerSGD, or your own. It gets the ``state`` that is registered with the result.
        ddp: The DistributedDataParallel that the result will be registered with.
        zero: The optimizer, made with ``overlap_with_ddp=True`` from this DDP's parameters, or several over different ones. An optimizer
            takes one hook.
        shard_buckets: If False, each bucket is owned by one rank; if True, its parameters are distributed over several.
        adapter: An adapter, or the name of an installed one. Default: by the device type of the parameters.
    """
    return _overlapped(hook, ddp, zero, schedule=Schedule.AFTER_BACKWARD, shard_buckets=shard_buckets, adapter=adapter)


@public
@called_together
def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer | Sequence[ZeroRedundancyOptimizer],
    shard_buckets: bool = False,
    *,
    adapter: Adapter | str | None = None,
) -> Hook:
    """Wrap a DDP communication hook so that each bucket's shard is updated as soon as it is reduced, inside backward.

    The updates overlap with the computation of the next gradients: prefer it where communication is fast. Otherwise as
    ``hook_with_zero_step``.

    Args:
        hook: What reduces a bucket's gradients, a function of ``(state, bucket)``.
        ddp: The DistributedDataParallel that the result will be registered with.
        zero: The optimizer, made with ``overlap_with_ddp=True`` from this DDP's parameters, or several over different ones.
        shard_buckets: If False, each bucket is owned by one rank; if True, its parameters are distributed over several.
        adapter: An adapter, or the name of an installed one. Default: by the device type of the parameters.
    """
    return _overlapped(hook, ddp, zero, schedule=Schedule.INTERLEAVED, shard_buckets=shard_buckets, adapter=adapter)


def _overlapped(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer | Sequence[ZeroRedundancyOptimizer],
    *,
    schedule: Schedule,
    shard_buckets: bool,
    adapter: Adapter | str | None,
) -> Hook:
    policy = Policy.BY_PARAMETER if shard_buckets else Policy.WHOLE_BUCKET
    zeros = [unwrapped(each) for each in several(zero)]
    takes_group = False

    def settings() -> list[Any]:
        nonlocal takes_group
        if not callable(hook):
            raise TypeError(f"hook must be a DDP communication hook, a function of (state, bucket), got {hook!r}")
        # torch's own hooks take no state to mean all ranks, even where DDP spans only some.
        takes_group = next(iter(inspect.signature(hook).parameters), None) == "process_group"
        return [schedule.value, policy.value]

    def connect(chosen: Adapter, groups: list[dist.ProcessGroup], undo: ExitStack) -> Hook:
        # A hook that waits for a second collective in the callback of the first blocks the backend's worker; with all
        # workers blocked that way nothing moves again. One such reduction at a time always leaves a worker free.
        one_by_one = not chosen.capabilities.futures_complete_at_enqueue and hook not in _NEVER_WAIT_IN_CALLBACKS
        reduce_lane = chosen.lane("reduce", device=zeros[0]._default_device) if one_by_one else None
        if reduce_lane is not None:
            undo.callback(reduce_lane.close)
        timeout = chosen.timeout(zeros[0].process_group).total_seconds()

        def alone(state: Any, bucket: GradBucket) -> Future[Tensor]:
            assert reduce_lane is not None
            return reduce_lane.submit(lambda: Waiter(hook(state, bucket)).wait(timeout))

        books = Books([each._book for each in zeros])
        strategy = WrappedHook(books, adapter=chosen, group=groups[0], policy=policy)
        engine = start_engine(
            ddp,
            zeros,
            books,
            undo,
            strategy=strategy,
            adapter=chosen,
            group=groups[0],
            schedule=schedule,
            hook=hook if reduce_lane is None else alone,
        )
        engine.default_state = ddp.process_group if takes_group else None
        ours = DDPHook(ddp.process_group, "hook_with_zero_step")
        ours.engine, ours.optimizers = engine, zeros
        return ours

    made, _ = connect_ranks(ddp, zeros, settings=settings, connect=connect, num_groups=1, adapter=adapter)
    return made
