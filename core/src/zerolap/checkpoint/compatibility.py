"""Whether an optimizer can use the states of a checkpoint: its class, options and state entries compared with the saved ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from zerolap._logging import logger_of
from zerolap.runtime.dcp_state import ParamShape, compare_options
from zerolap.runtime.param_groups import Options, ParamGroup, options_of, params_of
from zerolap.runtime.shard_optimizer import MASTER, stand_in_for
from zerolap.untrusted.files import printable

_LARGEST_TRIED = 2**22  # elements of a parameter that a class is tried on

logger = logger_of(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compatibility:
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


def compatibility_of(
    saved_class: str | None,
    our_class: str,
    *,
    saved_options: Sequence[Options],
    groups: Sequence[ParamGroup],
    entries: Mapping[str, frozenset[str]],
    params: Sequence[ParamShape],
    factory: Callable[[list[ParamGroup]], Optimizer],
) -> Compatibility:
    """Compare a checkpoint's class, options and state entries with those of an optimizer.

    Checkpoints of single files, and of older versions, do not name the class. What their states should have is found by a step of
    the class on a tensor like the smallest parameter of each kind.
    """
    kinds: dict[tuple[int, int], list[tuple[Tensor, ParamShape]]] = {}
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
        # Which entries there are may depend on switches and rates that are saved, too. Counts are left: a step could take forever.
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
    return Compatibility(
        differences=differences,
        without_state=frozenset(misfits),
        is_same_class=saved_class == our_class or (saved_class is None and not differences),
    )


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
