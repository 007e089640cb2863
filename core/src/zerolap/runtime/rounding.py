"""What a bucket's exchanges are where they are rounded: which format, from which masters, with which noise. Nothing is rounded here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap.backend.base import Adapter
from zerolap.backend.lanes import Pending, start_all
from zerolap.runtime.books import Books
from zerolap.runtime.bucket import Bucket
from zerolap.runtime.codec import CACHED, Blocks, Codec, Noise, word_of
from zerolap.runtime.common import Observer
from zerolap.runtime.precision import Precision
from zerolap.runtime.quantised_exchange import Differences, Masters, Owed, QuantisedReduce
from zerolap.schedule.ownership import GroupRank, Piece, Sections
from zerolap.schedule.wire_format import BLOCK, WireFormat


class Rounding:
    """Of one strategy: prepares exchanges in fewer bits."""

    def __init__(self, books: Books, *, adapter: Adapter, precision: Precision) -> None:
        self._books = books
        self._adapter = adapter
        self._precision = precision
        wire = precision.wire
        self.reduces_in, self.gathers_in = wire.reduces_in, wire.gathers_in
        self._owed = Owed() if wire.gradient_feedback else None
        self.clock = None if wire.seed is None else NoiseClock(wire.seed, books)

    def scattering(self, bucket: Bucket, *, group: dist.ProcessGroup) -> Callable[[], Pending]:
        """What starts a bucket's reduction, which leaves the mean."""
        assert self.reduces_in is not None
        assert bucket.owners is not None
        assert bucket.shard_gradients is not None
        codec = self._codec(self.reduces_in, bucket.buffer.dtype)
        start_of = dict(zip(bucket.places, bucket.offsets, strict=True))
        of_ranks = [bucket.owners.owned_by(GroupRank(rank)) for rank in range(self._books.world_size)]
        owed = None
        if self._owed is not None:
            pieces = [piece for of_rank in of_ranks for piece in of_rank]
            owed = self._owed.laid_out(pieces, like=bucket.buffer, dtype=codec.computes_in)
        ranges = [
            [(start_of[param] + start, start_of[param] + stop) for param, start, stop in of_rank]
            for of_rank in of_ranks
        ]
        all_to_all = partial(
            self._adapter.all_to_all, group=group, tag=bucket.index, what="all-to-all of rounded gradients"
        )
        reduce = QuantisedReduce(
            codec,
            [Blocks(bucket.buffer, of_rank, at_once=codec.at_once) for of_rank in ranges],
            bucket.shard_gradients,
            rank=self._books.rank,
            start=all_to_all,
            owed=owed,
        )
        if self.clock is None:
            return reduce.scatter
        noise = self.clock.noise(of_ranks, bucket.buffer.device, self._books.rank)
        return lambda: reduce.scatter(noise())

    def masters_of(self, buffer: Tensor, sections: Sequence[Sequence[int]]) -> Masters | None:
        """Exact values of what this rank owns, if differences from them are sent."""
        if self.gathers_in is None or self._books.world_size == 1:
            return None
        rank = self._books.rank
        ranges = [(ends[rank], ends[rank + 1]) for ends in sections]
        return Masters(buffer, ranges, dtype=self._precision.stepped_as(buffer.dtype))

    def differences(self, buffer: Tensor, sections: Sequence[Sequence[int]], masters: Masters) -> Differences:
        assert self.gathers_in is not None
        codec = self._codec(self.gathers_in, buffer.dtype)
        return Differences(codec, buffer, sections, masters, rank=self._books.rank)

    def gathering(
        self,
        bucket: Bucket,
        differences: Differences,
        gathers: Callable[[Tensor, Sequence[Sequence[int]]], list[Callable[[], Pending]]],
    ) -> Callable[[], Pending]:
        """What starts the gather of a bucket; ``gathers`` gives the all-gathers of memory that is cut at some ends."""

        assert isinstance(bucket.owners, Sections)
        assert bucket.flat is not None
        noise = None
        if self.clock is not None:
            own = [section.owned_by(self._books.rank) for section in bucket.owners.sections]
            noise = self.clock.noise(own, bucket.flat.buffer.device)

        def gather() -> Pending:
            message = differences.message(() if noise is None else noise())
            pending = start_all(gathers(message, differences.ends))
            return Pending(
                [pending],
                tensors=(message,),
                what="",  # the one inside says what failed
                sent_bytes=pending.sent_bytes,
                finish=partial(differences.apply, message),
            )

        return gather

    def _codec(self, form: WireFormat, dtype: torch.dtype) -> Codec:
        waits_on_host = not self._adapter.capabilities.futures_complete_at_enqueue
        return Codec(form, kept_as=dtype, at_once=CACHED if waits_on_host else None)


class NoiseClock(Observer):
    """Which backward it is, counted in the options of the first param group: they are saved, so a resumed run goes on with the next one."""

    KEY = "wire_step"

    def __init__(self, seed: int, books: Books) -> None:
        self._seed = seed
        self._books = books
        self._count = 0

    def backward_begins(self) -> None:
        first: dict[str, Any] = self._books.books[0].groups[0]
        first[self.KEY] = self._count = first.get(self.KEY, 0) + 1

    def noise(
        self, messages: Sequence[Sequence[Piece]], device: torch.device, *key: int
    ) -> Callable[[], list[Noise | None]]:
        """What gives the noise of some messages, each of these pieces, in this backward or in the update behind it."""
        blocks = [_numbers_of(pieces).to(device) for pieces in messages]
        return lambda: [Noise((self._seed, self._count, *key), each) for each in blocks]


def _numbers_of(pieces: Sequence[Piece]) -> Tensor:
    """A number for every block of these, by where it lies in its parameter."""
    found = [torch.zeros(0, dtype=torch.int32)]
    for param, start, stop in pieces:
        numbers = torch.arange(start // BLOCK, -(-stop // BLOCK), dtype=torch.int32)
        found.append(numbers.add_(word_of(param)))
    return torch.cat(found)
