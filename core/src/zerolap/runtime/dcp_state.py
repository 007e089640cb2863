"""Optimizer state as torch.distributed.checkpoint takes it: every rank its own pieces, loaded on any number of ranks.

A state entry with one value per element is saved flat, as ``FlatShards``: a tensor of one dimension of which this rank holds
some ranges. Which ranks held which ranges when it was saved is the checkpoint's business; whoever loads asks for other ranges and
gets them. All other entries (step counts, factored moments) are saved as they are, by one of the ranks that have them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zerolap._torch import make_wrapper_subclass
from zerolap._torch.checkpoint_format import set_element
from zerolap.runtime.param_groups import Options, ParamGroup, options_of
from zerolap.runtime.state_pieces import State, strides_in_bucket
from zerolap.schedule.ownership import Piece
from zerolap.untrusted.files import printable


class FlatShards(Tensor):
    """A tensor of one dimension of which this rank holds some ranges. For checkpoints only: nothing computes with it."""

    ranges: dict[int, Tensor]  # by where they start

    @staticmethod
    def __new__(cls, numel: int, ranges: Mapping[int, Tensor]) -> FlatShards:
        first = next(iter(ranges.values()))
        self: FlatShards = make_wrapper_subclass(cls, (numel,), dtype=first.dtype, device=first.device)
        self.ranges = dict(ranges)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's own has no types
        held = ", ".join(f"{start}:{start + part.numel()}" for start, part in sorted(self.ranges.items()))
        return f"FlatShards({held} of {self.numel()}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # as torch's own
        """The one thing that staging for an asynchronous save does; everything else is refused."""
        if func is torch.ops.aten.new_empty.default:
            shards, _size = args
            return FlatShards(
                shards.numel(), {start: torch.empty_like(part, **kwargs) for start, part in shards.ranges.items()}
            )
        raise NotImplementedError(f"{func} of a tensor of which this rank holds some ranges only")

    # --- the protocol of torch.distributed.checkpoint -----------------------------------------------------------------

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.ranges[chunk.offsets[0]]),
                    size=self.size(),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size([start]), sizes=part.size()) for start, part in self.ranges.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, f"{index.fqn}: asked for a range without its start"
        return self.ranges[index.offset[0]]


def names_of(model: nn.Module, params: Sequence[Tensor]) -> list[str]:
    """The name of each parameter in the model, without what DDP puts before it; ValueError if the model has not all."""
    found: dict[Tensor, str] = {param: name.removeprefix("module.") for name, param in model.named_parameters()}
    strangers = [index for index, param in enumerate(params) if param not in found]
    if strangers:
        raise ValueError(f"the model has no parameters {strangers} of the optimizer; give the model it was made for")
    return [found[param] for param in params]


class ParamShape(NamedTuple):
    """A parameter as a checkpoint knows it. Flat entries are in the order of its memory, so strides matter."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, name: str, param: Tensor) -> ParamShape:
        return cls(name, tuple(param.shape), tuple(strides_in_bucket(param)))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def shapes_of(model: nn.Module, params: Sequence[Tensor]) -> list[ParamShape]:
    """The optimizer's parameters, in its order, with their names in the model."""
    return [ParamShape.of(name, param) for name, param in zip(names_of(model, params), params, strict=True)]


def saved_shapes(saved: Any) -> dict[str, ParamShape]:
    """The parameters as a checkpoint says they were, by name; ValueError if no parameter can be like that."""
    then: dict[str, ParamShape] = {}
    if type(saved) not in (list, tuple):
        raise ValueError("the checkpoint does not list its parameters")
    for each in saved:
        match each:
            case (str(name), [*shape], [*strides]) if name not in then and _is_dense(shape, strides):
                then[name] = ParamShape(name, tuple(shape), tuple(strides))
            case _:
                raise ValueError(f"the checkpoint describes an impossible parameter: {printable(repr(each), 200)}")
    return then


def _is_dense(shape: list[Any], strides: list[Any]) -> bool:
    """Whether a tensor of this shape can lie in memory like this, each element in a place of its own and without gaps."""
    if len(shape) != len(strides) or not all(type(each) is int and 0 <= each < 2**60 for each in (*shape, *strides)):
        return False
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return expected < 2**60 or 0 in shape


def compare(params: Sequence[ParamShape], then: Mapping[str, ParamShape]) -> list[str]:
    """Everything in which a checkpoint's parameters differ from the model's, in words."""
    now = {param.name: param for param in params}
    return [
        *(f"{name} is not in the checkpoint" for name in now if name not in then),
        *(f"{name} of the checkpoint is not in the model" for name in then if name not in now),
        *(
            f"{name} has shape {then[name].shape} in the checkpoint and {param.shape} in the model"
            for name, param in now.items()
            if name in then and then[name].shape != param.shape
        ),
    ]


def compare_options(saved: Sequence[Options], groups: Sequence[ParamGroup], our_class: str) -> list[str]:
    """A difference if both sides have options that the other does not know: one alone may be of another version."""
    given = {key for options in saved for key in options_of(options)}
    ours = {key for group in groups for key in options_of(group)}
    if given - ours and ours - given:
        said = printable(sorted(given - ours), 300)
        return [f"its options {said} are none of {our_class}'s, which needs {sorted(ours - given)}"]
    return []


def to_sharded(states: Mapping[Piece, State], params: Sequence[ParamShape]) -> dict[str, State]:
    """This rank's flat states by parameter name. Shares their memory."""
    sharded: dict[str, State] = {}
    for piece, state in states.items():
        param = params[piece.param]
        if _is_nothing(piece, param):
            continue
        entries = sharded.setdefault(param.name, {})
        for key, value in state.items():
            is_flat = isinstance(value, Tensor) and _is_flat_entry(key, value.shape, piece.stop - piece.start)
            entries[key] = _with_range(entries.get(key), param.numel, piece.start, value) if is_flat else value
    return sharded


def room_for(
    saved: Metadata,
    path: tuple[str, ...],
    pieces: Iterable[Piece],
    params: Sequence[ParamShape],
    then: Mapping[str, ParamShape],
) -> dict[str, State]:
    """Memory on the CPU for this rank's pieces of the states a checkpoint has under ``path``: what its loader fills.

    ``then`` is what the parameters were when it was saved. If one lay otherwise in memory, all of its state is loaded.
    """
    entries: dict[str, dict[tuple[Any, ...], Any]] = {}
    for flat_name, where in (saved.planner_data or {}).items():
        if tuple(where[: len(path)]) == path and len(where) > len(path) + 1:
            name, *keys = where[len(path) :]
            if any(type(key) is int and not 0 <= key < len(saved.planner_data or ()) for key in keys):
                raise ValueError(f"the state of {printable(name, 200)} has more entries than the checkpoint")
            entries.setdefault(str(name), {})[tuple(keys)] = saved.state_dict_metadata[flat_name]
    room: dict[str, State] = {}
    for piece in pieces:
        param = params[piece.param]
        if _is_nothing(piece, param):
            continue
        start, stop = (piece.start, piece.stop) if param == then.get(param.name) else (0, param.numel)
        for (key, *inner), kept in entries.get(param.name, {}).items():
            state = room.setdefault(param.name, {})
            is_tensor = isinstance(kept, TensorStorageMetadata)
            if is_tensor and not inner and _is_flat_entry(key, kept.size, param.numel):
                memory = torch.empty(stop - start, dtype=kept.properties.dtype)
                state[key] = _with_range(state.get(key), param.numel, start, memory)
            else:  # as it is; lists and dicts of tensors were taken apart
                value = torch.empty(kept.size, dtype=kept.properties.dtype) if is_tensor else None
                set_element(state, (key, *inner), value)
    return room


def from_sharded(
    sharded: Mapping[str, State], params: Sequence[ParamShape], then: Mapping[str, ParamShape]
) -> dict[Piece, State]:
    """Flat states by piece, given what was loaded by name."""
    states: dict[Piece, State] = {}
    for index, param in enumerate(params):
        entries = sharded.get(param.name, {})
        flat = {key: value for key, value in entries.items() if isinstance(value, FlatShards)}
        others = {key: value for key, value in entries.items() if key not in flat}
        if not flat:
            if others:
                states[Piece(index, 0, param.numel)] = others
            continue
        for start, first in next(iter(flat.values())).ranges.items():
            state = {key: _reordered(value.ranges[start], param, then[param.name]) for key, value in flat.items()}
            states[Piece(index, start, start + first.numel())] = state | others
    return states


def _reordered(value: Tensor, param: ParamShape, then: ParamShape) -> Tensor:
    if param == then:
        return value
    shaped = value.as_strided(then.shape, then.strides)
    return (
        torch.empty_strided(param.shape, param.strides, dtype=value.dtype)
        .copy_(shaped)
        .as_strided((param.numel,), (1,))
    )


def _is_nothing(piece: Piece, param: ParamShape) -> bool:
    """Whether a piece holds nothing of a parameter that has something."""
    return piece.start == piece.stop and param.numel > 0


def _is_flat_entry(key: str, size: torch.Size, numel: int) -> bool:
    """Whether an entry has one value for each of ``numel`` elements."""
    return key != "step" and tuple(size) == (numel,) and numel > 0


def _with_range(held: FlatShards | None, numel: int, start: int, part: Tensor) -> FlatShards:
    return FlatShards(numel, {**(held.ranges if held is not None else {}), start: part})
