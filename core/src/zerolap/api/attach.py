"""``attach``: the native way to overlap, with its handle and the loss scaler that knows shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from enum import Enum
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
import torch.optim
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zerolap._logging import logger_of
from zerolap._public import public
from zerolap.api.hooks import Hook, agreement_of, guarded, meet, noted_by, use_engine
from zerolap.api.optimizer import ZeroRedundancyOptimizer
from zerolap.api.preflight import called_together, check_sent_dtype, unwrapped
from zerolap.api.tuner import Tuner, compiled_parts
from zerolap.backend.base import Adapter
from zerolap.observe.recorder import Trace
from zerolap.observe.stats import Stats
from zerolap.observe.trace import take
from zerolap.runtime.engine import Engine
from zerolap.runtime.native import NativeEngine, Precision
from zerolap.runtime.optimizer_facts import Factory, exact_cuts, fused_is_same, is_elementwise
from zerolap.runtime.param_groups import options_of, params_of
from zerolap.runtime.peers import all_gather_json
from zerolap.runtime.safety import NonFinite, Safety, WatchedEngine
from zerolap.runtime.shards import WITH_FUSED
from zerolap.schedule.machine import Gather, Schedule

logger = logger_of(__name__)

E = TypeVar("E", bound=Enum)


@public
class Handle:
    """What ``attach`` returns."""

    def __init__(
        self,
        optimizer: ZeroRedundancyOptimizer,
        engine: WatchedEngine,
        adapter: Adapter,
        tuner: Tuner | None,
        module: nn.Module,
        undo: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self._adapter = adapter
        self._tuner = tuner
        self._module = module
        self._undo = undo

    def __repr__(self) -> str:
        engine = self._engine
        how = "tuned by auto" if self._tuner is not None and self.is_tuned else "auto" if self._tuner else "chosen"
        return (
            f"<zerolap.Handle: {'attached' if self.is_attached else 'detached'}{', failed' if engine.has_failed else ''}; schedule="
            f"{self.schedule!r}, gather={self.gather!r} ({how}), adapter={self._adapter.name!r}, "
            f"{self._optimizer.world_size} ranks, {engine.num_buckets} buckets>"
        )

    @property
    def is_attached(self) -> bool:
        """Whether updates are still overlapped by this ``attach``."""
        return self._optimizer._engine is self._engine

    @property
    def schedule(self) -> str:
        """The schedule in use, as ``attach`` takes it."""
        return self._engine.schedule.value

    @property
    def gather(self) -> str:
        """The gather in use, as ``attach`` takes it."""
        return self._engine.gather.value

    @property
    def is_tuned(self) -> bool:
        """Whether schedule, gather and buckets stay as they are; with ``schedule="auto"`` that takes some iterations."""
        return self._tuner is None or self._tuner.is_done

    def finish(self) -> None:
        """Wait for all parameters that are still on their way."""
        self._engine.raise_if_failed()
        self._engine.wait_for_params()

    def detach(self) -> None:
        """Undo ``attach``: DDP averages gradients as usual again, and threads and groups are given up.

        Parameters and optimizer states stay as they are, for ``consolidate_state_dict`` or another ``attach`` of the same
        optimizer. Called by all ranks, between two iterations. Harmless when called twice, or after a failure.
        """
        if not self.is_attached:
            return
        has_failed = self._engine.has_failed
        try:
            if not has_failed:
                self.finish()
        finally:
            self._optimizer._engine = None
            with suppress(Exception) if has_failed else nullcontext():  # what is broken cannot be closed in order
                self._undo()

    def trace(self, path: str | os.PathLike[str] | None = None) -> AbstractContextManager[Trace]:
        """Note when each bucket's gradients were ready, its reduction, update and gathering began and ended, and who waited.

        With a ``path``, a folder, each rank writes a file there at the end, and ``zerolap trace PATH`` shows them all.
        """
        if not self.is_attached:
            raise RuntimeError("there is nothing to trace: this was detached")
        ranks = dist.get_process_group_ranks(self._optimizer.process_group)
        return take(self._engine, ranks=ranks, module=self._module, path=path)

    def audit(self) -> None:
        """Compare all parameters with the other ranks', which call this, too; raises on all ranks if any differ."""
        if not self.is_attached:
            raise RuntimeError("there is nothing to audit by: this was detached; attach again, or audit before")
        self._engine.audit()

    def refresh_masters(self) -> None:
        """Take over parameters that were set by hand; ``load_state_dict`` of the module does this by itself."""
        self._engine.refresh_masters()

    def stats(self) -> Stats:
        """Updates, bytes, memory, and how long training has waited; for a log or a chart. Waits for nothing."""
        engine, watch = self._engine, self._engine.watch
        states: Mapping[Any, dict[str, Any]] = self._optimizer._local_view().state
        return Stats(
            num_updates=engine.num_updates,
            num_steps=engine.num_steps,
            num_skipped=engine.num_skipped,
            num_buckets=engine.num_buckets,
            sent_bytes=engine.sent_bytes,
            state_bytes=sum(t.nbytes for state in states.values() for t in state.values() if isinstance(t, Tensor)),
            flat_bytes=engine.flat_bytes,
            gradient_bytes=engine.gradient_bytes,
            receive_bytes=self._adapter.kept_bytes,
            exposed_ms=1e3 * watch.exposed_seconds if watch.has_times else None,
            communication_ms=1e3 * watch.communication_seconds if watch.has_times else None,
        )


@public
@called_together
def attach(
    ddp: DistributedDataParallel,
    optimizer: ZeroRedundancyOptimizer,
    *,
    schedule: Literal["interleaved", "after_backward", "on_step", "auto"] = "interleaved",
    gather: Literal["eager", "lazy"] | None = None,
    adapter: Adapter | str | None = None,
    master_weights: bool = False,
    reduce_dtype: torch.dtype | None = None,
    gather_dtype: torch.dtype | None = None,
    audit_every: int | None = None,
    nonfinite: Literal["ignore", "raise", "skip"] = "ignore",
) -> Handle:
    """Overlap ``optimizer`` with ``ddp``: gradients by reduce-scatter, parameters by all-gather, 2P elements on the wire.

    Called by all ranks together, instead of ``ddp.register_comm_hook``. With ``interleaved`` and ``after_backward`` the
    update happens inside backward and ``step()`` may be left out; with ``on_step`` it happens in ``step()``, and gradients
    can be clipped or unscaled, or the step skipped, before. After backward a parameter's ``.grad`` is this rank's own
    gradient; the mean exists only in the shards.

    ``auto`` tries the first two, both gathers unless one is given, and other bucket sizes, in up to some ninety iterations of training
    whose updates are the same as any other's; then it stays with the fastest, and logs what it chose and why.

    With ``gather="eager"``, the default, all parameters are back when backward or ``step()`` returns. With ``lazy`` they come while the
    next forward runs: whoever reaches a parameter through its module waits for it, and ``handle.finish()`` waits for all.

    ``master_weights`` keeps, in the shards, a copy in single precision of parameters of 16 bits, from which they are rounded
    after each update; it is saved with the optimizer's state. ``reduce_dtype`` is the dtype in which gradients are sent and
    summed, ``gather_dtype`` the one in which parameters are sent, for both the parameters' own if not given. A
    ``gather_dtype`` narrower than a parameter rounds it on all ranks, and needs ``master_weights``.

    With ``audit_every=k`` the ranks compare checksums of their parameters after every k updates, when the next one begins; any
    difference is an error on all of them. ``nonfinite`` says what becomes of an update whose gradients have NaN or infinities:
    ``raise`` and ``skip`` find them before anything is changed, on all ranks.

    Where a class of torch's has a fused implementation that gives the same it is used, unless ``fused`` or ``foreach`` was given.
    ``adapter`` is one of your own, or the name of one that is installed; without it the parameters' device decides.
    """
    optimizer = unwrapped(optimizer)
    precision = Precision(master_weights=master_weights, reduce_dtype=reduce_dtype, gather_dtype=gather_dtype)
    safety = Safety()
    schedules: list[Schedule] = []
    gathers: list[Gather] = []

    def settings() -> list[Any]:
        nonlocal safety, schedules, gathers
        safety = Safety(
            audit_every=0 if audit_every is None else audit_every, nonfinite=_member(NonFinite, nonfinite, "nonfinite")
        )
        schedules, gathers = _ways(ddp, schedule, gather, safety)
        _check_attachable(ddp, optimizer, precision)
        _check_safety(safety, schedules[0])
        if gathers == [Gather.LAZY] and (parts := compiled_parts(ddp)):
            raise ValueError(
                f'gather="lazy" cannot wait inside what is compiled, which is {", ".join(parts[:5])}; use gather="eager" with '
                "torch.compile and TorchScript"
            )
        return ["native", schedule, [each.value for each in gathers], str(precision), str(safety)]

    def connect(
        chosen: Adapter, groups: list[dist.ProcessGroup], undo: ExitStack
    ) -> tuple[WatchedEngine, Adapter, Tuner | None]:
        reduce_group, group = groups
        cuts = _agree_on_facts(optimizer, cut=chosen.capabilities.exact_cut, precision=precision)
        engine = WatchedEngine(
            optimizer._book,
            reduce_group=reduce_group,
            cuts=cuts,
            precision=precision,
            safety=safety,
            named_params=list(ddp.module.named_parameters()),
            adapter=chosen,
            group=group,
            schedule=schedules[0],
            agreement=agreement_of(ddp),
            on_update=noted_by(optimizer),
            gather=gathers[0],
        )
        use_engine(optimizer, engine, undo)
        if master_weights:
            undo.callback(ddp.module.register_load_state_dict_post_hook(_RefreshMasters(engine)).remove)
        waits = undo.enter_context(ExitStack())

        def use_gather(gather: Gather) -> None:
            waits.close()
            if gather is Gather.LAZY:
                from zerolap.runtime.lazy_params import (
                    wait_on_access,  # takes a second to import: torch's compiler comes with it
                )

                waits.callback(wait_on_access(ddp.module, engine))

        use_gather(gathers[0])
        tuner = None
        if schedule == "auto":
            tuner = Tuner(
                ddp, engine, adapter=chosen, group=group, schedules=schedules, gathers=gathers, use_gather=use_gather
            )
            undo.callback(tuner.close)

        def on_bucket(state: object, bucket: GradBucket) -> Future[Tensor]:
            return engine.on_bucket(bucket)

        hook = guarded(ddp, on_bucket, adapter=chosen, engine=engine, optimizer=optimizer)
        undo.callback(_connect(ddp, hook, engine))
        return engine, chosen, tuner

    (engine, chosen, tuner), undo = meet(
        ddp, optimizer, settings=settings, connect=connect, num_groups=2, adapter=adapter
    )
    handle = Handle(optimizer, engine, chosen, tuner, ddp.module, undo.close)
    logger.info("attached: %s", handle)
    return handle


def _ways(
    ddp: DistributedDataParallel, schedule: str, gather: str | None, safety: Safety
) -> tuple[list[Schedule], list[Gather]]:
    """The schedules and gathers to use, or for ``auto`` to choose from; the first of each is what training begins with."""
    if schedule != "auto":
        return [_member(Schedule, schedule, "schedule", "auto")], [
            Gather.EAGER if gather is None else _member(Gather, gather, "gather")
        ]
    schedules = [Schedule.AFTER_BACKWARD]
    if safety.nonfinite is NonFinite.IGNORE:
        schedules.insert(0, Schedule.INTERLEAVED)
    if gather is not None:
        return schedules, [_member(Gather, gather, "gather")]
    return schedules, [Gather.EAGER] if compiled_parts(ddp) else [Gather.EAGER, Gather.LAZY]


@public
def trace(
    target: Handle | DistributedDataParallel | ZeroRedundancyOptimizer, path: str | os.PathLike[str] | None = None
) -> AbstractContextManager[Trace]:
    """``handle.trace(path)`` for who has no handle at hand: of a DDP, or an optimizer, that is attached or has a hook."""
    if isinstance(target, Handle):
        return target.trace(path)
    engine: Engine | None
    module: nn.Module | None = None
    if isinstance(target, DistributedDataParallel):
        switch: _Switch | None = vars(target).get(_SWITCH)
        engine, module = None if switch is None else switch.engine, target.module
    elif isinstance(target, ZeroRedundancyOptimizer):
        engine = target._engine
    else:
        raise TypeError(
            f"a trace is of what zerolap.attach() returned, a DDP or a ZeroRedundancyOptimizer, not of {type(target).__name__}"
        )
    if engine is None:
        raise ValueError(
            f"this {type(target).__name__} is not attached; call zerolap.attach(), or trace the optimizer if a hook was made "
            "for it"
        )
    return take(engine, ranks=dist.get_process_group_ranks(target.process_group), module=module, path=path)


def _connect(ddp: DistributedDataParallel, hook: Hook, engine: Engine) -> Callable[[], None]:
    """Hand DDP's buckets to ``hook``; returns what goes back to plain averaging.

    DDP takes one hook for its whole life, so it gets one that can be switched.
    """
    switch: _Switch | None = vars(ddp).get(_SWITCH)
    if switch is None:
        switch = _Switch()
        process_group = ddp.process_group

        def zerolap_hook(state: object, bucket: GradBucket) -> Future[Tensor]:
            return allreduce_hook(process_group, bucket) if switch.hook is None else switch.hook(None, bucket)

        # DDP compares annotations, and here they are strings.
        zerolap_hook.__annotations__ = {"bucket": GradBucket, "return": Future[Tensor]}
        ddp.register_comm_hook(None, zerolap_hook)
        setattr(ddp, _SWITCH, switch)
    switch.hook, switch.engine = hook, engine
    return switch.turn_off


_SWITCH = "_zerolap_switch"


class _Switch:
    """Who gets DDP's buckets; nobody after ``detach``, and in a copy of DDP or one from a file."""

    hook: Hook | None = None
    engine: Engine | None = None

    def turn_off(self) -> None:
        self.hook = self.engine = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (_Switch, ())


class _RefreshMasters:
    """Runs when the module has loaded a state dict. A copy of the module, or one from a file, has no masters to refresh."""

    def __init__(self, engine: NativeEngine | None = None) -> None:
        self._engine = engine

    def __call__(self, module: object, incompatible_keys: object) -> None:
        if self._engine is not None:
            self._engine.refresh_masters()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (_RefreshMasters, ())


def _agree_on_facts(
    optimizer: ZeroRedundancyOptimizer, *, cut: int, precision: Precision
) -> dict[torch.dtype, int | None]:
    """Where parameters of each dtype may be cut. Turns fused implementations on where that changes nothing but rounding.

    What one rank finds may be another's for another number of threads, or another processor: what all have found counts.
    """
    factory, groups = optimizer._book.factory, optimizer.param_groups
    is_known = optimizer._optimizer_class in WITH_FUSED  # a subclass may do otherwise with it
    fused = [is_known and _may_be_fused(factory, group, precision) for group in groups]
    for group, is_fused in zip(groups, fused, strict=True):
        if is_fused:
            group["fused"] = True  # as it will be stepped; taken back below if another rank finds otherwise
    cuts = (
        exact_cuts(factory, groups, cut=cut, stepped_as=precision.stepped_as)
        if is_elementwise(optimizer._optimizer_class)
        else {}
    )
    said = all_gather_json(
        [fused, {str(dtype): each for dtype, each in cuts.items()}],
        group=optimizer.process_group,
        what="comparing what the optimizer's class does",
    )
    for place, group in enumerate(groups):
        if fused[place] and not all(theirs[place] for theirs, _ in said):
            group["fused"] = None
    agreed = {dtype: each for dtype, each in cuts.items() if all(theirs[str(dtype)] for _, theirs in said)}
    whole = sorted({str(param.dtype) for param in optimizer._all_params if param.dtype not in agreed})
    if whole:
        logger.info(
            "shards of %s are whole parameters of %s, less evenly shared: it is not known to treat every element by itself, or its "
            "pieces would be rounded otherwise than the whole",
            optimizer._optimizer_class,
            ", ".join(whole),
        )
    return agreed


def _may_be_fused(factory: Factory, group: dict[str, Any], precision: Precision) -> bool:
    """Whether the user has said nothing about it, and it gives the same for every dtype of the group."""
    if group["fused"] is not None or group["foreach"] is not None or group["differentiable"]:
        return False
    if group.get("capturable"):
        return False
    params = {param.dtype: param for param in params_of(group)}.values()
    return bool(params) and all(
        fused_is_same(factory, options_of(group), param, dtype=precision.stepped_as(param.dtype)) for param in params
    )


def _member(kind: type[E], value: str, name: str, *others: str) -> E:
    try:
        return kind(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} must be one of {[*(each.value for each in kind), *others]}, got {value!r}") from error


def _check_attachable(ddp: DistributedDataParallel, optimizer: ZeroRedundancyOptimizer, precision: Precision) -> None:
    if type(precision.master_weights) is not bool:
        raise TypeError(f"master_weights must be True or False, got {precision.master_weights!r}")
    check_sent_dtype("reduce_dtype", precision.reduce_dtype)
    check_sent_dtype("gather_dtype", precision.gather_dtype)
    switch: _Switch | None = vars(ddp).get(_SWITCH)
    if switch is not None and switch.engine is not None:
        raise ValueError("this DDP is attached to another optimizer already; call detach() of that one's handle first")
    sent = precision.gather_dtype
    widest = max((param.dtype for param in optimizer._all_params), key=lambda dtype: dtype.itemsize)
    if sent is not None and sent.itemsize > widest.itemsize:
        raise ValueError(f"gather_dtype={sent} is wider than {widest}: it would send more for nothing")
    if sent is not None and sent.itemsize < widest.itemsize and not precision.master_weights:
        raise ValueError(f"gather_dtype={sent} rounds parameters of {widest} at every step; add master_weights=True")
    mine = set(optimizer._all_params)
    left_out = [name for name, param in ddp.module.named_parameters() if param.requires_grad and param not in mine]
    if left_out:
        raise ValueError(
            f"{len(left_out)} trainable parameters of this DDP are not in the optimizer ({', '.join(left_out[:5])}): nobody "
            "would reduce their gradients; give the optimizer all of them, or use hook_with_zero_step"
        )


def _check_safety(safety: Safety, schedule: Schedule) -> None:
    every, nonfinite = safety.audit_every, safety.nonfinite
    if type(every) is not int or every < 0:
        raise ValueError(f"audit_every must be a number of updates, or None for never, got {every!r}")
    if nonfinite is NonFinite.RAISE and schedule is Schedule.INTERLEAVED:
        raise ValueError(
            'nonfinite="raise" looks at all gradients before the first update, and interleaved updates come earlier; use '
            'schedule="after_backward" or "on_step"'
        )
    if nonfinite is NonFinite.SKIP and schedule is not Schedule.ON_STEP:
        raise ValueError('nonfinite="skip" skips step(), which updates with schedule="on_step" only; use that')


@public
class GradScaler(torch.amp.GradScaler):
    """torch's loss scaler for shards: unscales the mean gradients of ``on_step``, and all ranks find the same infinities."""

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        engine = _engine_of(optimizer) if self._enabled else None
        if engine is not None and not engine.is_unscaled:
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        engine = _engine_of(optimizer)
        if engine is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = engine.unscale_(inv_scale)
        return {found.device: found}


def _engine_of(optimizer: Optimizer) -> NativeEngine | None:
    """Where an optimizer's reduced gradients are, if not in ``.grad``; refuses one that has used them already."""
    if isinstance(optimizer, ZeroRedundancyOptimizer) and optimizer._overlap_with_ddp:
        return optimizer._engine_for_gradients("scaling losses")
    return None
