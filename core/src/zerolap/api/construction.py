"""How a sharded optimizer comes to its param groups and its first share of them. Nothing here is called while it trains."""

from __future__ import annotations

import weakref
from collections import defaultdict
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from zerolap.api.optimizer_arguments import as_groups, check_optimizer_class, check_params, tensors_of
from zerolap.runtime.optimizer_facts import Factory, refuse_inseparable
from zerolap.runtime.param_broadcast import ParamBroadcast
from zerolap.runtime.param_groups import ParamGroup, exposed
from zerolap.runtime.shard_optimizer import ShardBook


class _NoState(defaultdict[Tensor, Any]):
    """In place of the states of all parameters, which no rank has."""

    def __missing__(self, param: Tensor) -> NoReturn:
        raise RuntimeError(
            "the state of this optimizer is sharded, and was asked for as that of a plain one: look at optimizer.optim.state for this "
            "rank's part. If step() was called through a reference from before it was sharded, take that reference afterwards"
        )


def construct(zero: Any, params: Any, process_group: dist.ProcessGroup | None, factory: Factory) -> None:
    """What may be refused on one rank alone, and so is refused on all."""
    group, overlap = zero.process_group, zero._overlap_with_ddp
    if process_group is not None and process_group is not group:
        raise TypeError(
            f"process_group must be a ProcessGroup that this rank is in, or None for all ranks, got {process_group!r}"
        )
    groups = as_groups(params)
    check_optimizer_class(zero._optimizer_class)
    check_params(tensors_of(groups), overlap=overlap)
    # Without the defaults: the class fills them in, and may do so in another way for each group.
    Optimizer.__init__(zero, groups, {})
    Joinable.__init__(zero)
    weak = weakref.proxy(zero)  # which keeps the book
    zero._book = ShardBook(
        groups=partial(getattr, weak, "param_groups"),  # asked in every step, and costs no Python frame
        factory=factory,
        rank=zero.rank,
        world_size=zero.world_size,
    )
    zero._book.own_greedily(is_provisional=overlap)
    zero._expose_options()
    zero.defaults = dict(zero._book.locals[0].optimizer.defaults)  # some LR schedulers look there
    _refuse_inseparable(zero)
    in_buffers = zero.parameters_as_bucket_view and not overlap
    zero._broadcast = ParamBroadcast(zero._book, group, in_buffers=in_buffers)


def append_group(zero: Any, param_group: ParamGroup) -> None:
    """Append a group to the exposed ones, with the options that the class gives it."""
    (group,) = as_groups([param_group])
    check_params([*zero._book.params, *tensors_of([group])], overlap=zero._overlap_with_ddp)
    zero.defaults, defaults = {}, zero.defaults  # as in the constructor
    try:
        Optimizer.add_param_group(zero, group)
    finally:
        zero.defaults = defaults
    made = zero._book.make_local({})  # by the class, which fills in the options, and may refuse some
    zero.param_groups[-1].update(made.options()[-1])
    _refuse_inseparable(zero)


def _refuse_inseparable(zero: Any) -> None:
    if zero._overlap_with_ddp or zero.world_size > 1:  # or else one optimizer has all parameters
        refuse_inseparable(zero._book.factory, zero.param_groups)


def expose_groups(zero: Any) -> None:
    """Replace the groups by ones that wait for their parameters before they hand them out, and the states by none."""
    weak = weakref.ref(zero)  # which has the groups

    def wait() -> None:
        if (optimizer := weak()) is not None:
            optimizer._wait_for_params()

    zero.param_groups[:] = exposed(zero.param_groups, wait)
    zero.state = _NoState()
