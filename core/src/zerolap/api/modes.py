"""``train()`` and ``eval()`` of sharded optimizers whose class has them, as schedule-free ones do."""

from __future__ import annotations

from functools import partial
from typing import Any

from zerolap.runtime.modes import MODES, has_modes, switch_mode


class WithModes:
    """A part of ZeroRedundancyOptimizer. All ranks call them together."""

    def __getattr__(self, name: str) -> Any:
        if name in MODES and has_modes(vars(self).get("_optimizer_class")):
            return partial(_switch, self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _switch(zero: Any, mode: str) -> None:
    zero._refuse_fork()
    switch_mode(mode, zero._book, engine=zero._engine, broadcast=zero._broadcast)
    zero._expose_options()
