"""The DDP communication hooks that update shards inside backward. They wrap any other hook, which does the reducing.

Annotations are real here, not strings: DDP compares them when a hook is registered.
"""

import inspect
import uuid
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, PrefixStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from zerolap._public import public
from zerolap.api.optimizer import ZeroRedundancyOptimizer
from zerolap.api.preflight import called_together, check_kinds, meeting_group, unwrapped
from zerolap.backend.base import Adapter
from zerolap.backend.lanes import Waiter
from zerolap.backend.order_check import debug_modes, with_checked_order
from zerolap.backend.registry import resolve_adapter
from zerolap.errors import ZerolapError
from zerolap.runtime.engine import Engine, HookEngine
from zerolap.runtime.optimizer_facts import refuse_immovable
from zerolap.runtime.peers import all_gather_json, forget_keys, refuse_together
from zerolap.runtime.rereads import Rereads
from zerolap.schedule.machine import Agreement, Schedule
from zerolap.schedule.ownership import Policy

T = TypeVar("T")

Hook = Callable[[Any, GradBucket], Future[Tensor]]

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
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
    *,
    adapter: Adapter | str | None = None,
) -> Hook:
    """``hook``, and the optimizer's update once the last gradient is computed, while reductions are outstanding.

    Made by all ranks of DDP's group together, after the optimizer, and given to ``ddp.register_comm_hook``. Each bucket
    is owned by one rank, or with ``shard_buckets`` by several. Prefer it where communication is slow. The parameters' device
    decides which adapter is used, unless one is given.
    """
    return _overlapped(hook, ddp, zero, schedule=Schedule.AFTER_BACKWARD, shard_buckets=shard_buckets, adapter=adapter)


@public
@called_together
def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
    *,
    adapter: Adapter | str | None = None,
) -> Hook:
    """``hook``, and each bucket's update as soon as it is reduced, while backward computes the next gradients.

    Made and used like the hook of ``hook_with_zero_step``. Prefer it where communication is fast.
    """
    return _overlapped(hook, ddp, zero, schedule=Schedule.INTERLEAVED, shard_buckets=shard_buckets, adapter=adapter)


def _overlapped(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    *,
    schedule: Schedule,
    shard_buckets: bool,
    adapter: Adapter | str | None,
) -> Hook:
    policy = Policy.BY_PARAMETER if shard_buckets else Policy.WHOLE_BUCKET
    zero = unwrapped(zero)
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
        reduce_lane = chosen.lane("reduce", device=zero._default_device) if one_by_one else None
        if reduce_lane is not None:
            undo.callback(reduce_lane.close)
        timeout = chosen.timeout(zero.process_group).total_seconds()
        process_group = ddp.process_group
        hook_state: Any = None

        def reduce(bucket: GradBucket) -> Future[Tensor]:
            if reduce_lane is None:
                return hook(hook_state, bucket)
            return reduce_lane.submit(lambda: Waiter(hook(hook_state, bucket)).wait(timeout))

        engine = HookEngine(
            zero._book,
            reduce=reduce,
            policy=policy,
            adapter=chosen,
            group=groups[0],
            schedule=schedule,
            agreement=agreement_of(ddp),
            on_update=noted_by(zero),
        )
        use_engine(zero, engine, undo)

        def on_bucket(state: Any, bucket: GradBucket) -> Future[Tensor]:
            nonlocal hook_state
            hook_state = process_group if state is None and takes_group else state
            return engine.on_bucket(bucket)

        return guarded(ddp, on_bucket, adapter=chosen, engine=engine, optimizer=zero)

    made, _ = meet(ddp, zero, settings=settings, connect=connect, num_groups=1, adapter=adapter)
    return made


def use_engine(zero: ZeroRedundancyOptimizer, engine: Engine, undo: ExitStack) -> None:
    """Let ``engine`` update the optimizer until ``undo`` is closed; or until both are dropped, and their groups with them."""
    zero._engine = engine
    undo.callback(setattr, zero, "_engine", None)
    undo.callback(engine.dispose)
    if zero.rank == 0:
        prefix = engine.run_name.rpartition("-")[0]
        forget = weakref.finalize(engine, forget_keys, zero.process_group.get_group_store(), prefix)
        forget.atexit = False


def noted_by(zero: ZeroRedundancyOptimizer) -> Callable[[], None]:
    """What an engine calls after an update. It does not keep the optimizer, which keeps the engine."""
    ref = weakref.ref(zero)

    def note() -> None:
        updated: Any = ref()
        if updated is not None:
            updated._is_untouched = False
            updated._opt_called = (
                True  # LR schedulers warn if step() was not called; backward was this optimizer's step
            )

    return note


def meet(
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    *,
    settings: Callable[[], list[Any]],
    connect: Callable[[Adapter, list[dist.ProcessGroup], ExitStack], T],
    num_groups: int,
    adapter: Adapter | str | None = None,
) -> tuple[T, ExitStack]:
    """Check on all ranks that ``zero`` can be overlapped with ``ddp`` and that all want the same; then do it, on groups of its own.

    The adapter is the one given, or that of the parameters' device. ``settings`` refuses what the caller cannot do beyond that, and
    returns what must be the same on all ranks. ``connect`` starts what was asked for, and leaves in the stack what ends it again. All of
    this runs on all ranks or is undone on all: returns what ``connect`` has returned, and the stack.
    """
    modes: tuple[str, ...] = ()
    wanted: list[Any] = []

    def check() -> Adapter:
        nonlocal modes, wanted
        check_kinds(ddp, zero, expected=ZeroRedundancyOptimizer)
        if not zero._overlap_with_ddp:
            raise ValueError("construct ZeroRedundancyOptimizer with overlap_with_ddp=True to overlap it with DDP")
        if zero._engine is not None:
            raise ValueError("a hook was already made for this optimizer; one optimizer overlaps with one DDP")
        modes = debug_modes()
        found = resolve_adapter(adapter, device_type=zero._default_device.type)
        found.check_group(zero.process_group)
        _check(ddp, zero)
        refuse_immovable(zero._book.factory, zero.param_groups)
        wanted = settings()
        return found

    group, what = meeting_group(zero, ddp), "overlapping an optimizer with DDP"
    chosen: Adapter = refuse_together(check, group=group, what=what)
    zero._compare_with_other_ranks()  # once more: options may have been changed since
    mine = [chosen.name, *wanted, ddp.find_unused_parameters, ddp.static_graph, f"debug={','.join(modes)}"]
    layout: dict[str, Any] = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # torch gives it no types
    mine.append(f"buckets of {layout.get('bucket_sizes')} bytes")
    said = all_gather_json([uuid.uuid4().hex, mine], group=group, what="comparing hooks between ranks")
    name, first = said[0]
    for rank, (_, theirs) in enumerate(said):
        if theirs != first:
            raise ValueError(f"the hooks of group ranks 0 and {rank} differ: {first} and {theirs}")

    if "order" in modes:
        store = PrefixStore(f"zerolap-{name}-order", group.get_group_store())
        chosen = with_checked_order(chosen, store=store)

    def open_and_connect() -> T:
        groups = []
        if group.rank() == 0:
            undo.callback(forget_keys, group.get_group_store(), f"zerolap-{name}-")
        for i in range(num_groups):
            groups.append(chosen.open_group(group, name=f"zerolap-{name}-{i}"))
            undo.callback(chosen.close_group, groups[-1])
            # Connections are made by the first collective of a group: now, not in the first backward.
            all_gather_json(None, group=groups[-1], what="connecting the optimizer's own group")
        return connect(chosen, groups, undo)

    with ExitStack() as undo:
        result: T = refuse_together(open_and_connect, group=group, what=what)
        return result, undo.pop_all()


def guarded(
    ddp: DistributedDataParallel,
    on_bucket: Hook,
    *,
    adapter: Adapter,
    engine: Engine,
    optimizer: ZeroRedundancyOptimizer,
) -> Hook:
    """A hook for ``register_comm_hook`` that refuses what shows only in training: changed graph settings, joins, late reads."""
    agreement, ddp_ref, rereads = agreement_of(ddp), weakref.ref(ddp), Rereads(ddp.module, engine)

    def hook_with_zero_step(state: Any, bucket: GradBucket) -> Future[Tensor]:
        caller = ddp_ref()
        assert caller is not None, "a hook is called by a DDP that is alive"
        if agreement_of(caller) is not agreement:
            raise ZerolapError("DDP's static_graph was changed after the hook was made; set it before")
        if caller._join_config.enable and engine.is_tuning:
            raise ZerolapError(
                'schedule="auto" cannot be tried out under Join, where ranks make different numbers of iterations; train without '
                "Join until handle.is_tuned, or choose a schedule"
            )
        if (
            caller._join_config.enable
            and adapter.capabilities.one_issue_order
            and engine.schedule is Schedule.INTERLEAVED
        ):
            # A rank that has joined updates its buckets at the end, behind all reductions; others gather between them.
            raise ZerolapError(
                "updates interleaved with backward cannot work under Join on this device: ranks that have joined start "
                'collectives in another order than the others; use schedule="after_backward" or hook_with_zero_step'
            )
        future = on_bucket(state, bucket)
        if rereads.is_watching or (bucket.index() == 0 and engine.schedule is not Schedule.ON_STEP):
            rereads.bucket_ready(bucket)
        return future

    # The optimizer keeps the engine, and not the other way round; who has the hook may have dropped the optimizer itself.
    vars(hook_with_zero_step)["optimizer"] = optimizer
    return hook_with_zero_step


def agreement_of(ddp: DistributedDataParallel) -> Agreement:
    if ddp.static_graph:
        return Agreement.PER_LAYOUT
    return Agreement.ALWAYS if ddp.find_unused_parameters else Agreement.NEVER


def _check(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> None:
    """Refuse, with what to do instead, every combination whose numbers could not be right."""
    ranks, zero_ranks = (dist.get_process_group_ranks(g) for g in (ddp.process_group, zero.process_group))
    if ranks != zero_ranks:
        raise ValueError(f"DDP works on ranks {ranks}, the optimizer on {zero_ranks}; give both the same process_group")
    if ddp.mixed_precision is not None:
        raise ValueError("DDP's mixed_precision swaps parameters during backward; use torch.autocast instead")
    if ddp.skip_all_reduce_unused_params:
        raise ValueError("skip_all_reduce_unused_params=True hides buckets from hooks; leave it False")
    if ddp._use_python_reducer:
        raise ValueError("DDP's Python reducer (compiled autograd) does not run hooks in backward; use the default one")
    if any(isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse for m in ddp.module.modules()):
        raise ValueError("sparse gradients cannot be updated inside backward; use sparse=False")
    reduced = {p for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore}
    strangers = [i for i, p in enumerate(zero._all_params) if p.requires_grad and p not in reduced]
    if strangers:
        raise ValueError(
            f"trainable parameters {strangers[:10]} of the optimizer ({len(strangers)} in all) are not reduced by this DDP; "
            "make the optimizer from ddp.parameters() of the same DDP"
        )
    if any(hasattr(p, "_in_backward_optimizers") for p in zero._all_params):
        raise ValueError("a parameter has another optimizer applied in backward; use one or the other")
