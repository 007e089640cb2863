"""Workloads: what is trained, as sizes, and what of it a rank holds and sends. Pure functions; no tensors, no torch.

Where a parameter is used and its gradient is ready is given as a share of the forward's and the backward's time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import NamedTuple

from zerolap.schedule.ownership import EqualRanges, GroupRank, Layout, Policy, Slot, assign_owners

MB = 2**20
FIRST_BUCKET_BYTES = MB  # DDP's first bucket, unless a cap is given: its reduction shall start early
_ALIGNMENT_BYTES = 64  # of a parameter in its flat buffer; a gather sends the padding with it
_NUM_EXACT = 64  # up to this many ranks every share is looked at; beyond, the largest is bounded


class Param(NamedTuple):
    """One parameter, in the order in which the optimizer has them."""

    numel: int
    dtype: str = "float32"
    itemsize: int = 4
    used_at: float = 0.0  # in forward
    ready_at: float = 1.0  # in backward
    state_bytes_per_element: float = 0.0
    state_bytes_per_piece: int = 0  # step counts and the like: as many as there are pieces
    master_itemsize: int = 0  # of the copy from which it is rounded; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and how its gradients and parameters are sent. A parameter is cut at multiples of ``cut`` elements, or never."""

    params: tuple[Param, ...]
    layout: Layout
    reduce_itemsize: int | None = None  # None: the parameter's own
    gather_itemsize: int | None = None
    cut: int | None = 1
    max_receive_bytes: int | None = None  # None: room for all of a bucket
    shards_gradients: bool = False  # whole gradients are freed bucket by bucket, and shards once they were used

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)


class Traffic(NamedTuple):
    """What one bucket asks of a rank. Bytes are those of the rank with the most to send or receive: the others wait for it."""

    numel: int  # of the largest share
    reduce_bytes: float
    gather_bytes: float
    gradient_bytes: int  # of all of it, in its own dtype
    reduce_copy_bytes: int  # of all of it, in the dtype it is sent in, if that is another
    gather_copy_bytes: int
    used_at: float
    ready_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of a rank, activations left aside: held from step to step, and beside that within a step. Gradients are views of DDP's buckets,
    or are freed as they are used."""

    params: int
    gradients: int
    reduced: int  # the mean gradients of its shard
    state: int
    masters: int
    received: int  # on the way in, at most
    transient: int = 0  # gradients within a step, where they are freed: some buckets, and this rank's part of all means
    copies: int = 0  # in the dtype they are sent in, while they are under way

    @property
    def held(self) -> int:
        """From step to step."""
        return self.peak - self.transient - self.copies

    @property
    def peak(self) -> int:
        """At most."""
        return sum(getattr(self, field.name) for field in fields(self))


def bucketize(params: Sequence[Param], *, cap_bytes: int, first_bytes: int | None = None) -> Layout:
    """DDP's buckets once it has seen in which order gradients come: each is full when it has reached its cap.

    Dtypes are not mixed. Of gradients that come at the same time the last parameter's is first.
    """
    order = sorted(range(len(params)), key=lambda i: (params[i].ready_at, -i))
    filling: dict[str, list[Slot]] = {}
    bytes_in: dict[str, int] = {}
    caps: dict[str, int] = {}
    layout: list[tuple[Slot, ...]] = []
    for index in order:
        param = params[index]
        filling.setdefault(param.dtype, []).append(Slot(index, param.numel))
        bytes_in[param.dtype] = bytes_in.get(param.dtype, 0) + param.numel * param.itemsize
        if bytes_in[param.dtype] >= caps.get(param.dtype, first_bytes or cap_bytes):
            layout.append(tuple(filling.pop(param.dtype)))
            bytes_in[param.dtype], caps[param.dtype] = 0, cap_bytes
    return (*layout, *(tuple(slots) for slots in filling.values()))


def traffic_of(workload: Workload, world_size: int) -> list[Traffic]:
    """Every bucket's traffic, in DDP's order. Buckets are reduced in order, so none is ready before those ahead of it."""
    params, traffic, ready_at = workload.params, [], 0.0
    for slots, ranges in zip(workload.layout, _ranges(workload, world_size), strict=True):
        members = [params[slot.param] for slot in slots]
        ready_at = max([ready_at, *(param.ready_at for param in members)])
        numel = sum(slot.numel for slot in slots)
        largest, smallest = _extremes(ranges, slots, world_size, workload.cut)
        moved = max(numel - smallest, largest * (world_size - 1))
        itemsize = members[0].itemsize
        reduced_as, gathered_as = workload.reduce_itemsize or itemsize, workload.gather_itemsize or itemsize
        traffic.append(
            Traffic(
                numel=largest,
                reduce_bytes=moved * reduced_as,
                gather_bytes=moved * gathered_as,
                gradient_bytes=numel * itemsize,
                reduce_copy_bytes=numel * reduced_as if reduced_as != itemsize else 0,
                gather_copy_bytes=numel * gathered_as if gathered_as != itemsize else 0,
                used_at=min(param.used_at for param in members),
                ready_at=ready_at,
            )
        )
    return traffic


def sent_bytes(workload: Workload, world_size: int, *, rank: GroupRank, stage_sizes: Sequence[int]) -> int:
    """What a rank sends in a step, to the byte, where exchanges have these stages and parts are not padded to equal size."""
    params, sent = workload.params, 0
    for slots, ranges in zip(workload.layout, _ranges(workload, world_size), strict=True):
        itemsize = params[slots[0].param].itemsize
        # Bounds of blocks of ranks: the rank's own first, then those it has gathered.
        blocks, low, width = [], 0, world_size
        for size in stage_sizes:
            width //= size
            low += (rank - low) // width * width
            blocks.append((low, low + width, size - 1))
        ends = {end: ranges.end(end) for begin, stop, _ in blocks for end in (begin, stop)}
        mine = ends[blocks[-1][1]] - ends[blocks[-1][0]]
        sent += (sum(slot.numel for slot in slots) - mine) * (workload.reduce_itemsize or itemsize)
        padded = _positions(slots, list(ends.values()), step=_ALIGNMENT_BYTES // itemsize)
        place = dict(zip(ends, padded, strict=True))
        gathered = sum((place[stop] - place[begin]) * num_peers for begin, stop, num_peers in blocks)
        sent += gathered * (workload.gather_itemsize or itemsize)
    return sent


def sharded_memory(workload: Workload, world_size: int, *, rank: GroupRank | None = None) -> Memory:
    """What a rank holds; without one, the rank that holds the most state (all hold the same where parameters are cut)."""
    owners = _ranges(workload, world_size)
    if rank is None:
        rank = GroupRank(0) if workload.cut is not None else _heaviest(workload, owners, world_size)
    params, state, masters, reduced, flat = workload.params, 0.0, 0, 0, 0
    for slots, ranges in zip(workload.layout, owners, strict=True):
        itemsize = params[slots[0].param].itemsize
        step = _ALIGNMENT_BYTES // itemsize
        flat += itemsize * sum(-(-slot.numel // step) * step for slot in slots)
        for piece in ranges.owned_by(rank):
            param, size = params[piece.param], piece.stop - piece.start
            state += param.state_bytes_per_element * size + param.state_bytes_per_piece
            masters += param.master_itemsize * size
            sent_as = workload.reduce_itemsize or itemsize
            stepped_as = param.master_itemsize or itemsize
            reduced += size * (sent_as + (stepped_as if stepped_as != sent_as else 0))
    largest = max((_bytes(slots, params, workload.reduce_itemsize) for slots in workload.layout), default=0)
    limit = workload.max_receive_bytes
    freed = workload.shards_gradients
    # Two buckets of about the usual size on their way, and the one being filled with the parameters' own gradients of it.
    sizes = sorted(_bytes(slots, params, None) for slots in workload.layout)
    transient = 2 * sizes[-1] + 2 * sizes[len(sizes) // 2] + reduced if freed and sizes else 0
    return Memory(
        params=flat,
        gradients=0 if freed else sum(param.numel * param.itemsize for param in params),
        reduced=0 if freed else reduced,
        transient=transient,
        state=round(state),
        masters=masters,
        received=0 if world_size == 1 else largest if limit is None else min(largest, limit),
    )


def plain_memory(workload: Workload) -> Memory:
    """What a rank holds with DDP and the plain optimizer, with masters of its own where the workload has them."""
    params = workload.params
    return Memory(
        params=sum(param.numel * param.itemsize for param in params),
        gradients=sum(param.numel * param.itemsize for param in params),
        reduced=0,
        state=round(sum(p.state_bytes_per_element * p.numel + p.state_bytes_per_piece for p in params)),
        masters=sum(param.master_itemsize * param.numel for param in params),
        received=0,
    )


def _ranges(workload: Workload, world_size: int) -> list[EqualRanges]:
    ownership = assign_owners(workload.layout, world_size=world_size, policy=Policy.BY_ELEMENT, cut=workload.cut)
    return [ranges for ranges in ownership.buckets if isinstance(ranges, EqualRanges)]


def _bytes(slots: Sequence[Slot], params: Sequence[Param], itemsize: int | None) -> int:
    return sum(slot.numel * (itemsize or params[slot.param].itemsize) for slot in slots)


def _extremes(ranges: EqualRanges, slots: Sequence[Slot], world_size: int, cut: int | None) -> tuple[int, int]:
    """The elements of the largest and of the smallest share."""
    numel = sum(slot.numel for slot in slots)
    if world_size <= _NUM_EXACT:
        shares = [end - begin for begin, end in pairwise(ranges.bounds())]
        return max(shares), min(shares)
    if cut is None:
        largest = max(_shares_of_whole(ranges, slots, world_size).values(), default=0)
        return largest, numel // world_size if len(slots) >= world_size else 0
    ideal = numel / world_size
    return min(numel, -int(-ideal // cut) * cut), max(0, int(ideal // cut) * cut)


def _shares_of_whole(ranges: EqualRanges, slots: Sequence[Slot], world_size: int) -> dict[int, int]:
    """Elements by owner where parameters are whole: by parameter, for there may be far more ranks."""
    shares: dict[int, int] = {}
    start, total = 0, sum(slot.numel for slot in slots)
    for slot in slots:
        if slot.numel:
            owner = (
                (2 * start + slot.numel) * world_size // (2 * total)
            )  # whose range its middle lies in, or a neighbour
            while owner >= world_size or ranges.end(owner) > start:
                owner -= 1
            while ranges.end(owner + 1) <= start:
                owner += 1
            shares[owner] = shares.get(owner, 0) + slot.numel
            start += slot.numel
    return shares


def _heaviest(workload: Workload, owners: Sequence[EqualRanges], world_size: int) -> GroupRank:
    """The rank with the most elements."""
    load: dict[int, int] = {}
    for slots, ranges in zip(workload.layout, owners, strict=True):
        for owner, numel in _shares_of_whole(ranges, slots, world_size).items():
            load[owner] = load.get(owner, 0) + numel
    return GroupRank(max(load, key=lambda owner: load[owner], default=0))


def _positions(slots: Sequence[Slot], elements: Sequence[int], *, step: int) -> list[int]:
    """Where elements of a bucket lie in its flat buffer; padding goes with what stands before it."""
    unpadded = list(accumulate((slot.numel for slot in slots), initial=0))
    starts = list(accumulate((-(-slot.numel // step) * step for slot in slots), initial=0))
    places = [len(slots) if element == unpadded[-1] else bisect_right(unpadded, element) - 1 for element in elements]
    return [starts[place] + element - unpadded[place] for place, element in zip(places, elements, strict=True)]
