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
* ``.grad`` is let go of as soon as DDP has copied it: when the next gradient comes, which is behind DDP's copy of this one. Until the bucket
  is handed over a view of one zero stands there, which says that there was a gradient. Then it is None, so that nobody takes a rank's own
  gradient for the mean. That DDP has copied it is seen by the bucket's version: under ``no_sync()`` it does not, nor when a static graph has
  several gradients for a parameter, before the last one.
* At most some buckets wait for their reduction at once: whoever hands over another one waits for the oldest. With more, what is slow to
  be sent would pile up, and nothing would be sent any earlier.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zerolap._torch import are_buckets_current, version_of
from zerolap.backend.base import Adapter, Recycler
from zerolap.backend.lanes import Waitable
from zerolap.errors import CollectiveError

_MOST_UNREDUCED = 2  # buckets of the size that DDP was asked for: one is being sent, and one is ready behind it
# Kept for the next backward beside as much as that, but not more than this rank's part of all gradients, nor half of them in all: memory
# that must be asked for costs several percent of a step where nothing is sent over a network.
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

    @property
    def version(self) -> int:
        """How often it was written to."""
        return version_of(self._tensor)


class _Gradient:
    """A parameter's own gradient, until DDP has copied it into a bucket, which counts as a write to that."""

    __slots__ = ("_bucket", "_nothing", "_param", "_was_at")

    def __init__(self, param: Tensor, bucket: BucketMemory) -> None:
        self._param = weakref.ref(param)
        self._bucket = bucket
        self._nothing = param.detach().new_zeros(()).expand_as(param)
        self._was_at = 0

    def comes(self) -> None:
        self._was_at = self._bucket.version

    def let_go(self) -> None:
        """Unless DDP did not copy it: it accumulates, or expects another one."""
        param = self._param()
        if param is not None and param.grad is not None and self._bucket.version != self._was_at:
            param.grad = self._nothing


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
        sizes = [param.nbytes for param in ddp.parameters() if param.requires_grad]
        all_bytes = sum(sizes)
        part_bytes = all_bytes // ddp.process_group.size()
        self._most_kept_bytes = min(self._most_bytes + min(part_bytes, _MOST_KEPT_BYTES), all_bytes // 2)
        self._large_bytes = max(self._most_bytes, all_bytes // 4)
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
        self._last: _Gradient | None = None  # that has come, in this backward
        # Beside the buckets: gradients that DDP has not copied yet, and the first of those that add up.
        self._own_bytes = max(sizes, default=0) + _bytes_of_tied(ddp.module)
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
        """What gradients take in a step at most: buckets, the parameters' own, and this rank's part of all of them."""
        return self.peak_bytes + self._own_bytes + sum(self.shard_bytes.values())

    def watch(self, buckets: Sequence[tuple[BucketMemory, Sequence[Tensor]]]) -> None:
        """These are DDP's buckets: the memory of each is taken when the first gradient of one of its parameters comes."""
        ddp = self._ddp()
        assert ddp is not None, "a layout is that of a DDP that is alive"
        self.unwatch()
        self._layout = [memory for memory, _ in buckets]
        self._are_current = are_buckets_current(ddp)
        for memory, params in buckets:
            for param in params:
                if param.requires_grad:
                    comes = partial(self._gradient_comes, memory, _Gradient(param, memory))
                    self._hooks.append(param.register_hook(comes))  # type: ignore[no-untyped-call]  # torch gives it no types

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

    def _gradient_comes(self, memory: BucketMemory, gradient: _Gradient, _: Tensor) -> None:
        """On backward's thread, before it is in ``.grad``; it is behind DDP's copy of the last one."""
        if self._last is not None:
            self._last.let_go()
        self._last = gradient
        if not memory.is_there:
            self._take_for_backward(memory)
        gradient.comes()

    def _take_for_backward(self, wanted: BucketMemory) -> None:
        ddp = self._ddp()
        is_synced = ddp is not None and (ddp.require_backward_grad_sync or ddp.require_forward_param_sync)
        if self._recycler is None and not is_synced:
            return  # gradients are accumulated where they are: this would take memory for nothing
        if not self._are_current():
            return  # DDP has made others, whose memory is there
        if wanted.num_bytes > self._large_bytes:
            self._make_room_for_a_large_one()
        for memory in self._layout if self._is_taken_at_once else (wanted,):
            self.take(memory)

    def _make_room_for_a_large_one(self) -> None:
        """One parameter may be a good part of all: it takes the memory of the buckets that are under way, and what the allocator only keeps.

        Not for less than that: what the allocator gives back comes again page by page, which took a tenth of a step.
        """
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
        self._last = None
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
        self._hooks, self._layout, self._are_current, self._last = [], [], _never, None
        self._unreduced.clear()

    def readable(self, buffer: Tensor) -> Tensor:
        """Memory like this, which is not read: for DDP to make views of."""
        if self._scratch.numel() < buffer.numel() or self._scratch.dtype != buffer.dtype:
            self._scratch = torch.empty(buffer.numel(), dtype=buffer.dtype, device=buffer.device)
        return self._scratch


def _bytes_of_tied(module: nn.Module) -> int:
    """Of parameters that several modules have: the first one's gradient waits for the others'."""
    times = Counter(param for _, param in module.named_parameters(remove_duplicate=False))
    return sum(param.nbytes for param, num in times.items() if num > 1 and param.requires_grad)


def _never() -> bool:
    return False
