"""Optimizer states on their way between ranks. What arrives is loaded as plain data and tensors; nothing in it is executed."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap.errors import CollectiveError, ZerolapError
from zerolap.runtime.peers import all_gather
from zerolap.runtime.state_pieces import State, cut_state
from zerolap.schedule.ownership import GroupRank, Piece
from zerolap.untrusted.tensors import load_plain

_CHUNK_BYTES = 16 * 2**20  # one message: what a rank needs beside the states themselves is twice this
PieceTuple = tuple[int, int, int]  # a Piece as plain data


class _Streamed(NamedTuple):
    """A tensor that travels behind the rest of its message."""

    part: PieceTuple
    name: str
    dtype: torch.dtype
    numel: int


def move_states(
    states: Mapping[Piece, State],
    *,
    routes: Callable[[int], Sequence[tuple[int, int, GroupRank]]],
    group: dist.ProcessGroup,
    device: torch.device,
    into: torch.device | str | None = None,
    what: str,
) -> dict[Piece, State]:
    """Send flat states to where ``routes`` says a parameter's elements belong; return those that belong here.

    ``routes(param)`` gives (start, stop, owner) for every part of a parameter. A collective. In round k a rank sends to the
    one k places on and receives from the one k places back. Entries per element go chunk by chunk from where they are to where
    they will be, so that beside what it keeps a rank holds two chunks and the small rest of one message. What was here already
    is returned as it is; what arrives is on ``into``, or else on ``device``, by which the group communicates.
    """
    rank, world_size = group.rank(), group.size()
    outgoing: list[dict[PieceTuple, State]] = [{} for _ in range(world_size)]
    for piece, state in states.items():
        for start, stop, owner in routes(piece.param):
            part = Piece(piece.param, max(start, piece.start), min(stop, piece.stop))
            if part.start < part.stop or part == piece:  # or both are empty: the parameter has no elements
                outgoing[owner][part.param, part.start, part.stop] = (
                    state if part == piece else cut_state(state, piece, part)
                )
    arrived = outgoing[rank]
    try:
        for distance in range(1, world_size):
            to, source = GroupRank((rank + distance) % world_size), GroupRank((rank - distance) % world_size)
            arrived.update(_transfer_round(outgoing[to], to, source, group=group, device=device, into=into or device))
    except ZerolapError:
        raise
    except Exception as error:
        raise CollectiveError(f"rank {dist.get_rank()}: {what} failed: {error}") from error
    return {Piece(*key): state for key, state in arrived.items()}


def check_sendable(states: Mapping[Piece, State]) -> None:
    """ZerolapError if a rank that is sent these states could not load them safely."""
    rest, streamed, _ = _split({(piece.param, piece.start, piece.stop): state for piece, state in states.items()})
    _unpack(_pack((rest, [tuple(each) for each in streamed])))


def _transfer_round(
    states: Mapping[PieceTuple, State],
    to: GroupRank,
    source: GroupRank,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    into: torch.device | str,
) -> dict[PieceTuple, State]:
    """Send ``states`` to one rank while receiving those of another; all ranks at once."""
    rest, streamed, bodies = _split(states)
    message = (
        _pack((list(rest.items()), [tuple(each) for each in streamed])).to(device)
        if states
        else torch.empty(0, dtype=torch.uint8, device=device)
    )
    sizes = all_gather(torch.tensor([message.numel(), sum(body.nbytes for body in bodies)], device=device), group)
    heads, streams = zip(*(size.tolist() for size in sizes), strict=True)
    received = torch.empty(heads[source], dtype=torch.uint8, device=device)
    _send_in_chunks([message], to, [received], source, group=group, longest=max(heads), device=device)
    arrived, streamed = _unpack(received) if received.numel() else ({}, [])
    if sum(numel * dtype.itemsize for _, _, dtype, numel in streamed) != streams[source]:
        raise ZerolapError(f"group rank {source} announced other states than it sends")
    landing = [torch.empty(numel, dtype=dtype, device=into) for _, _, dtype, numel in streamed]
    _send_in_chunks(bodies, to, landing, source, group=group, longest=max(streams), device=device)
    for (part, name, _, _), body in zip(streamed, landing, strict=True):
        arrived[part][name] = body
    return arrived


def _split(states: Mapping[PieceTuple, State]) -> tuple[dict[PieceTuple, State], list[_Streamed], list[Tensor]]:
    """Entries per element, and all others with None in their places, so that entries keep their order."""
    rest, streamed, bodies = {}, [], []
    for part, state in states.items():
        rest[part] = dict(state)
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim == 1 and value.is_contiguous() and value.numel():
                streamed.append(_Streamed(part, name, value.dtype, value.numel()))
                bodies.append(value.detach())
                rest[part][name] = None
    return rest, streamed, bodies


def _send_in_chunks(
    bodies: Sequence[Tensor],
    to: GroupRank,
    landing: Sequence[Tensor],
    source: GroupRank,
    *,
    group: dist.ProcessGroup,
    longest: int,
    device: torch.device,
) -> None:
    """Send the bytes of some tensors behind each other, and fill others with what comes. ``longest`` is of any rank."""
    outbox, inbox = (torch.empty(min(longest, _CHUNK_BYTES), dtype=torch.uint8, device=device) for _ in range(2))
    sending, receiving = _slices(bodies), _slices(landing)
    for _ in range(0, longest, _CHUNK_BYTES):
        out, filled = next(sending, []), 0
        for each in out:
            outbox[filled : filled + each.numel()].copy_(each)
            filled += each.numel()
        expected = next(receiving, [])
        arriving = inbox[: sum(each.numel() for each in expected)]
        _send_and_receive(outbox[:filled], to, arriving, source, group)
        for each in expected:
            each.copy_(arriving[: each.numel()])
            arriving = arriving[each.numel() :]


def _slices(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The bytes of all tensors, as views, in portions of one chunk."""
    portion: list[Tensor] = []
    room = _CHUNK_BYTES
    for tensor in tensors:
        data = tensor.view(torch.uint8)
        while data.numel():
            portion.append(data[:room])
            data = data[portion[-1].numel() :]
            room -= portion[-1].numel()
            if not room:
                yield portion
                portion, room = [], _CHUNK_BYTES
    if portion:
        yield portion


def _send_and_receive(out: Tensor, to: GroupRank, into: Tensor, source: GroupRank, group: dist.ProcessGroup) -> None:
    """All ranks at once, each to one and from one. As one collective: sends and receives by themselves would be run one behind
    the other on a stream, and every rank's would wait for the next rank's."""
    sent, received = [0] * group.size(), [0] * group.size()
    sent[to], received[source] = out.numel(), into.numel()
    group.alltoall_base(into, out, received, sent).wait()


def _pack(value: object) -> Tensor:
    buffer = io.BytesIO()
    torch.save(_compact(value), buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _compact(value: Any) -> Any:
    """Give every tensor memory of its own if it is a part of something larger: torch.save() would send all of that."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    if isinstance(value, dict):
        return {key: _compact(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_compact(item) for item in value)
    return value


def _unpack(message: Tensor) -> tuple[dict[PieceTuple, State], list[_Streamed]]:
    buffer = bytearray(message.numel())
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(message)
    try:
        pairs, streamed = load_plain(io.BytesIO(buffer), len(buffer))
        rest = _checked_rest(dict(pairs))
        return rest, [_checked_streamed(rest, *each) for each in streamed]
    except Exception as error:
        raise ZerolapError(
            "an optimizer state holds something other than tensors, numbers, strings and containers of them, "
            f"and is not loaded from another rank: {error}"
        ) from error


def _checked_rest(rest: dict[Any, Any]) -> dict[PieceTuple, State]:
    if not all(_is_part(part) and type(state) is dict for part, state in rest.items()):
        raise TypeError("states do not come by parts of parameters")
    return rest


def _checked_streamed(rest: dict[PieceTuple, State], part: Any, name: Any, dtype: Any, numel: Any) -> _Streamed:
    if (
        part not in rest
        or name not in rest[part]
        or not isinstance(dtype, torch.dtype)
        or type(numel) is not int
        or numel < 0
    ):
        raise TypeError("an entry is announced that no state has")
    return _Streamed(part, name, dtype, numel)


def _is_part(part: Any) -> bool:
    return type(part) is tuple and len(part) == 3 and all(type(each) is int and each >= 0 for each in part)
