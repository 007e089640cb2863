"""`.grad` where updates wait for ``step()``: what backward leaves there, what ``step()`` finds there. What torch does between is `grad_tensor`'s.

Backward leaves a ``MeanGradient`` over this rank's part of each bucket's mean. ``step()`` takes what it finds: that; or another tensor, of
which this rank's part is taken; or None, and then the parameter is left alone, as the plain optimizer would. What is still there when the
next backward begins is added to.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from zerolap._torch import current_graph_task_id, join_config_of, make_wrapper_subclass
from zerolap.errors import ZerolapError
from zerolap.runtime.books import Books
from zerolap.runtime.bucket import Bucket, Update
from zerolap.runtime.common import Common
from zerolap.runtime.grad_part import Part, Slot
from zerolap.runtime.grad_tensor import MeanGradient
from zerolap.runtime.state_pieces import strides_in_bucket


class ShownGradients:
    """What the ``.grad`` of one engine's parameters hold. On the training thread, but for what backward does."""

    def __init__(self, books: Books, *, ddp: DistributedDataParallel, common: Common, update: Update) -> None:
        self._books = books
        self._ddp = weakref.ref(ddp)
        self._common = common
        self._update = update
        self._slots: list[tuple[Bucket, int, Tensor, Slot]] = []  # with the place in the bucket
        self._parts: dict[Tensor, Part] = {}  # those that are shown, or were last
        self._backward = 0  # the number of that which has shown them
        self._num_changes = 0
        self._known_norms: tuple[object, Tensor] = None, torch.empty(0)
        self._places = torch.empty(0, dtype=torch.int64)  # the slots' indices, for each range
        self._is_freed = False
        self.is_added_to = False  # by the backward at hand
        self.nonfinite: set[int] = (
            set()
        )  # optimizers of whose gradients a loss scaler has found some that are not finite
        self.on_nonfinite: Callable[[], None] = _nothing
        self.left: dict[Tensor, Part] = {}  # what another layout has left for the next update

    # --- at the ends of backward --------------------------------------------------------------------------------------

    def watch(self, layout: Sequence[Bucket]) -> None:
        """From now on those of these buckets."""
        names, self._slots, places = self._common.names, [], []
        for bucket in layout:
            for place, param in enumerate(bucket.params):
                ranges = [piece for piece in bucket.own if piece.place == place]
                index = len(self._slots)
                slot = Slot(
                    index,
                    self._books.number_of(bucket.places[place]),
                    names.get(param, f"parameter {bucket.places[place]}"),
                    param.shape,
                    strides_in_bucket(param),
                    param.dtype,
                    ranges,
                )
                self._slots.append((bucket, place, param, slot))
                places += [index] * len(ranges)
        self._places = torch.tensor(places, dtype=torch.int64, device=self._books.device)

    def show(self) -> None:
        """Backward has ended, and the means are there."""
        self._backward = self._common.probe.num_backwards
        self._is_freed = self.is_added_to = False
        self._num_changes += 1
        self._parts, self.left = {}, {}
        me = weakref.ref(self)
        for bucket, _, param, slot in self._slots:
            if bucket.reduced is not None and (param.grad is not None or bucket.freed is not None):
                part = self._parts[param] = Part(me, self._backward, slot, bucket.reduced)
                # Not by its constructor: a call for every parameter of every backward would show.
                grad = make_wrapper_subclass(
                    MeanGradient, slot.shape, strides=slot.strides, dtype=slot.dtype, device=bucket.reduced.device
                )
                grad.part, param.grad = part, grad

    def before_reduce(self, bucket: Bucket, *, is_joined: bool) -> None:
        """DDP has taken what is new of a bucket's gradients: keep what was there before, for it is added to. On backward's thread."""
        freed = bucket.freed
        if (
            is_joined
        ):  # it has no gradients of its own, and keeps what no step() has used, as ranks that are not joined do
            bucket.carried = None if freed is not None or bucket.reduced is None else bucket.reduced.clone()
            return
        is_unused = freed is not None and freed.is_unused
        if not (self.is_added_to or is_unused):
            return
        carried: list[tuple[Tensor, Part]] = []
        others: list[tuple[Tensor, Part]] = []
        for param in bucket.params:
            if (part := self._parts.get(param)) is not None:
                (carried if part.is_reduced_anew and not part.is_zero else others).append((param, part))
                part.is_reduced_anew = False
        for _, part in carried:
            part.settle()
        memory = bucket.shard_gradients if freed is None else freed.unused
        if any(part.memory is not memory for _, part in carried):  # they are of another layout
            self.left.update(carried)
        elif carried:
            assert memory is not None
            for _, part in others:
                for each in part.ranges():
                    each.zero_()
            bucket.carried = memory.clone() if freed is None else None
        elif freed is not None:
            freed.used()  # they were cleared

    # --- at step() ----------------------------------------------------------------------------------------------------

    def take(self, number: int | None = None, *, is_step: bool = False, is_dropped: bool = False) -> None:
        """What ``.grad`` holds, of one optimizer or of all, is what shall be used; nothing, if it was dropped."""
        if is_dropped:
            self._refuse_late(number)
        if self._backward != self._common.probe.num_backwards or self._is_freed:
            return  # they were never shown, as on a rank that has joined, or are gone
        for bucket, place, param, slot in self._slots:
            if number is not None and slot.optimizer != number:
                continue
            part, grad = self._parts.get(param), param.grad
            if isinstance(grad, MeanGradient):
                self._refuse_others(grad.part, part)
                grad.part.settle()
                if bucket.wanted is not None:
                    bucket.wanted[place] = None
                continue
            if grad is not None and bucket.reduced is not None:
                part = part or Part(weakref.ref(self), self._backward, slot, bucket.reduced)
                part.write(grad)
            elif part is not None and not is_step:  # where it is added up, it counts as none
                for each in part.ranges():
                    each.zero_()
            if part is not None or grad is not None:
                if bucket.wanted is None:
                    bucket.wanted = [None] * len(bucket.params)
                bucket.wanted[place] = grad is not None

    def _refuse_others(self, found: Part, expected: Part | None) -> None:
        if found is not expected:
            raise RuntimeError(
                f"the .grad of {found.slot.name if expected is None else expected.slot.name} holds the mean gradient of another parameter or of an "
                "earlier backward; give it a tensor of its own, as full_tensor() returns"
            )
        if found.local is not None:
            raise RuntimeError(
                f"a backward under no_sync() came after the last one that was not, so the gradient of {found.slot.name} differs between "
                "ranks; make the last backward before step() one that is not under no_sync()"
            )

    def _refuse_late(self, number: int | None) -> None:
        """Gradients of an optimizer were cleared and freed: what was set since then cannot be used."""
        for _, _, param, slot in self._slots:
            if slot.optimizer == number and param.grad is not None:
                raise RuntimeError(
                    f"the gradient of {slot.name} was set after zero_grad(), which has freed the memory of gradients (shard_gradients=True); "
                    "set gradients in place of those that backward has left, or attach without shard_gradients"
                )

    def used(self) -> None:
        """The update was made or left out; where gradients are freed, they are."""
        self._is_freed = self._common.gradient_memory is not None

    def clear(self) -> None:
        """The engine ends: nothing shall be left that only it knows."""
        for _, _, param, _ in self._slots:
            if isinstance(param.grad, MeanGradient):
                param.grad = None
        self._slots, self._parts, self.left = [], {}, {}

    # --- for the tensors ----------------------------------------------------------------------------------------------

    def refuse_stale(self, part: Part) -> None:
        if part.backward != self._backward or part.slot.number >= len(self._slots):
            raise RuntimeError(
                f"this mean gradient of {part.slot.name} is that of an earlier backward, and its memory was used again; keep a copy, as "
                "full_tensor() returns"
            )
        if self._is_freed:
            raise RuntimeError(
                f"the gradient of {part.slot.name} was freed by step(), as shard_gradients=True asks for: use it before step(), and call "
                "zero_grad() before the next backward"
            )
        self._common.raise_if_failed()

    def _begin(self, what: str) -> None:
        """All ranks are about to do something together."""
        ddp = self._ddp()
        if ddp is not None and join_config_of(ddp).enable and not self._common.is_alone:
            raise RuntimeError(
                f"{what} asks all ranks, and under Join some may have no inputs any more; leave it out, or train without Join"
            )
        for number, update in enumerate(self._update.of):
            if update.divisor is not None:  # what was clipped by our own functions, and not written yet
                for bucket in dict.fromkeys(bucket for bucket, _, _, _ in self._slots):
                    if bucket.reduced is not None and number in bucket.spans:
                        bucket.reduced[bucket.spans[number]].div_(update.divisor)
                update.divisor = None

    def note_change(self) -> None:
        self._num_changes += 1

    def note_added(self) -> None:
        self.is_added_to = True

    def collect(self, part: Part) -> Tensor:
        if current_graph_task_id() != -1:
            raise RuntimeError(
                f"the gradient of {part.slot.name} is asked for inside backward, where ranks cannot meet; use it after backward"
            )
        self._begin("collecting a gradient")
        return self._over_all_ranks(part.flat(), dist.ReduceOp.SUM, f"collecting the gradient of {part.slot.name}")

    def agree(self, found: Tensor, optimizers: set[int]) -> None:
        self._common.refuse_scaling()
        self._begin("unscaling gradients")
        mine = found.reshape(1).to(self._books.device, torch.float32)
        what = "search for gradients that are not finite"
        found.copy_(self._over_all_ranks(mine.clone(), dist.ReduceOp.MAX, what).reshape(()))
        if self._books.num_optimizers > 1 and found.item():
            self.nonfinite |= optimizers
            self.on_nonfinite()

    def norms(self, order: float) -> Tensor:
        key = order, self._num_changes, self._backward
        if self._known_norms[0] != key:
            self._begin("the norm of gradients")
            self._known_norms = (order, self._num_changes, self._backward), self._find_norms(order)
        return self._known_norms[1]

    def _find_norms(self, order: float) -> Tensor:
        dtype = self._common.norm_dtype
        num_slots = len(self._slots)
        device, is_extreme = self._books.device, math.isinf(order)
        own = list(_own_norms(self._slots, self._parts, order, dtype))
        sign = -1 if order == -math.inf else 1
        totals = torch.full((num_slots,), -math.inf if is_extreme else 0.0, dtype=dtype, device=device)
        if own:
            values = torch.stack(own)
            if is_extreme:
                totals.scatter_reduce_(0, self._places, sign * values, "amax")
            else:
                totals.index_add_(0, self._places, values if order == 0 else values**order)
        is_read = not self._common.adapter.capabilities.futures_complete_at_enqueue
        code = zlib.crc32(f"{order} {num_slots}".encode()) % 1024 if is_read else 0
        both = [totals.new_full((1,), code), totals.new_full((1,), -code)]
        op = dist.ReduceOp.MAX if is_extreme else dist.ReduceOp.SUM
        found = self._over_all_ranks(torch.cat([totals, *both]), op, "norms of gradients")
        totals, last = found[:-2], found[-2:]
        if is_read:
            times = 1 if is_extreme else self._books.world_size
            if last.tolist() != [times * code, -times * code]:
                raise ZerolapError(
                    f"{self._common.me}: ranks asked for different norms of gradients (here: of order {order}); all must ask for the same"
                )
        if is_extreme:
            return sign * totals
        return totals if order == 0 else totals ** (1 / order)

    def _over_all_ranks(self, value: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> Tensor:
        if self._common.is_alone:
            return value
        return self._common.run_on_lane(lambda: self._common.over_all_ranks(value, op, what))


def _nothing() -> None:
    pass


def _own_norms(
    slots: Sequence[tuple[Bucket, int, Tensor, Slot]], parts: Mapping[Tensor, Part], order: float, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Of this rank's ranges, one by one."""
    for _, _, param, slot in slots:
        part = parts.get(param)
        for each in slot.ranges:
            if part is None:  # it has no gradient, and nobody asks for its norm
                yield torch.zeros((), dtype=dtype, device=param.device)
            else:
                yield torch.linalg.vector_norm(each.view_of(part.memory), order, dtype=dtype)
