"""Memory of gradients that is given back as soon as it was used (``shard_gradients``). Nothing is reduced or updated here.

[Note: freed gradients]
DDP fills a bucket and hands it over. Here its memory is there from the first gradient until it is reduced; what stays is this rank's part
of the mean, until an update has used it. Tensors and their views stay as they are, so whatever was prepared for a bucket stays prepared.

* Where there are no streams the adapter discards what lies in the memory: it comes back, page by page, when DDP writes to it.
* On a device with streams storages are emptied, and filled again under the views of them. That must be done before DDP copies a gradient:
  by a hook of every parameter, which runs before DDP's own. Nobody waits on the host, and memory goes back on the stream that took it,
  behind its last use: backward's stream waits for the reduction of an earlier bucket, or at the end for the lane.
* DDP was told to leave alone what lies in its buckets (``rebucket``). It still makes views of what a future gives: that is memory which
  is there anyway, of the parameters, and never read.
* ``.grad`` is None as soon as DDP has copied it, so nobody takes a rank's own gradient for the mean.
* At most some buckets wait for their reduction at once: whoever hands over another one waits for the oldest. With more, what is slow to
  be sent would pile up, and nothing would be sent any earlier.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zerolap._torch import are_buckets_current
from zerolap.backend.lanes import Waitable
from zerolap.errors import CollectiveError

_MOST_UNREDUCED = 2  # buckets of the size that DDP was asked for: one is being sent, and one is ready behind it


class Refillable:
    """Memory of a tensor that can be given back and taken again under it and all its views; what was in it is lost."""

    __slots__ = ("_discard", "_tensor", "is_there", "num_bytes")

    def __init__(self, tensor: Tensor, discard: Callable[[Tensor], None] | None) -> None:
        """``discard`` gives memory back that comes again by itself; None if the storage is to be emptied."""
        self._tensor = tensor
        self._discard = discard
        self.num_bytes = tensor.nbytes
        self.is_there = True

    def take(self) -> None:
        if not self.is_there:
            self.is_there = True
            if self._discard is None:
                self._tensor.untyped_storage().resize_(self.num_bytes)

    def free(self) -> None:
        if self.is_there:
            self.is_there = False
            if self._discard is None:
                self._tensor.untyped_storage().resize_(0)
            else:
                self._discard(self._tensor)


class BucketMemory(Refillable):
    """Of one of DDP's buckets."""

    __slots__ = ("index", "reduction")

    def __init__(self, index: int, buffer: Tensor, discard: Callable[[Tensor], None] | None) -> None:
        super().__init__(buffer, discard)
        self.index = index
        self.reduction: Waitable | None = None  # what a stream waits for before this is freed


class GradientMemory:
    """All whole gradients of one rank: taken by backward's thread, given back by it or by the lane. See [Note: freed gradients]."""

    def __init__(
        self, ddp: DistributedDataParallel, *, discard: Callable[[Tensor], None] | None, timeout: float, me: str
    ) -> None:
        """``discard`` is the adapter's on a device without streams, else None."""
        self._ddp = weakref.ref(ddp)
        self._most_bytes = _MOST_UNREDUCED * ddp.bucket_bytes_cap
        self._discard = discard
        self._timeout = timeout
        self._me = me
        # DDP fills the places of parameters that are not used with zeros, of all buckets, when the first gradient comes.
        self._is_taken_at_once = ddp.find_unused_parameters or ddp.static_graph
        self._are_current: Callable[[], bool] = _never
        self._hooks: list[RemovableHandle] = []
        self._layout: list[BucketMemory] = []
        self._unreduced: deque[BucketMemory] = deque()  # handed over, oldest first; by backward's thread
        self._freed = threading.Condition()
        self._has_failed = False
        self._scratch = torch.empty(0)
        self._num_bytes = 0
        self.peak_bytes = 0

    def of(self, tensor: Tensor) -> Refillable:
        """Memory that is given back in the way of this device."""
        return Refillable(tensor, self._discard)

    def of_bucket(self, index: int, buffer: Tensor) -> BucketMemory:
        """The same, for one of DDP's buckets."""
        return BucketMemory(index, buffer, self._discard)

    def watch(self, buckets: Sequence[tuple[BucketMemory, Sequence[Tensor]]]) -> None:
        """These are DDP's buckets: the memory of each is taken when the first gradient of one of its parameters comes."""
        ddp = self._ddp()
        assert ddp is not None, "a layout is that of a DDP that is alive"
        self.unwatch()
        self._layout = [memory for memory, _ in buckets]
        if self._discard is not None:
            return  # it comes by itself
        self._are_current = are_buckets_current(ddp)
        for memory, params in buckets:

            def take(_: Tensor, memory: BucketMemory = memory) -> None:
                if not memory.is_there:
                    self._take_for_backward(memory)

            self._hooks += [param.register_hook(take) for param in params if param.requires_grad]

    def unwatch(self) -> None:
        """DDP has other buckets now, or will have."""
        for hook in self._hooks:
            hook.remove()
        if not self._has_failed:
            for memory in self._layout:
                self._free(memory)
        self._hooks, self._layout = [], []

    def _take_for_backward(self, wanted: BucketMemory) -> None:
        ddp = self._ddp()
        if ddp is None or not (ddp.require_backward_grad_sync or ddp.require_forward_param_sync):
            return  # gradients are accumulated where they are
        if not self._are_current():
            return  # DDP has made others, whose memory is there
        for memory in self._layout if self._is_taken_at_once else (wanted,):
            self.take(memory)

    def take(self, memory: BucketMemory) -> None:
        """Take it, if it is not there."""
        if not memory.is_there:
            memory.take()
            self.count(memory)

    def count(self, memory: BucketMemory) -> None:
        """This memory is there, from now on."""
        with self._freed:
            self._num_bytes += memory.num_bytes
            self.peak_bytes = max(self.peak_bytes, self._num_bytes)

    def _free(self, memory: BucketMemory) -> None:
        if memory.is_there:
            memory.reduction = None
            memory.free()
            with self._freed:
                self._num_bytes -= memory.num_bytes
                self._freed.notify_all()

    def reduced(self, memory: BucketMemory, reduction: Waitable) -> None:
        """Nothing of the bucket is needed any more, once a stream has waited for its reduction; by the lane."""
        if self._discard is not None:
            self._free(memory)
        else:
            memory.reduction = reduction

    def failed(self) -> None:
        """Nobody shall wait for a reduction that will not end; what may still be sent is not freed. On any thread."""
        with self._freed:
            self._has_failed = True
            self._freed.notify_all()

    def make_room_behind(self, memory: BucketMemory) -> None:
        """The bucket's reduction was started: wait for older ones if many are under way. On backward's thread."""
        waiting = self._unreduced
        waiting.append(memory)
        while waiting and not waiting[0].is_there:
            waiting.popleft()
        while len(waiting) > 1 and sum(each.num_bytes for each in waiting) > self._most_bytes:
            self._wait_for(waiting.popleft())

    def _wait_for(self, memory: BucketMemory) -> None:
        if self._discard is None:
            if memory.reduction is not None:
                memory.reduction.wait()  # the stream that took the memory does; the host goes on
                self._free(memory)
            return
        with self._freed:
            if not self._freed.wait_for(lambda: self._has_failed or not memory.is_there, self._timeout):
                raise CollectiveError(
                    f"{self._me}, bucket {memory.index}: the reduce-scatter of gradients was not done after {self._timeout:.0f} s, and "
                    "later buckets wait for its memory"
                )

    def end(self) -> None:
        """A backward is over, and whoever runs on has waited for all reductions: free what is left. On its thread."""
        self._unreduced.clear()
        self._scratch = torch.empty(0)
        if not self._has_failed:
            for memory in self._layout:
                self._free(memory)

    def close(self) -> None:
        """Take no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._layout, self._are_current = [], [], _never
        self._unreduced.clear()

    def readable(self, buffer: Tensor) -> Tensor:
        """Memory like this, which is not read: for DDP to make views of."""
        if self._scratch.numel() < buffer.numel() or self._scratch.dtype != buffer.dtype:
            self._scratch = torch.empty(buffer.numel(), dtype=buffer.dtype, device=buffer.device)
        return self._scratch


def _never() -> bool:
    return False
