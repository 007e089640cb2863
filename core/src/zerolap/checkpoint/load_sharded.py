"""Loading a sharded checkpoint on any number of ranks. It trusts nothing it reads.

Digests are compared, the pickles that torch.distributed.checkpoint writes are read as plain data without unpickling, and the live
model and optimizer are touched only when every rank has all of its part. Not named after the function ``load``: a module of that name
would replace it in ``zerolap.checkpoint`` once it is imported.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zerolap._public import public_in
from zerolap.api.optimizer import ZeroRedundancyOptimizer
from zerolap.api.preflight import meeting_group
from zerolap.checkpoint.compatibility import compatibility_of, entries_in
from zerolap.checkpoint.contents import STATES, Optimizers, class_name, module_of, on_all_or_none, optimizers_of
from zerolap.checkpoint.folder import find, latest, manifest_of, path_of, step_number, steps
from zerolap.checkpoint.reader import CheckpointError, CheckpointReader, unpacked
from zerolap.errors import ZerolapError
from zerolap.runtime.dcp_state import ParamShape, compare, from_sharded, room_for, saved_shapes, shapes_of
from zerolap.runtime.optimizer_state import options_by_name
from zerolap.runtime.param_groups import Options, options_of
from zerolap.runtime.peers import all_gather_json
from zerolap.runtime.state_pieces import State
from zerolap.schedule.ownership import Piece


@public_in("zerolap.checkpoint")
@dataclass(frozen=True, slots=True)
class Loaded:
    """What came with a checkpoint that was loaded."""

    step: int
    extra: Any
    path: Path


@public_in("zerolap.checkpoint")
def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None,
    *,
    step: int | None = None,
    strict: bool = True,
) -> Loaded:
    """Load the latest checkpoint, or that of ``step``; called by all ranks of the optimizer's group, however many there are.

    FileNotFoundError if there is none; CheckpointError, on all ranks and with nothing changed, if it is damaged or does not fit.

    Args:
        folder: The folder that ``save`` was given.
        model: The DDP, or the module in it, to load into.
        optimizer: The optimizer to load into, attached or not, or a list of several. Every parameter's state is found by its name, so what
            one optimizer has saved may go to several of the same classes. None: the model only, as to evaluate it.
        step: Which checkpoint, the same on all ranks. Default: the one that was written last.
        strict: If False, parameters that it does not have stay as they are, and those it has beyond the model's are left out; so is the
            state of another optimizer class where it does not fit, and its options. Shapes must match all the same.
    """
    optimizers = [] if optimizer is None else optimizers_of(optimizer)
    group = meeting_group(*optimizers, model)
    path = _chosen(folder, step, group)
    before = on_all_or_none(lambda: _manifest_digest(path), group, f"looking at {path}")
    if len(set(all_gather_json(before, group=group, what=f"comparing {path} between ranks"))) > 1:
        raise CheckpointError(
            f"{path} is not the same on all ranks; they need one folder, and it must not be written while it is loaded"
        )
    reader = on_all_or_none(
        lambda: CheckpointReader(path, share=(group.rank(), group.size())), group, f"checking {path}"
    )

    def read() -> _Found:
        found = _read(reader, model, optimizers, strict=strict)
        if _manifest_digest(path) != before:
            raise CheckpointError(f"{path} was replaced while it was loaded; load again")
        return found

    found = on_all_or_none(_damaged_is_an_error(read, path), group, f"loading {path}")
    module_of(model).load_state_dict(found.model, strict=strict)
    for each, part in zip(optimizers, found.parts, strict=True):
        each._resume_from(part.options, part.states)
    return Loaded(reader.step, found.extra, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Of one optimizer."""

    options: list[Options]
    states: dict[Piece, State]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """This rank's part of a checkpoint, read into memory of its own: the live model and optimizers are not touched yet."""

    model: dict[str, Any]
    parts: list[_Part]  # by optimizer
    extra: Any


def _read(
    reader: CheckpointReader, model: nn.Module, optimizers: Sequence[ZeroRedundancyOptimizer], *, strict: bool
) -> _Found:
    """Everything this rank loads; CheckpointError if it does not fit the model."""
    about = {"about": reader.room(("about",))} if reader.has(("about",)) else {}
    small = reader.read(
        {"optimizer": {"params": None, "param_groups": None}, "extra": reader.room(("extra",)), **about}
    )
    saved_groups = small["optimizer"]["param_groups"]
    then = saved_shapes(small["optimizer"]["params"])
    room = {
        name: torch.empty_like(value, device="cpu") if isinstance(value, Tensor) else None
        for name, value in module_of(model).state_dict().items()
    }
    classes = _saved_classes(unpacked(small["about"]), saved_groups) if about else {}
    plans = [_plan(reader, model, each, saved_groups=saved_groups, classes=classes, then=then) for each in optimizers]
    now = [param for plan in plans for param in plan.params]
    differences = [
        *(compare(now, then) if optimizers else ()),
        *_differences(room, reader),
        *(each for plan in plans for each in plan.differences),
    ]
    if not strict:
        differences = [difference for difference in differences if "has shape" in difference]
        room = {name: value for name, value in room.items() if reader.has(("model", name))}
    if differences:
        raise CheckpointError(f"{reader.folder} does not fit the model: " + "; ".join(dict.fromkeys(differences)))
    states = {name: state for plan in plans for name, state in plan.room.items()}
    whole = reader.read({"model": room, "optimizer": {"state": states}})
    return _Found(
        model=whole["model"],
        parts=[
            _Part(options=plan.options, states=from_sharded(whole["optimizer"]["state"], plan.params, then))
            for plan in plans
        ],
        extra=unpacked(small["extra"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What one optimizer takes from a checkpoint, before its states are read."""

    params: Sequence[ParamShape]
    options: list[Options]
    differences: list[str]
    room: dict[str, State]


def _plan(
    reader: CheckpointReader,
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    *,
    saved_groups: Sequence[Mapping[str, Any]],
    classes: Mapping[str, str],
    then: Mapping[str, ParamShape],
) -> _Plan:
    now = shapes_of(model, optimizer._book.params)
    options = options_by_name(optimizer.param_groups, saved_groups, now)
    saved_class = "+".join(dict.fromkeys(classes[param.name] for param in now if param.name in classes)) or None
    fit = compatibility_of(
        saved_class,
        class_name(optimizer),
        saved_options=options,
        groups=optimizer.param_groups,
        entries=entries_in(reader.metadata, STATES),
        params=now,
        factory=optimizer._book.factory,
    )
    pieces = [piece for local in optimizer._book.locals for piece in local.pieces]
    pieces = [piece for piece in pieces if now[piece.param].name not in fit.without_state]
    return _Plan(
        params=now,
        options=options if fit.is_same_class else [options_of(each) for each in optimizer.param_groups],
        differences=fit.differences,
        room=room_for(reader.metadata, STATES, pieces, now, then),
    )


def _saved_classes(about: Mapping[str, Any], saved_groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The class that has updated each parameter."""
    by_group = about.get("group_classes")
    if by_group is None:  # of one optimizer
        by_group = [about["optimizer_class"]] * len(saved_groups)
    return {
        name: str(its_class)
        for its_class, group in zip(by_group, saved_groups, strict=True)
        for name in group["params"]
    }


def _chosen(folder: str | os.PathLike[str], step: Any, group: dist.ProcessGroup) -> Path:
    """The checkpoint to load: the first rank's choice, so that all load the same one."""

    def look() -> tuple[list[int], int | None, int | None]:
        return steps(folder), latest(folder), None if step is None else step_number(step)

    mine = on_all_or_none(look, group, "looking for checkpoints")
    said = all_gather_json(mine, group=group, what="choosing a checkpoint")
    held, newest, _ = said[0]
    wanted = {each[2] for each in said}
    if len(wanted) > 1:
        raise ValueError(f"the ranks load different steps: {[each[2] for each in said]}")
    (number,) = wanted
    if not held or (number is not None and number not in held):
        raise FileNotFoundError(
            f"{folder} has no complete checkpoint{'' if number is None else f' of step {number}'}; it has {held}"
        )
    number = newest if number is None else number
    return find(folder, number) or path_of(folder, number)


def _manifest_digest(path: Path) -> str:
    """Tells one checkpoint from another that has taken its place."""
    try:
        return hashlib.blake2b(manifest_of(path)).hexdigest()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _differences(room: Mapping[str, Any], reader: CheckpointReader) -> list[str]:
    """What the checkpoint's model has otherwise, buffers included."""
    saved = reader.names(("model",))
    found = [f"{name} is not in the checkpoint" for name in room if name not in saved]
    found += [f"{name} of the checkpoint is not in the model" for name in saved if name not in room]
    for name, value in room.items():
        kept = saved.get(name)
        if isinstance(kept, TensorStorageMetadata) and isinstance(value, Tensor) and kept.size != value.shape:
            found.append(f"{name} has shape {tuple(kept.size)} in the checkpoint and {tuple(value.shape)} in the model")
    return found


def _damaged_is_an_error(read: Callable[[], Any], path: Path) -> Callable[[], Any]:
    def wrapped() -> Any:
        try:
            return read()
        except ZerolapError:
            raise
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error

    return wrapped
