"""Private names of torch.distributed.checkpoint. Apart from the others: importing it takes a moment, and few need it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver

from zerolap._torch.lookup import used

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
else:
    StorageInfo = used("torch.distributed.checkpoint.filesystem._StorageInfo")

__all__ = ["StorageInfo", "narrow_tensor_by_index", "save_state", "set_element"]

set_element: Callable[[dict[str, Any], tuple[str | int, ...], object], None] = used(
    "torch.distributed.checkpoint._traverse.set_element"
)
narrow_tensor_by_index: Callable[[Tensor, Sequence[int], Sequence[int]], Tensor] = used(
    "torch.distributed._shard._utils.narrow_tensor_by_index"
)
_save_state_dict: Callable[..., object] = used("torch.distributed.checkpoint.state_dict_saver._save_state_dict")


def save_state(state: dict[str, Any], *, writer: Any, planner: Any, group: dist.ProcessGroup | None) -> None:
    """Write a state dict by the ranks of a group together; without one by this rank alone, whether or not there are others."""
    if group is not None:
        state_dict_saver.save(state, storage_writer=writer, planner=planner, process_group=group)
    elif "no_dist" in inspect.signature(state_dict_saver.save).parameters:
        state_dict_saver.save(state, storage_writer=writer, planner=planner, no_dist=True)
    else:
        _save_state_dict(state, storage_writer=writer, planner=planner, no_dist=True)
