"""Mean gradients between backward and ``step()``: clipped, unscaled, searched for what is not finite. On the training thread.

They are in the shards, each element on one rank, so whatever concerns all of them is a collective.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap._torch import unscale_and_find_nonfinite_
from zerolap.runtime.books import Books
from zerolap.runtime.bucket import Bucket, Update
from zerolap.runtime.common import Common
from zerolap.runtime.shown_gradients import ShownGradients
from zerolap.runtime.state_pieces import strides_in_bucket
from zerolap.schedule.machine import Machine, Phase, Schedule

SEARCH = "search for gradients that are not finite"
_NOTHING = slice(0, 0)


class ReducedGradients:
    """What the buckets of the backward at hand hold."""

    def __init__(
        self,
        books: Books,
        *,
        common: Common,
        update: Update,
        machine: Machine,
        buckets: Sequence[Bucket],
        shown: ShownGradients,
        number: int | None = None,
    ) -> None:
        """Those of all optimizers, or only of the one with this number."""
        self._books = books
        self._common = common
        self._update = update
        self._machine = machine
        self._buckets = buckets
        self._shown = shown
        self._numbers = range(books.num_optimizers) if number is None else [number]
        self._own: list[ReducedGradients] = []
        if number is None and books.num_optimizers > 1:
            self._own = [
                ReducedGradients(
                    books, common=common, update=update, machine=machine, buckets=buckets, shown=shown, number=each
                )
                for each in self._numbers
            ]
        self.unscaled_backward = -1  # the number of the backward whose gradients a GradScaler has unscaled
        self._dropped_backward = -1  # and of that whose gradients shall not be used

    def of(self, number: int) -> ReducedGradients:
        """Those of one optimizer."""
        return self._own[number] if self._own else self

    @property
    def is_unscaled(self) -> bool:
        """Whether a GradScaler that knows shards has unscaled the gradients at hand."""
        return self.unscaled_backward == self._common.probe.num_backwards

    @property
    def are_dropped(self) -> bool:
        """Whether the gradients at hand were cleared."""
        return self._dropped_backward == self._common.probe.num_backwards

    def drop(self) -> None:
        """Clear those that were reduced and not used: where gradients are freed they are nowhere else."""
        if self._common.gradient_memory is None or self._machine.phase is not Phase.REDUCED:
            return
        self._dropped_backward = self._common.probe.num_backwards
        if len(self._numbers) < self._books.num_optimizers:
            return  # others may need theirs; the next update frees all
        for bucket in self._buckets:
            assert bucket.freed is not None
            bucket.freed.used()
            bucket.reduced = None
        self._shown.used()

    def usable_for(self, purpose: str) -> ReducedGradients:
        """Itself, if gradients can still be changed between backward and step()."""
        if self._machine.schedule is not Schedule.ON_STEP:
            raise RuntimeError(
                f"{purpose} cannot work with updates inside backward: they have used the gradients already; "
                'use zerolap.attach(ddp, optimizer, schedule="on_step"), or overlap_with_ddp=False'
            )
        return self

    def shards(self) -> list[Tensor]:
        """The mean gradients of everything this rank owns; one tensor per bucket."""
        self._common.raise_if_failed()
        if self._machine.phase is not Phase.REDUCED:
            raise RuntimeError("there are no reduced gradients: call this between backward() and step()")
        self._shown.take()
        self._shown.note_change()  # whoever asks may write to them
        return self._shards_at_hand()

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip by the norm over all ranks' shards; every element is in exactly one of them."""
        self.shards()  # which raises where there are none
        total = self._norm(self._with_divisors(), max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {total.item()}; it cannot be clipped by"
            )
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for number in self._numbers:
            update = self._update.of[number]
            if self._books.books[number].can_divide_gradients:
                divisor = (1 / coefficient).to(torch.float32)
                update.divisor = divisor if update.divisor is None else update.divisor * divisor
            else:
                for shard in self._shards_at_hand([number]):
                    shard.mul_(coefficient.to(shard.dtype))
        return total.to(torch.float32)

    def norm(self, norm_type: float) -> Tensor:
        """The norm of the mean gradients that the next step() uses; or, where updates are inside backward, of those of the last one."""
        if self._machine.schedule is Schedule.ON_STEP:
            self.shards()  # which raises where there are none
            return self._norm(self._with_divisors(), 0.0, norm_type, "grad_norm").to(torch.float32)
        self._common.raise_if_failed()
        if not self._common.tracks_norm or norm_type != 2:
            raise RuntimeError(
                "updates inside backward have used the gradients already: use zerolap.attach(ddp, optimizer, track_grad_norm=True), which "
                'adds up their norm of order 2 on the way, or schedule="on_step"'
            )
        if not self._common.probe.num_updates:
            raise RuntimeError("there was no update yet: call this after the first backward")
        return self._norm([(norm, None) for norm in self._update.norms], 0.0, 2.0, "grad_norm").to(torch.float32)

    def mean_of(self, param: Tensor) -> Tensor:
        """The mean gradient of one parameter, as the next step() uses it, collected from its owners; the same on all ranks."""
        self.shards()  # which raises where there are none
        bucket = next((bucket for bucket in self._buckets if any(each is param for each in bucket.params)), None)
        if bucket is None:
            raise ValueError("this is none of the optimizer's parameters that have a gradient")
        place = next(place for place, each in enumerate(bucket.params) if each is param)
        whole = gather_gradient(bucket, place, memory=bucket.reduced)
        whole = self._over_all_ranks(whole, dist.ReduceOp.SUM, "collecting a gradient")
        divisor = self._update.of[self._books.number_of(bucket.places[place])].divisor
        if divisor is not None:
            whole = whole / divisor
        return whole.as_strided(param.shape, strides_in_bucket(param))

    def carry_over(self, new: Mapping[Tensor, Bucket]) -> None:
        """Add what earlier backwards have left for the next update to the buckets of another layout. A collective, on the lane."""
        for param, part in self._shown.left.items():
            whole = self._common.over_all_ranks(part.flat(), dist.ReduceOp.SUM, "moving accumulated gradients")
            to = new[param]
            for piece in to.own:
                if to.params[piece.place] is param and to.reduced is not None:
                    piece.view_of(to.reduced).add_(whole[piece.start : piece.stop])

    def _with_divisors(self) -> list[tuple[Tensor, Tensor | None]]:
        """The gradients, with what each optimizer will divide its own by."""
        return [
            (shard, self._update.of[number].divisor)
            for number in self._numbers
            for shard in self._shards_at_hand([number])
        ]

    def _norm(
        self,
        shards: Sequence[tuple[Tensor, Tensor | None]],
        max_norm: float,
        norm_type: float,
        caller: str = "clip_grad_norm_",
    ) -> Tensor:
        """The norm of all gradients, each divided by what stands beside it. Arguments that are wrong or differ between ranks are refused on all of them.

        For that a code of the arguments goes with the norm, and none for wrong ones. It is read where reading does not hold up a stream.
        """
        mistake = _mistake_in(max_norm, norm_type)
        if mistake is not None:
            norm_type = 2.0
        # In double precision where there is one: the sum of squares of a large model in single precision would lose what
        # torch, which adds up norms of parameters, keeps.
        capabilities = self._common.adapter.capabilities
        dtype = torch.float64 if capabilities.has_float64 else torch.float32
        norms = [torch.linalg.vector_norm(shard, norm_type, dtype=dtype) for shard, _ in shards]
        norms = [norm if divisor is None else norm / divisor for norm, (_, divisor) in zip(norms, shards, strict=True)]
        local = torch.stack(norms) if norms else torch.zeros(1, dtype=dtype, device=self._device)
        is_max = norm_type == math.inf
        is_read = not capabilities.futures_complete_at_enqueue
        code = (
            math.inf if mistake is not None else zlib.crc32(f"{max_norm} {norm_type}".encode()) % 1024 if is_read else 0
        )
        both = [
            local.new_full((1,), code),
            local.new_full((1,), -code),
        ]  # filled on the device: a copy would wait for it
        mine = torch.cat([(local.max() if is_max else (local**norm_type).sum()).reshape(1), *both])
        op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
        total, *found = self._over_all_ranks(mine, op, "norm of gradients")
        if mistake is not None:
            raise mistake
        if is_read:
            times = 1 if is_max else self._books.world_size
            if [each.item() for each in found] != [times * code, -times * code]:
                raise ValueError(
                    f"{caller}(max_norm={max_norm}, norm_type={norm_type}) was called with other or wrong arguments on "
                    "another rank; all ranks must give the same"
                )
        norm: Tensor = total if is_max else total ** (1 / norm_type)
        return norm

    def unscale_(self, inverse_scale: Tensor) -> Tensor:
        """Multiply the gradients by ``inverse_scale``; return 1 if any rank found one that is not finite, else 0."""
        self._common.refuse_scaling()
        found = self._scale_and_search(self.shards(), inverse_scale)
        self.unscaled_backward = self._common.probe.num_backwards
        return self._over_all_ranks(found, dist.ReduceOp.MAX, SEARCH)

    def are_finite(self) -> bool:
        """Whether all gradients of all ranks are; on the lane."""
        found = self._scale_and_search(self._shards_at_hand(), torch.ones((), device=self._device))
        return not self._common.over_all_ranks(found, dist.ReduceOp.MAX, SEARCH).item()

    def _scale_and_search(self, shards: list[Tensor], scale: Tensor) -> Tensor:
        found = torch.zeros(1, dtype=torch.float32, device=self._device)
        if shards:
            unscale_and_find_nonfinite_(shards, found, scale)
        return found

    @property
    def _device(self) -> torch.device:
        return self._books.device

    def _shards_at_hand(self, numbers: Sequence[int] | None = None) -> list[Tensor]:
        numbers = self._numbers if numbers is None else numbers
        if len(numbers) == self._books.num_optimizers:
            return [each.reduced for each in self._buckets if each.reduced is not None and each.reduced.numel()]
        return [
            shard
            for each in self._buckets
            for number in numbers
            if each.reduced is not None and (shard := each.reduced[each.spans.get(number, _NOTHING)]).numel()
        ]

    def _over_all_ranks(self, value: Tensor, op: dist.ReduceOp.RedOpType, what: str) -> Tensor:
        if self._common.is_alone:
            return value
        return self._common.run_on_lane(lambda: self._common.over_all_ranks(value, op, what))


def gather_gradient(bucket: Bucket, place: int, *, memory: Tensor | None) -> Tensor:
    """This rank's part of a parameter's gradient, and zeros for that of others, in memory order."""
    assert memory is not None, "a bucket is reduced before its gradients are asked for"
    whole = torch.zeros(bucket.params[place].numel(), dtype=memory.dtype, device=memory.device)
    for piece in bucket.own:
        if piece.place == place:
            whole[piece.start : piece.stop] = piece.view_of(memory)
    return whole


def _mistake_in(max_norm: object, norm_type: object) -> Exception | None:
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not isinstance(value, Real | Tensor):
            return TypeError(f"{name} must be a number, got {value!r}")
    if not norm_type > 0:  # type: ignore[operator]  # it is one of those
        return ValueError(f"norm_type must be positive or inf, got {norm_type}")
    return None
