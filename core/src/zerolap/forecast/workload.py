"""Workloads: what is trained, as sizes, and what of it a rank holds and sends. Pure functions; no tensors, no torch.

Where a parameter is used and its gradient is ready is given as a share of the forward's and the backward's time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import accumulate, pairwise
from math import lcm
from typing import NamedTuple

from zerolap.schedule.balance import COST_PER_ELEMENT, Balance, Load, assign_whole, rank_loads
from zerolap.schedule.ownership import ByRank, EqualRanges, GroupRank, Layout, Piece, Section, Sections, Slot
from zerolap.schedule.wire_format import Wire, WireFormat, in_blocks

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
    optimizer: int = 0  # which of several has it
    cut: int | None = 1  # it may be cut at multiples of so many elements; None: it stays whole
    update_cost: int = 0  # of its update, where that is not the usual one for its elements

    @property
    def load(self) -> Load:
        """What it takes a rank to own all of it."""
        return Load(self.numel * self.itemsize, self.update_cost or COST_PER_ELEMENT * self.numel)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """A model and how its gradients and parameters are sent. Each is itself alone: to compare a hundred thousand parameters takes long."""

    params: tuple[Param, ...]
    layout: Layout
    reduce_itemsize: int | None = None  # None: the parameter's own
    gather_itemsize: int | None = None
    max_receive_bytes: int | None = None  # None: room for all of a bucket
    wire: Wire = field(default_factory=Wire)  # what is rounded on the way
    shards_gradients: bool = False  # whole gradients are freed bucket by bucket, and shards once they were used

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    @property
    def updated(self) -> float:
        """Elements, of which those that cost more to update count more."""
        return sum(param.load.work for param in self.params) / COST_PER_ELEMENT


class Traffic(NamedTuple):
    """What one bucket asks of a rank. Bytes are those of the rank with the most to send or receive: the others wait for it.

    Of parameters that stay whole a rank owns all or nothing in one bucket, and about its share over all of them: each bucket is
    taken to ask for as much of that as the busiest rank's, spread evenly.
    """

    updated: float  # elements of the largest share; those that cost more count more
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


class _Owners(NamedTuple):
    """Who owns what in all buckets, and how even that is for parameters that stay whole."""

    buckets: list[Sections]
    balance: Balance
    load_of: dict[int, Load]  # by parameter


@lru_cache(maxsize=4)
def _owners_of(workload: Workload, world_size: int) -> _Owners:
    params = workload.params
    whole = sorted((i for i, param in enumerate(params) if param.cut is None), key=lambda i: params[i].optimizer)
    loads = [params[i].load for i in whole]
    owners = assign_whole(loads, world_size=world_size)
    owner_of = dict(zip(whole, owners, strict=True))

    def sections(slots: Sequence[Slot]) -> Iterator[Section]:
        for number in sorted({params[slot.param].optimizer for slot in slots}):
            mine = [slot for slot in slots if params[slot.param].optimizer == number]
            cut = params[mine[0].param].cut
            if cut is None:
                yield ByRank.of(mine, [owner_of[slot.param] for slot in mine], world_size=world_size)
            else:
                yield EqualRanges.of(mine, world_size=world_size, cut=cut)

    buckets = [Sections(tuple(sections(slots))) for slots in workload.layout]
    held = rank_loads(loads, owners, world_size=world_size)
    return _Owners(buckets, Balance.of(held) if loads else Balance(1.0, 1.0), dict(zip(whole, loads, strict=True)))


def balance_of(workload: Workload, world_size: int) -> Balance:
    """How much more than the mean the busiest rank has, all parameters together."""
    params, whole = workload.params, _owners_of(workload, world_size).balance
    totals = [sum(each) or 1 for each in zip(*(param.load for param in params), strict=True)]
    uncut = [sum(each) for each in zip(*(p.load for p in params if p.cut is None), strict=True)] or [0, 0]
    return Balance(*(1 + (busy - 1) * part / total for busy, part, total in zip(whole, uncut, totals, strict=True)))


def traffic_of(workload: Workload, world_size: int) -> list[Traffic]:
    """Every bucket's traffic, in DDP's order. Buckets are reduced in order, so none is ready before those ahead of it."""
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    params, traffic, ready_at = workload.params, [], 0.0
    owners = _owners_of(workload, world_size)
    for slots, sections in zip(workload.layout, owners.buckets, strict=True):
        members = [params[slot.param] for slot in slots]
        ready_at = max([ready_at, *(param.ready_at for param in members)])
        numel = sum(slot.numel for slot in slots)
        itemsize = members[0].itemsize
        updated = moved = 0.0
        for section in sections.sections:
            if isinstance(section, EqualRanges):
                total = sum(params[index].numel for index in section.order())
                largest, smallest = _extremes(section, total, world_size, params[section.order()[0]].cut)
                updated += largest
                moved += max(total - smallest, largest * (world_size - 1))
            else:
                num_bytes, work = map(sum, zip(*(owners.load_of[index] for index in section.order()), strict=True))
                updated += owners.balance.work * work / COST_PER_ELEMENT / world_size
                share = owners.balance.state * num_bytes / itemsize / world_size
                moved += share * (world_size - 1)
        reduced_as = _bytes_each(workload.wire.reduces_in, workload.reduce_itemsize, itemsize)
        gathered_as = _bytes_each(workload.wire.gathers_in, workload.gather_itemsize, itemsize)
        traffic.append(
            Traffic(
                updated=updated,
                reduce_bytes=moved * reduced_as,
                gather_bytes=moved * gathered_as,
                gradient_bytes=numel * itemsize,
                reduce_copy_bytes=round(numel * reduced_as) if reduced_as != itemsize else 0,
                gather_copy_bytes=round(numel * gathered_as) if gathered_as != itemsize else 0,
                used_at=min(param.used_at for param in members),
                ready_at=ready_at,
            )
        )
    return traffic


def sent_bytes(workload: Workload, world_size: int, *, rank: GroupRank, stage_sizes: Sequence[int]) -> int:
    """What a rank sends in a step, to the byte, where exchanges have these stages and parts are not padded to equal size."""
    params, sent = workload.params, 0
    # Bounds of blocks of ranks: the rank's own first, then those it has gathered.
    blocks, low, width = [], 0, world_size
    for size in stage_sizes:
        width //= size
        low += (rank - low) // width * width
        blocks.append((low, low + width, size - 1))
    for slots, sections in zip(workload.layout, _owners_of(workload, world_size).buckets, strict=True):
        itemsize = params[slots[0].param].itemsize
        step = lcm(_ALIGNMENT_BYTES // itemsize, workload.wire.block)
        if workload.wire.reduces_in is not None:
            sent += _rounded_reduction(sections, workload.wire.reduces_in, world_size, rank=rank, itemsize=itemsize)
        for section in sections.sections:
            sizes = [params[index].numel for index in section.order()]
            ends = {end: section.end(end) for begin, stop, _ in blocks for end in (begin, stop)}
            mine = ends[blocks[-1][1]] - ends[blocks[-1][0]]
            if workload.wire.reduces_in is None:
                sent += (sum(sizes) - mine) * (workload.reduce_itemsize or itemsize)
            place = dict(zip(ends, _positions(sizes, list(ends.values()), step=step), strict=True))
            form = workload.wire.gathers_in
            if form is None:
                gathered = sum((place[stop] - place[begin]) * num_peers for begin, stop, num_peers in blocks)
                sent += gathered * (workload.gather_itemsize or itemsize)
                continue
            for begin, stop, num_peers in blocks:
                bounds = [section.end(end) for end in range(begin, stop + 1)]
                own = pairwise(_positions(sizes, bounds, step=step))
                sent += num_peers * sum(
                    form.num_bytes(last - first, scale_itemsize=_scale_of(itemsize)) for first, last in own
                )
    return sent


def _rounded_reduction(sections: Sections, form: WireFormat, world_size: int, *, rank: GroupRank, itemsize: int) -> int:
    """What a rank sends of a bucket's gradients: a message to the owner of every other part, in whole blocks of each piece."""
    others = (GroupRank(other) for other in range(world_size) if other != rank)
    sizes = (sum(in_blocks(piece.stop - piece.start) for piece in sections.owned_by(other)) for other in others)
    return sum(form.num_bytes(size, scale_itemsize=_scale_of(itemsize)) for size in sizes)


def _scale_of(itemsize: int) -> int:
    return 8 if itemsize == 8 else 4


def _bytes_each(form: WireFormat | None, sent_as: int | None, itemsize: int) -> float:
    """What an element takes on the wire."""
    if form is None:
        return sent_as or itemsize
    many = 2**20
    return form.num_bytes(many, scale_itemsize=_scale_of(itemsize)) / many


def sharded_memory(workload: Workload, world_size: int, *, rank: GroupRank | None = None) -> Memory:
    """What a rank holds; without one, the rank that holds the most state (all hold the same where parameters are cut)."""
    owners = _owners_of(workload, world_size).buckets
    if rank is None:
        rank = _heaviest(workload, owners)
    params, state, masters, reduced, flat = workload.params, 0.0, 0, 0, 0
    for slots, sections in zip(workload.layout, owners, strict=True):
        itemsize = params[slots[0].param].itemsize
        step = lcm(_ALIGNMENT_BYTES // itemsize, workload.wire.block)
        flat += itemsize * sum(-(-slot.numel // step) * step for slot in slots)
        for piece in sections.owned_by(rank):
            param, size = params[piece.param], piece.stop - piece.start
            state += param.state_bytes_per_element * size + param.state_bytes_per_piece
            masters += param.master_itemsize * size
            sent_as, size = _summed(workload, piece, itemsize)
            stepped_as = param.master_itemsize or itemsize
            reduced += size * (sent_as + (stepped_as if stepped_as != sent_as else 0))
    # What is rounded is received where it is decoded from: among the copies.
    is_exact = workload.wire.gradients is None
    largest = max((is_exact * _bytes(slots, params, workload.reduce_itemsize) for slots in workload.layout), default=0)
    limit = workload.max_receive_bytes
    freed = workload.shards_gradients
    # Two buckets of about the usual size on their way, and the one being filled with the parameters' own gradients of it.
    sizes = sorted(_bytes(slots, params, None) for slots in workload.layout)
    transient = 2 * sizes[-1] + 2 * sizes[len(sizes) // 2] + reduced if freed and sizes else 0
    return Memory(
        params=flat,
        gradients=(0 if freed else sum(param.numel * param.itemsize for param in params)) + _owed(workload),
        reduced=0 if freed else reduced,
        transient=transient,
        state=round(state),
        masters=masters,
        received=0 if world_size == 1 else largest if limit is None else min(largest, limit),
    )


def _owed(workload: Workload) -> int:
    """What is rounded off gradients, if it is kept for the next ones: of all parameters."""
    if not workload.wire.gradient_feedback:
        return 0
    return sum(in_blocks(param.numel) * max(4, param.itemsize) for param in workload.params)


def _summed(workload: Workload, piece: Piece, itemsize: int) -> tuple[int, int]:
    """Bytes of an element where gradients are added up, and how many elements a piece takes there."""
    size = piece.stop - piece.start
    if workload.wire.reduces_in is None:
        return workload.reduce_itemsize or itemsize, size
    return max(4, itemsize), in_blocks(size)


def plain_memory(workload: Workload) -> Memory:
    """What a rank holds with DDP and the plain optimizer, with masters of its own where the workload has them."""
    params = workload.params
    return Memory(
        params=sum(param.numel * param.itemsize for param in params),
        gradients=sum(param.numel * param.itemsize for param in params),
        reduced=0,
        state=round(sum(p.state_bytes_per_element * p.numel + p.state_bytes_per_piece for p in params)),
        # Those from which differences are sent are ours alone.
        masters=0 if workload.wire.parameters else sum(param.master_itemsize * param.numel for param in params),
        received=0,
    )


def _bytes(slots: Sequence[Slot], params: Sequence[Param], itemsize: int | None) -> int:
    return sum(slot.numel * (itemsize or params[slot.param].itemsize) for slot in slots)


def _extremes(ranges: EqualRanges, numel: int, world_size: int, cut: int | None) -> tuple[int, int]:
    """The elements of the largest and of the smallest share."""
    assert cut is not None, "parameters that stay whole have no equal ranges"
    if world_size <= _NUM_EXACT:
        shares = [end - begin for begin, end in pairwise(ranges.bounds())]
        return max(shares), min(shares)
    ideal = numel / world_size
    return min(numel, -int(-ideal // cut) * cut), max(0, int(ideal // cut) * cut)


def _heaviest(workload: Workload, buckets: Sequence[Sections]) -> GroupRank:
    """The rank with the most state; of what is cut all have the same."""
    held: dict[GroupRank, float] = {GroupRank(0): 0.0}
    for sections in buckets:
        for section in sections.sections:
            for owner, pieces in section.segments() if isinstance(section, ByRank) else ():
                for piece in pieces:
                    param = workload.params[piece.param]
                    num_bytes = (param.state_bytes_per_element + param.master_itemsize) * param.numel
                    held[owner] = held.get(owner, 0.0) + num_bytes + param.state_bytes_per_piece
    return max(held, key=lambda owner: held[owner])


def _positions(sizes: Sequence[int], elements: Sequence[int], *, step: int) -> list[int]:
    """Where elements of a section lie in the flat buffer, from its start; padding goes with what stands before it."""
    unpadded = list(accumulate(sizes, initial=0))
    starts = list(accumulate((-(-numel // step) * step for numel in sizes), initial=0))
    places = [len(sizes) if element == unpadded[-1] else bisect_right(unpadded, element) - 1 for element in elements]
    return [starts[place] + element - unpadded[place] for place, element in zip(places, elements, strict=True)]
