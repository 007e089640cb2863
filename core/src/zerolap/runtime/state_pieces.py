"""Optimizer states cut into pieces and joined again. Knows tensors and pieces; nothing of ranks or optimizers.

A state that travels is *flat*: entries with one value per element of the parameter are one-dimensional, in the order in
which the parameter lies in memory. Such entries can be cut and joined; all others (step counts, factored moments) are
taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerolap.runtime.wrapped_tensors import is_wrapped, take_apart
from zerolap.schedule.ownership import Piece

State = dict[str, Any]  # one parameter's optimizer state, as torch.optim keeps it


class OwnPiece(NamedTuple):
    """Elements of one parameter whose mean gradient this rank has."""

    place: int  # of the parameter in the bucket
    start: int
    stop: int
    offset: int  # in this rank's part of the bucket

    def view_of(self, memory: Tensor) -> Tensor:
        return memory[self.offset : self.offset + self.stop - self.start]


def strides_in_bucket(param: Tensor) -> tuple[int, ...]:
    """How a parameter, or its gradient, lies in a flat bucket. DDP's rule: one without gaps keeps its strides, so that
    channels-last stays channels-last; any other is laid out row by row."""
    dense = torch.empty_like(param, device="meta")  # has the parameter's own strides only if those leave no gaps
    return dense.stride() if dense.stride() == param.stride() else dense.contiguous().stride()


def flat_state(state: State, like: Tensor) -> State:
    """A state of ``like`` with every entry per element made flat, and tensors that are made of others taken apart."""
    return {name: _travelling(name, value, like) for name, value in state.items()}


def _travelling(name: str, value: Any, like: Tensor) -> Any:
    if is_wrapped(value):
        return take_apart(value)
    if isinstance(value, Tensor) and value.shape == like.shape and name != "step":
        return _flat(value, like)
    return value


def shaped_state(state: State, like: Tensor) -> State:
    """The inverse of ``flat_state``: entries per element get the shape and strides of ``like``. What was taken apart stays so."""
    return {
        name: value.contiguous().as_strided(like.shape, strides_in_bucket(like))
        if is_flat(value, like.numel()) and name != "step"
        else value
        for name, value in state.items()
    }


def by_param(states: Mapping[Piece, State]) -> dict[int, list[tuple[Piece, State]]]:
    """The pieces of each parameter."""
    grouped: dict[int, list[tuple[Piece, State]]] = {}
    for piece, state in states.items():
        grouped.setdefault(piece.param, []).append((piece, state))
    return grouped


def fit(pieces: Iterable[tuple[Piece, State]], wanted: Piece) -> State | None:
    """The flat state of ``wanted`` from these pieces; None if none of them has any of it."""
    parts: list[tuple[Piece, State]] = []
    for piece, state in sorted(pieces, key=lambda item: item[0]):
        if piece[:] == wanted[:]:
            return state
        start, stop = max(piece.start, wanted.start), min(piece.stop, wanted.stop)
        if start < stop:
            part = Piece(wanted.param, start, stop)
            parts.append((part, cut_state(state, piece, part)))
    if not parts:
        return None
    covered = sum(part.stop - part.start for part, _ in parts)
    if covered != wanted.stop - wanted.start:
        raise ValueError(f"only {covered} elements of {wanted} have a state")
    return _join(parts)


def cut_state(state: State, piece: Piece, part: Piece) -> State:
    """The state of ``part``, given that of the ``piece`` it lies in. Shares memory with it."""
    first, last = part.start - piece.start, part.stop - piece.start
    return {
        name: value[first:last] if is_flat(value, piece.stop - piece.start) else value for name, value in state.items()
    }


def copied(value: Any, *, device: torch.device | str | None = None) -> Any:
    """A deep copy of a state, with its tensors where they are or on ``device``."""
    if isinstance(value, Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, Mapping):
        return {key: copied(item, device=device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(item, device=device) for item in value)
    return value


def _join(parts: list[tuple[Piece, State]]) -> State:
    first, state = parts[0]
    return {
        # cat() copies even a single part: a view would keep the whole it was cut from alive. Some may have come from afar.
        name: torch.cat([other[name].to(value.device) for _, other in parts])
        if is_flat(value, first.stop - first.start)
        else value
        for name, value in state.items()
    }


def is_flat(value: object, numel: int) -> bool:
    """Whether an entry of a flat state has one value per element."""
    return isinstance(value, Tensor) and value.ndim == 1 and value.numel() == numel


def _flat(value: Tensor, like: Tensor) -> Tensor:
    strides = strides_in_bucket(like)
    if value.stride() != strides:
        value = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
    return value.as_strided((value.numel(),), (1,))
