"""``attach``: overlaps a sharded optimizer with DDP by reduce-scatter and all-gather."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from math import lcm
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zerolap._logging import logger_of
from zerolap._public import public
from zerolap._torch import can_free_buckets
from zerolap.api.attach_checks import check_attachable, check_wire
from zerolap.api.connect import connect_ranks, shard_gradients_of, start_engine, take_buckets
from zerolap.api.handle import Handle, refresh_masters
from zerolap.api.optimizer import ZeroRedundancyOptimizer
from zerolap.api.preflight import called_together, several, unwrapped
from zerolap.api.tuner import Tuner, compiled_parts
from zerolap.backend.base import Adapter
from zerolap.runtime.books import Books
from zerolap.runtime.engine import DDPHook, Engine
from zerolap.runtime.exchange_strategies import ReduceScatter
from zerolap.runtime.optimizer_facts import Factory, exact_cuts, fused_is_same, is_elementwise
from zerolap.runtime.param_groups import options_of, params_of
from zerolap.runtime.peers import all_gather_json
from zerolap.runtime.precision import Precision
from zerolap.runtime.safety import Audit, NonFinite, NonFiniteCheck, Safety
from zerolap.runtime.shard_optimizer import WITH_FUSED
from zerolap.schedule.machine import Gather, Schedule
from zerolap.schedule.wire_format import Wire

logger = logger_of(__name__)

E = TypeVar("E", bound=Enum)


@public
@called_together
def attach(
    ddp: DistributedDataParallel,
    optimizer: ZeroRedundancyOptimizer | Sequence[ZeroRedundancyOptimizer],
    *,
    schedule: Literal["interleaved", "after_backward", "on_step", "auto"] = "interleaved",
    gather: Literal["eager", "lazy"] | None = None,
    adapter: Adapter | str | None = None,
    master_weights: bool = False,
    reduce_dtype: torch.dtype | None = None,
    gather_dtype: torch.dtype | None = None,
    wire: Literal["int8", "fp8", "bf16"] | Wire | None = None,
    shard_gradients: bool = False,
    track_grad_norm: bool = False,
    audit_every: int | None = None,
    nonfinite: Literal["ignore", "raise", "skip"] = "ignore",
) -> Handle:
    """Overlap ``optimizer`` with ``ddp``: gradients by reduce-scatter, parameters by all-gather, 2P elements on the wire.

    Called by all ranks together, instead of ``ddp.register_comm_hook``; what is invalid on one rank is refused on all. After backward
    a parameter's ``.grad`` is this rank's own gradient; the mean exists only in the shards.

    Args:
        ddp: The DistributedDataParallel itself: neither its module nor a compiled wrapper around it.
        optimizer: Made with ``overlap_with_ddp=True`` from all trainable parameters of ``ddp``; or a list of several that share them out,
            such as Muon for matrices and AdamW for the rest. Where torch's fused implementation of a class gives the same results it is
            turned on, unless ``fused`` or ``foreach`` was given.
        schedule: When a bucket's shard is updated. ``"interleaved"``: as soon as the bucket is reduced, inside backward.
            ``"after_backward"``: once the last gradient is computed, while reductions are in flight. With both ``step()`` may be left out.
            ``"on_step"``: in ``step()``; gradients can be clipped or unscaled, or the step skipped, before. ``"auto"`` tries the first
            two, both gathers and other bucket sizes in up to some ninety iterations, which train like any other, and keeps the fastest.
        gather: When updated parameters are waited for. ``"eager"``, the default: before backward or ``step()`` returns. ``"lazy"``: they
            arrive during the next forward, and whoever reaches one through its module or the optimizer waits for it.
        adapter: An adapter, or the name of an installed one. Default: by the device type of the parameters.
        master_weights: Keep fp32 copies of 16-bit parameters in the shards, and round the parameters from them after each update.
        reduce_dtype: The dtype in which gradients are sent and summed. Default: the parameters' own.
        gather_dtype: The dtype in which parameters are sent; a narrower one rounds them and needs ``master_weights``. Default: their own.
        wire: ``"int8"``, ``"fp8"`` or ``"bf16"``: gradients are rounded to that once when they are sent, and of parameters the difference is
            sent that is left of exact values in the shards. Less is sent, and numbers are not those of DDP. ``zerolap.Wire`` says it by direction.
        shard_gradients: ZeRO stage 2. The memory of whole gradients is freed bucket by bucket, as soon as they are reduced, and that of this
            rank's part of their mean once it was used; functions of ``.grad`` need ``on_step``. Needs a DDP without ``gradient_as_bucket_view``.
        track_grad_norm: Add up the norm of the mean gradients while they are used, for ``handle.grad_norm()``: a pass over them more.
        audit_every: Compare checksums of all parameters and options between ranks after this many updates; a difference raises.
        nonfinite: What becomes of an update whose mean gradients have NaN or infinities. ``"ignore"``: it is made. ``"raise"``: all ranks
            raise before anything is changed; not with ``"interleaved"``. ``"skip"``: all ranks leave it out; only with ``"on_step"``.
    """
    precision = Precision(master_weights=master_weights, reduce_dtype=reduce_dtype, gather_dtype=gather_dtype)
    optimizers = [unwrapped(each) for each in several(optimizer)]
    wanted = _Attachment(
        ddp, optimizers, schedule, gather, precision, wire, shard_gradients, track_grad_norm, audit_every, nonfinite
    )
    return wanted.make(adapter)


@dataclass(slots=True)
class _Attachment:
    """What was asked for, as it is given, then as it is checked, then in use."""

    ddp: DistributedDataParallel
    optimizers: list[ZeroRedundancyOptimizer]
    schedule: str
    gather: str | None
    precision: Precision
    wire: object
    shard_gradients: bool
    track_grad_norm: bool
    audit_every: int | None
    nonfinite: str
    safety: Safety = field(default_factory=Safety)
    schedules: list[Schedule] = field(default_factory=list)  # the first is what training begins with
    gathers: list[Gather] = field(default_factory=list)

    def make(self, adapter: Adapter | str | None) -> Handle:
        (engine, audit, nonfinite, tuner), undo = connect_ranks(
            self.ddp, self.optimizers, settings=self._settings, connect=self._connect, num_groups=2, adapter=adapter
        )
        handle = Handle(
            self.optimizers,
            engine,
            audit=audit,
            nonfinite=nonfinite,
            tuner=tuner,
            module=self.ddp.module,
            undo=undo.close,
        )
        for optimizer in self.optimizers:
            optimizer._handle = handle
        logger.info("attached: %s", handle)
        return handle

    def _settings(self) -> list[Any]:
        """Refuse what cannot be; return what must be the same on all ranks."""
        every = 0 if self.audit_every is None else self.audit_every
        self.safety = Safety(audit_every=every, nonfinite=_member(NonFinite, self.nonfinite, "nonfinite"))
        self.schedules, self.gathers = _ways(self.ddp, self.schedule, self.gather, self.safety)
        self.precision = replace(self.precision, wire=Wire.of(self.wire))
        check_attachable(self.ddp, self.optimizers, self.precision)
        check_wire(self.optimizers, self.precision)
        _check_safety(self.safety, self.schedules[0])
        _check_sharded_gradients(self.ddp, self.shard_gradients)
        if type(self.track_grad_norm) is not bool:
            raise TypeError(f"track_grad_norm must be True or False, got {self.track_grad_norm!r}")
        if self.gathers == [Gather.LAZY] and (parts := compiled_parts(self.ddp)):
            raise ValueError(
                f'gather="lazy" cannot wait inside what is compiled, which is {", ".join(parts[:5])}; use gather="eager" with '
                "torch.compile and TorchScript"
            )
        gathers = [each.value for each in self.gathers]
        return [
            "native",
            self.schedule,
            gathers,
            str(self.precision),
            self.shard_gradients,
            self.track_grad_norm,
            str(self.safety),
        ]

    def _connect(
        self, adapter: Adapter, groups: list[dist.ProcessGroup], undo: ExitStack
    ) -> tuple[Engine, Audit, NonFiniteCheck | None, Tuner | None]:
        """Start the engine and whatever looks at it or changes its ways; ``undo`` ends all of it."""
        ddp, optimizers, precision = self.ddp, self.optimizers, self.precision
        books = Books([each._book for each in optimizers])
        reduce_group, group = groups
        if self.shard_gradients:
            shard_gradients_of(ddp, undo)
        strategy = ReduceScatter(
            books,
            adapter=adapter,
            reduce_group=reduce_group,
            group=group,
            cuts=[
                _agree_on_facts(each, cut=adapter.capabilities.exact_cut, precision=precision) for each in optimizers
            ],
            precision=precision,
        )
        engine = start_engine(
            ddp,
            optimizers,
            books,
            undo,
            strategy=strategy,
            adapter=adapter,
            group=group,
            schedule=self.schedules[0],
            gather=self.gathers[0],
            names={param: name for name, param in ddp.module.named_parameters()},
            shards_gradients=self.shard_gradients,
        )
        engine.common.tracks_norm = self.track_grad_norm
        engine.common.wire = precision.wire
        if strategy.rounding is not None and strategy.rounding.clock is not None:
            engine.observers.append(strategy.rounding.clock)
        audit, nonfinite = _observe(engine, self.safety)
        if precision.keeps_masters:
            undo.callback(ddp.module.register_load_state_dict_post_hook(_RefreshMasters(engine)).remove)
        use_gather = _waiting(ddp.module, engine, undo)
        use_gather(self.gathers[0])
        tuner = None
        if self.schedule == "auto":
            tuner = Tuner(
                ddp,
                engine,
                adapter=adapter,
                group=group,
                schedules=self.schedules,
                gathers=self.gathers,
                use_gather=use_gather,
            )
            undo.callback(tuner.close)
        undo.callback(_turn_off, weakref.ref(take_buckets(ddp, engine, optimizers)))  # which has the optimizers
        return engine, audit, nonfinite, tuner


def _turn_off(hook: weakref.ref[DDPHook]) -> None:
    if (found := hook()) is not None:
        found.turn_off()


def _observe(engine: Engine, safety: Safety) -> tuple[Audit, NonFiniteCheck | None]:
    """What is looked at beside training: nothing, unless it was asked for."""
    audit = Audit(
        safety.audit_every,
        books=engine.books,
        common=engine.common,
        machine=engine.machine,
        installed=engine.installed,
        bucket_of=engine.bucket_of,
    )
    if safety.audit_every:
        engine.observers.append(audit)
    if safety.nonfinite is NonFinite.IGNORE:
        return audit, None
    check = NonFiniteCheck(safety.nonfinite, common=engine.common, gradients=engine.gradients, buckets=engine.at_hand)
    if engine.machine.schedule is Schedule.ON_STEP:
        engine.observers.append(check)
    else:
        engine.update.check = check.refuse
    return audit, check


def _waiting(module: nn.Module, engine: Engine, undo: ExitStack) -> Callable[[Gather], None]:
    """What lets whoever reaches a parameter wait for it, if the gather is lazy, until it is called again or ``undo`` is closed."""
    waits = undo.enter_context(ExitStack())

    def use(gather: Gather) -> None:
        waits.close()
        if gather is Gather.LAZY:
            # Takes a second to import: torch's compiler comes with it.
            from zerolap.runtime.lazy_params import wait_on_access

            waits.callback(wait_on_access(module, engine.bucket_of))

    return use


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


class _RefreshMasters:
    """Runs when the module has loaded a state dict. A copy of the module, or one from a file, has no masters to refresh."""

    def __init__(self, engine: Engine | None = None) -> None:
        self._engine = engine

    def __call__(self, module: object, incompatible_keys: object) -> None:
        if self._engine is not None:
            refresh_masters(self._engine)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (_RefreshMasters, ())


def _agree_on_facts(optimizer: ZeroRedundancyOptimizer, *, cut: int, precision: Precision) -> dict[torch.dtype, int]:
    """Where parameters of each dtype may be cut. Turns fused implementations on where that changes nothing but rounding.

    What one rank finds may be another's for another number of threads, or another processor: what all have found counts.
    """
    factory, groups = optimizer._book.factory, optimizer.param_groups
    is_known = (
        optimizer._optimizer_class in WITH_FUSED and not optimizer._keeps_options
    )  # a subclass may do otherwise with it
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
    agreed = {
        dtype: lcm(each, precision.wire.block)
        for dtype, each in cuts.items()
        if each and all(theirs[str(dtype)] for _, theirs in said)
    }
    whole = sorted({str(param.dtype) for param in optimizer._all_params if param.dtype not in agreed})
    if whole:
        logger.info(
            "shards of %s are whole parameters of %s: it is not known to treat every element by itself, or its pieces would be rounded "
            "otherwise than the whole",
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


def _check_sharded_gradients(ddp: DistributedDataParallel, wish: object) -> None:
    if type(wish) is not bool:
        raise TypeError(f"shard_gradients must be True or False, got {wish!r}")
    if wish and ddp.gradient_as_bucket_view:
        raise ValueError(
            "shard_gradients=True frees DDP's buckets, and with gradient_as_bucket_view=True gradients would be views of freed memory; "
            "make the DDP without gradient_as_bucket_view"
        )
    if wish and not can_free_buckets(ddp):
        raise ValueError(
            f"shard_gradients=True needs a newer torch: the DDP of {torch.__version__} cannot do without its buckets"
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
