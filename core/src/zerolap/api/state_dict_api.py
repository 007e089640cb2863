"""``torch.distributed.checkpoint.state_dict`` on a sharded optimizer: who asks, and what is given."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import CodeType
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import Tensor

from zerolap._torch import ASKS_FOR_STATE_NAMES, ASKS_FOR_STATES, READIES_STATES, STATE_DICT_MODULE
from zerolap.runtime import optimizer_state
from zerolap.runtime.state_pieces import State
from zerolap.schedule.ownership import Piece

if TYPE_CHECKING:
    from zerolap.runtime.shard_optimizer import ShardBook


class WithStateDictApi:
    """What torch's functions look at, beside ``state_dict()`` and ``load_state_dict()``. All ranks call them together."""

    process_group: dist.ProcessGroup
    _book: ShardBook

    @property
    def state(self) -> Any:
        """Empty: states are in the shards. torch's state dict functions, which would make a step to have some, are told which there are."""
        name = _asked_by(sys._getframe(1).f_code)
        if name == READIES_STATES:
            from zerolap.runtime.param_shards import shared_states

            found = shared_states(self._book, self.process_group)
            vars(self)["known_states"] = {param: found.get(index, {}) for index, param in enumerate(self._book.params)}
        return vars(self)["known_states"] if name else vars(self).get("state", {})

    @state.setter
    def state(self, value: Any) -> None:
        vars(self)["state"] = value


def _asked_by(code: CodeType) -> str | None:
    """Which of torch's state dict functions this is."""
    if code.co_name not in (READIES_STATES, ASKS_FOR_STATES, ASKS_FOR_STATE_NAMES):
        return None
    module = sys.modules.get(STATE_DICT_MODULE)
    return code.co_name if module is not None and code.co_filename == module.__file__ else None


def states_asked_for(optimizer: WithStateDictApi) -> dict[int, State] | None:
    """The states that torch's state dict functions want of ``state_dict()``, which calls this; None if somebody else calls."""
    frame = sys._getframe(2)
    if _asked_by(frame.f_code) != ASKS_FOR_STATES:
        return None
    from zerolap.runtime.param_shards import row_by_row, shared_states

    book, group, info = optimizer._book, optimizer.process_group, frame.f_locals["info"]
    if not info.full_state_dict:
        return shared_states(book, group)
    if info.cpu_offload:
        first = optimizer_state.consolidate(book, to=0, group=group) or {}
        return {index: row_by_row(state) for index, state in first.items()}
    mine: dict[int, State] = {}
    for to in range(group.size()):
        found = optimizer_state.consolidate(book, to=to, group=group)
        if found is not None:
            mine = {index: row_by_row(state, book.params[index].device) for index, state in found.items()}
    return mine


def states_given(book: ShardBook, state_dict: Mapping[str, Any]) -> dict[Piece, State]:
    """Flat states from any state dict: ours, torch's class's, the plain optimizer's, or what torch's functions give, by name."""
    states: Mapping[Any, Any] = state_dict["state"]
    if any(not isinstance(key, int) for key in states):
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        index_of = {name: index for index, name in enumerate(names)}
        strangers = [name for name in states if name not in index_of]
        if strangers:
            raise ValueError(f"the state dict has states for {strangers[:5]}, which are in none of its param groups")
        states = {index_of[name]: state for name, state in states.items()}
    params: list[Tensor] = book.params
    optimizer_state.refuse_unknown_params(states, len(params))
    if not _has_parts(states):
        return optimizer_state.flat_states_of(cast("Mapping[int, State | None]", states), params)
    from zerolap.runtime.param_shards import pieces_given, refuse_gaps

    given = pieces_given(states, params)
    refuse_gaps(book, states, given)
    return given


def _has_parts(states: Mapping[int, Any]) -> bool:
    values = (value for state in states.values() if state for value in state.values())
    return any(hasattr(value, "ranges") for value in values)
