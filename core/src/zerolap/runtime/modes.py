"""Modes of optimizers that keep other values in the parameters while they train than for evaluation, such as schedule-free ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch.autograd.graph import increment_version

from zerolap.runtime.param_broadcast import ParamBroadcast
from zerolap.runtime.shard_optimizer import ShardBook

if TYPE_CHECKING:
    from zerolap.runtime.engine import Engine

MODES: Final = ("train", "eval")


def has_modes(optimizer_class: Any) -> bool:
    """Whether its instances are told before they train, and before the model is evaluated."""
    return all(callable(getattr(optimizer_class, mode, None)) for mode in MODES)


def begin_training(optimizer: Any) -> None:
    if has_modes(type(optimizer)):
        optimizer.train()


def switch_mode(mode: str, book: ShardBook, *, engine: Engine | None, broadcast: ParamBroadcast) -> None:
    """Tell one optimizer, and bring its parameters to all ranks. A collective, between two iterations."""
    if engine is None or not engine.installed:
        _switch(book, mode)
        broadcast.send()
        return
    buckets = engine.installed

    def switch() -> None:
        for bucket in buckets:
            bucket.wait(is_lane=True)
        _switch(book, mode)
        for bucket in buckets:
            increment_version(bucket.params)
            bucket.start_gather()
        for bucket in buckets:
            bucket.wait(is_lane=True)
            bucket.forget_gather()

    engine.raise_if_failed()
    engine.common.run_on_lane(switch)


def _switch(book: ShardBook, mode: str) -> None:
    """This rank's part of it; what it writes to its parameters the others do not have yet."""
    options = book.options()
    for local in book.locals:
        local.take_options(options)
        getattr(local.optimizer, mode)()
        local.round_to_params()
