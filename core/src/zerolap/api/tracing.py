"""Traces for those who did not keep the handle."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zerolap._public import public
from zerolap.api.connect import hook_of
from zerolap.api.handle import Handle
from zerolap.api.optimizer import ZeroRedundancyOptimizer
from zerolap.observe.recorder import Trace
from zerolap.observe.trace import take
from zerolap.runtime.engine import Engine


@public
def trace(
    target: Handle | DistributedDataParallel | ZeroRedundancyOptimizer, path: str | os.PathLike[str] | None = None
) -> AbstractContextManager[Trace]:
    """``handle.trace(path)`` without a handle: of a DDP, or an optimizer, that is attached or has a hook.

    Args:
        target: A handle, the DDP or the optimizer.
        path: As in ``Handle.trace``.
    """
    if isinstance(target, Handle):
        return target.trace(path)
    engine: Engine | None
    module: nn.Module | None = None
    if isinstance(target, DistributedDataParallel):
        hook = hook_of(target)
        engine, module = None if hook is None else hook.engine, target.module
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
