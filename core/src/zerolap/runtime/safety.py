"""Checks that are off unless asked for: audits of parameters, and gradients that are not finite. Both are collectives, on the lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap._logging import logger_of
from zerolap.errors import ZerolapError
from zerolap.runtime.books import Books
from zerolap.runtime.bucket import Bucket
from zerolap.runtime.common import Common, Observer
from zerolap.runtime.optimizer_description import describe_options, digest_of, first_option
from zerolap.runtime.peers import all_gather_json
from zerolap.runtime.reduced_gradients import ReducedGradients
from zerolap.schedule.machine import Machine, Schedule

logger = logger_of(__name__)


class NonFinite(Enum):
    """What becomes of an update whose gradients are not finite."""

    IGNORE = "ignore"  # it is made: no cost
    RAISE = "raise"  # no rank makes it, all raise
    SKIP = "skip"  # no rank makes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Safety:
    """What is watched, beside training."""

    audit_every: int = 0  # updates; 0 for never
    nonfinite: NonFinite = NonFinite.IGNORE


class NonFiniteCheck(Observer):
    """Looks at all gradients before the first of them is used."""

    def __init__(
        self, wish: NonFinite, *, common: Common, gradients: ReducedGradients, buckets: Sequence[Bucket]
    ) -> None:
        self._wish = wish
        self._common = common
        self._gradients = gradients
        self._buckets = buckets  # of the backward at hand
        self.num_skipped = 0

    def may_update(self) -> bool:
        found = self._common.run_on_lane(self._find)
        if found is None:
            return True
        if self._wish is NonFinite.RAISE:
            raise ZerolapError(found)  # nothing was changed: the next backward starts anew
        self.num_skipped += 1
        logger.warning("%s; it was skipped", found)
        return False

    def refuse(self) -> None:
        """For updates inside backward: on the lane, when all buckets are reduced and none is stepped."""
        found = self._find()
        if found is not None:
            raise ZerolapError(found)

    def _find(self) -> str | None:
        """Where there are gradients that are not finite, on any rank; the same on all of them."""
        if self._gradients.are_finite():
            return None
        common, mine = self._common, []
        assert common.group is not None
        for bucket in self._buckets:
            mine += _nonfinite_in(bucket)
        what = f"{common.me}: naming gradients that are not finite"
        said = [name for names in all_gather_json(mine[:3], group=common.group, what=what) for name in names]
        whose = f"those of {'; '.join(said[:9])}" if said else "their sum over all ranks has overflowed"
        return f"{common.me}: gradients are not finite, update {common.probe.num_updates + 1} was not made: {whose}"


def _nonfinite_in(bucket: Bucket) -> list[str]:
    """Which of its gradients are not finite: this rank's own, or of the mean where its own are freed."""
    where, names = f"bucket {bucket.index}", bucket.common.names
    if bucket.freed is None:
        ends = zip(bucket.params, bucket.offsets, strict=True)
        own = [(param, bucket.buffer[offset : offset + param.numel()]) for param, offset in ends]
        return [f"{bucket.common.me}, {where}, {names.get(param)}" for param, grad in own if not grad.isfinite().all()]
    assert bucket.reduced is not None, "gradients are reduced before they are looked at"
    places = {piece.place for piece in bucket.own if not piece.view_of(bucket.reduced).isfinite().all()}
    return [f"the mean over ranks, {where}, {names.get(bucket.params[place])}" for place in sorted(places)]


class Audit(Observer):
    """Compares all parameters and the optimizer's options between ranks, by checksums: every so many updates, or when asked."""

    def __init__(
        self,
        every: int,
        *,
        books: Books,
        common: Common,
        machine: Machine,
        installed: Sequence[Bucket],
        bucket_of: Mapping[Tensor, Bucket],
    ) -> None:
        self._every = every  # 0 for when asked
        self._books = books
        self._common = common
        self._machine = machine
        self._installed = installed
        self._bucket_of = bucket_of

    def run(self) -> None:
        """Compare now; on the training thread."""
        self._common.raise_if_failed()
        self._common.run_on_lane(self._compare)

    def backward_begins(self) -> None:
        if self._is_due() and self._machine.schedule is not Schedule.ON_STEP:
            # Ahead of the updates: if it fails, there are none.
            self._common.lane.submit(partial(self._common.do_quietly, self._compare))

    def may_update(self) -> bool:
        if self._is_due():
            self._common.run_on_lane(self._compare)
        return True

    def _is_due(self) -> bool:
        num_updates = self._common.probe.num_updates
        return bool(self._every and num_updates and num_updates % self._every == 0)

    def _compare(self) -> None:
        for bucket in self._installed:
            bucket.wait(is_lane=True)
        common, device = self._common, self._books.device
        rest = [(name, param) for param, name in common.names.items() if param not in self._bucket_of]
        flats = [bucket.flat.buffer for bucket in self._installed if bucket.flat is not None]
        options = torch.tensor(int(digest_of(describe_options(self._books.groups))[:15], 16), device=device)
        sums = torch.cat([checksums([*flats, *(param for _, param in rest)], device=device), options.reshape(1)])
        halves = sums.view(torch.int32)  # some backends reduce nothing wider
        # The largest of all ranks, and the complement of the smallest.
        ends = common.over_all_ranks(torch.stack([halves, ~halves]), dist.ReduceOp.MAX, "audit of parameters")
        is_different = ends[0] != ~ends[1]
        if is_different.any():
            self._refuse(int(is_different.nonzero()[0]) // 2, rest, num_buckets=len(flats))

    def _refuse(self, first: int, rest: Sequence[tuple[str, Tensor]], *, num_buckets: int) -> None:
        """Say what differs, given the place of the first checksum that does."""
        common = self._common
        assert common.group is not None
        after = f"{common.me}: the audit after update {common.probe.num_updates}"
        if first == num_buckets + len(rest):
            raise ZerolapError(
                f"{after} found that the optimizer's options differ between group ranks "
                f"{self._other_option(common.group)}; schedulers and whatever else sets them must do the same on all ranks"
            )
        if first < num_buckets:
            where, params = f"bucket {first}, ", self._installed[first].params
            suspects = [(name, param) for param, name in common.names.items() if param in set(params)]
        else:
            where, suspects = "", [rest[first - num_buckets]]
        mine = checksums([param for _, param in suspects], device=suspects[0][1].device).tolist()
        said = all_gather_json([common.me, mine], group=common.group, what=f"{common.me}: naming what drifted")
        raise ZerolapError(
            f"{after} found that parameters differ between ranks: {where}{describe_drift([name for name, _ in suspects], said)}"
        )

    def _other_option(self, group: dist.ProcessGroup) -> str:
        what = f"{self._common.me}: naming options that differ"
        said = all_gather_json(describe_options(self._books.groups), group=group, what=what)
        for rank, theirs in enumerate(said):
            difference = first_option(said[0], theirs)
            if difference is not None:
                return f"0 and {rank}: {difference}"
        return "a moment ago, and no longer do"


def checksums(tensors: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """One integer for each tensor: the sum of its bits, read as whole numbers."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.stack([_words(tensor).sum(dtype=torch.int64) for tensor in tensors])


def _words(tensor: Tensor) -> Tensor:
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
    is_even = bits.numel() % 8 == 0 and bits.storage_offset() % 8 == 0
    return bits.view(torch.int64) if is_even else bits


def describe_drift(names: Sequence[str], said: Sequence[tuple[str, Sequence[int]]]) -> str:
    """What differs, given every rank's name and its checksums of the parameters called ``names``."""
    for place, name in enumerate(names):
        sides: dict[int, list[str]] = {}
        for rank, sums in said:
            sides.setdefault(sums[place], []).append(rank)
        if len(sides) == 1:
            continue
        *few, most = sorted(sides.values(), key=len)
        minority = ", ".join(rank for side in few for rank in side)
        if len(few[-1]) == len(most):
            return (
                f"{name} differs between {' and '.join(map(', '.join, sorted(sides.values())))}: no side is the larger"
            )
        return f"{name} of {minority} differs from that of the {len(most)} others"
    return "parameters differed a moment ago, and no longer do"
