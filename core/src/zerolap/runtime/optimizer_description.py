"""An optimizer as plain data, which ranks compare: its class, its options and what its parameters are.

Parameters that are updated by different rules on different ranks are the worst kind of wrong: every rank's own shard looks fine,
all ranks hold the same parameters, and no audit of those finds anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap.errors import ZerolapError
from zerolap.runtime.param_groups import ParamGroup, options_of, params_of
from zerolap.runtime.peers import all_gather_json

_FEW = 64  # values that are spelled out; of more there is a digest


def compare_between_ranks(
    *optimizers: tuple[Any, Sequence[ParamGroup]],
    group: dist.ProcessGroup,
) -> None:
    """ValueError on all ranks if classes, options or parameters of some optimizers are not the same everywhere."""
    mine = [describe(optimizer_class, groups) for optimizer_class, groups in optimizers]
    what = "comparing the optimizer's class, options and parameters between ranks"
    if len(set(all_gather_json(digest_of(mine), group=group, what=what))) == 1:
        return
    theirs = all_gather_json(mine, group=group, what=what)
    for rank, other in enumerate(theirs):
        difference = first_of_several(theirs[0], other)
        if difference:
            raise ValueError(f"the optimizers of group ranks 0 and {rank} differ: {difference}")
    raise ZerolapError("the ranks' optimizers have different digests but equal descriptions")


def describe(optimizer_class: Any, groups: Sequence[ParamGroup]) -> dict[str, Any]:
    """Everything that must be the same on all ranks."""
    return {
        "class": _plain(optimizer_class),
        "options": describe_options(groups),
        "params": [
            [[list(param.shape), str(param.dtype), param.requires_grad] for param in params_of(group)]
            for group in groups
        ],
    }


def describe_options(groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    return [{key: _plain(value) for key, value in sorted(options_of(group).items())} for group in groups]


def digest_of(described: Any) -> str:
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def first_of_several(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> str | None:
    """Where the descriptions of some optimizers differ, in words."""
    if len(ours) != len(theirs):
        return f"there are {len(ours)} and {len(theirs)} of them"
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        difference = first_difference(a, b)
        if difference:
            return difference if len(ours) == 1 else f"of optimizer {number}, {difference}"
    return None


def first_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Where two descriptions differ, in words."""
    if ours["class"] != theirs["class"]:
        return f"the optimizer's class is {ours['class']} and {theirs['class']}"
    if len(ours["params"]) != len(theirs["params"]):
        return f"there are {len(ours['params'])} and {len(theirs['params'])} param groups"
    for place, (a, b) in enumerate(zip(ours["params"], theirs["params"], strict=True)):
        if len(a) != len(b):
            return f"group {place} has {len(a)} and {len(b)} parameters"
        for index, (mine, other) in enumerate(zip(a, b, strict=True)):
            if mine != other:
                return f"parameter {index} of group {place} is {_words(mine)} and {_words(other)}"
    return first_option(ours["options"], theirs["options"])


def first_option(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> str | None:
    """The first option that differs, in words."""
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for key in sorted({*a, *b}):
            if a.get(key) != b.get(key):
                return f"{key} of param group {place} is {a.get(key, 'absent')} and {b.get(key, 'absent')}"
    return None


def _words(entry: Sequence[Any]) -> str:
    shape, dtype, requires_grad = entry
    return f"{tuple(shape)} {dtype}{'' if requires_grad else ' frozen'}"


def _plain(value: Any) -> Any:
    """What JSON has, the same for equal values in all processes: of an object with an address, its type."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(float(value))  # JSON has no infinities
    if isinstance(value, Tensor):
        return ["tensor", list(value.shape), str(value.dtype), _values(value)]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=repr)
    if isinstance(value, torch.device):
        return value.type  # every rank has its own index
    if isinstance(value, torch.dtype | complex | Enum):
        return str(value)
    if callable(getattr(value, "item", None)):  # NumPy's numbers
        return _plain(value.item())
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _values(tensor: Tensor) -> Any:
    values = tensor.detach().cpu()
    if values.numel() <= _FEW:
        return _plain(values.tolist())
    return hashlib.sha256(bytes(values.contiguous().view(-1).view(torch.uint8).tolist())).hexdigest()
