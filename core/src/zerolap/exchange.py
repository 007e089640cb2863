"""Plain data and optimizer states between ranks. Nothing a peer sends is ever executed: JSON, or tensors by weights_only."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap.errors import CollectiveError, ZerolapError
from zerolap.plan import GroupRank, Piece
from zerolap.states import State, cut_state

# Collectives here are methods of the group, not functions of torch.distributed: those know registered groups only, and
# hide what went wrong on another behind an error of their own.
_CHUNK_BYTES = 256 * 2**20  # one message; some transports take no more than 2**31 bytes at a time


def all_gather_json(value: object, *, group: dist.ProcessGroup, what: str) -> list[Any]:
    """Every rank's ``value``, in rank order."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    device = torch.device(dist.distributed_c10d._get_object_coll_device(group))
    try:
        sizes = _all_gather(torch.tensor([data.numel()], device=device), group)
        longest = max(int(size.item()) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        gathered = _all_gather(padded.to(device), group)
    except Exception as error:
        raise CollectiveError(f"rank {dist.get_rank()}: {what} failed: {error}") from error
    return [
        json.loads(bytes(part[: int(size.item())].cpu().tolist())) for part, size in zip(gathered, sizes, strict=True)
    ]


def refuse_together(check: Callable[[], object], *, group: dist.ProcessGroup, what: str) -> Any:
    """Run ``check`` on every rank; if it raises on any, raise on all. Returns what it returned.

    Without this, one rank would leave with a clear error and the others would wait for it until their timeout.
    """
    mine: Exception | None = None
    result: object = None
    try:
        result = check()
    except Exception as error:
        mine = error
    said = all_gather_json(None if mine is None else f"{type(mine).__name__}: {mine}", group=group, what=what)
    if mine is not None:
        raise mine
    refusals = [f"rank {rank}: {message}" for rank, message in enumerate(said) if message is not None]
    if refusals:
        raise ZerolapError(f"{what} was refused on another rank. " + "; ".join(refusals))
    return result


def move_states(
    states: Mapping[Piece, State],
    *,
    routes: Callable[[int], Sequence[tuple[int, int, GroupRank]]],
    group: dist.ProcessGroup,
    device: torch.device,
    what: str,
) -> dict[Piece, State]:
    """Send flat states to where ``routes`` says a parameter's elements belong; return those that belong here.

    ``routes(param)`` gives (start, stop, owner) for every part of a parameter. A collective. In round k a rank sends to the
    one k places on and receives from the one k places back, so that no rank holds more than one other rank's message at a
    time and only owners receive anything. What was here already is returned as it is.
    """
    rank, world_size = group.rank(), group.size()
    outgoing: list[dict[tuple[int, int, int], State]] = [{} for _ in range(world_size)]
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
            message = _pack(outgoing[to])
            sizes = _all_gather(torch.tensor([message.numel()], device=device), group)
            numels = [int(size.item()) for size in sizes]
            received = torch.empty(numels[source], dtype=torch.uint8, device=device)
            message = message.to(device)
            for start in range(0, max(numels), _CHUNK_BYTES):
                chunk = slice(start, start + _CHUNK_BYTES)
                _send_and_receive(message[chunk], to, received[chunk], source, group)
            arrived.update(_unpack(received))
    except ZerolapError:
        raise
    except Exception as error:
        raise CollectiveError(f"rank {dist.get_rank()}: {what} failed: {error}") from error
    return {Piece(*key): state for key, state in arrived.items()}


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    group.allgather(parts, tensor).wait()
    return parts


def _send_and_receive(out: Tensor, to: GroupRank, into: Tensor, source: GroupRank, group: dist.ProcessGroup) -> None:
    """All ranks at once, each to one and from one. As one collective: sends and receives by themselves would be run one behind
    the other on a stream, and every rank's would wait for the next rank's."""
    sent, received = [0] * group.size(), [0] * group.size()
    sent[to], received[source] = out.numel(), into.numel()
    group.alltoall_base(into, out, received, sent).wait()


def _pack(states: dict[tuple[int, int, int], State]) -> Tensor:
    if not states:
        return torch.empty(0, dtype=torch.uint8)
    buffer = io.BytesIO()
    torch.save(_compact(states), buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _compact(value: Any) -> Any:
    """Give every tensor memory of its own if it is a part of something larger: torch.save() would send all of that."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    if isinstance(value, dict):
        return {key: _compact(item) for key, item in value.items()}
    return value


def _unpack(message: Tensor) -> dict[tuple[int, int, int], State]:
    if not message.numel():
        return {}
    buffer = bytearray(message.numel())
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(message)
    try:
        states: dict[tuple[int, int, int], State] = torch.load(
            io.BytesIO(buffer), map_location="cpu", weights_only=True
        )
    except Exception as error:
        raise ZerolapError(
            "an optimizer state holds something other than tensors, numbers, strings and containers of them, "
            f"and is not loaded from another rank: {error}"
        ) from error
    return states
