"""ZeroRedundancyOptimizer: the surface users see, in torch's words. Sharding, overlap and exchange happen elsewhere."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerolap._logging import logger_of
from zerolap._public import public
from zerolap.api.preflight import called_together, meeting_group
from zerolap.errors import CollectiveError, ZerolapError, forked
from zerolap.runtime.optimizer_description import describe, digest_of, first_difference
from zerolap.runtime.optimizer_facts import refuse_inseparable
from zerolap.runtime.param_groups import ExposedGroup, Options, ParamGroup, options_of, params_of
from zerolap.runtime.peers import all_gather_json, refuse_together
from zerolap.runtime.shards import FlatParams, ShardBook
from zerolap.runtime.state_pieces import State, by_param, copied, fit, flat_state, shaped_state
from zerolap.runtime.state_transfer import move_states
from zerolap.schedule.machine import Gather, Schedule
from zerolap.schedule.ownership import GlobalRank, GroupRank, Piece

if TYPE_CHECKING:
    from zerolap.runtime.dcp_state import Described
    from zerolap.runtime.engine import Engine
    from zerolap.runtime.native import NativeEngine

logger = logger_of(__name__)


class LocalView(NamedTuple):
    """What this rank holds under overlap, by model parameter: the part of ``.optim`` that people look at."""

    param_groups: list[ParamGroup]
    state: Mapping[Tensor, State]


class _StepJoinHook(JoinHook):
    """Shadows the step of ranks that still have inputs. Gradients must have been set by an earlier hook."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero

    def main_hook(self) -> None:
        self._zero.step()


@public
class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Any ``torch.optim`` class with its state sharded over the ranks of ``process_group``.

    Every rank keeps the state of its own parameters only, updates those, and receives the others. The result is that of
    the plain optimizer on every rank.

    Without overlap, ``step()`` does all of this. With ``overlap_with_ddp=True`` it happens inside DDP's backward, from the
    first one on, once a hook made by ``hook_with_zero_step`` or ``hook_with_zero_step_interleaved`` is registered;
    ``step()`` may then be left out. ``parameters_as_bucket_view`` keeps each rank's parameters in one buffer, which is sent
    as a whole; under overlap that is always so, bucket by bucket.

    Made by all ranks of the group together: the constructor compares their parameters.
    """

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
        given: object = process_group
        if given is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this rank is not in the process_group; only the ranks that are make the optimizer")
        group = meeting_group(process_group)
        self.process_group: dist.ProcessGroup = group
        self.world_size: int = group.size()
        self.rank: GroupRank = GroupRank(group.rank())
        self.global_rank: GlobalRank = GlobalRank(dist.get_rank())
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.initialized = False
        self._process = os.getpid()
        self._overlap_with_ddp = overlap_with_ddp
        self._optimizer_class = optimizer_class
        self._engine: Engine | None = None
        self._flats: list[tuple[GroupRank, FlatParams]] = []
        self._consolidated: dict[int, State] | None = None
        self._is_untouched = True  # no rank has a state: none was made by a step, none loaded

        def construct() -> None:
            if process_group is not None and process_group is not group:
                raise TypeError(
                    f"process_group must be a ProcessGroup that this rank is in, or None for all ranks, got {process_group!r}"
                )
            groups = _as_groups(params)
            _check_optimizer_class(optimizer_class)
            _check_params(_tensors_of(groups), overlap=overlap_with_ddp)
            # Without the defaults: the class fills them in, and may do so in another way for each group.
            Optimizer.__init__(self, groups, {})
            Joinable.__init__(self)
            me = weakref.ref(self)  # which keeps the book
            self._book = ShardBook(
                groups=lambda: me().param_groups,  # type: ignore[union-attr]  # it is there while the book is used
                factory=lambda groups: optimizer_class(groups, **defaults),
                rank=self.rank,
                world_size=self.world_size,
            )
            self._book.own_greedily(is_provisional=overlap_with_ddp)
            self._expose_options()
            self.defaults = dict(self._book.locals[0].optimizer.defaults)  # some LR schedulers look there
            self._refuse_inseparable()

        refuse_together(construct, group=group, what="constructing ZeroRedundancyOptimizer")
        self._compare_with_other_ranks()
        if overlap_with_ddp and parameters_as_bucket_view:
            logger.warning("parameters_as_bucket_view=True has no effect under overlap: there it is always so")
        self._build_flats()
        self.initialized = True

    # --- what the user calls ------------------------------------------------------------------------------------------

    @property
    def optim(self) -> Any:
        """This rank's optimizer; once updates are overlapped, a view of its groups and states by model parameter."""
        if self._engine is None or not self._engine.has_seen_buckets:
            return self._book.locals[0].optimizer
        self._wait_for_params()
        return self._local_view()

    def _local_view(self) -> LocalView:
        params = self._book.params
        held: dict[Tensor, State] = {}
        mine: set[Tensor] = set()
        for local in self._book.locals:
            mine.update(params[piece.param] for piece in local.pieces)
            held.update({params[piece.param]: state for piece, state in local.states().items()})
        groups = [{"params": [p for p in params_of(g) if p in mine], **options_of(g)} for g in self.param_groups]
        return LocalView(groups, MappingProxyType(held))

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's parameters and bring all of them to all ranks; under overlap, see that backward did it."""
        if self._overlap_with_ddp:
            return self._step_under_overlap(closure, kwargs)
        self._refuse_fork()
        Join.notify_join_context(self)
        self._is_untouched = False
        (local,) = self._book.locals
        local.take_options([options_of(group) for group in self.param_groups])
        optimizer = local.optimizer
        loss = optimizer.step(**kwargs) if closure is None else optimizer.step(closure=closure, **kwargs)
        self._expose_options()
        self._sync_params()
        return loss

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group, on all ranks; each gets a share of it. Under overlap it counts from the next backward on."""
        if not getattr(self, "initialized", False):  # called by torch's constructor
            super().add_param_group(param_group)
            self._expose_groups()
            return

        self._refuse_fork()
        num_groups = len(self.param_groups)

        def add() -> None:
            (group,) = _as_groups([param_group])
            _check_params([*self._book.params, *_tensors_of([group])], overlap=self._overlap_with_ddp)
            self.defaults, defaults = {}, self.defaults  # as in the constructor
            try:
                Optimizer.add_param_group(self, group)
            finally:
                self.defaults = defaults
            made = self._book.make_local({})  # by the class, which fills in the options, and may refuse some
            self.param_groups[-1].update(made.options()[-1])
            self._refuse_inseparable()

        try:
            refuse_together(add, group=self.process_group, what="add_param_group()")
            self._compare_with_other_ranks()
        except Exception:
            del self.param_groups[num_groups:]  # where it was right, too: the ranks' groups stay the same
            raise
        self._book.add_last_group()
        self._expose_options()
        self._build_flats()
        if self._engine is not None:
            self._engine.forget_layout()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters; unlike torch's own it waits for no parameter that is on its way."""
        kept: list[Tensor] = []
        for group in self.param_groups:
            for param in params_of(group):
                grad = param.grad
                if grad is None or set_to_none:
                    param.grad = None
                    continue
                if grad.grad_fn is None:
                    grad.requires_grad_(False)
                else:
                    grad.detach_()
                kept.append(grad)
        if kept:
            torch._foreach_zero_(kept)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._expose_groups()  # load_state_dict() puts others in their place

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the whole state on group rank ``to``, for its ``state_dict()``. Called by all ranks; only ``to`` receives."""
        self._check_destination(to)
        params = self._book.params
        pieces = move_states(
            self._book.flat_states(),
            routes=lambda index: [(0, params[index].numel(), GroupRank(to))],
            group=self.process_group,
            device=self._default_device,
            into="cpu",
            what=f"consolidating optimizer state to group rank {to}",
        )
        grouped = by_param(pieces)
        del pieces  # so that each goes when it has been joined
        self._consolidated = self._whole_states(grouped) if self.rank == to else None

    def _refuse_fork(self) -> None:
        """A child of the process that trains has its groups, but not their threads: it would wait for ever."""
        if os.getpid() != self._process:
            raise forked()

    def _check_destination(self, to: int) -> None:
        self._refuse_fork()

        def check() -> int:
            if type(to) is not int or not 0 <= to < self.world_size:
                raise ValueError(f"consolidate_state_dict(to={to}): the group has ranks 0 to {self.world_size - 1}")
            return to

        what = "consolidate_state_dict()"
        said = all_gather_json(
            refuse_together(check, group=self.process_group, what=what), group=self.process_group, what=what
        )
        if len(set(said)) > 1:
            raise ValueError(
                f"consolidate_state_dict() was called with different ranks to collect on: {said}, by group rank"
            )

    def _whole_states(self, grouped: dict[int, list[tuple[Piece, State]]]) -> dict[int, State]:
        whole = {}
        for index, param in enumerate(self._book.params):
            joined = fit(grouped.pop(index, ()), Piece(index, 0, param.numel()))
            if joined is not None:
                # Copied: our own states would change under the snapshot's feet with the next step.
                whole[index] = shaped_state(copied(joined, device="cpu"), param)
        return whole

    def state_dict(self) -> dict[str, Any]:
        """The whole state as last consolidated to this rank, in the form of the plain optimizer's.

        Before the first step there is nothing to consolidate: frameworks that ask then get what the plain optimizer gives.
        """
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
        """Take this rank's part of a whole state: ours, torch's ZeroRedundancyOptimizer's or the plain optimizer's.

        The given dict is left as it is, and nothing we do later shows in it.
        """
        num_params = len(self._book.params)
        strangers = [index for index in state_dict["state"] if index not in range(num_params)]
        if strangers:
            raise ValueError(f"the state dict has states for parameters {strangers}; there are {num_params} parameters")
        # torch's own checks, hooks and rules for the groups; the states are ours to place.
        super().load_state_dict({**state_dict, "state": {}})
        params = self._book.params
        given = {
            Piece(index, 0, params[index].numel()): flat_state(state, params[index])
            for index, state in state_dict["state"].items()
            if state is not None
        }
        self._take([options_of(group) for group in self.param_groups], given)
        self._is_untouched = not given

    def sharded_state_dict(self, model: nn.Module, *, make_room: bool = False) -> dict[str, Any]:
        """This rank's part of the state, by parameter name, for torch.distributed.checkpoint to save.

        To load, on any number of ranks: make one with ``make_room=True``, which has memory for states that are not there yet, let
        torch.distributed.checkpoint fill it, and give it to ``load_sharded_state_dict``.
        """
        from zerolap.runtime.dcp_state import to_sharded  # imports torch.distributed.checkpoint, which takes a second

        params = self._described(model)
        states = self._book.flat_states()
        if make_room:
            blank = (local.blank_states() for local in self._book.locals if local.pieces - states.keys())
            states = {**{piece: state for each in blank for piece, state in each.items()}, **states}
            states = {piece: copied(state) for piece, state in states.items()}  # what is loaded may turn out to be bad
        return {
            "state": to_sharded(states, params),
            # Not lists: a checkpoint would take those apart.
            "param_groups": tuple(self._named_groups(params)),
            "params": tuple(tuple(param) for param in params),
        }

    def load_sharded_state_dict(self, sharded: Mapping[str, Any], model: nn.Module) -> None:
        """Take what torch.distributed.checkpoint has loaded into a ``sharded_state_dict(make_room=True)``."""
        from zerolap.runtime.dcp_state import Described, compare, compare_options, from_sharded

        params = self._described(model)
        then = {name: Described(name, tuple(shape), tuple(strides)) for name, shape, strides in sharded["params"]}
        given = self._options_by_name(sharded["param_groups"], params)
        name = type(self._book.locals[0].optimizer).__name__
        differences = compare(params, then) or compare_options(given, self.param_groups, name)
        if differences:
            raise ValueError("the checkpoint does not fit the model: " + "; ".join(differences))
        self._take(given, from_sharded(sharded["state"], params, then))

    def _described(self, model: nn.Module) -> list[Described]:
        from zerolap.runtime.dcp_state import Described, names_of

        params = self._book.params
        return [Described.of(name, param) for name, param in zip(names_of(model, params), params, strict=True)]

    def _named_groups(self, params: Sequence[Described]) -> Iterator[Options]:
        names = iter([param.name for param in params])
        for group in self.param_groups:
            yield {**copied(options_of(group)), "params": [next(names) for _ in params_of(group)]}

    def _options_by_name(self, saved: Iterable[Mapping[str, Any]], params: Sequence[Described]) -> list[Options]:
        """The options of each group: of the saved group that its first parameter was in."""
        of_name = {name: options_of(dict(group)) for group in saved for name in group["params"]}
        names = iter([param.name for param in params])
        found = []
        for group in self.param_groups:
            mine = [next(names) for _ in params_of(group)]
            found.append(next((of_name[name] for name in mine if name in of_name), options_of(group)))
        return found

    def _take(self, options: Sequence[Options], states: Mapping[Piece, State]) -> None:
        """Go on from these options and flat states; what has none starts anew."""
        self._is_untouched = False
        for exposed, given in zip(self.param_groups, options, strict=True):
            exposed.update(copied(given))
        for local in self._book.locals:
            local.clear_states()
            local.refresh_masters()  # for what the given state has none of
            local.take_options(copied([options_of(group) for group in self.param_groups]))
        self._book.load(states)
        self._expose_options()  # options that an older state did not have yet

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the mean gradients of all parameters together, and return their norm before; torch's function for shards.

        Called by all ranks between backward and ``step()``; under overlap that needs ``schedule="on_step"``.
        """
        if not self._overlap_with_ddp:
            return torch.nn.utils.clip_grad_norm_(self._book.params, max_norm, norm_type, error_if_nonfinite)
        return self._engine_for_gradients("clipping").clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    # --- Join ---------------------------------------------------------------------------------------------------------

    def join_hook(self, **_kwargs: Any) -> JoinHook:
        """Shadow ``step()`` for ranks without inputs; where updates are in backward, DDP's own join hook does all of it."""
        in_backward = self._overlap_with_ddp and not (self._engine and self._engine.schedule is Schedule.ON_STEP)
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
        """For who comes from torch's class; ours need not wait, and asks the book."""
        self._wait_for_params()
        return self._book.params

    def _wait_for_params(self) -> None:
        """Whoever is handed a parameter by its optimizer, and reads or writes it, finds its updated value."""
        if self._engine is not None and self._engine.gather is Gather.LAZY:
            self._engine.wait_for_params()

    def _expose_groups(self) -> None:
        me = weakref.ref(self)  # which has the groups

        def wait() -> None:
            engine = None if (optimizer := me()) is None else optimizer._engine
            if engine is not None and engine.gather is Gather.LAZY:
                engine.wait_for_params()

        for place, group in enumerate(self.param_groups):
            if not isinstance(group, ExposedGroup):
                self.param_groups[place] = ExposedGroup(group, wait)

    @property
    def _default_device(self) -> torch.device:
        return self._book.params[0].device

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler asks this before it steps an optimizer."""
        if not self._overlap_with_ddp:
            return False
        engine = self._engine_for_gradients("scaling losses")
        if not engine.is_unscaled:
            raise RuntimeError("a torch.amp.GradScaler sees unreduced gradients only; use zerolap.GradScaler instead")
        return False

    def _engine_for_gradients(self, purpose: str) -> NativeEngine:
        """The engine, if gradients can still be changed between backward and step()."""
        from zerolap.runtime.native import NativeEngine

        engine = self._hooked_engine()
        if not isinstance(engine, NativeEngine) or engine.schedule is not Schedule.ON_STEP:
            raise RuntimeError(
                f"{purpose} cannot work with updates inside backward: they have used the gradients already; "
                'use zerolap.attach(ddp, optimizer, schedule="on_step"), or overlap_with_ddp=False'
            )
        return engine

    def _hooked_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError(
                "overlap_with_ddp=True, but no hook was made for this optimizer; call zerolap.attach(ddp, optimizer), or "
                "ddp.register_comm_hook(state, zerolap.hook_with_zero_step(hook, ddp, optimizer)), before training"
            )
        return self._engine

    def _step_under_overlap(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        engine = self._hooked_engine()
        if kwargs:
            raise TypeError(
                f"step() takes no options under overlap, where updates happen in backward: {sorted(kwargs)}"
            )
        if self._join_config.enable and self._join_config.is_first_joinable:
            raise RuntimeError("under overlap give DDP to Join before the optimizer: Join([ddp, optimizer])")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine.step_called()
        if not engine.has_seen_buckets and any(param.grad is not None for param in self._book.params):
            raise RuntimeError(
                "there are gradients, but DDP has not called the hook made for this optimizer; "
                "register it by ddp.register_comm_hook(state, hook)"
            )
        return loss

    def _expose_options(self) -> None:
        for exposed, options in zip(self.param_groups, self._book.locals[0].options(), strict=True):
            exposed.update(options)

    def _refuse_inseparable(self) -> None:
        if self._overlap_with_ddp or self.world_size > 1:  # or else one optimizer has all parameters
            refuse_inseparable(self._book.factory, self.param_groups)

    def _build_flats(self) -> None:
        """Keep what each rank owns in one buffer per device and dtype."""
        if not self.parameters_as_bucket_view or self._overlap_with_ddp:
            return
        buckets: dict[tuple[GroupRank, torch.device, torch.dtype], list[Tensor]] = {}
        for param, owner in zip(self._book.params, self._book.owners.values(), strict=True):
            buckets.setdefault((owner, param.device, param.dtype), []).append(param)
        self._flats = [(owner, FlatParams(params)) for (owner, _, _), params in buckets.items()]

    def _sync_params(self) -> None:
        """Send each rank's parameters to all others, frozen ones too: one frozen after backward is still updated."""
        if self.world_size == 1:
            return
        owned: Iterable[tuple[GroupRank, Tensor]]
        if self.parameters_as_bucket_view:
            if not all(flat.is_intact() for _, flat in self._flats):
                self._build_flats()  # the model was moved or its parameters replaced
            owned = [(owner, flat.buffer) for owner, flat in self._flats]
        else:
            params = self._book.params
            owned = [(owner, params[index].detach()) for index, owner in self._book.owners.items()]
        try:
            sent = [
                (self.process_group.broadcast(wire := memory.contiguous(), root=owner), wire, memory)
                for owner, memory in owned
                if memory.numel()
            ]
            for work, wire, memory in sent:
                work.wait()
                if wire is not memory:
                    memory.copy_(wire)
        except Exception as error:
            raise CollectiveError(
                f"rank {self.global_rank}: broadcast of updated parameters failed: {error}"
            ) from error

    def _compare_with_other_ranks(self) -> None:
        """ValueError on all ranks if class, options or parameters are not the same everywhere."""
        mine = describe(self._optimizer_class, self.param_groups)
        what = "comparing the optimizer's class, options and parameters between ranks"
        if len(set(all_gather_json(digest_of(mine), group=self.process_group, what=what))) == 1:
            return
        theirs = all_gather_json(mine, group=self.process_group, what=what)
        for rank, other in enumerate(theirs):
            difference = first_difference(theirs[0], other)
            if difference:
                raise ValueError(f"the optimizers of group ranks 0 and {rank} differ: {difference}")
        raise ZerolapError("the ranks' optimizers have different digests but equal descriptions")


def _as_groups(params: Any) -> list[ParamGroup]:
    """The caller's parameters as param groups of lists, with torch's exception types for what they cannot be.

    As in torch, parameters may be given as pairs of name and tensor; torch then keeps the names in its groups.
    """
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of tensors or dicts, not a tensor")
    try:
        given = list(params)
    except TypeError as error:
        raise TypeError(f"params must be an iterable of tensors or dicts, not {type(params).__name__}") from error
    if not given:
        raise ValueError("ZeroRedundancyOptimizer got an empty parameter list")
    if _are_params(given):
        return [{"params": given}]
    if not all(isinstance(item, dict) for item in given):
        kinds = ", ".join(sorted({type(item).__name__ for item in given}))
        raise TypeError(f"params must hold tensors only, pairs of name and tensor only, or dicts only, got {kinds}")
    groups = []
    for group in given:
        if "params" not in group:
            raise ValueError(f"a param group needs a 'params' entry, got {sorted(group)}")
        inside = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        if not _are_params(inside):
            raise TypeError("a param group's 'params' must hold tensors only, or pairs of name and tensor only")
        groups.append({**group, "params": inside})
    if not any(group["params"] for group in groups):
        raise ValueError("ZeroRedundancyOptimizer got param groups without parameters")
    return groups


def _are_params(given: list[Any]) -> bool:
    return all(isinstance(item, Tensor) for item in given) or all(
        isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor)
        for item in given
    )


def _tensors_of(groups: list[ParamGroup]) -> list[Tensor]:
    return [item[1] if isinstance(item, tuple) else item for group in groups for item in group["params"]]


def _check_optimizer_class(optimizer_class: Any) -> None:
    if not callable(optimizer_class) or (
        isinstance(optimizer_class, type) and not issubclass(optimizer_class, Optimizer)
    ):
        raise ValueError(f"optimizer_class must be a torch.optim.Optimizer subclass, got {optimizer_class!r}")
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, LBFGS):
        raise ValueError("LBFGS cannot be sharded: its update of one parameter depends on all gradients")
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, SparseAdam):
        raise ValueError(
            "SparseAdam cannot be sharded here: sparse gradients are not supported; use Adam and sparse=False"
        )


def _check_params(params: list[Tensor], *, overlap: bool) -> None:
    if len({id(param) for param in params}) != len(params):
        raise ValueError("a parameter is listed twice; give each parameter to the optimizer once")
    devices = {str(param.device) for param in params}
    if overlap and len(devices) > 1:
        raise ValueError(
            f"overlap needs all parameters on one device per rank, got {', '.join(sorted(devices))}; "
            "use overlap_with_ddp=False for a model on several devices"
        )
    for param in params:
        if is_traceable_wrapper_subclass(param):
            raise ValueError(
                f"a parameter is a {type(param).__name__}, which has no memory of its own to shard; give the optimizer plain "
                "parameters: what tensor parallelism or FSDP has sharded already needs an optimizer of torch's"
            )
        if nn.parameter.is_lazy(param):
            raise ValueError(
                "a parameter of a lazy module has no shape yet; run a forward before the optimizer is made"
            )
        if overlap and param.is_complex():
            raise ValueError(
                "complex parameters cannot be updated inside backward: DDP's buckets hold their real and imaginary parts as numbers of "
                "their own; use overlap_with_ddp=False, or keep the parameter real and use torch.view_as_complex() in forward"
            )
        if param.layout is not torch.strided:
            raise ValueError(f"only dense parameters can be sharded, got one of layout {param.layout}")
        if not param.is_leaf:
            raise ValueError("can't optimize a non-leaf tensor: give the optimizer the parameters themselves")
        if param.device.type == "meta":
            raise ValueError("a parameter is on the meta device and has no memory; materialize the model first")
    if not overlap:  # torch's rule; under overlap DDP keeps every dtype in buckets of its own
        kinds = {torch.typename(param) for param in params}
        if len(kinds) > 1:
            raise ValueError(
                f"all parameters must be of one dense type without overlap, got {', '.join(sorted(kinds))}"
            )
        return
    memory = sorted(
        (param.untyped_storage().data_ptr(), param.storage_offset() * param.element_size(), param.nbytes)
        for param in params
        if param.numel()
    )
    for (storage, start, size), (other, next_start, _) in pairwise(memory):
        if storage == other and next_start < start + size:
            raise ValueError("two parameters share memory; tie weights by using one parameter twice instead")
