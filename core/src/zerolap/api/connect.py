"""Connecting an optimizer with a DDP, on all ranks together or on none: what they compare, the groups they open, the engine they start."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zerolap._torch import (
    PrefixStore,
    bucket_caps_of,
    has_python_reducer,
    hides_unused_buckets,
    is_updated_in_backward,
    logging_data_of,
    own_caps_of,
    rebucket,
    store_of,
)
from zerolap.api.optimizer import ZeroRedundancyOptimizer
from zerolap.api.preflight import check_kinds, check_methods, check_modules, meeting_group
from zerolap.backend.base import Adapter
from zerolap.backend.order_check import debug_modes, with_checked_order
from zerolap.backend.registry import resolve_adapter
from zerolap.runtime.books import Books
from zerolap.runtime.bucket import Update
from zerolap.runtime.common import Common, Hook
from zerolap.runtime.engine import DDPHook, Engine, agreement_of
from zerolap.runtime.exchange_strategies import ExchangeStrategy
from zerolap.runtime.failures import Failures
from zerolap.runtime.gradient_memory import GradientMemory
from zerolap.runtime.optimizer_description import compare_between_ranks
from zerolap.runtime.optimizer_facts import refuse_immovable
from zerolap.runtime.peers import all_gather_json, forget_keys, refuse_together
from zerolap.runtime.probe import Probe
from zerolap.schedule.machine import Agreement, Gather, Machine, Schedule

T = TypeVar("T")

# A collective's own timeout says more than ours, so it gets this much longer to speak first.
_GRACE_SECONDS = 5.0
_HOOK = "_zerolap_hook"


def connect_ranks(
    ddp: DistributedDataParallel,
    zeros: Sequence[ZeroRedundancyOptimizer],
    *,
    settings: Callable[[], list[Any]],
    connect: Callable[[Adapter, list[dist.ProcessGroup], ExitStack], T],
    num_groups: int,
    adapter: Adapter | str | None = None,
) -> tuple[T, ExitStack]:
    """Check on all ranks that ``zeros`` can be overlapped with ``ddp`` and that all want the same; then do it, on groups of its own.

    The adapter is the one given, or that of the parameters' device. ``settings`` refuses what the caller cannot do beyond that, and
    returns what must be the same on all ranks. ``connect`` starts what was asked for, and leaves in the stack what ends it again. All of
    this runs on all ranks or is undone on all: returns what ``connect`` has returned, and the stack.
    """
    modes: tuple[str, ...] = ()
    wanted: list[Any] = []

    def check() -> Adapter:
        nonlocal modes, wanted
        _check_unused(ddp, zeros)
        modes = debug_modes()
        found = resolve_adapter(adapter, device_type=zeros[0]._default_device.type)
        found.check_group(zeros[0].process_group)
        _check(ddp, zeros)
        for zero in zeros:
            refuse_immovable(zero._book.factory, zero.param_groups)
        wanted = settings()
        return found

    group, what = meeting_group(*zeros, ddp), "overlapping an optimizer with DDP"
    chosen: Adapter = refuse_together(check, group=group, what=what)
    # Once more: options may have been changed since.
    compare_between_ranks(*((zero._optimizer_class, zero.param_groups) for zero in zeros), group=group)
    mine = [chosen.name, *wanted, ddp.find_unused_parameters, ddp.static_graph, f"debug={','.join(modes)}"]
    mine.append(f"buckets of {logging_data_of(ddp).get('bucket_sizes')} bytes")
    said = all_gather_json([uuid.uuid4().hex, mine], group=group, what="comparing hooks between ranks")
    name, first = said[0]
    for rank, (_, theirs) in enumerate(said):
        if theirs != first:
            raise ValueError(f"the hooks of group ranks 0 and {rank} differ: {first} and {theirs}")

    if "order" in modes:
        store = PrefixStore(f"zerolap-{name}-order", store_of(group))
        chosen = with_checked_order(chosen, store=store)

    def open_and_connect() -> T:
        groups = []
        if group.rank() == 0:
            undo.callback(forget_keys, store_of(group), f"zerolap-{name}-")
        for i in range(num_groups):
            groups.append(chosen.open_group(group, name=f"zerolap-{name}-{i}"))
            undo.callback(chosen.close_group, groups[-1])
            # Connections are made by the first collective of a group: now, not in the first backward.
            all_gather_json(None, group=groups[-1], what="connecting the optimizer's own group")
        return connect(chosen, groups, undo)

    with ExitStack() as undo:
        result: T = refuse_together(open_and_connect, group=group, what=what)
        return result, undo.pop_all()


def start_engine(
    ddp: DistributedDataParallel,
    zeros: Sequence[ZeroRedundancyOptimizer],
    books: Books,
    undo: ExitStack,
    *,
    strategy: ExchangeStrategy,
    adapter: Adapter,
    group: dist.ProcessGroup,
    schedule: Schedule,
    gather: Gather = Gather.EAGER,
    names: Mapping[Tensor, str] | None = None,
    hook: Hook | None = None,
    shards_gradients: bool = False,
) -> Engine:
    """Let a new engine update the optimizers until ``undo`` is closed; or until all are dropped, and their groups with them."""
    agreement, device, me = agreement_of(ddp), books.device, f"rank {dist.get_rank()}"
    probe = Probe(waits_on_host=not adapter.capabilities.futures_complete_at_enqueue)
    timeout = adapter.timeout(group).total_seconds() + _GRACE_SECONDS
    memory = None
    if shards_gradients:
        memory = GradientMemory(ddp, adapter=adapter, waits_on_host=probe.has_times, timeout=timeout, me=me)
    common = Common(
        me=me,
        adapter=adapter,
        lane=adapter.lane("update", device=device),
        reduce_side=adapter.side(device),
        gather_side=adapter.side(device),
        timeout=timeout,
        failures=Failures(me, group, probe),
        probe=probe,
        names=names or {},
        is_lazy=gather is Gather.LAZY,
        is_alone=books.world_size == 1,
        waits_on_host=probe.has_times,
        asks_for_use=agreement is not Agreement.NEVER,
        group=group,
        hook=hook,
        norm_dtype=torch.float64 if adapter.capabilities.has_float64 else torch.float32,
        gradient_memory=memory,
    )
    engine = Engine(
        books,
        ddp=ddp,
        common=common,
        strategy=strategy,
        machine=Machine(schedule, gather=gather, agreement=agreement),
        update=Update(books),
        on_update=[weakref.WeakMethod(zero._note_update) for zero in zeros],
    )
    if memory is not None:
        undo.callback(weakref.finalize(engine, memory.close))
    _give_engine(engine, zeros, undo)
    return engine


def _give_engine(engine: Engine, zeros: Sequence[ZeroRedundancyOptimizer], undo: ExitStack) -> None:
    for number, zero in enumerate(zeros):
        zero._engine, zero._number = engine, number
        undo.callback(_forget_engine, weakref.ref(zero))  # which has the handle, and that has this
    undo.callback(engine.dispose)
    if engine.books.rank == 0:
        prefix = engine.run_name.rpartition("-")[0]
        forget = weakref.finalize(engine, forget_keys, store_of(zeros[0].process_group), prefix)
        forget.atexit = False


def _forget_engine(optimizer: weakref.ref[ZeroRedundancyOptimizer]) -> None:
    if (zero := optimizer()) is not None:
        zero._engine = zero._handle = None


def hook_of(ddp: DistributedDataParallel) -> DDPHook | None:
    """The hook by which ``attach`` takes a DDP's buckets, if it has one."""
    hook: DDPHook | None = vars(ddp).get(_HOOK)
    return hook


def take_buckets(
    ddp: DistributedDataParallel, engine: Engine, optimizers: Sequence[ZeroRedundancyOptimizer]
) -> DDPHook:
    """Hand DDP's buckets to an engine, until the hook that is returned is turned off."""
    hook = hook_of(ddp)
    if hook is None:
        hook = DDPHook(ddp.process_group, "zerolap.attach")
        ddp.register_comm_hook(None, hook)
        setattr(ddp, _HOOK, hook)
    hook.engine, hook.optimizers = engine, optimizers
    return hook


def shard_gradients_of(ddp: DistributedDataParallel, undo: ExitStack) -> None:
    """Let DDP begin with buckets of their final size, which it neither reads nor copies anything from, until ``undo`` is closed."""
    cap, first_cap = bucket_caps_of(ddp)
    rebucket(ddp, cap=cap, first_cap=first_cap, is_freed=True)
    undo.callback(_rebucket, weakref.ref(ddp), cap, first_cap)


def _rebucket(found: weakref.ref[DistributedDataParallel], cap: int, first_cap: int) -> None:
    if (ddp := found()) is not None:  # which has what undoes this
        rebucket(ddp, cap=cap, first_cap=first_cap)


def _check_unused(ddp: DistributedDataParallel, zeros: Sequence[ZeroRedundancyOptimizer]) -> None:
    if not zeros:
        raise ValueError("there must be at least one optimizer, got an empty list")
    for zero in zeros:
        check_kinds(ddp, zero, expected=ZeroRedundancyOptimizer)
        if not zero._overlap_with_ddp:
            raise ValueError("construct ZeroRedundancyOptimizer with overlap_with_ddp=True to overlap it with DDP")
        if zero._engine is not None:
            raise ValueError("a hook was already made for this optimizer; one optimizer overlaps with one DDP")


def _check(ddp: DistributedDataParallel, zeros: Sequence[ZeroRedundancyOptimizer]) -> None:
    """Refuse, with what to do instead, every combination whose numbers could not be right."""
    for zero in zeros:
        ranks, zero_ranks = (dist.get_process_group_ranks(g) for g in (ddp.process_group, zero.process_group))
        if ranks != zero_ranks:
            raise ValueError(
                f"DDP works on ranks {ranks}, the optimizer on {zero_ranks}; give both the same process_group"
            )
    for zero in zeros:
        check_methods(zero, ("state_dict", "load_state_dict"))
    check_modules(ddp.module)
    _check_params(ddp, zeros)
    if ddp.mixed_precision is not None:
        raise ValueError("DDP's mixed_precision swaps parameters during backward; use torch.autocast instead")
    if hides_unused_buckets(ddp):
        raise ValueError("skip_all_reduce_unused_params=True hides buckets from hooks; leave it False")
    if ddp.static_graph and own_caps_of(ddp):
        raise ValueError(
            "with static_graph=True and bucket_cap_mb_list DDP numbers its first buckets wrongly; use bucket_cap_mb"
        )
    if has_python_reducer(ddp):
        raise ValueError("DDP's Python reducer (compiled autograd) does not run hooks in backward; use the default one")
    if any(isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse for m in ddp.module.modules()):
        raise ValueError("sparse gradients cannot be updated inside backward; use sparse=False")


def _check_params(ddp: DistributedDataParallel, zeros: Sequence[ZeroRedundancyOptimizer]) -> None:
    reduced = {p for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore}
    names = {param: name for name, param in ddp.module.named_parameters()}
    owner: dict[Tensor, int] = {}
    for number, zero in enumerate(zeros):
        params = zero._book.params
        strangers = [i for i, p in enumerate(params) if p.requires_grad and p not in reduced]
        if strangers:
            raise ValueError(
                f"trainable parameters {strangers[:10]} of the optimizer ({len(strangers)} in all) are not reduced by this DDP; "
                "make the optimizer from ddp.parameters() of the same DDP"
            )
        if any(is_updated_in_backward(p) for p in params):
            raise ValueError("a parameter has another optimizer applied in backward; use one or the other")
        if zero._default_device != zeros[0]._default_device:
            raise ValueError(
                f"the parameters of optimizers 0 and {number} are on {zeros[0]._default_device} and {zero._default_device}; "
                "optimizers that are attached together need one device"
            )
        for index, param in enumerate(params):
            if owner.setdefault(param, number) != number:
                name = names.get(param, f"parameter {index} of optimizer {number}")
                raise ValueError(
                    f"{name} is in optimizers {owner[param]} and {number}; give every parameter to one of them"
                )
