"""Memory of gradients that is given back as soon as it was used (``shard_gradients``). Nothing is reduced or updated here.

[Note: freed gradients]
DDP fills a bucket through views of its memory, and hands it over. Here that memory is there from the bucket's first gradient until it is
reduced; what stays is this rank's part of the mean, until it is used by an update. A storage is emptied and filled again under the views
of it, so whatever was prepared for a bucket stays as it is.

* A hook of every parameter runs before DDP's own, which copies the gradient into the bucket: there the memory is taken.
* DDP was told to leave alone what lies in its buckets (``rebucket``). It still makes views of what a future gives: that is memory which
  is there anyway, of the parameters, and never read.
* ``.grad`` is None as soon as DDP has copied it, so nobody takes a rank's own gradient for the mean.
* At most some buckets wait for their reduction at once: whoever hands over another one waits for the oldest. With more, what is slow to
  be sent would pile up, and nothing would be sent any earlier.

On a device with streams nobody waits on the host. Memory is given back on the stream that took it, behind its last use: backward's
stream waits for the reduction of an earlier bucket, or at the end for the lane.
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
    """Memory of a tensor that is emptied and filled again under it and all views of it; what was in it is lost."""

    __slots__ = ("_storage", "is_there", "num_bytes")

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self.num_bytes = self._storage.nbytes()
        self.is_there = True

    def take(self) -> None:
        if not self.is_there:
            self._storage.resize_(self.num_bytes)
            self.is_there = True

    def free(self) -> None:
        if self.is_there:
            self._storage.resize_(0)
            self.is_there = False


class BucketMemory(Refillable):
    """Of one of DDP's buckets."""

    __slots__ = ("index", "reduction")

    def __init__(self, index: int, buffer: Tensor) -> None:
        super().__init__(buffer)
        self.index = index
        self.reduction: Waitable | None = None  # what a stream waits for before this is freed


class GradientMemory:
    """All whole gradients of one rank: taken by backward's thread, given back by it or by the lane. See [Note: freed gradients]."""

    def __init__(self, ddp: DistributedDataParallel, *, waits_on_host: bool, timeout: float, me: str) -> None:
        self._ddp = weakref.ref(ddp)
        self._most_bytes = _MOST_UNREDUCED * ddp.bucket_bytes_cap
        self._waits_on_host = waits_on_host
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

    def watch(self, buckets: Sequence[tuple[BucketMemory, Sequence[Tensor]]]) -> None:
        """These are DDP's buckets: take the memory of each when the first gradient of one of its parameters comes."""
        ddp = self._ddp()
        assert ddp is not None, "a layout is that of a DDP that is alive"
        self.unwatch()
        self._layout = [memory for memory, _ in buckets]
        self._are_current = are_buckets_current(ddp)
        for memory, params in buckets:

            def take(_: Tensor, memory: BucketMemory = memory) -> None:
                if not memory.is_there:
                    self._take(memory)

            self._hooks += [param.register_hook(take) for param in params if param.requires_grad]

    def unwatch(self) -> None:
        """DDP has other buckets now, or will have."""
        for hook in self._hooks:
            hook.remove()
        if not self._has_failed:
            for memory in self._layout:
                self._free(memory)
        self._hooks, self._layout = [], []

    def _take(self, wanted: BucketMemory) -> None:
        ddp = self._ddp()
        if ddp is None or not (ddp.require_backward_grad_sync or ddp.require_forward_param_sync):
            return  # gradients are accumulated where they are
        if not self._are_current():
            return  # DDP has made others, whose memory is there
        for memory in self._layout if self._is_taken_at_once else (wanted,):
            if not memory.is_there:
                memory.take()
                self.count(memory)

    def count(self, memory: BucketMemory) -> None:
        """This memory is there from now on."""
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
        if self._waits_on_host:
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
        if not self._waits_on_host:
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
