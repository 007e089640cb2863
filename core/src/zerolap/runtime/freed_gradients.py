"""What is freed of one bucket's gradients, and when. Where their memory comes from and goes is in `gradient_memory`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerolap.backend.lanes import Waitable
from zerolap.runtime.gradient_memory import BucketMemory, GradientMemory, Refillable


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
