"""What frameworks ask an optimizer for that has only a part of it: its whole state, and to clip some parameters. No framework here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
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


def know_shards(scaler: torch.amp.GradScaler | None) -> None:
    """Let a loss scaler find gradients in shards: it stays the object it is, and becomes a ``zerolap.GradScaler``."""
    if scaler is None or isinstance(scaler, zerolap.GradScaler):
        return
    cls = type(scaler)
    same = cls is torch.amp.GradScaler
    scaler.__class__ = zerolap.GradScaler if same else type(cls.__name__, (zerolap.GradScaler, cls), {})


# --- clipping ---------------------------------------------------------------------------------------------------------


def among(params: Sequence[Tensor], optimizers: Sequence[Sharded]) -> list[Sharded]:
    """Those that have these parameters: all of theirs, or it is a ValueError. Empty if no parameter is any optimizer's."""
    asked = {id(param) for param in params}
    found = []
    for each in optimizers:
        own = [param for param in params_of(each) if param.requires_grad]
        inside = [id(param) in asked for param in own]
        if any(inside) and not all(inside):
            raise ValueError(
                f"clipping is asked for {sum(inside)} of the {len(own)} parameters of an optimizer that zerolap has sharded: its gradients "
                "are in shards, and are clipped together; give it all parameters of the optimizer"
            )
        if any(inside):
            found.append(each)
    if found:
        known = {id(param) for each in found for param in params_of(each)}
        strangers = [param for param in params if id(param) not in known and param.grad is not None]
        if strangers:
            raise ValueError(
                f"clipping is asked for parameters of sharded optimizers and {len(strangers)} others together, whose gradients are "
                "elsewhere; clip them apart"
            )
    return found


def clip_grad_norm_(optimizers: Sequence[Sharded], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip all parameters of these optimizers by one norm, as torch's function does, and return it."""
    if len(optimizers) == 1:
        return optimizers[0].clip_grad_norm_(max_norm, norm_type)
    norms = [each.clip_grad_norm_(float("inf"), norm_type) for each in optimizers]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if total > max_norm:  # each then gets its share of it
        for each, norm in zip(optimizers, norms, strict=True):
            each.clip_grad_norm_(max_norm * (norm / total).item(), norm_type)
    return total
