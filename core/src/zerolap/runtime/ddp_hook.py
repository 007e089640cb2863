"""What DDP calls for every bucket, and what is asked of DDP: the hook, and how often ranks must agree. Buckets are taken elsewhere."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from zerolap._torch import GradBucket
from zerolap.schedule.machine import Agreement


class DDPHook:
    """What DDP calls for every bucket. It takes one for its whole life, so this one can be switched off: then it averages as DDP does.

    A copy of DDP, or one from a file, has one that is off.
    """

    def __init__(self, group: Any = None, name: str = "zerolap") -> None:
        self._group = group
        self.__name__ = self.__qualname__ = name  # DDP notes it
        self.engine: Any = None
        # Optimizers keep the engine, and not the other way round; who has the hook may have dropped the optimizers themselves.
        self.optimizers: object = None

    def __call__(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        if self.engine is None:
            return allreduce_hook(self._group, bucket)
        future: Future[Tensor] = self.engine.on_bucket(state, bucket)
        return future

    def turn_off(self) -> None:
        self.engine = self.optimizers = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (DDPHook, ())


# DDP compares annotations, and in this file they are strings.
vars(DDPHook)["__call__"].__annotations__ = {"bucket": GradBucket, "return": Future[Tensor]}


def agreement_of(ddp: DistributedDataParallel) -> Agreement:
    """How often ranks must agree on which parameters were used."""
    if ddp.static_graph:
        return Agreement.PER_LAYOUT
    return Agreement.ALWAYS if ddp.find_unused_parameters else Agreement.NEVER
