"""What frameworks ask an optimizer for that has only a part of it: its whole state. No framework here.

Gradients need nothing: what ``.grad`` holds between backward and ``step()`` takes torch's own clipping and loss scaling.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

import zerolap

Sharded = zerolap.ZeroRedundancyOptimizer


def unwrapped(optimizer: Any) -> Any:
    """The optimizer in what a framework has wrapped round it. Lightning's wrapper is an instance of whatever class it wraps."""
    while (within := vars(optimizer).get("_optimizer", vars(optimizer).get("optimizer"))) is not None:
        optimizer = within
    return optimizer


def sharded_of(optimizers: Iterable[Any]) -> list[Sharded]:
    return [each for each in map(unwrapped, optimizers) if isinstance(each, Sharded)]


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@contextmanager
def whole_states(optimizers: Sequence[Sharded], *, to: int = 0) -> Iterator[None]:
    """Inside, ``state_dict()`` of each has the whole state on group rank ``to``, and cannot be asked for elsewhere. All ranks enter.

    Not longer: a rank that keeps the whole state has saved no memory.
    """
    try:
        for each in optimizers:
            each.consolidate_state_dict(to)
        yield
    finally:
        for each in optimizers:
            each._consolidated = None
