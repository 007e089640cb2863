"""What one rank steps: real torch.optim instances over the parameters, or pieces of them, that it owns.

Nothing here decides who owns what (ownership), when something happens (machine), or talks to another rank (state_transfer, adapter).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, KeysView, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerolap._torch import foreach_copy_, step_hooks_of
from zerolap.runtime.param_groups import Options, ParamGroup, options_of, params_of
from zerolap.runtime.state_pieces import State, by_param, copied, fit, flat_state, is_flat, shaped_state
from zerolap.runtime.update_cost import update_cost
from zerolap.runtime.wrapped_tensors import is_taken_apart, put_together
from zerolap.schedule.balance import Load
from zerolap.schedule.ownership import GroupRank, Piece, greedy_owners

WITH_FUSED = frozenset({torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad})
MASTER = "master_weight"  # a piece's master in its state, when it travels or is saved


class LocalOptimizer:
    """One real optimizer over tensors that are parameters, or pieces of them, and stay known as such.

    The tensors may be master weights: copies of higher precision, from which the parameters are rounded after each step.
    """

    def __init__(
        self,
        factory: Callable[[list[ParamGroup]], Optimizer],
        groups: list[dict[str, Any]],
        params: Mapping[Piece, Tensor] | None,
        is_provisional: bool,
    ) -> None:
        """``groups`` are param groups whose ``params`` map a piece to the tensor to update; with masters, ``params`` are the
        pieces of the parameters themselves. A provisional one never steps, and keeps masters for those that come after it."""
        self._params = params
        self.has_masters = params is not None  # from which the parameters are rounded
        self.sends_differences = False  # the parameters get what their masters have more by the gather
        self._is_provisional = is_provisional
        self._factory = factory
        self._tensors: dict[Piece, Tensor] = {}
        for group in groups:
            self._tensors |= group["params"]
        self.optimizer = factory([{**group, "params": list(group["params"].values())} for group in groups])
        # torch wraps step() to call hooks and to label it for profilers, which costs as much as all of ours. Hooks on every
        # optimizer are called once an update, for the optimizer the user has, as they are with a plain one.
        step = type(self.optimizer).step
        bare_step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
        self.bare_step = partial(bare_step, self.optimizer)
        self.own_hooks = step_hooks_of(self.optimizer)  # its class's own, which a bare step leaves out

    def add_group(self, options: Options, tensors: Mapping[Piece, Tensor]) -> None:
        self._tensors.update(tensors)
        self.optimizer.add_param_group({**options, "params": list(tensors.values())})

    def clear_states(self) -> None:
        self.optimizer.state.clear()

    @property
    def pieces(self) -> KeysView[Piece]:
        return self._tensors.keys()

    def step(self, divisor: Tensor | None = None) -> None:
        """Step the optimizer, and round its result to the parameters if it works on masters.

        A divisor of the gradients is for optimizers that can apply it while they use them.
        """
        optimizer: Any = self.optimizer
        step = optimizer.step if any(self.own_hooks) else self.bare_step
        if divisor is None:
            step()
        else:
            optimizer.grad_scale, optimizer.found_inf = divisor, torch.zeros_like(divisor)
            try:
                step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        self.round_to_params()

    @torch.no_grad()
    def round_to_params(self) -> None:
        """Write masters to the parameters, if there are any and no gather does it."""
        if self._params is not None and not self.sends_differences:
            foreach_copy_(self._param_list(), list(self._tensors.values()))

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take the parameters' values for the masters: they were loaded, or set by hand."""
        if self._params is not None:
            foreach_copy_(list(self._tensors.values()), self._param_list())

    def _param_list(self) -> list[Tensor]:
        assert self._params is not None
        return [self._params[piece] for piece in self._tensors]

    def states(self) -> dict[Piece, State]:
        """The live states of the pieces that have one; a master is part of it."""
        state = self.optimizer.state
        held = {piece: state[tensor] for piece, tensor in self._tensors.items() if tensor in state}
        if self._params is None:
            return held
        return {piece: {**held.get(piece, {}), MASTER: tensor.detach()} for piece, tensor in self._tensors.items()}

    def flat_states(self) -> dict[Piece, State]:
        """The same, ready to travel; memory is shared where the layout allows."""
        return {piece: flat_state(state, self._tensors[piece]) for piece, state in self.states().items()}

    def take_states(self, params: Container[int]) -> dict[Piece, State]:
        """The same for the pieces of these parameters, which are then forgotten here: what moves shall not be held twice."""
        taken = {
            piece: flat_state(state, self._tensors[piece])
            for piece, state in self.states().items()
            if piece.param in params
        }
        gone = {self._tensors.pop(piece) for piece in list(self._tensors) if piece.param in params}
        for tensor in gone:
            self.optimizer.state.pop(tensor, None)
        for group in self.optimizer.param_groups:
            group["params"] = [tensor for tensor in group["params"] if tensor not in gone]
        if self._params is not None:
            self._params = {piece: tensor for piece, tensor in self._params.items() if piece.param not in params}
        return taken

    def blank_states(self) -> dict[Piece, State]:
        """Flat states such as a first step makes, found by stepping copies of no value; what is here stays as it is."""
        made = self._first_states(list(self._tensors.values()))
        return {
            piece: flat_state({**state, MASTER: blank.detach()} if self._params is not None else state, blank)
            for piece, (blank, state) in zip(self._tensors, made, strict=True)
        }

    def whole_tensors(self, state: State, tensor: Tensor) -> State:
        """A state whose tensors were taken apart, with those put together as this optimizer makes them for ``tensor``."""
        if not any(map(is_taken_apart, state.values())):
            return state
        ((_, made),) = self._first_states([tensor])
        return {
            key: put_together(value, made.get(key)) if is_taken_apart(value) else value for key, value in state.items()
        }

    def _first_states(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, State]]:
        """For each of these, which are some of ours, a copy of no value and the state that a first step makes of that."""
        blanks = {tensor: nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors}
        groups = [
            {**group, "params": [blanks[tensor] for tensor in group["params"] if tensor in blanks]}
            for group in self.optimizer.param_groups
        ]
        for blank in blanks.values():
            blank.grad = torch.zeros_like(blank)
        optimizer = self._factory(groups)
        optimizer.step()
        return [(blank, optimizer.state[blank]) for blank in blanks.values()]

    def load(self, states: Mapping[int, Sequence[tuple[Piece, State]]], *, copies: bool = True) -> None:
        """Take what is ours from flat states by parameter; the optimizer's own rules decide dtype and device.

        Without copies the states are nobody else's, and their memory is used.
        """
        packed = self.optimizer.state_dict()
        with_masters: dict[Tensor, State] = {}
        for place, (piece, tensor) in enumerate(self._tensors.items()):  # optimizers number parameters in this order
            state = fit(states.get(piece.param, ()), piece)
            if state is None:
                continue
            if copies:
                state = copied(state)
            else:
                state = {
                    key: value if _is_alone(value, tensor.numel()) else copied(value) for key, value in state.items()
                }
            state = self.whole_tensors(shaped_state(state, tensor), tensor)
            if MASTER in state:
                with_masters[tensor] = state
            state = {key: value for key, value in state.items() if key != MASTER}
            if state:
                packed["state"][place] = state
        self.optimizer.load_state_dict(packed)
        for tensor, state in with_masters.items():
            if self._params is not None:
                tensor.detach().copy_(state[MASTER])
            elif self._is_provisional:
                self.optimizer.state[tensor] = state  # as it is: the optimizer would round it to the parameter's dtype

    def inherit(self, older: LocalOptimizer) -> None:
        """Go on counting where ``older`` was: a class may keep numbers in the instance, where no state dict has them."""
        for name, value in vars(older.optimizer).items():
            if isinstance(value, bool | int | float | str):
                setattr(self.optimizer, name, value)

    def take_options(self, groups: Sequence[Options]) -> None:
        """Obey the options exposed to the user."""
        for mine, given in zip(self.optimizer.param_groups, groups, strict=True):
            mine.update(given)

    def options(self) -> list[Options]:
        """The options as the optimizer has them, what it added or changed itself included."""
        return [options_of(group) for group in self.optimizer.param_groups]


class GradSlot(NamedTuple):
    """Where the gradient of one stand-in lies in reduced memory, and the place of its parameter in the bucket."""

    place: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view_of(self, memory: Tensor) -> Tensor:
        return memory.as_strided(self.size, self.stride, memory.storage_offset() + self.offset)


@dataclass(slots=True)
class Shard:
    """This rank's part of one bucket: stand-ins for what it owns, each with its gradient, and what steps them.

    A stand-in shares the parameter's memory but has a ``.grad`` of its own: the parameter's belongs to DDP, which is still
    writing to it while the shard is stepped.
    """

    slots: Sequence[GradSlot]
    stand_ins: Sequence[Tensor]
    locals: Mapping[int, LocalOptimizer]  # by the number of the optimizer whose parameters they are
    grads_of: Tensor | None = None  # the memory that gradients point into
    used: Sequence[bool] | None = None  # the parameters that have one; None for all
    cast: Tensor | None = None  # where they are, if the optimizer works in another dtype

    def set_grads(self, reduced: Tensor, used: Sequence[bool] | None) -> None:
        """Point the stand-ins' gradients into reduced memory; None for parameters that no rank used.

        That memory is reused, so this is done once per layout unless a hook returns a tensor of its own, the used parameters change, or
        the optimizer works in another dtype: no work per parameter in the hot path.
        """
        if reduced.dtype != self.stand_ins[0].dtype:  # masters, or a hook that returns what it has sent
            if self.cast is None:
                self.cast = torch.empty_like(reduced, dtype=self.stand_ins[0].dtype)
            reduced = self.cast.copy_(reduced)
        if self.grads_of is not None and self.grads_of.data_ptr() == reduced.data_ptr() and self.used == used:
            return
        for stand_in, slot in zip(self.stand_ins, self.slots, strict=True):
            stand_in.grad = slot.view_of(reduced) if used is None or used[slot.place] else None
        self.grads_of, self.used = reduced, used


def used_params(agreed: Sequence[bool] | None, wanted: Sequence[bool | None]) -> list[bool] | None:
    """Which parameters of a bucket an update uses, where some gradients were removed or set before step(); None for all."""
    by_ranks = agreed or [True] * len(wanted)
    used = [ranks if user is None else user for ranks, user in zip(by_ranks, wanted, strict=True)]
    return None if all(used) else used


def stand_in_for(param: Tensor, memory: Tensor | None = None) -> Tensor:
    """A leaf over the same memory, or a part of it, that an optimizer cannot tell from ``param``."""
    memory = param.detach() if memory is None else memory
    stand_in = nn.Parameter(memory, requires_grad=param.requires_grad) if isinstance(param, nn.Parameter) else memory
    stand_in.__dict__.update(param.__dict__)  # optimizers may look for marks that a model left on its parameters
    return stand_in


class ShardBook:
    """All parameters and groups of one optimizer, who owns each parameter, and this rank's part of it."""

    def __init__(
        self,
        *,
        groups: Callable[[], list[ParamGroup]],
        factory: Callable[[list[ParamGroup]], Optimizer],
        rank: GroupRank,
        world_size: int,
    ) -> None:
        self.read_groups = groups
        self.factory = factory
        self.rank = rank
        self.world_size = world_size
        self.owners: dict[int, GroupRank] = {}  # of parameters that are in no bucket
        self.locals: list[LocalOptimizer] = []

    @property
    def groups(self) -> list[ParamGroup]:
        return self.read_groups()

    @property
    def can_divide_gradients(self) -> bool:
        """Whether the optimizers divide gradients while they use them: torch's fused ones do, for loss scalers."""
        return type(self.locals[0].optimizer) in WITH_FUSED and all(group["fused"] for group in self.groups)

    def load_of(self, param: Tensor) -> Load:
        """What it takes a rank to own a whole parameter."""
        return Load(param.nbytes, update_cost(type(self.locals[0].optimizer), tuple(param.shape)))

    @property
    def params(self) -> list[Tensor]:
        return [param for group in self.groups for param in params_of(group)]

    def options(self) -> list[Options]:
        """As the user has them."""
        return [options_of(group) for group in self.groups]

    def _greedy(self) -> dict[int, GroupRank]:
        sizes = [[param.numel() for param in params_of(group)] for group in self.groups]
        owners = [rank for of_group in greedy_owners(sizes, world_size=self.world_size) for rank in of_group]
        return dict(enumerate(owners))

    def make_local(
        self,
        tensors: Mapping[Piece, Tensor],
        *,
        params: Mapping[Piece, Tensor] | None = None,
        is_provisional: bool = False,
    ) -> LocalOptimizer:
        """An optimizer over ``tensors`` that has every group, empty ones included, so that groups keep their index."""
        groups: list[dict[str, Any]] = [{**options_of(group), "params": {}} for group in self.groups]
        ends = list(accumulate(len(params_of(group)) for group in self.groups))
        for piece in sorted(tensors):
            groups[bisect_right(ends, piece.param)]["params"][piece] = tensors[piece]
        return LocalOptimizer(self.factory, groups, params, is_provisional)

    def own_greedily(self, *, is_provisional: bool) -> None:
        """Before there is a plan, or without overlap: one optimizer over this rank's greedy share of the parameters."""
        self.owners = self._greedy()
        mine = {_whole(i, p): p for i, p in enumerate(self.params) if self.owners[i] == self.rank}
        self.locals = [self.make_local(mine, is_provisional=is_provisional)]

    def add_last_group(self) -> None:
        """Take in the group just appended to the exposed ones; no parameter changes hands."""
        self.owners = self._greedy()
        *earlier, last = self.groups
        start = sum(len(params_of(group)) for group in earlier)
        added = {_whole(i, p): p for i, p in enumerate(params_of(last), start) if self.owners[i] == self.rank}
        for local in self.locals:  # every optimizer has every group
            local.add_group(options_of(last), added if local is self.locals[0] else {})

    def flat_states(self) -> dict[Piece, State]:
        """The states of everything this rank owns, ready to travel."""
        return {piece: state for local in self.locals for piece, state in local.flat_states().items()}

    def as_saved(self, index: int, state: State) -> State:
        """The state of a whole parameter as the class itself has it, with all tensors on the CPU."""
        if not any(map(is_taken_apart, state.values())):
            return state
        param = self.params[index]
        blank = stand_in_for(param, memory=torch.zeros_like(param, device="cpu"))
        return self.make_local({_whole(index, param): blank}).whole_tensors(state, blank)

    def load(self, states: Mapping[Piece, State]) -> None:
        """Give each optimizer the states of its pieces, cut and joined as needed."""
        grouped = by_param(states)
        for local in self.locals:
            local.load(grouped)


def _is_alone(value: object, numel: int) -> bool:
    """Whether an entry has one value per element, and no more memory than that: what it was cut from shall go."""
    return isinstance(value, Tensor) and is_flat(value, numel) and value.untyped_storage().nbytes() == value.nbytes


def _whole(index: int, param: Tensor) -> Piece:
    return Piece(index, 0, param.numel())
