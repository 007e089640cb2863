"""Plain optimizers as they stand: what an instance consists of, and others like it over other parameters. No communication.

An instance is not made again by its class's constructor, whose arguments it need not have kept: what it holds itself is copied, and
torch's part of it is made anew.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerolap._torch import STEP_CALLED, WRAPPED_BY_SCHEDULER, step_hooks_of
from zerolap.api.preflight import check_methods, replaced_method
from zerolap.runtime.optimizer_facts import Factory
from zerolap.runtime.param_groups import ParamGroup, params_of

_TORCHS = vars(Optimizer([torch.zeros(1)], {}))  # what every optimizer has, whatever its class
_HOOKS = [name for name, value in _TORCHS.items() if isinstance(value, OrderedDict)]


def factory_like(plain: Optimizer) -> Factory:
    """What makes optimizers like this one, of its class and with what it holds, over other parameters."""
    made_of = {name: value for name, value in vars(plain).items() if name not in (*_TORCHS, STEP_CALLED)}
    made_of = {name: _own_copy(value) for name, value in made_of.items() if replaced_method(plain, name) is None}
    cls, defaults = type(plain), dict(plain.defaults)
    hooks = tuple([hook.__func__ for hook in each.values() if _is_of(hook, plain)] for each in step_hooks_of(plain))

    def make(groups: list[ParamGroup]) -> Optimizer:
        other = cls.__new__(cls)
        vars(other).update({name: _own_copy(value) for name, value in made_of.items()})
        Optimizer.__init__(other, groups, dict(defaults))
        for functions, register in zip(
            hooks, (other.register_step_pre_hook, other.register_step_post_hook), strict=True
        ):
            for function in functions:
                register(MethodType(function, other))
        return other

    return make


def hooks_of(plain: Optimizer) -> dict[str, Any]:
    """The hooks that were registered on it, by the attribute that has them."""
    return {name: getattr(plain, name) for name in _HOOKS}


def forget_own_hooks(optimizer: Optimizer) -> None:
    """Those that its class has registered itself: what steps has them now."""
    for hooks in hooks_of(optimizer).values():
        for key in [key for key, hook in hooks.items() if _is_of(hook, optimizer)]:
            del hooks[key]


def is_scheduled(plain: Optimizer) -> bool:
    """Whether an LR scheduler was made on it: that wraps step(), to see whether it was called."""
    return hasattr(vars(plain).get("step"), WRAPPED_BY_SCHEDULER)


def refuse_bound(plain: Optimizer) -> None:
    """TypeError if it holds what binds it to its own parameters, or what somebody has put in place of its methods."""
    name = type(plain).__name__
    instead = f"zerolap.ZeroRedundancyOptimizer(ddp.parameters(), {name}, ..., overlap_with_ddp=True) and zerolap.attach() make one anew"
    params = {id(param) for group in plain.param_groups for param in params_of(group)}
    for attribute, value in vars(plain).items():
        if attribute in _TORCHS:
            continue
        if not hasattr(value, WRAPPED_BY_SCHEDULER):
            check_methods(plain, [attribute])
        for each in _within(value):
            if isinstance(each, Optimizer) or id(each) in params:
                what = "another optimizer" if isinstance(each, Optimizer) else "some of its parameters"
                raise TypeError(
                    f"this {name} keeps {what} in its attribute {attribute!r}, and so cannot be taken over; {instead}"
                )


def describe_states(plain: Optimizer) -> list[Any]:
    """What of its states must be the same on all ranks, as plain data: which there are, of what kind, and their step counts."""
    said = []
    for group in plain.param_groups:
        for param in params_of(group):
            state = plain.state.get(param, {})
            said.append(sorted((str(key), _described(value)) for key, value in state.items()))
    return said


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return [list(value.shape), str(value.dtype), value.item() if value.numel() == 1 else None]
    return repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__


def _is_of(hook: Any, plain: Optimizer) -> bool:
    return getattr(hook, "__self__", None) is plain


def _within(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _within(key)
            yield from _within(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _within(item)


def _own_copy(value: Any) -> Any:
    """Of data a copy, as instances must not count for each other; whatever else it is, such as a process group, is shared."""
    return copy.deepcopy(value) if all(_is_data(each) for each in _within(value)) else value


def _is_data(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float | complex | str | bytes | Tensor | torch.dtype | torch.device | Mapping)
        or type(value) in (list, tuple, set, frozenset)
    )
