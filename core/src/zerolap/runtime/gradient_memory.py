"""Memory of gradients that is given back as soon as it was used (``shard_gradients``). Nothing is reduced or updated here.

[Note: freed gradients]
DDP fills a bucket and hands it over. Here its memory is there from the first gradient until it is reduced; what stays is this rank's part
of the mean, until an update has used it. Tensors and their views stay as they are, so whatever was prepared for a bucket stays prepared.

* Memory is taken before DDP copies the first gradient: by a hook of every parameter, which runs before DDP's own.
* Where there are no streams the adapter hands on pages of memory, from buckets that were reduced to those that are filled next; some are
  kept for the next backward. What is not handed on comes by itself when it is written to. But nothing may be written to what has not
  been taken: its pages may be handed on at any time.
* On a device with streams storages are emptied, and filled again under the views of them. Nobody waits on the host, and memory goes back
  on the stream that took it, behind its last use: backward's stream waits for the reduction of an earlier bucket, or at the end for
  the lane.
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
from zerolap.backend.base import Adapter, Recycler
from zerolap.backend.lanes import Waitable
from zerolap.errors import CollectiveError

_MOST_UNREDUCED = 2  # buckets of the size that DDP was asked for: one is being sent, and one is ready behind it
# Kept for the next backward beside as much as that, but not more than this rank's part of all gradients: memory that must be asked for
# costs several percent of a step where nothing is sent over a network.
_MOST_KEPT_BYTES = 25 * 2**20


class Refillable:
    """Memory of a tensor that can be given back and taken again under it and all its views; what was in it is lost."""

    __slots__ = ("_recycler", "_tensor", "is_there", "num_bytes")

    def __init__(self, tensor: Tensor, recycler: Recycler | None) -> None:
        """The recycler hands memory on; None if the storage is to be emptied."""
        self._tensor = tensor
        self._recycler = recycler
        self.num_bytes = tensor.nbytes
        self.is_there = True

    def is_of(self, tensor: Tensor) -> bool:
        return self._tensor is tensor

    def take(self) -> None:
        """Before it is written to, all of it."""
        if not self.is_there:
            self.is_there = True
            if self._recycler is None:
                self._tensor.untyped_storage().resize_(self.num_bytes)
            else:
                self._recycler.refill(self._tensor)

    def free(self) -> None:
        if self.is_there:
            self.is_there = False
            if self._recycler is None:
                self._tensor.untyped_storage().resize_(0)
            else:
                self._recycler.discard(self._tensor)


class BucketMemory(Refillable):
    """Of one of DDP's buckets."""

    __slots__ = ("index", "is_new", "reduction")

    def __init__(self, index: int, buffer: Tensor, recycler: Recycler | None) -> None:
        super().__init__(buffer, recycler)
        self.index = index
        self.is_new = True  # it was never given back: DDP has just made it
        self.reduction: Waitable | None = None  # what a stream waits for before this is freed


class _KeptMemory:
    """Where an adapter hands nothing on: all memory stays."""

    def discard(self, tensor: Tensor) -> None:
        """It stays."""

    def refill(self, tensor: Tensor) -> None:
        """It is there."""

    def release(self, most_bytes: int = 0) -> None:
        """Nothing is kept."""

    num_bytes = 0


class GradientMemory:
    """All whole gradients of one rank: taken by backward's thread, given back by it or by the lane. See [Note: freed gradients]."""

    def __init__(
        self, ddp: DistributedDataParallel, *, adapter: Adapter, waits_on_host: bool, timeout: float, me: str
    ) -> None:
        self._ddp = weakref.ref(ddp)
        self._most_bytes = _MOST_UNREDUCED * ddp.bucket_bytes_cap
        self.waits_on_host = waits_on_host  # what one thread has waited for is done for all
        part_bytes = sum(param.nbytes for param in ddp.parameters() if param.requires_grad) // ddp.process_group.size()
        self._most_kept_bytes = self._most_bytes + min(part_bytes, _MOST_KEPT_BYTES)
        self._release_memory = adapter.release_memory
        self._recycler: Recycler | None = None
        if waits_on_host:
            self._recycler = adapter.recycler() or _KeptMemory()
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
        self.peak_bytes = 0  # of DDP's buckets at once
        self._most_in_bucket = 0
        self.shard_bytes: dict[int, int] = {}  # of this rank's part of each bucket

    def of(self, tensor: Tensor) -> Refillable:
        """Memory that is given back in the way of this device."""
        return Refillable(tensor, self._recycler)

    def of_bucket(self, index: int, buffer: Tensor) -> BucketMemory:
        """The same, for one of DDP's buckets, which has its memory now."""
        memory = BucketMemory(index, buffer, self._recycler)
        self._count(memory)
        return memory

    @property
    def kept_bytes(self) -> int:
        """Of memory that waits for the next backward's gradients."""
        return 0 if self._recycler is None else self._recycler.num_bytes

    @property
    def most_transient_bytes(self) -> int:
        """What gradients take in a step at most: buckets, the parameters' own of one more, and this rank's part of all of them."""
        return self.peak_bytes + self._most_in_bucket + sum(self.shard_bytes.values())

    def watch(self, buckets: Sequence[tuple[BucketMemory, Sequence[Tensor]]]) -> None:
        """These are DDP's buckets: the memory of each is taken when the first gradient of one of its parameters comes."""
        ddp = self._ddp()
        assert ddp is not None, "a layout is that of a DDP that is alive"
        self.unwatch()
        self._layout = [memory for memory, _ in buckets]
        self._are_current = are_buckets_current(ddp)
        for memory, params in buckets:

            def take(_: Tensor, memory: BucketMemory = memory) -> None:
                if not memory.is_there:
                    self._take_for_backward(memory)

            for param in params:
                if param.requires_grad:
                    self._hooks.append(param.register_hook(take))  # type: ignore[no-untyped-call]  # torch gives it no types

    def unwatch(self) -> None:
        """DDP has other buckets now, or will have."""
        for hook in self._hooks:
            hook.remove()
        if not self._has_failed:
            for memory in self._layout:
                self._free(memory)
        self._hooks, self._layout = [], []
        if self._recycler is not None:
            self._recycler.release()

    def _take_for_backward(self, wanted: BucketMemory) -> None:
        ddp = self._ddp()
        is_synced = ddp is not None and (ddp.require_backward_grad_sync or ddp.require_forward_param_sync)
        if self._recycler is None and not is_synced:
            return  # gradients are accumulated where they are: this would take memory for nothing
        if not self._are_current():
            return  # DDP has made others, whose memory is there
        if wanted.num_bytes > self._most_bytes:
            self._make_room_for_a_large_one()
        for memory in self._layout if self._is_taken_at_once else (wanted,):
            self.take(memory)

    def _make_room_for_a_large_one(self) -> None:
        """One parameter may be larger than all buckets that are under way: it takes their memory, and what the allocator only keeps."""
        while len(self._unreduced) > 1:
            self._wait_for(self._unreduced.popleft())
        self._release_memory()

    def take(self, memory: BucketMemory) -> None:
        """Take it, if it is not there, before DDP writes to it."""
        if not memory.is_there:
            memory.take()
            self._count(memory)

    def handed_over(self, memory: BucketMemory) -> None:
        """DDP has filled it; if it was not taken before, it has come by itself."""
        if memory.is_new:
            self._release_memory()  # in a backward or two, in which nobody knows yet what comes
        if not memory.is_there:
            memory.is_there = True
            self._count(memory)

    def _count(self, memory: BucketMemory) -> None:
        with self._freed:
            self._num_bytes += memory.num_bytes
            self._most_in_bucket = max(self._most_in_bucket, memory.num_bytes)
            self.peak_bytes = max(self.peak_bytes, self._num_bytes)

    def _free(self, memory: BucketMemory) -> None:
        if memory.is_there:
            memory.reduction = None
            memory.free()
            if memory.is_new and self._recycler is not None:
                self._recycler.release()  # what comes behind it is new, too, and takes nothing
            memory.is_new = False
            with self._freed:
                self._num_bytes -= memory.num_bytes
                self._freed.notify_all()

    def reduced(self, memory: BucketMemory, reduction: Waitable) -> None:
        """Nothing of the bucket is needed any more, once a stream has waited for its reduction; by the lane."""
        if self.waits_on_host:
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
        if not self.waits_on_host:
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
            self.settle()

    def settle(self) -> None:
        """An update is over, too: keep what the next backward begins with."""
        if self._recycler is not None:
            self._recycler.release(self._most_kept_bytes)

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


class FreedGradients:
    """What is freed of one bucket's gradients: of the whole when they are reduced, of this rank's part of the mean when it was used.

    Several backwards may come before an update: their means are added up here.
    """

    __slots__ = ("_all", "_cast", "_mean", "_num_unused", "_part", "_sum", "_sum_memory", "whole")

    def __init__(self, memory: GradientMemory) -> None:
        self._all = memory
        self.whole: BucketMemory
        self._part: Refillable | None = None
        self._mean: Tensor | None = None  # where a reduction leaves it
        self._num_unused = 0  # means that no update has used yet
        self._sum: Tensor | None = None  # of them, if there are several
        self._sum_memory: Refillable | None = None
        self._cast: Refillable | None = None

    @classmethod
    def filled_in(
        cls, same: FreedGradients | None, buffer: Tensor, index: int, memory: GradientMemory
    ) -> FreedGradients:
        """The same bucket's, or a new one's, where DDP fills it in from now on."""
        freed = same or cls(memory)
        freed.whole = memory.of_bucket(index, buffer)
        return freed

    def reduced_into(self, mean: Tensor) -> None:
        """Where its reductions leave this rank's part of the mean."""
        self._all.shard_bytes[self.whole.index] = mean.nbytes
        self._mean, self._part = mean, self._all.of(mean)

    @property
    def is_unused(self) -> bool:
        return self._num_unused > 0

    @property
    def unused(self) -> Tensor | None:
        """The mean that no update has used yet, or the sum of several."""
        return self._sum if self._num_unused > 1 else self._mean

    @property
    def num_shard_bytes(self) -> int:
        """Of this rank's part that are there."""
        held = (self._part, self._sum_memory, self._cast)
        return sum(each.num_bytes for each in held if each is not None and each.is_there)

    def hand_over(self, buffer: Tensor, params: Sequence[Tensor], offsets: Sequence[int]) -> None:
        """DDP has filled the bucket: let go of the parameters' own gradients. What lies where one has none is nothing."""
        assert self._part is not None
        assert self._mean is not None
        if self._num_unused == 1:  # where the next one comes to
            if self._sum is None or self._sum_memory is None:
                self._sum = torch.empty_like(self._mean)
                self._sum_memory = self._all.of(self._sum)
            self._sum_memory.take()
            self._sum.copy_(self._mean)
        self._part.take()
        self._all.handed_over(self.whole)
        for param, offset in zip(params, offsets, strict=True):
            if param.grad is None:
                buffer[offset : offset + param.numel()].zero_()
            param.grad = None

    def reduced(self, mean: Tensor, reduction: Waitable) -> Tensor:
        """The mean is there; returns it, with those of earlier backwards for the same update. By the lane."""
        self._all.reduced(self.whole, reduction)
        self._num_unused += 1
        if self._num_unused == 1 or self._sum is None or self._part is None:
            return mean
        self._sum.add_(mean)
        if self._all.waits_on_host:
            self._part.free()
        return self._sum

    def before_step(self) -> None:
        """Gradients are about to be cast for the optimizer, if it works in another dtype."""
        if self._cast is not None:
            self._cast.take()

    def after_step(self, cast: Tensor | None) -> None:
        """The update has used them; ``cast`` is what they were cast to. On the lane, where another stream may be waited for yet."""
        if cast is None:
            self._cast = None
        elif self._cast is None or not self._cast.is_of(cast):
            self._cast = self._all.of(cast)
        self._num_unused = 0
        if self._all.waits_on_host:
            self.used()

    def used(self) -> None:
        """They were used, or shall not be, and whoever calls has waited for that."""
        self._num_unused = 0
        for memory in (self._part, self._sum_memory, self._cast):
            if memory is not None:
                memory.free()


def _never() -> bool:
    return False
