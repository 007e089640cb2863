"""What ``attach`` refuses of parameters and of the dtypes in which they are kept and sent. The rest of what it refuses stands beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from zerolap.api.connect import hook_of
from zerolap.api.optimizer import ZeroRedundancyOptimizer
from zerolap.api.preflight import check_sent_dtype
from zerolap.runtime.precision import Precision


def check_attachable(
    ddp: DistributedDataParallel, optimizers: Sequence[ZeroRedundancyOptimizer], precision: Precision
) -> None:
    if type(precision.master_weights) is not bool:
        raise TypeError(f"master_weights must be True or False, got {precision.master_weights!r}")
    check_sent_dtype("reduce_dtype", precision.reduce_dtype)
    check_sent_dtype("gather_dtype", precision.gather_dtype)
    hook = hook_of(ddp)
    if hook is not None and hook.engine is not None:
        raise ValueError("this DDP is attached to another optimizer already; call detach() of that one's handle first")
    sent = precision.gather_dtype
    mine = {param for optimizer in optimizers for param in optimizer._book.params}
    widest = max((param.dtype for param in mine), key=lambda dtype: dtype.itemsize)
    if sent is not None and sent.itemsize > widest.itemsize:
        raise ValueError(f"gather_dtype={sent} is wider than {widest}: it would send more for nothing")
    if sent is not None and sent.itemsize < widest.itemsize and not precision.master_weights:
        raise ValueError(f"gather_dtype={sent} rounds parameters of {widest} at every step; add master_weights=True")
    left_out = [name for name, param in ddp.module.named_parameters() if param.requires_grad and param not in mine]
    if left_out:
        raise ValueError(
            f"{len(left_out)} trainable parameters of this DDP are not in the optimizer ({', '.join(left_out[:5])}): nobody "
            "would reduce their gradients; give the optimizer all of them, or use hook_with_zero_step"
        )


def check_wire(optimizers: Sequence[ZeroRedundancyOptimizer], precision: Precision) -> None:
    """Refuse what cannot be sent in fewer bits, or is asked for twice."""
    wire = precision.wire
    if wire.gradients is not None and precision.reduce_dtype is not None:
        raise ValueError(
            f"wire sends gradients as {wire.gradients} and reduce_dtype={precision.reduce_dtype}: use one of them"
        )
    if wire.parameters is None:
        return
    if precision.gather_dtype is not None:
        raise ValueError(
            f"wire sends parameters as {wire.parameters} and gather_dtype={precision.gather_dtype}: use one of them"
        )
    for number, optimizer in enumerate(optimizers):
        for index, param in enumerate(optimizer._book.params):
            if not bool(torch.isfinite(param.detach()).all()):
                raise ValueError(
                    f"parameter {index} of optimizer {number} has values that are not finite, and wire sends differences, which "
                    'have none there; use wire=zerolap.Wire(gradients="int8"), which sends parameters as they are'
                )
