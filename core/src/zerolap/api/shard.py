"""``shard``: a plain optimizer becomes a sharded one, and stays the object that it is."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, cast, overload

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zerolap._public import public
from zerolap._torch import STEP_CALLED, WRAPPED_BY_SCHEDULER
from zerolap.api.attach import attach
from zerolap.api.optimizer import ZeroRedundancyOptimizer, set_up
from zerolap.api.optimizer_arguments import check_optimizer_class
from zerolap.api.plain_optimizers import (
    describe_states,
    factory_like,
    forget_own_hooks,
    hooks_of,
    is_scheduled,
    refuse_bound,
)
from zerolap.api.preflight import called_together, check_plain, meeting_group, several, unwrapped
from zerolap.runtime.optimizer_description import digest_of
from zerolap.runtime.optimizer_facts import Factory
from zerolap.runtime.optimizer_state import flat_states_of
from zerolap.runtime.peers import all_gather_json, refuse_together
from zerolap.runtime.state_pieces import State

How = Literal["interleaved", "after_backward", "on_step", "auto"]


@overload
def shard(
    ddp: DistributedDataParallel, optimizer: Optimizer, *, schedule: How = ..., **options: Any
) -> ZeroRedundancyOptimizer: ...
@overload
def shard(
    ddp: DistributedDataParallel, optimizer: Sequence[Optimizer], *, schedule: How = ..., **options: Any
) -> list[ZeroRedundancyOptimizer]: ...
@public
@called_together
def shard(
    ddp: DistributedDataParallel,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    schedule: How = "on_step",
    **options: Any,
) -> ZeroRedundancyOptimizer | list[ZeroRedundancyOptimizer]:
    """Shard a plain optimizer over the ranks of ``ddp``, and attach it: the training loop stays as it is.

    The object that is given becomes a ``ZeroRedundancyOptimizer`` and is returned, so LR schedulers, scalers and frameworks that have it
    already need not be told. Its state is taken over, whether it has stepped or was loaded, and each rank keeps its part only. Called by
    all ranks together; what is invalid on one rank is refused on all, and then the optimizer is as it was.

    Args:
        ddp: The DistributedDataParallel itself: neither its module nor a compiled wrapper around it.
        optimizer: Any plain optimizer over all trainable parameters of ``ddp``; or a list of several that share them out.
        schedule: As in ``attach``, but by default ``"on_step"``: gradients can be clipped and scaled, and steps left out, as with DDP.
        **options: What else ``attach`` takes.
    """
    given = [unwrapped(each) for each in several(optimizer)]
    group, what = meeting_group(ddp), "sharding an optimizer"
    factories = refuse_together(lambda: _check(ddp, given), group=group, what=what)
    said = all_gather_json(digest_of([describe_states(each) for each in given]), group=group, what=what)
    if len(set(said)) > 1:
        raise ValueError(
            "the optimizer's states differ between ranks, as after a checkpoint that only some of them have loaded; bring all ranks to "
            "the same state before the optimizer is sharded"
        )
    whole = [each.state for each in given]
    old_groups = [group for each in given for group in each.param_groups]
    with ExitStack() as undo:
        for each, factory in zip(given, factories, strict=True):
            _become_sharded(each, factory, group=group, undo=undo)
        attach(ddp, given, schedule=schedule, **options)
        undo.pop_all()
    for each in given:
        forget_own_hooks(each)
    for gone in (*whole, *old_groups):  # whoever still has them shall not take them for what trains
        gone.clear()
    return cast("ZeroRedundancyOptimizer | list[ZeroRedundancyOptimizer]", optimizer)


def _check(ddp: DistributedDataParallel, given: Sequence[Any]) -> list[Factory]:
    if not given:
        raise ValueError("there must be at least one optimizer, got an empty list")
    for each in given:
        check_plain(ddp, each, sharded=ZeroRedundancyOptimizer)
        check_optimizer_class(type(each))
        refuse_bound(each)
    if len({id(each) for each in given}) < len(given):
        raise ValueError("an optimizer is listed twice")
    return [factory_like(each) for each in given]


def _become_sharded(plain: Any, factory: Factory, *, group: dist.ProcessGroup, undo: ExitStack) -> None:
    """In place; the whole state is kept until nothing can be refused any more."""
    cls, before, groups = type(plain), dict(vars(plain)), plain.param_groups
    hooks, is_watched = hooks_of(plain), is_scheduled(plain)
    undo.callback(_become_plain, plain, cls, before, list(groups))
    vars(plain).clear()
    plain.__class__ = ZeroRedundancyOptimizer
    set_up(plain, [dict(each) for each in groups], cls, factory, process_group=group, overlap_with_ddp=True)
    vars(plain).update(hooks)
    plain._keeps_options = True
    take = partial(_take_states, plain, before["state"])
    refuse_together(take, group=group, what="taking over the optimizer's state")
    groups[:], plain.param_groups = plain.param_groups, groups  # the list that others may have
    if is_watched:
        plain.step = _watched_step(plain)


def _take_states(zero: ZeroRedundancyOptimizer, states: Mapping[Tensor, State]) -> None:
    """This rank's part of the states of all parameters, which every rank has."""
    params = zero._book.params
    held = {index: states[param] for index, param in enumerate(params) if states.get(param)}
    zero._book.load(flat_states_of(held, params))
    zero._is_untouched = not held


def _become_plain(plain: Any, cls: type[Optimizer], before: dict[str, Any], groups: list[Any]) -> None:
    plain.__class__ = cls
    vars(plain).clear()
    vars(plain).update(before)
    plain.param_groups[:] = groups


def _watched_step(zero: ZeroRedundancyOptimizer) -> Callable[..., Any]:
    """``step()`` as LR schedulers wrap it: they look whether it was called before theirs."""
    weak, step = weakref.ref(zero), ZeroRedundancyOptimizer.step

    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        zero = weak()
        assert zero is not None, "its step() is called"
        setattr(zero, STEP_CALLED, True)
        return step(zero, *args, **kwargs)

    setattr(watched, WRAPPED_BY_SCHEDULER, True)
    return watched
