"""How buckets are reduced and gathered: by a wrapped DDP hook and broadcasts, or by reduce-scatter and all-gather.

A strategy decides who owns what and prepares a bucket's collectives, once for as long as its memory stays. It starts none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap.backend.base import Adapter
from zerolap.backend.lanes import Pending, start_all
from zerolap.backend.parts import Parts
from zerolap.runtime.books import Books
from zerolap.runtime.bucket import Bucket
from zerolap.runtime.gradient_memory import GradientMemory
from zerolap.runtime.precision import Precision
from zerolap.runtime.quantised_exchange import Masters
from zerolap.runtime.rounding import Rounding
from zerolap.runtime.shard_optimizer import GradSlot, Shard, stand_in_for
from zerolap.runtime.state_pieces import OwnPiece, strides_in_bucket
from zerolap.schedule.balance import assign_whole
from zerolap.schedule.ownership import (
    ByRank,
    EqualRanges,
    GroupRank,
    Piece,
    Policy,
    Section,
    Sections,
    assign_owners,
)


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

    def __init__(self, books: Books, *, adapter: Adapter, group: dist.ProcessGroup, policy: Policy) -> None:
        self._books = books
        self._adapter = adapter
        self._group: dist.ProcessGroup | None = group
        self._policy = policy

    def prepare_reduce(self, bucket: Bucket) -> None:
        """The hook is asked for every bucket anew."""

    def assign(self, buckets: Sequence[Bucket]) -> None:
        layout = tuple(bucket.slots for bucket in buckets)
        ownership = assign_owners(layout, world_size=self._books.world_size, policy=self._policy)
        for bucket, owners in zip(buckets, ownership.buckets, strict=True):
            bucket.owners = owners

    def install(self, bucket: Bucket) -> None:
        assert bucket.flat is not None
        assert bucket.owners is not None
        assert self._group is not None
        mine = {piece.param: piece for piece in bucket.owners.owned_by(self._books.rank)}
        stand_ins: dict[Piece, Tensor] = {}
        slots = []
        for place, (index, param) in enumerate(zip(bucket.places, bucket.params, strict=True)):
            if index in mine:
                stand_ins[mine[index]] = stand_in_for(param)
                slots.append(GradSlot(place, param.size(), strides_in_bucket(param), bucket.offsets[place]))
        bucket.shard = Shard(slots, list(stand_ins.values()), self._books.make_locals(stand_ins)) if mine else None
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
    """Reduces by reduce-scatter and gathers by all-gather: every rank owns a part of every bucket, which may be empty.

    A bucket of P elements costs a rank 2P(n-1)/n on the wire, where all-reduce and broadcast cost 3P(n-1)/n. Each rank steps its
    part only, in flat memory that is kept between steps, and nobody else ever sees the reduced gradients.

    [Note: sections] Of what an optimizer treats element by element every rank owns an equal range of each bucket. Other parameters stay
    whole, and one assignment over all of them says who owns which; it does not depend on buckets, so those may change without a
    state being moved. A rank's part of a bucket is what it owns of the first optimizer's section, then of the next one's.
    """

    def __init__(
        self,
        books: Books,
        *,
        adapter: Adapter,
        reduce_group: dist.ProcessGroup,
        group: dist.ProcessGroup,
        cuts: Sequence[Mapping[torch.dtype, int]],
        precision: Precision,
    ) -> None:
        """``cuts`` says, by optimizer, where parameters of a dtype may be cut; those of others stay whole.

        Reductions are started by backward's thread, gathers by the lane: a group each, so that one thread uses one group.
        """
        self._books = books
        self._adapter = adapter
        self._reduce_group: dist.ProcessGroup | None = reduce_group
        self._group: dist.ProcessGroup | None = group
        self._cuts = cuts
        self.precision = precision
        self._whole: dict[int, GroupRank] = {}  # the owners of parameters that stay whole
        self.rounding = None if precision.wire.is_exact else Rounding(books, adapter=adapter, precision=precision)

    def prepare_reduce(self, bucket: Bucket) -> None:
        assert self._reduce_group is not None
        if bucket.owners is None:
            bucket.owners = Sections(tuple(self._sections(bucket)))
        buffer = bucket.buffer
        if bucket.shard_gradients is None:
            num_mine = sum(map(self.precision.num_summed, bucket.owners.owned_by(self._books.rank)))
            bucket.shard_gradients = buffer.new_empty(num_mine, dtype=self.precision.summed_as(buffer.dtype))
            if bucket.freed is not None:
                bucket.freed.reduced_into(bucket.shard_gradients)
        into = bucket.shard_gradients
        if self.rounding is not None and self.rounding.reduces_in is not None:
            bucket.scale = 1.0  # it is the mean that is left
            bucket.scatter = self.rounding.scattering(bucket, group=self._reduce_group)
            return
        start = partial(
            self._adapter.reduce_scatter,
            into=into,
            group=self._reduce_group,
            tag=bucket.index,
            what="reduce-scatter of gradients",
        )
        mean = 1 / self._books.world_size
        is_scaled_before = into.dtype is torch.float16  # a sum of halves may overflow: as DDP does it
        bucket.scale = 1.0 if is_scaled_before else mean
        runs = list(_runs(bucket, self._books.world_size))
        if is_scaled_before or into.dtype is not buffer.dtype:

            def scatter() -> Pending:
                memory = buffer.to(into.dtype)
                return start(_cutting(memory * mean if is_scaled_before else memory, runs)())

            bucket.scatter = scatter
        elif all(len(of_rank) < 2 for of_rank in runs):
            bucket.scatter = partial(start, _cutting(buffer, runs)())
        else:
            cut = _cutting(buffer, runs)
            bucket.scatter = lambda: start(cut())

    def assign(self, buckets: Sequence[Bucket]) -> None:
        """Each bucket's owners are known since it was prepared."""

    def install(self, bucket: Bucket) -> None:
        assert bucket.flat is not None
        assert bucket.owners is not None
        assert self._group is not None
        owned = bucket.owners.owned_by(self._books.rank)
        place_of = {index: place for place, index in enumerate(bucket.places)}
        ends = accumulate(map(self.precision.num_summed, owned), initial=0)
        pieces = [
            OwnPiece(place_of[param], start, stop, offset)
            for (param, start, stop), offset in zip(owned, ends, strict=False)
        ]
        bucket.own = [piece for piece in pieces if piece.start < piece.stop]
        bucket.spans = self._spans(bucket)
        sections = [bucket.flat.positions(bounds) for bounds in _bounds_of(bucket)]
        masters = None if self.rounding is None else self.rounding.masters_of(bucket.flat.buffer, sections)
        bucket.shard = self._make_shard(bucket, owned, pieces, masters) if owned else None
        if self.rounding is not None and masters is not None:
            differences = self.rounding.differences(bucket.flat.buffer, sections, masters)
            gathers = partial(self._gathers, bucket)
            bucket.gather = self.rounding.gathering(bucket, differences, gathers)
            return
        sent_as, buffer = self.precision.gather_dtype, bucket.flat.buffer
        is_rounded = sent_as not in (None, buffer.dtype)  # what is owned, too
        if not self._adapter.capabilities.futures_complete_at_enqueue and not is_rounded:
            bucket.marks = bucket.flat.mark([piece[:3] for piece in bucket.own])
        if not is_rounded:
            bucket.gather = partial(start_all, self._gathers(bucket, buffer, sections))
            return

        def gather() -> Pending:
            wire = buffer.to(sent_as)
            pending = start_all(self._gathers(bucket, wire, sections))
            # Our own part as well: every rank must have the rounded value.
            return Pending(
                [pending],
                tensors=(wire,),
                what="",  # the one inside says what failed
                sent_bytes=pending.sent_bytes,
                finish=partial(_copy, buffer, wire),
            )

        bucket.gather = gather

    def _gathers(
        self, bucket: Bucket, memory: Tensor, sections: Sequence[Sequence[int]]
    ) -> list[Callable[[], Pending]]:
        """An all-gather for every section of ``memory``, which is laid out as the flat buffer."""
        assert self._group is not None
        what = f"{bucket.common.me}, bucket {bucket.index}: all-gather of updated parameters"
        tag = bucket.index * self._books.num_optimizers
        return [
            partial(
                self._adapter.all_gather,
                Parts.cut(memory[ends[0] : ends[-1]], [end - ends[0] for end in ends]),
                group=self._group,
                tag=tag + number,
                what=what,
            )
            for number, ends in enumerate(sections)
        ]

    def _make_shard(
        self, bucket: Bucket, owned: Sequence[Piece], pieces: Sequence[OwnPiece], masters: Masters | None
    ) -> Shard:
        assert bucket.flat is not None
        has_masters = self.precision.has_masters(bucket.flat.buffer.dtype)
        params: dict[Piece, Tensor] = {}
        stand_ins: dict[Piece, Tensor] = {}
        slots = []
        for piece, (place, start, stop, offset) in zip(owned, pieces, strict=True):
            param = bucket.params[place]
            if self.cut_of(piece.param, param.dtype) is None:  # whole: the optimizer may need its shape
                params[piece] = param.detach()
            else:
                params[piece] = bucket.flat.piece(place, start, stop)
            memory = params[piece]
            if masters is not None:
                exact = masters.of(bucket.flat.piece(place, start, stop))
                memory = exact.as_strided(memory.shape, memory.stride())
            elif has_masters:
                memory = memory.to(self.precision.stepped_as(memory.dtype), copy=True)
            stand_ins[piece] = stand_in_for(param, memory=memory)
            slots.append(GradSlot(place, tuple(memory.shape), memory.stride(), offset))
        locals_ = self._books.make_locals(stand_ins, params=params if has_masters else None)
        for local in locals_.values():
            local.sends_differences = masters is not None
        return Shard(slots, list(stand_ins.values()), locals_)

    def _sections(self, bucket: Bucket) -> Iterator[Section]:
        world_size = self._books.world_size
        for number in range(self._books.num_optimizers):
            slots = [slot for slot in bucket.slots if self._books.number_of(slot.param) == number]
            cut = self._cuts[number].get(bucket.buffer.dtype)
            if slots and cut is None:
                yield ByRank.of(slots, [self._owner_of(slot.param) for slot in slots], world_size=world_size)
            elif slots:
                yield EqualRanges.of(slots, world_size=world_size, cut=cut)

    def _spans(self, bucket: Bucket) -> dict[int, slice]:
        spans, end = {}, 0
        assert isinstance(bucket.owners, Sections)
        for section in bucket.owners.sections:
            begin = end
            end += sum(map(self.precision.num_summed, section.owned_by(self._books.rank)))
            spans[self._books.number_of(section.order()[0])] = slice(begin, end)
        return spans

    def _owner_of(self, place: int) -> GroupRank:
        """Of a parameter that stays whole."""
        if place not in self._whole:
            params = self._books.by_place()
            whole = [each for each, param in params.items() if self.cut_of(each, param.dtype) is None]
            loads = [self._books.load_of(each, params[each]) for each in whole]
            self._whole = dict(zip(whole, assign_whole(loads, world_size=self._books.world_size), strict=True))
        return self._whole[place]

    def cut_of(self, place: int, dtype: torch.dtype) -> int | None:
        """Where a parameter may be cut; None if it stays whole."""
        return self._cuts[self._books.number_of(place)].get(dtype)

    def close(self) -> None:
        self._group = self._reduce_group = None


def _bounds_of(bucket: Bucket) -> list[list[int]]:
    """Where ranks' parts of each section begin, in elements of the flat buffer, in which the sections lie one behind the other."""
    assert isinstance(bucket.owners, Sections)
    bounds: list[list[int]] = []
    for section in bucket.owners.sections:
        begin = bounds[-1][-1] if bounds else 0
        bounds.append([begin + end for end in section.bounds()])
    return bounds


def _runs(bucket: Bucket, num_ranks: int) -> Iterator[list[tuple[int, int]]]:
    """For each rank where in DDP's memory its part of the bucket lies: as few runs as can be."""
    assert bucket.owners is not None
    start_of = dict(zip(bucket.places, bucket.offsets, strict=True))
    for rank in range(num_ranks):
        runs: list[tuple[int, int]] = []
        for param, first, last in bucket.owners.owned_by(GroupRank(rank)):
            start, stop = start_of[param] + first, start_of[param] + last
            if runs and runs[-1][1] == start:
                runs[-1] = runs[-1][0], stop
            elif start < stop:
                runs.append((start, stop))
        yield runs


def _cutting(memory: Tensor, runs: Sequence[Sequence[tuple[int, int]]]) -> Callable[[], Parts]:
    """What cuts memory into every rank's runs. Those that do not lie in one piece are copied, whenever it is called."""
    views = [[memory[a:b] for a, b in of_rank] or [memory[:0]] for of_rank in runs]
    scattered = [view for of_rank in views if len(of_rank) > 1 for view in of_rank]
    if not scattered:
        parts = Parts.of([view for (view,) in views])
        return lambda: parts
    sizes = [sum(view.numel() for view in of_rank) for of_rank in views if len(of_rank) > 1]

    def cut() -> Parts:
        packed = iter(torch.split(torch.cat(scattered), sizes))
        return Parts.of([of_rank[0] if len(of_rank) == 1 else next(packed) for of_rank in views])

    return cut


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source)


def for_views(bucket: Bucket, memory: GradientMemory) -> Tensor:
    """What DDP makes views of, and nobody reads, where whole gradients are freed."""
    if bucket.common.failures.first is not None:
        memory.failed()
    return memory.readable(bucket.buffer) if bucket.flat is None else bucket.flat.buffer
