"""The native engine: reduce-scatter of gradients, all-gather of parameters, every rank an equal range of every bucket.

A bucket of P elements costs a rank 2P(n-1)/n on the wire, where all-reduce and broadcast cost 3P(n-1)/n. Each rank steps its
range only, in flat memory that is kept between steps, and nobody else ever sees the reduced gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from zerolap.backend.collectives import Parts, Pending
from zerolap.forecast.workload import Param, Workload
from zerolap.runtime.engine import Arrival, Engine, Installed, Recorded, Reduction
from zerolap.runtime.shards import BucketShard, FlatParams, GradSlot, Marks, ShardBook, stand_in_for
from zerolap.schedule.machine import Phase
from zerolap.schedule.ownership import EqualRanges, Layout, Piece, Plan, Policy, Slot

SEARCH = "search for gradients that are not finite"


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What is kept, reduced and sent in another dtype than the parameters'."""

    master_weights: bool = False
    reduce_dtype: torch.dtype | None = None
    gather_dtype: torch.dtype | None = None

    def has_masters(self, dtype: torch.dtype) -> bool:
        """Whether parameters of this dtype are rounded from a master."""
        return self.master_weights and (dtype.itemsize < 4 or self.gather_dtype not in (None, dtype))

    def stepped_as(self, dtype: torch.dtype) -> torch.dtype:
        """In what the shards of such parameters are updated: with masters in single precision, or more if they have it."""
        return torch.float32 if self.has_masters(dtype) and dtype.itemsize < 4 else dtype


class _Scatter:
    """The reduction of one bucket by reduce-scatter, made once for as long as the bucket stays."""

    def __init__(
        self,
        recorded: Recorded,
        bounds: list[int],
        into: Tensor,
        scale: float,
        start: Callable[[Parts, Tensor], Pending],
    ) -> None:
        self.recorded = recorded
        self._bounds = bounds
        self._parts = Parts.cut(recorded.buffer, bounds)
        self._into = into
        self._is_cast = into.dtype is not recorded.buffer.dtype
        self._scale = scale
        self._is_scaled_before = into.dtype is torch.float16  # a sum of halves may overflow: as DDP does it
        self._start = start
        self.pending: Pending | None = None  # the one under way

    def start(self) -> Pending:
        parts = self._parts
        if self._is_cast or self._is_scaled_before:
            memory = self.recorded.buffer.to(self._into.dtype)
            parts = Parts.cut(memory * self._scale if self._is_scaled_before else memory, self._bounds)
        return self._start(parts, self._into)

    def wait(self, timeout: float) -> Tensor:
        assert self.pending is not None, "a reduction is started before it is waited for"
        self.pending.wait()  # the group's own timeout ends this
        self.pending = None
        return self._into if self._is_scaled_before or self._scale == 1 else self._into.mul_(self._scale)


class _Gather:
    """The all-gather of one bucket, made once for as long as the bucket is installed."""

    def __init__(
        self, buffer: Tensor, ends: list[int], dtype: torch.dtype | None, start: Callable[[Parts], Pending]
    ) -> None:
        self._buffer = buffer
        self._ends = ends
        self._parts = Parts.cut(buffer, ends)
        self._dtype = dtype if dtype is not buffer.dtype else None
        self._start = start

    def start(self) -> Pending:
        if self._dtype is None:
            return self._start(self._parts)
        wire = self._buffer.to(self._dtype)
        pending = self._start(Parts.cut(wire, self._ends))
        # Our own part as well: every rank must have the rounded value.
        return Pending(
            [pending],
            tensors=(wire,),
            what="",  # the one inside says what failed
            sent_bytes=pending.sent_bytes,
            finish=lambda: _copy(self._buffer, wire),
        )


class NativeEngine(Engine):
    """Reduces by reduce-scatter and gathers by all-gather, on groups of its own."""

    def __init__(
        self,
        book: ShardBook,
        *,
        reduce_group: dist.ProcessGroup,
        cuts: Mapping[torch.dtype, int | None],
        precision: Precision,
        **options: Any,
    ) -> None:
        """``cuts`` says where parameters of a dtype may be cut; of others, and where it is None, shards are whole parameters."""
        super().__init__(book, **options)
        self._precision = precision
        # Reductions are started by backward's thread, gathers by the lane: a group each, so that one thread uses one group.
        self._reduce_group = reduce_group
        self._reduce_side = self._adapter.side(self._device)
        self._cuts = cuts
        self._bounds: dict[tuple[int, ...], list[int]] = {}  # by what a bucket holds
        self._memory: dict[tuple[int, ...], Tensor] = {}
        self._scatters: dict[int, _Scatter] = {}  # by bucket; by backward's thread
        self._scale = 1 / book.world_size
        self._all_gathers: list[_Gather] = []  # by bucket; by the lane
        self.sent_bytes = 0
        self.num_updates = 0
        self.is_unscaled = False  # the gradients at hand, by a GradScaler that knows shards

    @property
    def gradient_bytes(self) -> int:
        """Of memory that is kept for reduced gradients."""
        return sum(memory.nbytes for memory in self._memory.values())

    def workload(self) -> Workload:
        """What is trained, in the buckets at hand, for forecasts; when it is used and ready is not known here."""
        params: list[Param] = []
        layout: list[tuple[Slot, ...]] = []
        for recorded in self._layout:
            layout.append(tuple(Slot(len(params) + i, param.numel()) for i, param in enumerate(recorded.params)))
            params += [
                Param(param.numel(), dtype=str(param.dtype), itemsize=param.itemsize) for param in recorded.params
            ]
        reduced_as, gathered_as = self._precision.reduce_dtype, self._precision.gather_dtype
        return Workload(
            params=tuple(params),
            layout=tuple(layout),
            reduce_itemsize=reduced_as.itemsize if reduced_as else None,
            gather_itemsize=gathered_as.itemsize if gathered_as else None,
        )

    def _make_plan(self, layout: Layout) -> Plan:
        known = {tuple(slot.param for slot in bucket) for bucket in layout}
        self._bounds = {key: value for key, value in self._bounds.items() if key in known}
        self._memory = {key: value for key, value in self._memory.items() if key in known}
        self._scatters = {}
        ranges = tuple(self._make_ranges(recorded) for recorded in self._layout)
        return Plan(policy=Policy.BY_ELEMENT, world_size=self._book.world_size, buckets=ranges)

    def _forget_buffers(self) -> None:
        self._scatters = {}
        super()._forget_buffers()

    def dispose(self) -> None:
        super().dispose()
        self._scatters, self._all_gathers = {}, []
        del self._reduce_group

    def _start_reduce(self, index: int, recorded: Recorded, bucket: GradBucket) -> Reduction:
        self.is_unscaled, self._divisor = False, None  # a step that was skipped may have left one
        scatter = self._scatters.get(index)
        if scatter is None or scatter.recorded is not recorded:
            self._scatters[index] = scatter = self._make_scatter(index, recorded)
        scatter.pending = pending = self.watch.start("reduce", index, self._reduce_side, scatter.start)
        self.sent_bytes += pending.sent_bytes
        return scatter

    def _make_scatter(self, index: int, recorded: Recorded) -> _Scatter:
        key, rank = recorded.indices, self._book.rank
        if key not in self._bounds:
            # Equal ranges depend on nothing but the bucket, so even a layout that is new is reduced as it comes.
            self._bounds[key] = bounds = self._make_ranges(recorded).bounds()
            mine = recorded.buffer[bounds[rank] : bounds[rank + 1]]
            self._memory[key] = torch.empty_like(mine, dtype=self._precision.reduce_dtype or mine.dtype)
        adapter, group = self._adapter, self._reduce_group

        def start(parts: Parts, into: Tensor) -> Pending:
            return adapter.reduce_scatter(parts, into=into, group=group, tag=index, what="reduce-scatter of gradients")

        return _Scatter(recorded, self._bounds[key], self._memory[key], self._scale, start)

    def _make_ranges(self, recorded: Recorded) -> EqualRanges:
        return EqualRanges.of(recorded.slots, world_size=self._book.world_size, cut=self._cut_of(recorded))

    def _cut_of(self, recorded: Recorded) -> int | None:
        return self._cuts.get(recorded.params[0].dtype) if recorded.params else 1

    def _gradients(self, arrival: Arrival) -> Tensor:
        return arrival.recorded.buffer  # this rank's own, unreduced: only the owner of an element has its mean

    def _make_shard(self, recorded: Recorded, flat: FlatParams, owned: Sequence[Piece]) -> BucketShard:
        begin = self._bounds[recorded.indices][self._book.rank]
        place_of = {index: place for place, index in enumerate(recorded.indices)}
        has_masters = self._precision.has_masters(recorded.buffer.dtype)
        params: dict[Piece, Tensor] = {}
        stand_ins: dict[Piece, Tensor] = {}
        slots = []
        for piece in owned:
            place = place_of[piece.param]
            param, size = recorded.params[place], piece.stop - piece.start
            if self._cut_of(recorded) is None:  # a whole parameter, which the optimizer may need in its shape
                params[piece] = param.detach()
            else:
                params[piece] = flat.piece(place, piece.start, piece.stop)
            memory = params[piece]
            if has_masters:
                memory = memory.to(self._precision.stepped_as(memory.dtype), copy=True)
            stand_ins[piece] = stand_in_for(param, memory=memory)
            offset = recorded.offsets[place] + piece.start - begin if size else 0
            slots.append(GradSlot(place, tuple(memory.shape), memory.stride(), offset))
        local = self._book.make_local(stand_ins, params=params if has_masters else None)
        return BucketShard(stand_ins=list(stand_ins.values()), slots=slots, local=local)

    def _mark(self, recorded: Recorded, flat: FlatParams, owned: Sequence[Piece]) -> Marks | None:
        is_rounded = self._precision.gather_dtype not in (None, flat.buffer.dtype)  # what is owned, too
        if self._adapter.capabilities.futures_complete_at_enqueue or is_rounded:
            return None
        place_of = {index: place for place, index in enumerate(recorded.indices)}
        return flat.mark([(place_of[piece.param], piece.start, piece.stop) for piece in owned])

    def _start_gather(self, index: int, installed: Installed) -> Pending:
        pending = self.watch.start("gather", index, self._gather_side, self._all_gathers[index].start)
        self.sent_bytes += pending.sent_bytes
        return pending

    def _install(self) -> None:
        self._all_gathers = []  # which would keep the buffers that are about to be replaced
        super()._install()
        self._all_gathers = [
            self._make_gather(index, installed.flat, self._bounds[recorded.indices])
            for index, (installed, recorded) in enumerate(zip(self._installed, self._layout, strict=True))
        ]

    def _make_gather(self, index: int, flat: FlatParams, bounds: list[int]) -> _Gather:
        adapter, group = self._adapter, self._group
        what = f"{self._me}, bucket {index}: all-gather of updated parameters"

        def start(parts: Parts) -> Pending:
            return adapter.all_gather(parts, group=group, tag=index, what=what)

        return _Gather(flat.buffer, flat.positions(bounds), self._precision.gather_dtype, start)

    def refresh_masters(self) -> None:
        """Take the parameters' values for the master weights: they were loaded, or set by hand."""
        for local in self._book.locals:
            local.refresh_masters()

    def _finish_update(self) -> None:
        super()._finish_update()
        self.num_updates += 1

    # --- gradients between backward and step(): on the training thread ------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip by the norm over all ranks' shards; every element is in exactly one of them."""
        shards = self._reduced_shards()
        if norm_type <= 0:
            raise ValueError(f"norm_type must be positive or inf, got {norm_type}")
        # In double precision where there is one: the sum of squares of a large model in single precision would lose what
        # torch, which adds up norms of parameters, keeps.
        dtype = torch.float64 if self._adapter.capabilities.has_float64 else torch.float32
        norms = [torch.linalg.vector_norm(shard, norm_type, dtype=dtype) for shard in shards]
        local = torch.stack(norms) if norms else torch.zeros(1, dtype=dtype, device=self._device)
        if norm_type == math.inf:
            total = self._over_all_ranks(local.max(), dist.ReduceOp.MAX, "norm of gradients")
        else:
            total = self._over_all_ranks((local**norm_type).sum(), dist.ReduceOp.SUM, "norm of gradients")
            total = total ** (1 / norm_type)
        if self._divisor is not None:  # clipped before
            total = total / self._divisor
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {total.item()}; it cannot be clipped by"
            )
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if self._book.can_divide_gradients:
            divisor = (1 / coefficient).to(torch.float32)
            self._divisor = divisor if self._divisor is None else self._divisor * divisor
        else:
            for shard in shards:
                shard.mul_(coefficient.to(shard.dtype))
        return total.to(torch.float32)

    def unscale_(self, inverse_scale: Tensor) -> Tensor:
        """Multiply the gradients by ``inverse_scale``; return 1 if any rank found one that is not finite, else 0."""
        found = self._scale_and_search(self._reduced_shards(), inverse_scale)
        self.is_unscaled = True
        return self._over_all_ranks(found, dist.ReduceOp.MAX, SEARCH)

    def _scale_and_search(self, shards: list[Tensor], scale: Tensor) -> Tensor:
        found = torch.zeros(1, dtype=torch.float32, device=self._device)
        if shards:
            torch._amp_foreach_non_finite_check_and_unscale_(shards, found, scale)
        return found

    @property
    def _device(self) -> torch.device:
        return self._book.params[0].device

    def _reduced_shards(self) -> list[Tensor]:
        """The mean gradients of everything this rank owns; one tensor per bucket."""
        self.raise_if_failed()
        if self.phase is not Phase.REDUCED:
            raise RuntimeError("there are no reduced gradients: call this between backward() and step()")
        return self._shards_at_hand()

    def _shards_at_hand(self) -> list[Tensor]:
        return [
            arrival.reduced for arrival in self._arrivals if arrival.reduced is not None and arrival.reduced.numel()
        ]

    def _over_all_ranks(self, value: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> Tensor:
        return self._run_on_lane(lambda: self._reduce(value, op, what)) if self._book.world_size > 1 else value

    def _reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> Tensor:
        """On the lane, the one thread that uses this group."""
        if self._book.world_size > 1:
            self._adapter.all_reduce(value, op=op, group=self._group, what=f"{self._me}: {what}").wait()
        return value
