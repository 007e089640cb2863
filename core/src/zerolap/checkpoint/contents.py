"""What saving, loading and converting know in common: how a checkpoint is organized, and errors that all ranks share."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zerolap.api.optimizer import ZeroRedundancyOptimizer
from zerolap.api.preflight import several
from zerolap.checkpoint.reader import CheckpointError, unpacked
from zerolap.errors import CollectiveError, ZerolapError
from zerolap.runtime.peers import refuse_together

STATES = ("optimizer", "state")  # where the optimizer's states are in a checkpoint


def module_of(model: nn.Module) -> nn.Module:
    """The model without DDP around it: its names are those of a checkpoint."""
    return model.module if isinstance(model, DistributedDataParallel) else model


Optimizers = ZeroRedundancyOptimizer | Sequence[ZeroRedundancyOptimizer]


def optimizers_of(given: Optimizers) -> list[ZeroRedundancyOptimizer]:
    """One optimizer, or several over different parameters, whose states are saved as those of one."""
    optimizers = several(given)
    if not optimizers or not all(isinstance(each, ZeroRedundancyOptimizer) for each in optimizers):
        raise TypeError(f"a checkpoint is of a zerolap.ZeroRedundancyOptimizer, or of a list of them, not of {given!r}")
    return optimizers


def class_name(optimizer: ZeroRedundancyOptimizer) -> str:
    """The name of the class that updates the parameters, as a checkpoint records it."""
    return type(optimizer._book.locals[0].optimizer).__name__


def pack(value: Any) -> Tensor:
    """As bytes; refused if it could not be loaded again."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    packed = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    unpacked(packed)
    return packed


def on_all_or_none(do: Callable[[], Any], group: dist.ProcessGroup, what: str) -> Any:
    """As ``refuse_together``, with CheckpointError on the ranks that have no error of their own."""
    try:
        return refuse_together(do, group=group, what=what)
    except (CheckpointError, CollectiveError):
        raise
    except ZerolapError as error:
        raise CheckpointError(str(error)) from error
