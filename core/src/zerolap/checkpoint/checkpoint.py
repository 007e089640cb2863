"""Checkpoints of a model and its sharded optimizer: atomic, written by all ranks, loaded by any number of them.

A checkpoint gets its name once everything in it is on disk. Loading trusts nothing it reads: digests are compared, the pickles
that torch.distributed.checkpoint writes are read as plain data without unpickling, and the live model and optimizer are
touched only when every rank has all of its part.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn.parallel import DistributedDataParallel

from zerolap._public import public_in
from zerolap.api.optimizer import ZeroRedundancyOptimizer
from zerolap.checkpoint.compatibility import Compatibility, compatibility_of, entries_in
from zerolap.checkpoint.folder import find, keep_number, latest, manifest_of, path_of, step_number, steps
from zerolap.checkpoint.reader import CheckpointError, CheckpointReader, unpacked
from zerolap.checkpoint.writer import Saving, Target, limit_of, partial_name, timeout_of, write_state
from zerolap.errors import CollectiveError, ZerolapError
from zerolap.runtime.dcp_state import (
    FlatShards,
    ParamShape,
    compare,
    from_sharded,
    room_for,
    saved_shapes,
    shapes_of,
)
from zerolap.runtime.optimizer_state import options_by_name
from zerolap.runtime.param_groups import options_of
from zerolap.runtime.peers import all_gather_json, refuse_together
from zerolap.runtime.state_pieces import copied
from zerolap.schedule.ownership import greedy_owners

STATES = ("optimizer", "state")  # where they are in a checkpoint


@public_in("zerolap.checkpoint")
@dataclass(frozen=True, slots=True)
class Loaded:
    """What came with a checkpoint that was loaded."""

    step: int
    extra: Any
    path: Path


# --- saving -----------------------------------------------------------------------------------------------------------


@public_in("zerolap.checkpoint")
def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    *,
    step: int,
    extra: Any = None,
    keep: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Save model and optimizer, each rank its own part; called by all ranks of the optimizer's group.

    ``extra`` is the first rank's: numbers, strings, tensors, and containers of them. With ``keep`` only so many of the checkpoints
    that were written last are kept, this one among them. The folder must be the same one for all ranks. CheckpointError, on all
    ranks, if it could not be written: what was there before is as it was.
    """
    group = optimizer.process_group

    def state_of() -> tuple[Target, dict[str, Any]]:
        _finish_last(group)
        target = _target(folder, step, keep, overwrite, group)
        return target, _state_of(model, optimizer, extra)

    target, state = _on_all_or_none(state_of, group, "saving a checkpoint")
    target, _ = _agreed(target, group)
    return write_state(target, state, group)


_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}  # of background saves, by the optimizer's
_last: dict[dist.ProcessGroup, Saving] = {}


@public_in("zerolap.checkpoint")
def async_save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    *,
    step: int,
    extra: Any = None,
    keep: int | None = None,
    overwrite: bool = False,
) -> Saving:
    """Copy what this rank saves, and write it while training goes on. Waits for an earlier one that is not done yet.

    Wait for the last one before the process ends. A save that fails does not keep the next one from being made: its error is raised
    by ``wait()``, and is a warning of the next save if ``wait()`` was never called.
    """
    group = optimizer.process_group

    def staged_state_of() -> tuple[Target, dict[str, Any]]:
        _finish_last(group)
        if torch.device("cpu") not in group._device_types:
            raise CheckpointError(
                "saving in the background needs a process group that can communicate on the CPU, too; name a CPU backend "
                "beside the device's in init_process_group()"
            )
        target = _target(folder, step, keep, overwrite, group)
        return target, _staged(_state_of(model, optimizer, extra))

    target, state = _on_all_or_none(staged_state_of, group, "saving a checkpoint")
    target, are_groups_usable = _agreed(target, group, has_group=group in _groups)
    if not are_groups_usable:
        _groups[group] = _background_group(group)
    behind = _groups[group]
    _last[group] = saving = Saving(
        lambda progress: write_state(target, state, behind, progress), path=target.path, limit=limit_of(group, state)
    )
    return saving


def _finish_last(group: dist.ProcessGroup) -> None:
    """Wait until the last background save is over. A group that some ranks may have left in the middle is not used again; it is not
    destroyed either, for torch would give the next one its name."""
    saving = _last.get(group)
    if saving is None:
        return
    saving._join()  # one that does not end stays the last
    del _last[group]
    if saving._has_lost_step:
        _groups.pop(group, None)
    unseen = saving._take_unseen_error()
    if unseen is not None:
        warnings.warn(f"an earlier background save failed, and wait() was not called: {unseen}", stacklevel=5)


def _background_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """One of their own for background saves, with the same timeout: another thread uses the optimizer's."""
    try:
        made: dist.ProcessGroup | None = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timedelta(seconds=timeout_of(group)),
            use_local_synchronization=True,
        )
    except Exception as error:
        raise CollectiveError(
            f"rank {dist.get_rank()}: making a process group for background saves failed: {error}"
        ) from error
    assert made is not None
    return made


def _target(folder: Any, step: Any, keep: Any, overwrite: bool, group: dist.ProcessGroup) -> Target:
    number = step_number(step)
    target = Target(
        folder=Path(folder),
        step=number,
        keep=keep_number(keep),
        overwrite=bool(overwrite),
        partial=partial_name(number, group),
    )
    there = find(folder, number) or (target.path if os.path.lexists(target.path) else None)
    if there is not None and not overwrite:
        raise FileExistsError(f"{there} is there already; give overwrite=True to replace it")
    return target


def _agreed(target: Target, group: dist.ProcessGroup, *, has_group: bool = False) -> tuple[Target, bool]:
    """What all ranks save, under the first one's name, and whether all have a group for background saves."""
    mine = [target.step, target.keep, target.overwrite]
    said = all_gather_json([mine, target.partial, has_group], group=group, what="comparing what is saved between ranks")
    (first, partial, _), *_ = said
    for rank, (theirs, _, _) in enumerate(said):
        if theirs != first:
            raise ValueError(
                f"the ranks save with different step, keep and overwrite: group rank 0 has {first}, group rank {rank} {theirs}"
            )
    return replace(target, partial=partial), all(has for _, _, has in said)


def _module_of(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _state_of(model: nn.Module, optimizer: ZeroRedundancyOptimizer, extra: Any) -> dict[str, Any]:
    """What this rank saves. Refuses what could not be loaded again."""
    rank, size = optimizer.rank, optimizer.world_size
    if size > 1:
        _refuse_without_numpy()
    module = _module_of(model)
    whole = module.state_dict()
    params = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    shared = [name for name in whole if name in params]
    ((*owners,),) = greedy_owners([[whole[name].numel() for name in shared]], world_size=size)
    owner_of = dict(zip(shared, owners, strict=True))
    state: dict[str, Any] = {
        # Parameters are the same everywhere, so each is written by one rank; buffers are the first rank's, as in DDP.
        "model": {name: value for name, value in whole.items() if owner_of.get(name, 0) == rank},
        "optimizer": optimizer.sharded_state_dict(model),
    }
    pack(state["optimizer"]["param_groups"])  # for its refusal
    if rank == 0:
        state["extra"] = pack(extra)
        state["about"] = pack({"optimizer_class": class_name(optimizer)})
    return state


def class_name(optimizer: ZeroRedundancyOptimizer) -> str:
    return type(optimizer._book.locals[0].optimizer).__name__


def _refuse_without_numpy() -> None:
    """torch does not bring NumPy, but sends objects by it: DCP would fail on one rank, and leave the others waiting."""
    try:
        torch.empty(0).numpy()
    except RuntimeError as error:
        raise CheckpointError(
            "torch.distributed.checkpoint needs NumPy to save on several ranks, and it cannot be used here; pip install numpy"
        ) from error


def pack(value: Any) -> Tensor:
    """As bytes; refused if it could not be loaded again."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    packed = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    unpacked(packed)
    return packed


def _staged(value: Any) -> Any:
    """A copy of what will be written, on the CPU."""
    if isinstance(value, FlatShards):
        return FlatShards(value.numel(), copied(value.ranges, device="cpu"))
    if isinstance(value, Mapping):
        return {key: _staged(item) for key, item in value.items()}
    return copied(value, device="cpu")


# --- loading ----------------------------------------------------------------------------------------------------------


@public_in("zerolap.checkpoint")
def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    *,
    step: int | None = None,
    strict: bool = True,
) -> Loaded:
    """Load the latest checkpoint, or that of ``step``; called by all ranks of the optimizer's group, however many there are.

    FileNotFoundError if there is none; CheckpointError, on all ranks and with nothing changed, if it is damaged or does not fit.
    With ``strict=False`` parameters that it does not have stay as they are, and those it has beyond the model's are left out; so is
    the state of another optimizer class where it does not fit, and its options.
    """
    group = optimizer.process_group
    path = _chosen(folder, step, group)
    before = _on_all_or_none(lambda: _manifest_digest(path), group, f"looking at {path}")
    if len(set(all_gather_json(before, group=group, what=f"comparing {path} between ranks"))) > 1:
        raise CheckpointError(
            f"{path} is not the same on all ranks; they need one folder, and it must not be written while it is loaded"
        )
    reader = _on_all_or_none(
        lambda: CheckpointReader(path, share=(group.rank(), group.size())), group, f"checking {path}"
    )

    def read() -> tuple[dict[str, Any], Any]:
        """Everything, beside what is live."""
        about = {"about": reader.room(("about",))} if reader.has(("about",)) else {}
        small = reader.read(
            {"optimizer": {"params": None, "param_groups": None}, "extra": reader.room(("extra",)), **about}
        )
        then = saved_shapes(small["optimizer"]["params"])
        now = shapes_of(model, optimizer._book.params)
        module = _module_of(model)
        room = {
            name: torch.empty_like(value, device="cpu") if isinstance(value, Tensor) else None
            for name, value in module.state_dict().items()
        }
        saved_class = unpacked(small["about"])["optimizer_class"] if about else None
        fit = _fit(optimizer, saved_class, small["optimizer"]["param_groups"], entries_in(reader.metadata, STATES), now)
        differences = [*compare(now, then), *_differences(room, reader), *fit.differences]
        if not strict:
            differences = [difference for difference in differences if "has shape" in difference]
            room = {name: value for name, value in room.items() if reader.has(("model", name))}
        if differences:
            raise CheckpointError(f"{path} does not fit the model: " + "; ".join(dict.fromkeys(differences)))
        pieces = [piece for local in optimizer._book.locals for piece in local.pieces]
        pieces = [piece for piece in pieces if now[piece.param].name not in fit.without_state]
        states = room_for(reader.metadata, STATES, pieces, now, then)
        whole = reader.read({"model": room, "optimizer": {"state": states}})
        found = from_sharded(whole["optimizer"]["state"], now, then)
        options = options_by_name(optimizer.param_groups, small["optimizer"]["param_groups"], now)
        if not fit.is_same_class:
            options = [options_of(each) for each in optimizer.param_groups]
        if _manifest_digest(path) != before:
            raise CheckpointError(f"{path} was replaced while it was loaded; load again")
        return {"model": whole["model"], "states": found, "options": options}, unpacked(small["extra"])

    found, extra = _on_all_or_none(_damaged_is_an_error(read, path), group, f"loading {path}")
    module = _module_of(model)
    module.load_state_dict(found["model"], strict=strict)
    optimizer._resume_from(found["options"], found["states"])
    return Loaded(reader.step, extra, path)


def _chosen(folder: str | os.PathLike[str], step: Any, group: dist.ProcessGroup) -> Path:
    """The checkpoint to load: the first rank's choice, so that all load the same one."""

    def look() -> tuple[list[int], int | None, int | None]:
        return steps(folder), latest(folder), None if step is None else step_number(step)

    mine = _on_all_or_none(look, group, "looking for checkpoints")
    said = all_gather_json(mine, group=group, what="choosing a checkpoint")
    held, newest, _ = said[0]
    wanted = {each[2] for each in said}
    if len(wanted) > 1:
        raise ValueError(f"the ranks load different steps: {[each[2] for each in said]}")
    (number,) = wanted
    if not held or (number is not None and number not in held):
        raise FileNotFoundError(
            f"{folder} has no whole checkpoint{'' if number is None else f' of step {number}'}; it has {held}"
        )
    number = newest if number is None else number
    return find(folder, number) or path_of(folder, number)


def _on_all_or_none(do: Callable[[], Any], group: dist.ProcessGroup, what: str) -> Any:
    """As ``refuse_together``, with one type of error on all ranks."""
    try:
        return refuse_together(do, group=group, what=what)
    except (CheckpointError, CollectiveError):
        raise
    except ZerolapError as error:
        raise CheckpointError(str(error)) from error


def _manifest_digest(path: Path) -> str:
    """Tells one checkpoint from another that has taken its place."""
    try:
        return hashlib.blake2b(manifest_of(path)).hexdigest()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _fit(
    optimizer: ZeroRedundancyOptimizer,
    saved_class: str | None,
    saved_groups: Sequence[Mapping[str, Any]],
    entries: Mapping[str, frozenset[str]],
    params: Sequence[ParamShape],
) -> Compatibility:
    return compatibility_of(
        saved_class,
        class_name(optimizer),
        saved_options=options_by_name(optimizer.param_groups, saved_groups, params),
        groups=optimizer.param_groups,
        entries=entries,
        params=params,
        factory=optimizer._book.factory,
    )


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
