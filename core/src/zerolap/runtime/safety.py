"""The native engine, watched: audits of parameters, and gradients that are not finite. All of it is off unless asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap._logging import logger_of
from zerolap.errors import ZerolapError
from zerolap.runtime.audit import checksums, describe_drift
from zerolap.runtime.native import SEARCH, NativeEngine
from zerolap.runtime.optimizer_description import describe_options, digest_of, first_option
from zerolap.runtime.peers import all_gather_json
from zerolap.runtime.shards import ShardBook
from zerolap.schedule.machine import Phase, Schedule, Verb

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


class WatchedEngine(NativeEngine):
    """Compares replicas every so many updates, and looks at gradients before they are used."""

    def __init__(
        self, book: ShardBook, *, safety: Safety, named_params: Sequence[tuple[str, Tensor]], **options: Any
    ) -> None:
        super().__init__(book, **options)
        self._safety = safety
        self._named_params = named_params  # the module's, frozen ones included
        self.num_skipped = 0
        self._is_skipped = False  # the update by the gradients at hand
        self._is_searched = False  # these gradients, for ones that are not finite
        if safety.nonfinite is not NonFinite.IGNORE and self.schedule is not Schedule.ON_STEP:
            self._on_lane[Verb.STEP] = type(self)._step_if_finite

    # --- on the training thread ---------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Compare all parameters with the other ranks'."""
        self.raise_if_failed()
        self._run_on_lane(self._audit)

    def _begin_backward(self) -> None:
        super()._begin_backward()
        self._is_skipped = self._is_searched = False
        if self._is_audit_due() and self.schedule is not Schedule.ON_STEP:
            self._lane.submit(
                partial(self._do_quietly, self._audit)
            )  # ahead of the updates; if it fails, there are none

    def _shall_update(self) -> bool:
        if self.phase is not Phase.REDUCED:
            return True
        if self._is_audit_due():
            self._run_on_lane(self._audit)
        if self._safety.nonfinite is NonFinite.IGNORE:
            return True
        if not self._is_skipped:
            found = self._run_on_lane(self._find_nonfinite)
            if found is None:
                return True
            if self._safety.nonfinite is NonFinite.RAISE:
                raise ZerolapError(found)  # nothing was changed: the next backward starts anew
            self.num_skipped += 1
            self._is_skipped = True
            logger.warning("%s; it was skipped", found)
        return False

    def _name_of(self, param: Tensor) -> str:
        return next((name for name, each in self._named_params if each is param), super()._name_of(param))

    # --- on the lane --------------------------------------------------------------------------------------------------

    def _step_if_finite(self, index: int) -> None:
        if not self._is_searched:  # before the first bucket's update, when all are reduced
            self._is_searched = True
            found = self._find_nonfinite()
            if found is not None:
                raise ZerolapError(found)
        self._step(index)

    def _find_nonfinite(self) -> str | None:
        """Where there are gradients that are not finite, on any rank; the same on all of them."""
        found = self._scale_and_search(self._shards_at_hand(), torch.ones((), device=self._device))
        if not self._reduce(found, dist.ReduceOp.MAX, SEARCH).item():
            return None
        mine = []
        name_of = {param: name for name, param in self._named_params}
        for index, arrival in enumerate(self._arrivals):
            recorded = arrival.recorded  # whose memory still holds this rank's own gradients
            if not recorded.buffer.isfinite().all():
                mine += [
                    f"{self._me}, bucket {index}, {name_of.get(param)}"
                    for param, offset in zip(recorded.params, recorded.offsets, strict=True)
                    if not recorded.buffer[offset : offset + param.numel()].isfinite().all()
                ]
        what = f"{self._me}: naming gradients that are not finite"
        said = [name for names in all_gather_json(mine[:3], group=self._group, what=what) for name in names]
        whose = f"those of {'; '.join(said[:9])}" if said else "their sum over all ranks has overflowed"
        return f"{self._me}: gradients are not finite, update {self.num_updates + 1} was not made: {whose}"

    def _is_audit_due(self) -> bool:
        every = self._safety.audit_every
        return bool(every and self.num_updates and self.num_updates % every == 0)

    def _audit(self) -> None:
        self._wait_for_all()
        inside = self._bucket_of
        rest = [(name, param) for name, param in self._named_params if param not in inside]
        flats = [installed.flat.buffer for installed in self._installed]
        options = torch.tensor(int(digest_of(describe_options(self._book.groups))[:15], 16), device=self._device)
        sums = torch.cat([checksums([*flats, *(param for _, param in rest)], device=self._device), options.reshape(1)])
        halves = sums.view(torch.int32)  # some backends reduce nothing wider
        # The largest of all ranks, and the complement of the smallest.
        ends = self._reduce(torch.stack([halves, ~halves]), dist.ReduceOp.MAX, "audit of parameters")
        is_different = ends[0] != ~ends[1]
        if not is_different.any():
            return
        first = int(is_different.nonzero()[0]) // 2
        if first == len(sums) - 1:
            raise ZerolapError(
                f"{self._me}: the audit after update {self.num_updates} found that the optimizer's options differ between group ranks "
                f"{self._other_option()}; schedulers and whatever else sets them must do the same on all ranks"
            )
        if first < len(flats):
            where = f"bucket {first}, "
            suspects = [(name, param) for name, param in self._named_params if inside.get(param) == first]
        else:
            where, suspects = "", [rest[first - len(flats)]]
        mine = checksums([param for _, param in suspects], device=self._device).tolist()
        said = all_gather_json([self._me, mine], group=self._group, what=f"{self._me}: naming what drifted")
        raise ZerolapError(
            f"{self._me}: the audit after update {self.num_updates} found that parameters differ between ranks: {where}"
            f"{describe_drift([name for name, _ in suspects], said)}"
        )

    def _other_option(self) -> str:
        what = f"{self._me}: naming options that differ"
        said = all_gather_json(describe_options(self._book.groups), group=self._group, what=what)
        for rank, theirs in enumerate(said):
            difference = first_option(said[0], theirs)
            if difference is not None:
                return f"0 and {rank}: {difference}"
        return "a moment ago, and no longer do"
