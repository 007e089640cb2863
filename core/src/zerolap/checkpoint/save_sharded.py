"""Saving a model and its sharded optimizer: what each rank writes, at once or in the background. Writing it is in writer.py.

Not named after the function ``save``: a module of that name would replace it in ``zerolap.checkpoint`` once it is imported.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerolap._public import public_in
from zerolap._torch import device_types_of
from zerolap.api.optimizer import ZeroRedundancyOptimizer
from zerolap.checkpoint.contents import Optimizers, class_name, module_of, on_all_or_none, optimizers_of, pack
from zerolap.checkpoint.folder import find, keep_number, step_number
from zerolap.checkpoint.reader import CheckpointError
from zerolap.checkpoint.writer import Saving, Target, limit_of, partial_name, timeout_of, write_state
from zerolap.errors import CollectiveError
from zerolap.runtime.dcp_state import FlatShards
from zerolap.runtime.peers import all_gather_json
from zerolap.runtime.state_pieces import copied
from zerolap.schedule.ownership import greedy_owners


@public_in("zerolap.checkpoint")
def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers,
    *,
    step: int,
    extra: Any = None,
    keep: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Save model and optimizer atomically, each rank its own part; called by all ranks of the optimizer's group.

    CheckpointError, on all ranks, if it could not be written: earlier checkpoints are unchanged.

    Args:
        folder: The folder of checkpoints, one that all ranks share.
        model: The DDP, or the module in it.
        optimizer: The optimizer, or a list of several; each rank writes the state that it holds.
        step: The number of this checkpoint, the same on all ranks.
        extra: Anything else to resume with, of the first rank: tensors, numbers, strings and containers of them.
        keep: How many checkpoints to keep, of those that were written last, this one included. Default: all.
        overwrite: Replace a checkpoint of the same step; without it that is a FileExistsError.
    """
    optimizers = optimizers_of(optimizer)
    group = optimizers[0].process_group

    def state_of() -> tuple[Target, dict[str, Any]]:
        _finish_last(group)
        target = _target(folder, step, keep, overwrite, group)
        return target, _state_of(model, optimizers, extra)

    target, state = on_all_or_none(state_of, group, "saving a checkpoint")
    target, _ = _agreed(target, group)
    return write_state(target, state, group)


_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}  # of background saves, by the optimizer's
_last: dict[dist.ProcessGroup, Saving] = {}


@public_in("zerolap.checkpoint")
def async_save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers,
    *,
    step: int,
    extra: Any = None,
    keep: int | None = None,
    overwrite: bool = False,
) -> Saving:
    """Copy what this rank saves, and write it while training goes on. Waits for an earlier one that is not done yet.

    Wait for the last one before the process ends. A save that fails does not keep the next one from being made: its error is raised
    by ``wait()``, and is a warning of the next save if ``wait()`` was never called.

    Args:
        folder: As in ``save``, like all others.
        model: It may be trained on as soon as this returns.
        optimizer: So may this.
        step: The number of this checkpoint.
        extra: Anything else to resume with.
        keep: How many checkpoints to keep.
        overwrite: Replace a checkpoint of the same step.
    """
    optimizers = optimizers_of(optimizer)
    group = optimizers[0].process_group

    def staged_state_of() -> tuple[Target, dict[str, Any]]:
        _finish_last(group)
        if torch.device("cpu") not in device_types_of(group):
            raise CheckpointError(
                "saving in the background needs a process group that can communicate on the CPU, too; name a CPU backend "
                "beside the device's in init_process_group()"
            )
        target = _target(folder, step, keep, overwrite, group)
        return target, _staged(_state_of(model, optimizers, extra))

    target, state = on_all_or_none(staged_state_of, group, "saving a checkpoint")
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
        raise FileExistsError(f"{there} already exists; give overwrite=True to replace it")
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


def _state_of(model: nn.Module, optimizers: Sequence[ZeroRedundancyOptimizer], extra: Any) -> dict[str, Any]:
    """What this rank saves. Refuses what could not be loaded again."""
    rank, size = optimizers[0].rank, optimizers[0].world_size
    if size > 1:
        _refuse_without_numpy()
    module = module_of(model)
    whole = module.state_dict()
    params = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    shared = [name for name in whole if name in params]
    ((*owners,),) = greedy_owners([[whole[name].numel() for name in shared]], world_size=size)
    owner_of = dict(zip(shared, owners, strict=True))
    state: dict[str, Any] = {
        # Parameters are the same everywhere, so each is written by one rank; buffers are the first rank's, as in DDP.
        "model": {name: value for name, value in whole.items() if owner_of.get(name, 0) == rank},
        "optimizer": _as_one([optimizer.sharded_state_dict(model) for optimizer in optimizers]),
    }
    pack(state["optimizer"]["param_groups"])  # for its refusal
    if rank == 0:
        state["extra"] = pack(extra)
        classes = [class_name(optimizer) for optimizer in optimizers for _ in optimizer.param_groups]
        state["about"] = pack({"optimizer_class": "+".join(dict.fromkeys(classes)), "group_classes": classes})
    return state


def _as_one(sharded: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several optimizers' as those of one that has all groups; their parameters have different names."""
    state: dict[str, Any] = {}
    for each in sharded:
        state.update(each["state"])
    return {"state": state} | {
        key: tuple(item for each in sharded for item in each[key]) for key in ("param_groups", "params")
    }


def _refuse_without_numpy() -> None:
    """torch does not bring NumPy, but sends objects by it: DCP would fail on one rank, and leave the others waiting."""
    try:
        torch.empty(0).numpy()
    except RuntimeError as error:
        raise CheckpointError(
            "torch.distributed.checkpoint needs NumPy to save on several ranks, and it cannot be used here; pip install numpy"
        ) from error


def _staged(value: Any) -> Any:
    """A copy of what will be written, on the CPU."""
    if isinstance(value, FlatShards):
        return FlatShards(value.numel(), copied(value.ranges, device="cpu"))
    if isinstance(value, Mapping):
        return {key: _staged(item) for key, item in value.items()}
    return copied(value, device="cpu")
