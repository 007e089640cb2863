"""Recording a layout: what DDP's buckets hold, noted as they come, before owners are assigned. No collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerolap._torch import GradBucket
from zerolap.runtime.books import Books
from zerolap.runtime.bucket import Bucket, Update
from zerolap.runtime.common import Common

_NO_BUFFER = torch.empty(0)  # that is no bucket's


class Recording:
    """The buckets of one backward, none while no backward is recorded. On backward's thread."""

    def __init__(self, books: Books, common: Common, update: Update) -> None:
        self._books = books
        self._common = common
        self._update = update
        self._index_of: dict[Tensor, int] = {}
        self.buckets: list[Bucket] = []

    def take(self, given: GradBucket, *, before: Sequence[Bucket]) -> None:
        """Note the next one: it is that of the layout before, if it holds the same parameters, or a new one."""
        index, buffer = given.index(), given.buffer()
        if index == 0:
            self._begin(before)
        if buffer.layout is not torch.strided:
            raise ValueError("sparse gradients cannot be updated inside backward; use sparse=False")
        # Of gradients() only the offsets are right: it has row-by-row strides even where DDP has others.
        held = [
            (place, param, int(grad.storage_offset() - buffer.storage_offset()))
            for param, grad in zip(given.parameters(), given.gradients(), strict=True)
            if (place := self._index_of.get(param)) is not None  # DDP may reduce for another optimizer, too
        ]
        places, params, offsets = zip(*held, strict=True) if held else ((), (), ())
        if index < len(before) and before[index].places == places:
            before[index].record(buffer, offsets)
            self.buckets.append(before[index])
        else:
            self.buckets.append(Bucket(index, self._common, self._update, places, params, buffer, offsets))
            self.buckets[-1].record(buffer, offsets)

    def outside(self) -> list[Tensor]:
        """The optimizer's parameters that are in none of the buckets."""
        inside = {place for bucket in self.buckets for place in bucket.places}
        return [param for param, index in self._index_of.items() if index not in inside]

    def _begin(self, before: Sequence[Bucket]) -> None:
        """DDP has other memory now; what it had shall not be held beside that."""
        self.buckets = []
        if self._common.gradient_memory is not None:
            self._common.gradient_memory.unwatch()
        for bucket in before:
            bucket.record(_NO_BUFFER, bucket.offsets)
        self._common.adapter.release_memory()
        self._index_of = {param: place for place, param in self._books.by_place().items()}
