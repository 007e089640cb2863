"""zerolap in Hugging Face Accelerate: one call before ``prepare``, and optimizers that are prepared are sharded over the ranks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import zerolap
from zerolap._torch import original_of
from zerolap_integrations import _options, _state
from zerolap_integrations._frameworks import Unknown, need
from zerolap_integrations._live import LivePoints

need("accelerate")

from accelerate import Accelerator  # noqa: E402

__all__ = ["ZeroLapAccelerator", "ZeroLapMonitor", "shard"]

logger = logging.getLogger(__name__)
A = TypeVar("A", bound=Accelerator)


def shard(accelerator: A, **options: Any) -> A:
    """Let ``accelerator`` shard the optimizers that it prepares; it stays the object it is, and its own calls work as with DDP.

    Args:
        accelerator: Before it has prepared an optimizer. With one process there is nothing to shard, and nothing changes.
        **options: What ``zerolap.attach`` takes, such as ``gather``; the schedule is ``"on_step"`` unless it is given.
    """
    if isinstance(accelerator, Sharding):
        raise ValueError("this accelerator shards its optimizers already; call shard() once")
    if accelerator._optimizers:
        raise ValueError("this accelerator has prepared an optimizer already; call shard() before prepare()")
    begin = _checked(accelerator, options)
    cls = type(accelerator)
    accelerator.__class__ = type(cls.__name__, (Sharding, cls), {"__module__": cls.__module__})
    begin()
    return accelerator


def _checked(accelerator: Any, options: dict[str, Any]) -> Callable[[], None]:
    """What lets it begin, if it can."""
    unknown = _options.split(options)[1]
    if unknown:
        raise TypeError(f"zerolap.attach has no options {sorted(unknown)}; it has {', '.join(_options.names())}")
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ValueError(f"zerolap shards optimizers of DDP, and this accelerator uses {kind}; use one or the other")
    if kind == "NO":
        logger.info("one process: there is nothing to shard")

    def begin() -> None:
        accelerator._zerolap_options = options
        accelerator._zerolap_handles = None if kind == "NO" else weakref.WeakKeyDictionary()

    return begin


class Sharding(Unknown):
    """Put before the class of an accelerator."""

    _optimizers: list[Any]
    _zerolap_options: dict[str, Any]
    _zerolap_handles: weakref.WeakKeyDictionary[DistributedDataParallel, zerolap.Handle | None] | None
    """Of every DDP that was prepared; None with one process, where there is none."""

    # --- preparing ----------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        places = [None] * len(args) if device_placement is None else device_placement
        if self._zerolap_handles is None or len(places) != len(args):  # or it says so
            return super().prepare(*args, device_placement=device_placement)
        later = [isinstance(each, Optimizer | LRScheduler) for each in args]
        result = list(args)
        for is_later in (False, True):  # optimizers are sharded as soon as DDP is there, and wrapped then
            chosen = [number for number, each in enumerate(later) if each is is_later]
            if is_later:
                self._shard([args[number] for number in chosen])
            if chosen:
                given = [args[number] for number in chosen]
                done = super().prepare(*given, device_placement=[places[number] for number in chosen])
                for number, each in zip(chosen, [done] if len(chosen) == 1 else done, strict=True):
                    result[number] = each
        return tuple(result) if len(result) > 1 else result[0]

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        prepared = super().prepare_model(model, *args, **kwargs)
        ddp = original_of(prepared) or prepared  # Accelerate compiles DDP
        if isinstance(ddp, DistributedDataParallel) and self._zerolap_handles is not None:
            self._zerolap_handles.setdefault(ddp, None)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        self._shard([optimizer])
        if _state.sharded_of([optimizer]):
            device_placement = False  # its states are where the parameters are, and are not whole
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    def _shard(self, given: list[Any]) -> None:
        """Shard those that are plain, each with all others of the same DDP; attach those again whose DDP was made anew."""
        handles = self._zerolap_handles
        if handles is None:
            return
        by_ddp: dict[DistributedDataParallel, list[Any]] = {}
        for each in given:
            if not isinstance(each, Optimizer):
                continue
            inner = _state.unwrapped(each)
            ddp = _ddp_of(inner, handles)
            if not isinstance(inner, zerolap.ZeroRedundancyOptimizer) or handles[ddp] is not inner.handle:
                by_ddp.setdefault(ddp, []).append(inner)
        for ddp, optimizers in by_ddp.items():
            options = {"schedule": "on_step", **self._zerolap_options}
            if all(isinstance(each, zerolap.ZeroRedundancyOptimizer) for each in optimizers):
                for each in optimizers:
                    if each.handle is not None:
                        each.handle.detach()
                zerolap.attach(ddp, optimizers, **options)
            else:
                zerolap.shard(ddp, optimizers, **options)
            handles[ddp] = optimizers[0].handle

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; the states are collected for it on the first process, which writes them."""
        held, sharded = self._optimizers, _state.sharded_of(self._optimizers)
        if self.project_configuration.save_on_each_node and sharded and self.num_processes > _num_local(self):
            raise ValueError(
                "save_on_each_node=True is not possible with sharded optimizers: their states are collected on one process"
            )
        with _state.whole_states(sharded):
            if not self.is_main_process:  # asks every optimizer, and writes nothing
                self._optimizers = [_Elsewhere() if _state.sharded_of([each]) else each for each in held]
            try:
                return super().save_state(*args, **kwargs)
            finally:
                self._optimizers = held


class ZeroLapAccelerator(Sharding, Accelerator):
    """Accelerate's ``Accelerator``, whose optimizers are sharded over the ranks; it takes the options of ``zerolap.attach``, too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        ours, others = _options.split(options)
        super().__init__(*args, **others)
        _checked(self, ours)()


def _ddp_of(optimizer: Optimizer, prepared: Iterable[DistributedDataParallel]) -> DistributedDataParallel:
    """The one that has its parameters."""
    params = {id(param) for param in _state.params_of(optimizer)}
    found = [ddp for ddp in reversed(list(prepared)) if any(id(param) in params for param in ddp.parameters())]
    inside = {id(param) for param in found[0].parameters()} if found else set()
    if not params <= inside or not found:
        what = "parameters of several models" if found else "parameters of no model that was prepared"
        raise ValueError(
            f"this {type(optimizer).__name__} has {what}; zerolap shards an optimizer over the ranks of its model's DDP: prepare "
            "the model before its optimizer, or together with it, and make one optimizer for each model"
        )
    return found[0]


class _Elsewhere:
    """An optimizer whose state another process writes."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def _num_local(accelerator: Any) -> int:
    """How many processes this node has."""
    mine = torch.tensor([accelerator.local_process_index], device=accelerator.device)
    return int(accelerator.gather(mine).max().item()) + 1


class ZeroLapMonitor:
    """Logs how much of the communication was hidden, how long training has waited for it, bytes and memory, by ``accelerator.log``.

    Args:
        accelerator: The one that has prepared the optimizer.
        prefix: Of the names.
    """

    def __init__(self, accelerator: Accelerator, *, prefix: str = "zerolap") -> None:
        sharded = _state.sharded_of(accelerator._optimizers)
        if not sharded or sharded[0].handle is None:
            raise RuntimeError(
                "ZeroLapMonitor needs an optimizer that zerolap has sharded; call shard(accelerator) before prepare()"
            )
        self._accelerator = accelerator
        self._points = LivePoints(sharded[0].handle, prefix=prefix)

    def log(self, step: int) -> dict[str, float]:
        """Log one point, of what happened since the one before, and return it."""
        points = self._points.take(step)
        self._accelerator.log(points, step=step)
        return points
