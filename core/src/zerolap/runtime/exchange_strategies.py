"""How buckets are reduced and gathered: by a wrapped DDP hook and broadcasts, or by reduce-scatter and all-gather.

A strategy decides who owns what and prepares a bucket's collectives, once for as long as its memory stays. It starts none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap.backend.base import Adapter
from zerolap.backend.lanes import Pending, start_all
from zerolap.backend.parts import Parts
from zerolap.runtime.bucket import Bucket, OwnPiece
from zerolap.runtime.precision import Precision
from zerolap.runtime.shard_optimizer import GradSlot, Shard, ShardBook, stand_in_for
from zerolap.runtime.state_pieces import strides_in_bucket
from zerolap.schedule.ownership import EqualRanges, Piece, Policy, assign_owners


class ExchangeStrategy(Protocol):
    """One of the two ways."""

    def prepare_reduce(self, bucket: Bucket) -> None:
        """Say how a bucket is reduced whose memory is new; on backward's thread, before its owners are assigned."""

    def assign(self, buckets: Sequence[Bucket]) -> None:
        """Decide who owns what of a layout that was recorded."""

    def install(self, bucket: Bucket) -> None:
        """Give a bucket whose parameters are in their flat buffer its shard, and say how it is gathered; on the lane."""

    def close(self) -> None:
        """Let go of groups."""


class WrappedHook:
    """Reduces by another DDP hook, all of a bucket on all ranks, and sends whole parameters from their owners by broadcast."""

    def __init__(self, book: ShardBook, *, adapter: Adapter, group: dist.ProcessGroup, policy: Policy) -> None:
        self._book = book
        self._adapter = adapter
        self._group: dist.ProcessGroup | None = group
        self._policy = policy

    def prepare_reduce(self, bucket: Bucket) -> None:
        """The hook is asked for every bucket anew."""

    def assign(self, buckets: Sequence[Bucket]) -> None:
        layout = tuple(bucket.slots for bucket in buckets)
        ownership = assign_owners(layout, world_size=self._book.world_size, policy=self._policy)
        for bucket, owners in zip(buckets, ownership.buckets, strict=True):
            bucket.owners = owners

    def install(self, bucket: Bucket) -> None:
        assert bucket.flat is not None
        assert bucket.owners is not None
        assert self._group is not None
        mine = {piece.param: piece for piece in bucket.owners.owned_by(self._book.rank)}
        stand_ins: dict[Piece, Tensor] = {}
        slots = []
        for place, (index, param) in enumerate(zip(bucket.places, bucket.params, strict=True)):
            if index in mine:
                stand_ins[mine[index]] = stand_in_for(param)
                slots.append(GradSlot(place, param.size(), strides_in_bucket(param), bucket.offsets[place]))
        local = self._book.make_local(stand_ins) if mine else None
        bucket.shard = None if local is None else Shard(list(stand_ins.values()), slots, local)
        starts, first = [], 0
        for owner, pieces in bucket.owners.segments():
            part = bucket.flat.slice(first, first + len(pieces))
            first += len(pieces)
            if part.numel():
                where = f"{bucket.common.me}, bucket {bucket.index}"
                what = f"{where}: broadcast of updated parameters from group rank {owner}"
                starts.append(partial(self._adapter.broadcast, part, src=owner, group=self._group, what=what))
        bucket.gather = partial(start_all, starts)

    def close(self) -> None:
        self._group = None


class ReduceScatter:
    """Reduces by reduce-scatter and gathers by all-gather: every rank owns an equal range of every bucket.

    A bucket of P elements costs a rank 2P(n-1)/n on the wire, where all-reduce and broadcast cost 3P(n-1)/n. Each rank steps its
    range only, in flat memory that is kept between steps, and nobody else ever sees the reduced gradients.
    """

    def __init__(
        self,
        book: ShardBook,
        *,
        adapter: Adapter,
        reduce_group: dist.ProcessGroup,
        group: dist.ProcessGroup,
        cuts: Mapping[torch.dtype, int | None],
        precision: Precision,
    ) -> None:
        """``cuts`` says where parameters of a dtype may be cut; of others, and where it is None, shards are whole parameters.

        Reductions are started by backward's thread, gathers by the lane: a group each, so that one thread uses one group.
        """
        self._book = book
        self._adapter = adapter
        self._reduce_group: dist.ProcessGroup | None = reduce_group
        self._group: dist.ProcessGroup | None = group
        self._cuts = cuts
        self.precision = precision

    def prepare_reduce(self, bucket: Bucket) -> None:
        assert self._reduce_group is not None
        if bucket.owners is None:
            # Equal ranges depend on nothing but the bucket, so even a layout that is new is reduced as it comes.
            bucket.owners = EqualRanges.of(
                bucket.slots, world_size=self._book.world_size, cut=self._cut_of(bucket.params)
            )
        buffer, bounds = bucket.buffer, self._bounds_of(bucket)
        mine = buffer[bounds[self._book.rank] : bounds[self._book.rank + 1]]
        if bucket.shard_gradients is None:
            bucket.shard_gradients = torch.empty_like(mine, dtype=self.precision.reduce_dtype or mine.dtype)
            if bucket.freed is not None:
                bucket.freed.reduced_into(bucket.shard_gradients)
        into = bucket.shard_gradients
        start = partial(
            self._adapter.reduce_scatter,
            into=into,
            group=self._reduce_group,
            tag=bucket.index,
            what="reduce-scatter of gradients",
        )
        mean = 1 / self._book.world_size
        is_scaled_before = into.dtype is torch.float16  # a sum of halves may overflow: as DDP does it
        bucket.scale = 1.0 if is_scaled_before else mean
        if is_scaled_before or into.dtype is not buffer.dtype:

            def scatter() -> Pending:
                memory = buffer.to(into.dtype)
                return start(Parts.cut(memory * mean if is_scaled_before else memory, bounds))

            bucket.scatter = scatter
        else:
            bucket.scatter = partial(start, Parts.cut(buffer, bounds))

    def assign(self, buckets: Sequence[Bucket]) -> None:
        """Each bucket's owners are known since it was prepared."""

    def install(self, bucket: Bucket) -> None:
        assert bucket.flat is not None
        assert bucket.owners is not None
        assert self._group is not None
        owned = bucket.owners.owned_by(self._book.rank)
        begin = self._bounds_of(bucket)[self._book.rank]
        place_of = {index: place for place, index in enumerate(bucket.places)}
        bucket.own = [
            OwnPiece(place_of[piece.param], *piece[1:], bucket.offsets[place_of[piece.param]] + piece.start - begin)
            for piece in owned
            if piece.start < piece.stop
        ]
        bucket.shard = self._make_shard(bucket, owned) if owned else None
        sent_as, buffer = self.precision.gather_dtype, bucket.flat.buffer
        is_rounded = sent_as not in (None, buffer.dtype)  # what is owned, too
        if not self._adapter.capabilities.futures_complete_at_enqueue and not is_rounded:
            bucket.marks = bucket.flat.mark([piece[:3] for piece in bucket.own])
        what = f"{bucket.common.me}, bucket {bucket.index}: all-gather of updated parameters"
        start = partial(self._adapter.all_gather, group=self._group, tag=bucket.index, what=what)
        ends = bucket.flat.positions(self._bounds_of(bucket))
        if not is_rounded:
            bucket.gather = partial(start, Parts.cut(buffer, ends))
            return

        def gather() -> Pending:
            wire = buffer.to(sent_as)
            pending = start(Parts.cut(wire, ends))
            # Our own part as well: every rank must have the rounded value.
            return Pending(
                [pending],
                tensors=(wire,),
                what="",  # the one inside says what failed
                sent_bytes=pending.sent_bytes,
                finish=partial(_copy, buffer, wire),
            )

        bucket.gather = gather

    def _make_shard(self, bucket: Bucket, owned: Sequence[Piece]) -> Shard:
        assert bucket.flat is not None
        begin = self._bounds_of(bucket)[self._book.rank]
        place_of = {index: place for place, index in enumerate(bucket.places)}
        has_masters = self.precision.has_masters(bucket.flat.buffer.dtype)
        params: dict[Piece, Tensor] = {}
        stand_ins: dict[Piece, Tensor] = {}
        slots = []
        for piece in owned:
            place = place_of[piece.param]
            param, size = bucket.params[place], piece.stop - piece.start
            if self._cut_of(bucket.params) is None:  # a whole parameter, which the optimizer may need in its shape
                params[piece] = param.detach()
            else:
                params[piece] = bucket.flat.piece(place, piece.start, piece.stop)
            memory = params[piece]
            if has_masters:
                memory = memory.to(self.precision.stepped_as(memory.dtype), copy=True)
            stand_ins[piece] = stand_in_for(param, memory=memory)
            offset = bucket.offsets[place] + piece.start - begin if size else 0
            slots.append(GradSlot(place, tuple(memory.shape), memory.stride(), offset))
        local = self._book.make_local(stand_ins, params=params if has_masters else None)
        return Shard(list(stand_ins.values()), slots, local)

    def _cut_of(self, params: Sequence[Tensor]) -> int | None:
        return self._cuts.get(params[0].dtype) if params else 1

    def _bounds_of(self, bucket: Bucket) -> list[int]:
        assert isinstance(bucket.owners, EqualRanges)
        return bucket.owners.bounds()

    def close(self) -> None:
        self._group = self._reduce_group = None


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source)
