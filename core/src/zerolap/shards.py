"""What one rank holds: flat parameter buffers, and real torch.optim instances over the parameters it owns.

Nothing here decides who owns what (plan), when something happens (machine), or talks to another rank (exchange, adapter).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerolap.exchange import State
from zerolap.plan import GroupRank, Piece, greedy_owners

ParamGroup = dict[str, Any]
Options = dict[str, Any]  # a param group without its parameters

# A matrix product may take another path, and round otherwise, when its operand does not start where an allocation of its
# own would: every parameter starts at a multiple of this many bytes in its flat buffer.
_ALIGNMENT_BYTES = 64


def options_of(group: ParamGroup) -> Options:
    return {key: value for key, value in group.items() if key != "params"}


def strides_in_bucket(param: Tensor) -> tuple[int, ...]:
    """How a parameter, or its gradient, lies in a flat bucket. DDP's rule: one without gaps keeps its strides, so that
    channels-last stays channels-last; any other is laid out row by row."""
    dense = torch.empty_like(param, device="meta")  # has the parameter's own strides only if those leave no gaps
    return dense.stride() if dense.stride() == param.stride() else dense.contiguous().stride()


class FlatParams:
    """Some parameters of one device and dtype in one buffer; each parameter is made a view of it."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        first = params[0]
        step = _ALIGNMENT_BYTES // first.element_size()
        self._starts = [0]
        for param in params:
            self._starts.append(self._starts[-1] + -(-param.numel() // step) * step)
        self.buffer = torch.zeros(self._starts[-1], dtype=first.dtype, device=first.device)
        self.views = [
            self.buffer[start:].as_strided(param.shape, strides_in_bucket(param))
            if param.numel()
            else self.buffer.new_empty(param.shape)
            for param, start in zip(params, self._starts, strict=False)
        ]
        for param, view in zip(params, self.views, strict=True):
            view.copy_(param.detach())
            param.data = view

    def is_intact(self) -> bool:
        """Whether the parameters still live here; the ends tell, for what moves parameters moves them all."""
        return all(self._params[i].data_ptr() == self.views[i].data_ptr() for i in (0, -1))

    def slice(self, first: int, last: int) -> Tensor:
        """The part of the buffer that holds parameters ``first`` to ``last - 1``, padding included."""
        return self.buffer[self._starts[first] : self._starts[last]]


class GradSlot(NamedTuple):
    """Where one parameter's gradient lies in DDP's flat bucket."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view_of(self, bucket: Tensor) -> Tensor:
        return bucket.as_strided(self.size, self.stride, bucket.storage_offset() + self.offset)


class LocalOptimizer:
    """One real optimizer over some of the parameters, which stay known by their index over all parameters."""

    def __init__(self, factory: Callable[[list[ParamGroup]], Optimizer], groups: list[dict[str, Any]]) -> None:
        """``groups`` are param groups whose ``params`` map a parameter's index to the tensor to update."""
        self._tensors: dict[int, Tensor] = {}
        for group in groups:
            self._tensors |= group["params"]
        self.optimizer = factory([{**group, "params": list(group["params"].values())} for group in groups])

    def add_group(self, options: Options, tensors: Mapping[int, Tensor]) -> None:
        self._tensors.update(tensors)
        self.optimizer.add_param_group({**options, "params": list(tensors.values())})

    def clear_states(self) -> None:
        self.optimizer.state.clear()

    def states(self) -> dict[int, State]:
        """The live states of the parameters that have one."""
        state = self.optimizer.state
        return {index: state[tensor] for index, tensor in self._tensors.items() if tensor in state}

    def load(self, states: Mapping[int, State]) -> None:
        """Take over states; the optimizer's own rules decide their dtype and device."""
        packed = self.optimizer.state_dict()
        for place, index in enumerate(
            self._tensors
        ):  # an optimizer numbers its parameters in the order they were given
            if index in states:
                packed["state"][place] = states[index]
        self.optimizer.load_state_dict(packed)

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


class BucketShard:
    """This rank's part of one bucket: stand-ins for the parameters it owns, each with its gradient, and their optimizer.

    A stand-in shares the parameter's memory but has a ``.grad`` of its own: the parameter's belongs to DDP, which is still
    writing to it while the shard is stepped.
    """

    def __init__(self, *, places: Sequence[int], stand_ins: Sequence[Tensor], local: LocalOptimizer) -> None:
        self._places = places  # which of the bucket's gradients are ours
        self._stand_ins = stand_ins
        self.local = local
        self._grads_of: Tensor | None = None
        self._used: Sequence[bool] | None = None

    def set_grads(self, reduced: Tensor, slots: Sequence[GradSlot], used: Sequence[bool] | None) -> None:
        """Point the stand-ins' gradients into the reduced bucket; None for parameters that no rank used.

        DDP reuses its buckets, so this is done once per layout unless a hook returns a tensor of its own or the used
        parameters change: no work per parameter in the hot path.
        """
        if self._grads_of is not None and self._grads_of.data_ptr() == reduced.data_ptr() and self._used == used:
            return
        for place, stand_in in zip(self._places, self._stand_ins, strict=True):
            stand_in.grad = slots[place].view_of(reduced) if used is None or used[place] else None
        self._grads_of, self._used = reduced, used


def stand_in_for(param: Tensor) -> Tensor:
    """A leaf over the same memory that an optimizer cannot tell from ``param``."""
    memory = param.detach()
    stand_in = nn.Parameter(memory, requires_grad=param.requires_grad) if isinstance(param, nn.Parameter) else memory
    stand_in.__dict__.update(param.__dict__)  # optimizers may look for marks that a model left on its parameters
    return stand_in


class ShardBook:
    """All parameters and groups, who owns each parameter, and this rank's optimizers."""

    def __init__(
        self,
        *,
        groups: Callable[[], list[ParamGroup]],
        factory: Callable[[list[ParamGroup]], Optimizer],
        rank: GroupRank,
        world_size: int,
    ) -> None:
        self._groups = groups
        self._factory = factory
        self.rank = rank
        self.world_size = world_size
        self.owners: dict[int, GroupRank] = {}
        self.locals: list[LocalOptimizer] = []

    @property
    def groups(self) -> list[ParamGroup]:
        return self._groups()

    @property
    def params(self) -> list[Tensor]:
        return [param for group in self.groups for param in group["params"]]

    def greedy(self) -> dict[int, GroupRank]:
        sizes = [[param.numel() for param in group["params"]] for group in self.groups]
        owners = [rank for of_group in greedy_owners(sizes, world_size=self.world_size) for rank in of_group]
        return dict(enumerate(owners))

    def make_local(self, tensors: Mapping[int, Tensor]) -> LocalOptimizer:
        """An optimizer over ``tensors`` that has every param group, empty ones included, so that groups keep their index."""
        groups: list[dict[str, Any]] = [{**group, "params": {}} for group in self.groups]
        ends = list(accumulate(len(group["params"]) for group in self.groups))
        for index in sorted(tensors):
            groups[bisect_right(ends, index)]["params"][index] = tensors[index]
        return LocalOptimizer(self._factory, groups)

    def own_greedily(self) -> None:
        """Before there is a plan, or without overlap: one optimizer over this rank's greedy share of the parameters."""
        self.owners = self.greedy()
        params = self.params
        self.locals = [self.make_local({i: params[i] for i, owner in self.owners.items() if owner == self.rank})]

    def add_last_group(self) -> None:
        """Take in the group just appended to the exposed ones; no parameter changes hands."""
        self.owners = self.greedy() | self.owners
        *earlier, last = self.groups
        start = sum(len(group["params"]) for group in earlier)
        added = {i: param for i, param in enumerate(last["params"], start) if self.owners[i] == self.rank}
        for local in self.locals:  # every optimizer has every group
            local.add_group(options_of(last), added if local is self.locals[0] else {})

    def make_bucket_shard(self, params: Mapping[int, Tensor], *, owned: Sequence[Piece]) -> BucketShard | None:
        """This rank's shard of a bucket that holds ``params``, in this order; None if it owns none of it."""
        mine = {piece.param for piece in owned}
        if not mine:
            return None
        stand_ins = {index: stand_in_for(param) for index, param in params.items() if index in mine}
        places = [place for place, index in enumerate(params) if index in mine]
        return BucketShard(places=places, stand_ins=list(stand_ins.values()), local=self.make_local(stand_ins))

    def states(self) -> dict[int, State]:
        """The live states of every parameter this rank owns."""
        return {index: state for local in self.locals for index, state in local.states().items()}

    def load(self, states: Mapping[int, State]) -> None:
        """Give each state to the optimizer that has its parameter."""
        for local in self.locals:
            local.load(states)
