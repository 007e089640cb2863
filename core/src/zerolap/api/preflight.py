"""Before ranks work together: where they meet, and what the objects they were given must be. All of them refuse, or none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zerolap._torch import original_of
from zerolap.runtime.peers import refuse_together

P = ParamSpec("P")
T = TypeVar("T")

_NUM_WRAPPERS = 8  # of an optimizer round another: more is a circle
_HOW_TO_MAKE = "ZeroRedundancyOptimizer(ddp.parameters(), {name}, ..., overlap_with_ddp=True)"
# What is summed and sent: every backend reduces these, and optimizers compute in them.
SENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def meeting_group(*given: object) -> dist.ProcessGroup:
    """The group whose ranks were called with ``given``: the optimizer's, else DDP's, else one that was given, else all ranks."""
    for kind in (Optimizer, nn.Module, dist.ProcessGroup):
        for each in (unwrapped(each) for some in given for each in several(some)):
            group = each if kind is dist.ProcessGroup else getattr(each, "__dict__", {}).get("process_group")
            if isinstance(each, kind) and isinstance(group, dist.ProcessGroup):
                return group
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise ValueError("torch.distributed is not initialized; call init_process_group() first")
    return dist.group.WORLD


def several(given: object) -> list[Any]:
    """One thing, or a list of them, as a list."""
    return list(given) if isinstance(given, list | tuple) else [given]


def called_together(fn: Callable[P, T]) -> Callable[P, T]:
    """``fn``, which begins with ``refuse_together``; a call on one rank that does not even fit its signature takes part in that."""
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            _refuse(error, fn.__name__, meeting_group(*args, *kwargs.values()))
        return fn(*args, **kwargs)

    return call


def _refuse(error: Exception, name: str, group: dist.ProcessGroup) -> None:
    def refuse() -> None:
        raise TypeError(f"{name}() was called with arguments that do not fit it: {error}") from error

    refuse_together(refuse, group=group, what="calling it")


def unwrapped(optimizer: Any) -> Any:
    """The sharded optimizer inside of what a framework has wrapped round it, as Accelerate and Lightning do; else what was given."""
    inner = optimizer
    for _ in range(_NUM_WRAPPERS):
        if isinstance(inner, type | LRScheduler):
            return optimizer
        within = getattr(inner, "optimizer", None)
        if within is None:
            return inner if isinstance(inner, Optimizer) else optimizer
        inner = within
    return optimizer


def check_kinds(ddp: object, optimizer: object, *, expected: type[Optimizer]) -> None:
    """Refuse, with what to do, all but a DDP and an optimizer of the ``expected`` class."""
    if isinstance(ddp, Optimizer) and isinstance(optimizer, nn.Module):
        raise TypeError("the arguments are swapped: DDP comes first, the optimizer second")
    _check_ddp(ddp)
    if isinstance(optimizer, expected):
        return
    if isinstance(optimizer, type):
        name = f"{optimizer.__module__}.{optimizer.__qualname__}"
        how = _HOW_TO_MAKE.format(name="torch.optim.AdamW" if issubclass(optimizer, expected) else optimizer.__name__)
        raise TypeError(f"optimizer must be an optimizer, got the class {name}; make one: {how}")
    if isinstance(optimizer, Optimizer) and type(optimizer).__name__ == expected.__name__:
        raise TypeError(
            f"optimizer is torch's own {expected.__name__}; import it from zerolap instead, the arguments are the same"
        )
    if isinstance(optimizer, LRScheduler):
        raise TypeError(f"optimizer must be the optimizer, got its LR scheduler, a {type(optimizer).__name__}")
    name = type(optimizer).__name__
    if isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a zerolap.{expected.__name__}, got {name}; zerolap.shard(ddp, optimizer) makes one of it"
        )
    how = _HOW_TO_MAKE.format(name="torch.optim.AdamW")
    raise TypeError(f"optimizer must be a zerolap.{expected.__name__}, got {name}; make one: {how}")


def check_plain(ddp: object, optimizer: object, *, sharded: type[Optimizer]) -> None:
    """Refuse, with what to do, all but a DDP and a plain optimizer."""
    if isinstance(optimizer, sharded):
        raise TypeError("optimizer is sharded already; overlap it with DDP by zerolap.attach(ddp, optimizer)")
    if isinstance(ddp, nn.Module) and isinstance(optimizer, Optimizer) and type(optimizer).__name__ != sharded.__name__:
        _check_ddp(ddp)
        return
    if isinstance(optimizer, type):
        raise TypeError(
            f"optimizer must be an optimizer, got the class {optimizer.__qualname__}; make one of ddp.parameters()"
        )
    if isinstance(optimizer, nn.Module | LRScheduler | Optimizer) or isinstance(ddp, Optimizer):
        check_kinds(ddp, optimizer, expected=sharded)
    _check_ddp(ddp)
    raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")


def _check_ddp(ddp: object) -> None:
    if isinstance(ddp, DistributedDataParallel):
        return
    name = type(ddp).__name__
    kinds = {kind.__name__ for kind in type(ddp).__mro__}
    if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        what = "FSDP shards parameters and optimizer by itself; use one or the other"
    elif isinstance(original_of(ddp), DistributedDataParallel):
        what = "give the DDP that was compiled, before it is compiled"
    elif isinstance(ddp, type) or not isinstance(ddp, nn.Module):
        what = "make one: DistributedDataParallel(model)"
    else:
        what = "wrap the model first: ddp = DistributedDataParallel(model)"
    raise TypeError(f"ddp must be a DistributedDataParallel, got {name}: {what}")


def check_modules(model: nn.Module) -> None:
    """Refuse modules whose weights are elsewhere, too: what is trained would not be what is used, or what is saved."""
    for name, module in model.named_modules():
        if any(kind.__name__.endswith("IPEXPrepackModule") for kind in type(module).__mro__):
            raise ValueError(
                f"{name or 'the model'} computes with a packed copy of its weight, as ipex.optimize() makes it, which would not be trained; call that "
                "with weights_prepack=False"
            )
        if hasattr(module, "master_weight_split"):
            raise ValueError(
                f"{name or 'the model'} has its weights from ipex.optimize(dtype=...), whose master weights would not be trained, but saved; call that "
                "without dtype, and use torch.autocast, or model.bfloat16() and attach(..., master_weights=True)"
            )


def replaced_method(optimizer: Optimizer, name: str) -> str | None:
    """Who has put something in place of a method of this one optimizer, if anybody has."""
    value = vars(optimizer).get(name)
    if not callable(value) or not callable(getattr(Optimizer, name, None)):
        return None
    function = inspect.unwrap(getattr(value, "__func__", value))
    return f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', type(value).__name__)}"


def check_methods(optimizer: Optimizer, names: Iterable[str]) -> None:
    """Refuse an optimizer some of whose methods were replaced on itself, by name."""
    for name in names:
        if who := replaced_method(optimizer, name):
            raise TypeError(
                f"{type(optimizer).__name__}.{name} was replaced on this optimizer by {who}, which shards would not call; shard it "
                "before that is done, or leave that out"
            )


def check_sent_dtype(name: str, dtype: object) -> None:
    """Refuse what gradients or parameters cannot be sent in."""
    if dtype is not None and dtype not in SENT_DTYPES:
        known = ", ".join(map(str, SENT_DTYPES))
        raise ValueError(f"{name} must be one of {known}, or None for that of the parameters, got {dtype!r}")
