"""ZeroRedundancyOptimizer: the class users see, with torch's signatures. Sharding, overlap and communication happen elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from zerolap._logging import logger_of
from zerolap._public import public
from zerolap._torch import STEP_CALLED, foreach_zero_, join_config_of
from zerolap._torch.versions import warn_if_untried
from zerolap.api.construction import append_group, construct, expose_groups
from zerolap.api.modes import WithModes
from zerolap.api.preflight import called_together, meeting_group
from zerolap.api.state_dict_api import WithStateDictApi, states_asked_for, states_given
from zerolap.errors import forked
from zerolap.runtime import optimizer_state
from zerolap.runtime.grad_tensor import MeanGradient
from zerolap.runtime.optimizer_description import compare_between_ranks
from zerolap.runtime.optimizer_facts import Factory
from zerolap.runtime.param_broadcast import ParamBroadcast
from zerolap.runtime.param_groups import Options, ParamGroup, options_of
from zerolap.runtime.peers import refuse_together
from zerolap.runtime.shard_optimizer import ShardBook
from zerolap.runtime.state_pieces import State
from zerolap.schedule.machine import Schedule
from zerolap.schedule.ownership import GlobalRank, GroupRank, Piece

if TYPE_CHECKING:
    from zerolap.api.handle import Handle
    from zerolap.runtime.engine import Engine
    from zerolap.runtime.reduced_gradients import ReducedGradients

logger = logger_of(__name__)


def set_up(
    zero: ZeroRedundancyOptimizer,
    params: Any,
    optimizer_class: type[Optimizer],
    factory: Factory,
    *,
    process_group: dist.ProcessGroup | None,
    parameters_as_bucket_view: bool = False,
    overlap_with_ddp: bool = False,
) -> None:
    """Make one, of nothing or of what was another optimizer before. ``factory`` makes what steps this rank's part."""
    if cast(object, process_group) is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the process_group; make the optimizer on the ranks of that group only")
    group = meeting_group(process_group)
    zero.process_group = group
    zero.world_size = group.size()
    zero.rank = GroupRank(group.rank())
    zero.global_rank = GlobalRank(dist.get_rank())
    zero.parameters_as_bucket_view = parameters_as_bucket_view
    zero.initialized = False
    zero._process = os.getpid()
    zero._overlap_with_ddp = overlap_with_ddp
    zero._optimizer_class = optimizer_class
    zero._engine = zero._handle = zero._consolidated = None
    zero._number = 0
    zero._is_untouched = True
    zero._keeps_options = False
    construct_it = partial(construct, zero, params, process_group, factory)
    refuse_together(construct_it, group=group, what="constructing ZeroRedundancyOptimizer")
    zero._compare_with_other_ranks()
    if overlap_with_ddp and parameters_as_bucket_view:
        logger.warning("parameters_as_bucket_view=True has no effect under overlap: there it is always so")
    zero._broadcast.lay_out()
    zero.initialized = True
    if zero.rank == 0:
        warn_if_untried(torch.__version__)


class _StepJoinHook(JoinHook):
    """Shadows the step of ranks that still have inputs. Gradients must have been set by an earlier hook."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero

    def main_hook(self) -> None:
        self._zero.step()


@public
class ZeroRedundancyOptimizer(WithStateDictApi, WithModes, Optimizer, Joinable):
    """Any ``torch.optim`` class with its state sharded over the ranks of ``process_group``.

    Every rank keeps the state of its own shard only, updates that, and receives the others. The result is that of the plain optimizer
    on every rank. Made by all ranks of the group together: the constructor compares their parameters, class and options.

    Args:
        params: Parameters, pairs of name and parameter, or param groups, as ``torch.optim`` takes them.
        optimizer_class: The class to shard. That it updates each parameter by itself is tried on small tensors.
        process_group: The data-parallel ranks to shard over, DDP's. Default: all ranks.
        parameters_as_bucket_view: Without overlap, keep each rank's parameters in one buffer, which is sent as a whole.
        overlap_with_ddp: Update inside DDP's backward, once ``zerolap.attach`` was called or a hook of ``hook_with_zero_step`` or
            ``hook_with_zero_step_interleaved`` is registered; ``step()`` may then be left out. If False, ``step()`` does everything.
        **defaults: Options of ``optimizer_class``, such as ``lr``, for param groups that do not set them.
    """

    process_group: dist.ProcessGroup
    world_size: int
    rank: GroupRank
    global_rank: GlobalRank
    parameters_as_bucket_view: bool
    initialized: bool
    _process: int
    _overlap_with_ddp: bool
    _optimizer_class: type[Optimizer]
    _book: ShardBook
    _broadcast: ParamBroadcast
    _engine: Engine | None
    _handle: Handle | None
    _number: int  # of several that are overlapped together
    _consolidated: dict[int, State] | None
    _is_untouched: bool  # no rank has a state: none was made by a step, none loaded
    _keeps_options: bool  # as they are: none is set where that would make it faster

    @called_together
    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        set_up(
            self,
            params,
            optimizer_class,
            lambda groups: optimizer_class(groups, **defaults),
            process_group=process_group,
            parameters_as_bucket_view=parameters_as_bucket_view,
            overlap_with_ddp=overlap_with_ddp,
        )

    # --- what the user calls ------------------------------------------------------------------------------------------

    @property
    def handle(self) -> Handle | None:
        """What ``attach`` has returned for this optimizer; None if it is not attached."""
        return self._handle

    @property
    def optim(self) -> Any:
        """This rank's optimizer; once updates are overlapped, a view of its groups and states by model parameter."""
        if self._engine is None or not self._engine.probe.num_backwards:
            return self._book.locals[0].optimizer
        self._wait_for_params()
        return optimizer_state.local_view(self._book)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's parameters and bring all of them to all ranks; under overlap, see that backward did it."""
        if self._overlap_with_ddp:
            return _step_under_overlap(self, closure, kwargs)
        self._refuse_fork()
        Join.notify_join_context(self)
        self._is_untouched = False
        (local,) = self._book.locals
        local.take_options(self._book.options())
        optimizer = local.optimizer
        loss = optimizer.step(**kwargs) if closure is None else optimizer.step(closure=closure, **kwargs)
        self._expose_options()
        self._broadcast.send()
        return loss

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group, on all ranks; each gets a share of it. Under overlap it counts from the next backward on."""
        if not getattr(self, "initialized", False):  # called by torch's constructor
            super().add_param_group(param_group)
            expose_groups(self)
            return

        self._refuse_fork()
        num_groups = len(self.param_groups)

        try:
            refuse_together(lambda: append_group(self, param_group), group=self.process_group, what="add_param_group()")
            self._compare_with_other_ranks()
        except Exception:
            del self.param_groups[num_groups:]  # where it was right, too: the ranks' groups stay the same
            raise
        self._book.add_last_group()
        self._expose_options()
        self._broadcast.lay_out()
        if self._engine is not None:
            self._engine.layout = []  # so that owners are assigned anew at the end of the next backward

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters; unlike torch's own it waits for no parameter that is on its way."""
        is_freed = self._engine is not None and self._engine.common.gradient_memory is not None
        if self._engine is not None and is_freed:
            self._engine.gradients.of(self._number).drop()
        kept: list[Tensor] = []
        for group in self.param_groups:
            # Not params_of(): this runs at every step, beside the updates, and a call of another module for each group would show.
            for param in dict.__getitem__(group, "params"):
                grad = param.grad
                if grad is None or set_to_none or (is_freed and isinstance(grad, MeanGradient)):
                    param.grad = None
                    continue
                if grad.grad_fn is None:
                    grad.requires_grad_(False)
                else:
                    grad.detach_()
                kept.append(grad)
        if kept:
            foreach_zero_(kept)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        expose_groups(self)  # load_state_dict() puts others in their place

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the whole state on group rank ``to``, for its ``state_dict()``. Called by all ranks; only ``to`` receives."""
        self._refuse_fork()
        self._consolidated = optimizer_state.consolidate(self._book, to=to, group=self.process_group)

    def state_dict(self) -> dict[str, Any]:
        """The whole state as last consolidated to this rank, in the form of the plain optimizer's.

        Before the first step there is nothing to consolidate: frameworks that ask then get what the plain optimizer gives.
        """
        asked = states_asked_for(self)
        if asked is not None:
            return {**super().state_dict(), "state": asked}
        is_known = self._consolidated is not None or (self._is_untouched and not self._book.flat_states())
        if not is_known:
            raise RuntimeError(
                f"the optimizer state was not consolidated to this rank; call consolidate_state_dict(to={self.rank}) "
                "on all ranks first"
            )
        packed = super().state_dict()
        packed["state"] = {index: dict(state) for index, state in sorted((self._consolidated or {}).items())}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole state: ours, torch's class's or the plain optimizer's. The dict stays as it is."""
        states = states_given(self._book, state_dict)
        # torch's own checks, hooks and rules for the groups; the states are ours to place.
        super().load_state_dict({**state_dict, "state": {}})
        self._resume_from([options_of(group) for group in self.param_groups], states)
        self._is_untouched = not states

    def sharded_state_dict(self, model: nn.Module, *, make_room: bool = False) -> dict[str, Any]:
        """This rank's part of the state, by parameter name, for torch.distributed.checkpoint to save.

        To load, on any number of ranks: make one with ``make_room=True``, which has memory for states that are not there yet, let
        torch.distributed.checkpoint fill it, and give it to ``load_sharded_state_dict``.
        """
        return optimizer_state.to_sharded_dict(self._book, model, make_room=make_room)

    def load_sharded_state_dict(self, sharded: Mapping[str, Any], model: nn.Module) -> None:
        """Take what torch.distributed.checkpoint has loaded into a ``sharded_state_dict(make_room=True)``."""
        self._resume_from(*optimizer_state.from_sharded_dict(self._book, model, sharded))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the mean gradients of all parameters together, and return their norm before; torch's function for shards.

        Called by all ranks between backward and ``step()``; under overlap that needs ``schedule="on_step"``.
        """
        if not self._overlap_with_ddp:
            return torch.nn.utils.clip_grad_norm_(self._book.params, max_norm, norm_type, error_if_nonfinite)
        return self._reduced_gradients("clipping").clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    # --- Join ---------------------------------------------------------------------------------------------------------

    def join_hook(self, **_kwargs: Any) -> JoinHook:
        """Shadow ``step()`` for ranks without inputs; where updates are in backward, DDP's own join hook does all of it."""
        in_backward = self._overlap_with_ddp and not (
            self._engine and self._engine.machine.schedule is Schedule.ON_STEP
        )
        return JoinHook() if in_backward else _StepJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return self._default_device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    # --- ours ---------------------------------------------------------------------------------------------------------

    @property
    def _all_params(self) -> list[Tensor]:
        """The parameters, as torch's class has them; the book's need not be waited for."""
        self._wait_for_params()
        return self._book.params

    def _wait_for_params(self) -> None:
        """Let whoever gets a parameter from its optimizer find the updated value in it."""
        if self._engine is not None and self._engine.common.is_lazy:
            self._engine.wait_for_params()

    @property
    def _default_device(self) -> torch.device:
        return self._book.params[0].device

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler asks this before it steps an optimizer."""
        if self._overlap_with_ddp:
            self._reduced_gradients("scaling losses")  # which raises where they were used inside backward
        return False

    def _resume_from(self, options: Sequence[Options], states: Mapping[Piece, State]) -> None:
        """Continue from these options and flat states; a parameter without one starts anew."""
        self._is_untouched = False
        optimizer_state.resume_from(self._book, options, states)
        self._expose_options()  # options that an older state did not have yet

    def _refuse_fork(self) -> None:
        """A child of the process that trains has its groups, but not their threads: it would wait forever."""
        if os.getpid() != self._process:
            raise forked()

    def _reduced_gradients(self, purpose: str) -> ReducedGradients:
        return _hooked_engine(self).gradients.of(self._number).usable_for(purpose)

    def _note_update(self) -> None:
        """An engine has made one."""
        self._is_untouched = False
        vars(self)[STEP_CALLED] = True  # or LR schedulers would warn; backward was this optimizer's step

    def _expose_options(self) -> None:
        for group, options in zip(self.param_groups, self._book.locals[0].options(), strict=True):
            group.update(options)

    def _compare_with_other_ranks(self) -> None:
        """ValueError on all ranks if class, options or parameters are not the same everywhere."""
        compare_between_ranks((self._optimizer_class, self.param_groups), group=self.process_group)


def _step_under_overlap(
    zero: ZeroRedundancyOptimizer, closure: Callable[[], Any] | None, kwargs: dict[str, Any]
) -> Any:
    engine = _hooked_engine(zero)
    if kwargs:
        raise TypeError(f"step() takes no options under overlap, where updates happen in backward: {sorted(kwargs)}")
    join = join_config_of(zero)
    if join.enable and join.is_first_joinable:
        raise RuntimeError("under overlap give DDP to Join before the optimizer: Join([ddp, optimizer])")
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    engine.step_called(zero._number)
    if not engine.probe.num_backwards and any(param.grad is not None for param in zero._book.params):
        raise RuntimeError(
            "there are gradients, but DDP has not called the hook made for this optimizer; "
            "register it by ddp.register_comm_hook(state, hook)"
        )
    return loss


def _hooked_engine(zero: ZeroRedundancyOptimizer) -> Engine:
    if zero._engine is None:
        raise RuntimeError(
            "overlap_with_ddp=True, but no hook was made for this optimizer; call zerolap.attach(ddp, optimizer), or "
            "ddp.register_comm_hook(state, zerolap.hook_with_zero_step(hook, ddp, optimizer)), before training"
        )
    return zero._engine
