"""Optimizer state as ``torch.distributed.checkpoint.state_dict`` hands it out: entries of the parameters' shapes, of which a rank has a part.

A rank owns ranges of a parameter in memory order. A range of a matrix is at most three boxes: the end of a row, whole rows, the beginning
of a row; and so on for more dimensions. That is how a checkpoint takes them, so whatever reads tensors of these shapes reads ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zerolap._torch import TO_COPY, make_wrapper_subclass
from zerolap.runtime.peers import all_gather_json
from zerolap.runtime.shard_optimizer import ShardBook
from zerolap.runtime.state_pieces import State, flat_state, is_flat, strides_in_bucket
from zerolap.runtime.wrapped_tensors import is_taken_apart
from zerolap.schedule.ownership import Piece


class Box(NamedTuple):
    """A part of a tensor with as many dimensions, all of whose elements follow each other in memory."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # of its first element in memory


def boxes(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """A range of a tensor that lies row by row, as few boxes as it takes."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,) * len(shape), (stop - start,) * len(shape), start)
        return
    inner = math.prod(shape[1:])
    (first, begin), (last, end) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from _in_row(first, begin, end, shape)
        return
    if begin:
        yield from _in_row(first, begin, inner, shape)
        first += 1
    if first < last:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]), first * inner)
    yield from _in_row(last, 0, end, shape)


def _in_row(row: int, begin: int, end: int, shape: Sequence[int]) -> Iterator[Box]:
    for box in boxes(begin, end, shape[1:]):
        yield Box((row, *box.offsets), (1, *box.sizes), row * math.prod(shape[1:]) + box.start)


class ParamShards(Tensor):
    """A tensor of which this rank has some ranges, in memory order. For checkpoints only: nothing computes with it."""

    ranges: dict[int, Tensor]  # by where they start

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        strides: Sequence[int],
        ranges: Mapping[int, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> ParamShards:
        self: ParamShards = make_wrapper_subclass(cls, tuple(shape), strides=tuple(strides), dtype=dtype, device=device)
        self.ranges = dict(ranges)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's own has no types
        held = ", ".join(f"{start}:{start + part.numel()}" for start, part in sorted(self.ranges.items())) or "nothing"
        return f"ParamShards({held} of {tuple(self.shape)}, dtype={self.dtype})"

    def _like(self, ranges: Mapping[int, Tensor]) -> ParamShards:
        of = next(iter(ranges.values()), None)
        dtype, device = (self.dtype, self.device) if of is None else (of.dtype, of.device)
        return ParamShards(self.shape, self.stride(), ranges, dtype=dtype, device=device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # as torch's own
        """What moves and stages a state dict; everything else is refused."""
        kwargs = kwargs or {}
        if func in _EACH and isinstance(args[0], ParamShards):
            return args[0]._like({start: func(part, **kwargs) for start, part in args[0].ranges.items()})
        if func is torch.ops.aten.new_empty.default:
            return args[0]._like({start: torch.empty_like(part, **kwargs) for start, part in args[0].ranges.items()})
        if func is torch.ops.aten.copy_.default and all(isinstance(each, ParamShards) for each in args[:2]):
            for start, part in args[0].ranges.items():
                part.copy_(args[1].ranges[start])
            return args[0]
        raise NotImplementedError(
            f"{func} of optimizer state of which this rank has a part only; ask torch.distributed.checkpoint.state_dict for "
            "StateDictOptions(full_state_dict=True)"
        )

    # --- the protocol of torch.distributed.checkpoint -----------------------------------------------------------------

    def parts(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Boxes of what this rank has, by their offsets; they share its memory."""
        strides: tuple[int, ...] = self.stride()
        order = sorted(range(self.ndim), key=lambda dim: (-strides[dim], dim))  # from the slowest in memory
        back = [order.index(dim) for dim in range(self.ndim)]
        shape = [self.shape[dim] for dim in order]
        for start, part in self.ranges.items():
            for box in boxes(start, start + part.numel(), shape):
                first = box.start - start
                view = part[first : first + math.prod(box.sizes)].view(box.sizes)
                yield tuple(box.offsets[dim] for dim in back), view.permute(back)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=part.size()),
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.size(),
                ),
            )
            for offsets, part in self.parts()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=part.size()) for offsets, part in self.parts()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, f"{index.fqn}: asked for a part without its place"
        return next(part for offsets, part in self.parts() if offsets == tuple(index.offset))


_EACH = {
    TO_COPY,
    torch.ops.aten.detach.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.empty_like.default,
}

# --- of an optimizer --------------------------------------------------------------------------------------------------


def states_or_blank(book: ShardBook) -> dict[Piece, State]:
    """The states of what this rank owns, as they are; such as a first step makes for what has none."""
    states = book.flat_states()
    blank = (local.blank_states() for local in book.locals if local.pieces - states.keys())
    return {**{piece: state for each in blank for piece, state in each.items()}, **states}


def shared_states(book: ShardBook, group: dist.ProcessGroup) -> dict[int, State]:
    """The states of all parameters by index, each rank its part, with the same keys on all ranks. A collective."""
    params = book.params
    states = {piece: state for piece, state in states_or_blank(book).items() if piece.start < piece.stop}
    mine = [
        [piece.param, key, *_describe(value, piece)] for piece, state in states.items() for key, value in state.items()
    ]
    found: dict[int, State] = {}
    for said in all_gather_json(mine, group=group, what="comparing what states ranks have"):
        for index, key, kind, dtype, extra in said:
            if key in found.setdefault(index, {}):
                continue
            param = params[index]
            shape = param.shape if kind == "range" else extra
            if kind in ("range", "tensor"):
                strides = strides_in_bucket(param) if kind == "range" else torch.empty(shape, device="meta").stride()
                found[index][key] = ParamShards(shape, strides, {}, dtype=getattr(torch, dtype), device=param.device)
            else:
                found[index][key] = torch.tensor(extra, dtype=getattr(torch, dtype)) if kind == "scalar" else extra
    for piece, state in states.items():
        for key, value in state.items():
            known = found[piece.param][key]
            if isinstance(known, ParamShards) and is_flat(value, piece.stop - piece.start) and key != "step":
                known.ranges[piece.start] = value
            else:
                found[piece.param][key] = value
    return dict(sorted(found.items()))


def _describe(value: Any, piece: Piece) -> tuple[str, str, Any]:
    if is_taken_apart(value):
        raise NotImplementedError(
            "states that are tensors made of others, such as quantised ones, have no form that other implementations read; save them by "
            "zerolap.checkpoint"
        )
    if not isinstance(value, Tensor):
        return "value", "", value
    dtype = str(value.dtype).removeprefix("torch.")
    if value.ndim == 0:
        return "scalar", dtype, value.item()
    return ("range", dtype, None) if is_flat(value, piece.stop - piece.start) else ("tensor", dtype, list(value.shape))


def pieces_given(states: Mapping[int, State | None], params: Sequence[Tensor]) -> dict[Piece, State]:
    """Flat states from a state dict whose entries are whole tensors or ``ParamShards``."""
    found: dict[Piece, State] = {}
    for index, state in states.items():
        if state is None:
            continue
        shards = [value for value in state.values() if isinstance(value, ParamShards)]
        param = params[index]
        if not shards:
            found[Piece(index, 0, param.numel())] = flat_state(state, param)
            continue
        whole = flat_state({key: each for key, each in state.items() if not isinstance(each, ParamShards)}, param)
        for start, first in next((each.ranges for each in shards if each.ranges), {}).items():
            stop = start + first.numel()
            found[Piece(index, start, stop)] = {
                **{key: value[start:stop] if is_flat(value, param.numel()) else value for key, value in whole.items()},
                **{
                    key: each.ranges[start]
                    for key, each in state.items()
                    if isinstance(each, ParamShards) and each.ranges
                },
            }
    return found


def refuse_gaps(book: ShardBook, states: Mapping[int, State | None], given: Mapping[Piece, State]) -> None:
    """ValueError if a state dict of parts is not of the parts that this rank owns now."""
    there = {(piece.param, element) for piece in given for element in (piece.start, piece.stop)}
    whole = {piece.param for piece in given if piece.start == 0 and piece.stop == book.params[piece.param].numel()}
    for local in book.locals:
        for piece in local.pieces:
            is_sharded = any(isinstance(each, ParamShards) for each in (states.get(piece.param) or {}).values())
            is_there = piece.param in whole or {(piece.param, piece.start), (piece.param, piece.stop)} <= there
            if is_sharded and not is_there and piece.start < piece.stop:
                raise ValueError(
                    f"the state dict has other parts of parameter {piece.param} than this rank owns now: DDP has changed its buckets since it "
                    "was made; call get_optimizer_state_dict() again before the checkpoint is loaded into it"
                )


def row_by_row(state: State, device: torch.device | str = "cpu") -> State:
    """A whole state where the plain optimizer would have it. torch broadcasts tensors as they lie in memory, into others that lie row by row."""
    return {
        key: value.to(device).contiguous() if isinstance(value, Tensor) and value.ndim else value
        for key, value in state.items()
    }
