"""The state of a sharded optimizer in the forms in which it is saved: whole on one rank, or each rank its part by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from zerolap.runtime.param_groups import Options, ParamGroup, options_of, params_of
from zerolap.runtime.peers import all_gather_json, refuse_together
from zerolap.runtime.shard_optimizer import ShardBook
from zerolap.runtime.state_pieces import State, by_param, copied, fit, flat_state, shaped_state
from zerolap.runtime.state_transfer import move_states
from zerolap.schedule.ownership import GroupRank, Piece

if TYPE_CHECKING:
    from zerolap.runtime.dcp_state import ParamShape

# zerolap.runtime.dcp_state is imported where it is used: it imports torch.distributed.checkpoint, which takes a second.


class LocalView(NamedTuple):
    """What this rank holds under overlap, by model parameter: the part of ``.optim`` that people look at."""

    param_groups: list[ParamGroup]
    state: Mapping[Tensor, State]


def local_view(book: ShardBook) -> LocalView:
    """This rank's parameters and states, as if one optimizer held them all."""
    params = book.params
    held: dict[Tensor, State] = {}
    mine: set[Tensor] = set()
    for local in book.locals:
        mine.update(params[piece.param] for piece in local.pieces)
        held.update({params[piece.param]: state for piece, state in local.states().items()})
    groups = [{"params": [p for p in params_of(g) if p in mine], **options_of(g)} for g in book.groups]
    return LocalView(groups, MappingProxyType(held))


def resume_from(book: ShardBook, options: Sequence[Options], states: Mapping[Piece, State]) -> None:
    """Continue from these options and flat states; a parameter without one starts anew."""
    for exposed, given in zip(book.groups, options, strict=True):
        exposed.update(copied(given))
    for local in book.locals:
        local.clear_states()
        local.refresh_masters()  # for parameters that have no state among these
        local.take_options(copied([options_of(group) for group in book.groups]))
    book.load(states)


# --- whole, on one rank -----------------------------------------------------------------------------------------------


def consolidate(book: ShardBook, *, to: int, group: dist.ProcessGroup) -> dict[int, State] | None:
    """All states by parameter index on group rank ``to``, None elsewhere. A collective."""
    _check_destination(to, group)
    params = book.params
    pieces = move_states(
        book.flat_states(),
        routes=lambda index: [(0, params[index].numel(), GroupRank(to))],
        group=group,
        device=params[0].device,
        into="cpu",
        what=f"consolidating optimizer state to group rank {to}",
    )
    grouped = by_param(pieces)
    del pieces  # so that each goes when it has been joined
    return _joined(grouped, book) if group.rank() == to else None


def _check_destination(to: int, group: dist.ProcessGroup) -> None:
    def check() -> int:
        if type(to) is not int or not 0 <= to < group.size():
            raise ValueError(f"consolidate_state_dict(to={to}): the group has ranks 0 to {group.size() - 1}")
        return to

    what = "consolidate_state_dict()"
    said = all_gather_json(refuse_together(check, group=group, what=what), group=group, what=what)
    if len(set(said)) > 1:
        raise ValueError(
            f"consolidate_state_dict() was called with different ranks to collect on: {said}, by group rank"
        )


def _joined(grouped: dict[int, list[tuple[Piece, State]]], book: ShardBook) -> dict[int, State]:
    whole = {}
    for index, param in enumerate(book.params):
        joined = fit(grouped.pop(index, ()), Piece(index, 0, param.numel()))
        if joined is not None:
            # Copied: our own states would change under the snapshot's feet with the next step.
            whole[index] = book.as_saved(index, shaped_state(copied(joined, device="cpu"), param))
    return whole


def refuse_unknown_params(states: Iterable[Any], num_params: int) -> None:
    """ValueError if a state dict has states for parameters that the optimizer does not have."""
    strangers = [index for index in states if index not in range(num_params)]
    if strangers:
        raise ValueError(f"the state dict has states for parameters {strangers}; there are {num_params} parameters")


def flat_states_of(states: Mapping[int, State | None], params: Sequence[Tensor]) -> dict[Piece, State]:
    """The states of a state dict, each as that of a whole parameter."""
    return {
        Piece(index, 0, params[index].numel()): flat_state(state, params[index])
        for index, state in states.items()
        if state is not None
    }


# --- sharded, by parameter name ---------------------------------------------------------------------------------------


def to_sharded_dict(book: ShardBook, model: nn.Module, *, make_room: bool) -> dict[str, Any]:
    """This rank's part of the state, for torch.distributed.checkpoint; with ``make_room`` also memory for absent states."""
    from zerolap.runtime.dcp_state import shapes_of, to_sharded

    params = shapes_of(model, book.params)
    states = book.flat_states()
    if make_room:
        blank = (local.blank_states() for local in book.locals if local.pieces - states.keys())
        states = {**{piece: state for each in blank for piece, state in each.items()}, **states}
        states = {piece: copied(state) for piece, state in states.items()}  # what is loaded may turn out to be bad
    return {
        "state": to_sharded(states, params),
        # Not lists: a checkpoint would take those apart.
        "param_groups": tuple(_named_groups(book.groups, params)),
        "params": tuple(tuple(param) for param in params),
    }


def from_sharded_dict(
    book: ShardBook, model: nn.Module, sharded: Mapping[str, Any]
) -> tuple[list[Options], dict[Piece, State]]:
    """The options of each group and the flat states in a sharded state dict; ValueError if it does not fit the model."""
    from zerolap.runtime.dcp_state import ParamShape, compare, compare_options, from_sharded, shapes_of

    params = shapes_of(model, book.params)
    then = {name: ParamShape(name, tuple(shape), tuple(strides)) for name, shape, strides in sharded["params"]}
    options = options_by_name(book.groups, sharded["param_groups"], params)
    name = type(book.locals[0].optimizer).__name__
    differences = compare(params, then) or compare_options(options, book.groups, name)
    if differences:
        raise ValueError("the checkpoint does not fit the model: " + "; ".join(differences))
    return options, from_sharded(sharded["state"], params, then)


def _named_groups(groups: Iterable[ParamGroup], params: Sequence[ParamShape]) -> Iterator[Options]:
    names = iter([param.name for param in params])
    for group in groups:
        yield {**copied(options_of(group)), "params": [next(names) for _ in params_of(group)]}


def options_by_name(
    groups: Iterable[ParamGroup], saved: Iterable[Mapping[str, Any]], params: Sequence[ParamShape]
) -> list[Options]:
    """The options of each group: of the saved group that its first parameter was in."""
    of_name = {name: options_of(dict(group)) for group in saved for name in group["params"]}
    names = iter([param.name for param in params])
    found = []
    for group in groups:
        mine = [next(names) for _ in params_of(group)]
        found.append(next((of_name[name] for name in mine if name in of_name), options_of(group)))
    return found
