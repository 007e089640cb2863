"""Private names of torch.distributed.checkpoint. Apart from the others: importing it takes a moment, and few need it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zerolap._torch.lookup import used

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
else:
    StorageInfo = used("torch.distributed.checkpoint.filesystem._StorageInfo")

__all__ = ["StorageInfo", "narrow_tensor_by_index", "set_element"]

set_element: Callable[[dict[str, Any], tuple[str | int, ...], object], None] = used(
    "torch.distributed.checkpoint._traverse.set_element"
)
narrow_tensor_by_index: Callable[[Tensor, Sequence[int], Sequence[int]], Tensor] = used(
    "torch.distributed._shard._utils.narrow_tensor_by_index"
)
