"""Optimizer state as torch.distributed.checkpoint takes it: every rank its own pieces, loaded on any number of ranks.

A state entry with one value per element is saved flat, as ``FlatShards``: a tensor of one dimension of which this rank holds
some ranges. Which ranks held which ranges when it was saved is the checkpoint's business; whoever loads asks for other ranges and
gets them. All other entries (step counts, factored moments) are saved as they are, by one of the ranks that have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from torch.optim import Optimizer

from zerolap._logging import logger_of
from zerolap._torch import make_wrapper_subclass
from zerolap._torch.checkpoint_format import set_element
from zerolap.runtime.param_groups import Options, ParamGroup, options_of, params_of
from zerolap.runtime.shard_optimizer import MASTER, stand_in_for
from zerolap.runtime.state_pieces import State, strides_in_bucket
from zerolap.schedule.ownership import Piece
from zerolap.untrusted.files import printable

_LARGEST_TRIED = 2**22  # elements of a parameter that a class is tried on

logger = logger_of(__name__)


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


class Described(NamedTuple):
    """A parameter as a checkpoint knows it. Flat entries are in the order of its memory, so strides matter."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, name: str, param: Tensor) -> Described:
        return cls(name, tuple(param.shape), tuple(strides_in_bucket(param)))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def described_then(saved: Any) -> dict[str, Described]:
    """The parameters as a checkpoint says they were, by name; ValueError if no parameter can be like that."""
    then: dict[str, Described] = {}
    if type(saved) not in (list, tuple):
        raise ValueError("the checkpoint does not list its parameters")
    for each in saved:
        match each:
            case (str(name), [*shape], [*strides]) if name not in then and _is_dense(shape, strides):
                then[name] = Described(name, tuple(shape), tuple(strides))
            case _:
                raise ValueError(f"the checkpoint describes a parameter that cannot be: {printable(repr(each), 200)}")
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


def compare(params: Sequence[Described], then: Mapping[str, Described]) -> list[str]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What an optimizer can do with the states of a checkpoint: in words where it cannot, and the parameters whose state it leaves."""

    differences: list[str]
    without_state: frozenset[str]
    is_same_class: bool


def entries_in(saved: Metadata, path: tuple[str, ...]) -> dict[str, frozenset[str]]:
    """The names of the entries that each parameter's state has in a checkpoint; masters are ours, not the class's."""
    found: dict[str, set[str]] = {}
    for where in (saved.planner_data or {}).values():
        if tuple(where[: len(path)]) == path and len(where) > len(path) + 1:
            found.setdefault(str(where[len(path)]), set()).add(str(where[len(path) + 1]))
    return {name: frozenset(keys - {MASTER}) for name, keys in found.items() if keys - {MASTER}}


def fit_of(
    saved_class: str | None,
    our_class: str,
    *,
    saved_options: Sequence[Options],
    groups: Sequence[ParamGroup],
    entries: Mapping[str, frozenset[str]],
    params: Sequence[Described],
    factory: Callable[[list[ParamGroup]], Optimizer],
) -> Fit:
    """Compare a checkpoint's class, options and state entries with those of an optimizer.

    Checkpoints of single files, and of older versions, do not name the class. What their states should have is found by a step of
    the class on a tensor like the smallest parameter of each kind.
    """
    kinds: dict[tuple[int, int], list[tuple[Tensor, Described]]] = {}
    described = iter(params)
    for place, group in enumerate(groups):
        for param in params_of(group):
            found = next(described)
            if found.name in entries:
                kinds.setdefault((place, param.ndim), []).append((param, found))
    misfits: dict[str, str] = {}
    for (place, _), alike in kinds.items() if saved_class != our_class else ():
        param, specimen = min(alike, key=lambda each: each[0].numel())
        ours = options_of(groups[place])
        # Which entries there are may depend on switches and rates that are saved, too. Counts are left: a step could take for ever.
        theirs = {key: value for key, value in saved_options[place].items() if isinstance(value, bool | float)}
        expected = _entries_made(factory, ours, param)
        if saved_class is None and expected != entries[specimen.name]:
            expected = (
                _entries_made(factory, {**ours, **{key: theirs.get(key, ours[key]) for key in ours}}, param) or expected
            )
        for _, each in alike:
            has = entries[each.name]
            if expected is None:
                is_misfit = saved_class is not None
            else:
                is_misfit = entries[specimen.name] != expected or has < expected
            if is_misfit:
                said = printable(sorted(has), 300)
                misfits[each.name] = (
                    f"the state of {each.name} has {said}, where {our_class} keeps {sorted(expected or ())}"
                )
    differences = list(misfits.values())
    if saved_class not in (None, our_class):
        differences = [f"it was saved with the optimizer {printable(saved_class, 100)}, not {our_class}"]
    elif saved_class is None and not differences:
        differences = compare_options(saved_options, groups, our_class)
    return Fit(
        differences=differences,
        without_state=frozenset(misfits),
        is_same_class=saved_class == our_class or (saved_class is None and not differences),
    )


def compare_options(saved: Sequence[Options], groups: Sequence[ParamGroup], our_class: str) -> list[str]:
    """A difference if both sides have options that the other does not know: one alone may be of another version."""
    given = {key for options in saved for key in options_of(options)}
    ours = {key for group in groups for key in options_of(group)}
    if given - ours and ours - given:
        said = printable(sorted(given - ours), 300)
        return [f"its options {said} are none of {our_class}'s, which needs {sorted(ours - given)}"]
    return []


def _entries_made(
    factory: Callable[[list[ParamGroup]], Optimizer], options: Options, like: Tensor
) -> frozenset[str] | None:
    """The entries that a first step leaves in the state of such a parameter; None if that cannot be tried."""
    if like.numel() > _LARGEST_TRIED:
        return None
    tried = stand_in_for(like, torch.zeros_like(like, memory_format=torch.contiguous_format))
    tried.requires_grad_()
    tried.grad = torch.ones_like(tried)
    try:
        with torch.random.fork_rng(devices=[]):
            optimizer = factory([{**options, "params": [tried]}])
            optimizer.step()
    except Exception as error:  # whatever a class of the user's raises for such options, it is not what is asked here
        logger.debug("the entries of an optimizer's state are not known: %s: %s", type(error).__name__, error)
        return None
    return frozenset(optimizer.state[tried]) if tried in optimizer.state else frozenset()


def to_sharded(states: Mapping[Piece, State], params: Sequence[Described]) -> dict[str, State]:
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
    params: Sequence[Described],
    then: Mapping[str, Described],
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
    sharded: Mapping[str, State], params: Sequence[Described], then: Mapping[str, Described]
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


def _reordered(value: Tensor, param: Described, then: Described) -> Tensor:
    if param == then:
        return value
    shaped = value.as_strided(then.shape, then.strides)
    return (
        torch.empty_strided(param.shape, param.strides, dtype=value.dtype)
        .copy_(shaped)
        .as_strided((param.numel,), (1,))
    )


def _is_nothing(piece: Piece, param: Described) -> bool:
    """Whether a piece holds nothing of a parameter that has something."""
    return piece.start == piece.stop and param.numel > 0


def _is_flat_entry(key: str, size: torch.Size, numel: int) -> bool:
    """Whether an entry has one value for each of so many elements."""
    return key != "step" and tuple(size) == (numel,) and numel > 0


def _with_range(held: FlatShards | None, numel: int, start: int, part: Tensor) -> FlatShards:
    return FlatShards(numel, {**(held.ranges if held is not None else {}), start: part})
