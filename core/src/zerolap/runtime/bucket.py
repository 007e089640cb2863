"""One bucket, one life: from DDP's hook to the next forward. When each thing happens is the engine's to say, and who owns what is not ours.

How a bucket is reduced and gathered is prepared by an exchange strategy, once for as long as its memory stays: in the hot path there is
no work per parameter, and no choice left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from zerolap._torch import GradBucket, is_profiling
from zerolap.backend.lanes import Pending, Waiter
from zerolap.errors import CollectiveError, ZerolapError, forked
from zerolap.runtime.books import Books
from zerolap.runtime.common import Common
from zerolap.runtime.flat_buffer import FlatBuffer, Marks, Sealed
from zerolap.runtime.freed_gradients import FreedGradients
from zerolap.runtime.param_groups import NOT_OPTIONS, Options
from zerolap.runtime.shard_optimizer import LocalOptimizer, Shard, ShardBook, used_params
from zerolap.runtime.state_pieces import OwnPiece
from zerolap.schedule.ownership import BucketOwners, Sections, Slot


class OptimizerUpdate:
    """What the buckets of one update share of one optimizer. Each sees the same options, even if the optimizer changes them in its step."""

    def __init__(self, book: ShardBook) -> None:
        self._book = book
        self.options: list[Options] | None = None  # None until the update begins
        self.divisor: Tensor | None = None  # of the gradients, where the optimizer applies it
        self.last: LocalOptimizer | None = None  # that was stepped, in this update or an earlier one
        self.is_left_out = False  # of this update, which is only of other optimizers
        self._has_stepped = False

    def begin(self) -> None:
        """Take the options as they are now; before the first step."""
        self.options = [
            {key: value for key, value in dict.items(group) if key not in NOT_OPTIONS}
            for group in self._book.read_groups()
        ]

    def step(self, local: LocalOptimizer) -> None:
        """Step one shard's optimizer with the options of this update."""
        if self.is_left_out:
            return
        assert self.options is not None, "an update is begun before its first step"
        for mine, given in zip(local.optimizer.param_groups, self.options, strict=True):
            mine.update(given)
        pre_hooks, post_hooks = local.own_hooks
        if self.divisor is None and not (pre_hooks or post_hooks or local.has_masters):
            local.bare_step()
        else:
            local.step(self.divisor)
        self.last, self._has_stepped = local, True

    def finish(self) -> None:
        """Show in the exposed groups what the optimizer itself has changed or added, as a plain one does."""
        if not self._has_stepped:
            self.step(self._book.locals[0])  # nothing here is ours: step over nothing, so that counters go on
        if self._has_stepped:
            assert self.options is not None
            assert self.last is not None
            stepped = self.last.optimizer.param_groups
            for exposed, before, after in zip(self._book.read_groups(), self.options, stepped, strict=True):
                exposed.update(
                    (key, value)
                    for key, value in after.items()
                    if key not in NOT_OPTIONS and before.get(key, self) is not value
                )
        self.options = self.divisor = None
        self._has_stepped = self.is_left_out = False


class Update:
    """What the buckets of one update share."""

    def __init__(self, books: Books) -> None:
        self.of = [OptimizerUpdate(book) for book in books.books]  # by optimizer
        self.check: Callable[[], None] | None = None  # called before the first bucket is stepped, on all ranks
        self.norms: list[Tensor] = []  # of the mean gradients that were used, shard by shard, if they are tracked
        self._has_begun = False

    def forget(self) -> None:
        """What was begun for an update that is not made."""
        for each in self.of:
            each.options = each.divisor = None

    def leave_out(self, left_out: Sequence[bool]) -> None:
        """Which optimizers do not step in this update."""
        for each, is_left_out in zip(self.of, left_out, strict=True):
            each.is_left_out = is_left_out

    def begin(self) -> None:
        """Before the first bucket of an update is stepped."""
        if self._has_begun:
            return
        if self.check is not None:
            self.check()
        self._has_begun = True
        self.norms = []
        for each in self.of:
            if each.options is None:
                each.begin()

    def step(self, shard: Shard) -> None:
        """Step one bucket's shard."""
        for number, local in shard.locals.items():
            self.of[number].step(local)

    def finish(self) -> None:
        """All buckets were stepped."""
        self.begin()  # if there was none
        for each in self.of:
            each.finish()
        self._has_begun = False


@dataclass(slots=True, eq=False)
class Bucket:
    """One of DDP's buckets on this rank.

    Its life, in every backward:

    1. ``start_reduce``: DDP's hook hands it over, full of gradients, and their reduction starts. On backward's thread.
    2. ``finish_reduce``: their mean is there, of the whole bucket or of this rank's shard of it. On the lane, as is all that follows.
       With ``shard_gradients`` the memory of the whole is freed here, and taken again for the first gradient of the next backward.
    3. ``step``: the shard's optimizer updates the stand-ins, and with them the parameters that this rank owns.
    4. ``start_gather``: the updated shards go to all ranks.
    5. ``wait``: whoever uses one of its parameters next, the lane at the end of backward or the next forward, waits for the gather.

    Before that, once for a layout: ``record`` notes what DDP's bucket holds, and ``install`` moves the parameters into a flat buffer and
    gives the bucket its shard. DDP may replace the memory of gradients (``buffer``) at any time; then the reduction is prepared anew.
    """

    index: int
    common: Common
    update: Update
    places: tuple[int, ...]  # of its parameters in the optimizer
    params: tuple[Tensor, ...]
    # Kept while DDP has it, so that no other bucket can ever get its identity: the same buffer means the same bucket.
    buffer: Tensor
    offsets: tuple[int, ...]  # where parameters' gradients start in it

    # Of the reduction: by backward's thread, then by the lane.
    scatter: Callable[[], Pending] | None = None  # starts it, where it is ours; None until it is prepared
    shard_gradients: Tensor | None = None  # where it leaves this rank's sum
    scale: float = 1.0  # that makes the mean of it
    used: list[bool] | None = None  # by this rank, in this backward
    reduced: Tensor | None = None  # the means, once they are there, until the next backward
    gradients: Tensor | None = None  # what DDP shall take: the means, or where an element's owner alone has it, its own
    freed: FreedGradients | None = None  # what is freed of all of these, if anything is
    carried: Tensor | None = None  # what earlier backwards have left, which the means are added to
    wanted: list[bool | None] | None = None  # by parameter: whether step() was given a gradient, or as ranks agree
    _reduction: Waiter[Tensor] | Pending | None = None

    # Of the update, once installed: by the lane.
    owners: BucketOwners | None = None
    flat: FlatBuffer | None = None
    shard: Shard | None = None  # None if nothing here is this rank's
    own: Sequence[OwnPiece] = ()
    spans: Mapping[int, slice] = field(default_factory=dict)  # of each optimizer's section in this rank's part
    marks: Marks | None = None
    gather: Callable[[], Pending] | None = None  # starts the gather
    agreed: list[bool] | None = None  # which parameters any rank used; None while that is all

    # Of the gather: started by the lane, waited for by the lane or by whoever uses a parameter first. The lock is held while waiting,
    # so that nobody takes a gather that another thread waits for as finished.
    gathering: Pending | None = None
    _sealed: Sealed | None = None  # while gathers are lazy
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What it holds, in sizes."""
        return tuple(Slot(place, param.numel()) for place, param in zip(self.places, self.params, strict=True))

    def record(self, buffer: Tensor, offsets: tuple[int, ...]) -> None:
        """DDP has other memory for these gradients now, or will have."""
        self.buffer, self.offsets = buffer, offsets
        self.scatter = self.gradients = self.reduced = None
        if self.common.gradient_memory is not None:
            self.freed = FreedGradients.filled_in(self.freed, buffer, self.index, self.common.gradient_memory)

    def lay_out(self) -> None:
        """Move its parameters into a flat buffer, rank by rank and section by section where its owners have such."""
        order = None
        if isinstance(self.owners, Sections):
            place_of = {index: place for place, index in enumerate(self.places)}
            order = [place_of[param] for section in self.owners.sections for param in section.order()]
        self.flat = FlatBuffer(self.params, order, block=self.common.wire.block)
        self.shard = self.marks = self.agreed = None

    def uninstall(self) -> None:
        """Its parameters are about to move elsewhere."""
        self.flat = self.shard = self.marks = self.gather = None

    def release(self) -> None:
        """Let go of what belongs to groups and gradients."""
        self.scatter = self.gather = self._reduction = self.reduced = self.gradients = self.carried = None
        self.forget_gather()

    # --- 1, 2: the reduction ------------------------------------------------------------------------------------------

    def start_reduce(self, given: GradBucket, state: object) -> None:
        """Start reducing what DDP has handed over; on backward's thread."""
        common, probe = self.common, self.common.probe
        # Read now: once the bucket is reduced DDP gives a gradient to parameters that only other ranks used.
        self.used = [param.grad is not None for param in self.params] if common.asks_for_use else None
        self.reduced, self.gradients = None, self.buffer
        if self.freed is not None:
            self.freed.hand_over(self.buffer, self.params, self.offsets)
        probe.now.begun.append(perf_counter())
        is_seen = probe.trace is not None or is_profiling()
        hook, side, scatter = common.hook, common.reduce_side, self.scatter
        try:
            if hook is not None:
                if is_seen:
                    self._reduction = probe.reducing(self.index, lambda: Waiter(hook(state, given)))
                else:
                    self._reduction = Waiter(hook(state, given))
            else:
                assert scatter is not None, "a reduction is prepared before it is started"
                pending = probe.start("reduce", self.index, side, scatter) if is_seen else side.start(scatter)
                probe.reduced_bytes += pending.sent_bytes
                self._reduction = pending
        except RuntimeError as error:
            if isinstance(error, ZerolapError):
                raise  # already names what failed
            raise CollectiveError(f"the reduction could not be started: {type(error).__name__}: {error}") from error

    def finish_reduce(self) -> None:
        """Wait for the reduction."""
        reduction, self._reduction = self._reduction, None
        try:
            if isinstance(reduction, Waiter):
                self.reduced = self.gradients = reduction.wait(self.common.timeout)
            else:
                assert reduction is not None, "a reduction is started before it is waited for"
                assert self.shard_gradients is not None
                reduction.wait()  # the group's own timeout ends this
                self.reduced = self.shard_gradients
                if self.scale != 1:
                    self.reduced.mul_(self.scale)
                if self.carried is not None:
                    self.reduced.add_(self.carried)
                    self.carried = None
                if self.freed is not None:
                    self.gradients, self.reduced = None, self.freed.reduced(self.reduced, reduction)
        except Exception as error:
            raise CollectiveError(f"{self.common.me}, bucket {self.index}: the reduction failed: {error}") from error
        self.common.probe.now.ended.append(perf_counter())

    # --- 3: the update ------------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """Find out which parameters any rank used; DDP leaves the others without a gradient, and the optimizer leaves them alone."""
        if not self.used:
            return
        common = self.common
        assert common.group is not None
        # Not of a smaller type: some backends reduce none.
        votes = torch.tensor(self.used, dtype=torch.int32, device=self.buffer.device)
        what = f"{common.me}, bucket {self.index}: all-reduce of which parameters were used"
        common.adapter.all_reduce(votes, op=dist.ReduceOp.MAX, group=common.group, what=what).wait()
        agreed = [bool(vote) for vote in votes.tolist()]
        self.agreed = None if all(agreed) else agreed

    def step(self) -> None:
        """Update this rank's shard."""
        update, common, probe = self.update, self.common, self.common.probe
        update.begin()
        if self.gathering is not None:
            self.wait(is_lane=True)  # of the last update: it reads the memory that is about to be written
        # As an optimizer's own writing would: a node of this backward that still needs an old value now raises.
        increment_version(self.params)
        shard = self.shard
        if shard is None:
            return
        assert self.reduced is not None, "a bucket is reduced before it is stepped"
        start = perf_counter()
        if self.freed is not None:
            self.freed.before_step()
        used = self.agreed if self.wanted is None else used_params(self.agreed, self.wanted)
        if self.reduced is not shard.grads_of or used is not None or shard.used is not None:
            shard.set_grads(self.reduced, used)
        if common.tracks_norm:
            update.norms.append(torch.linalg.vector_norm(self.reduced, dtype=common.norm_dtype))
        update.step(shard)
        probe.now.steps.append((start, perf_counter()))
        if self.freed is not None:
            self.freed.after_step(shard.cast)

    # --- 4, 5: the gather ---------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Start sending the updated shards to all ranks."""
        common, probe = self.common, self.common.probe
        assert self.flat is not None, "a bucket is installed before it is gathered"
        for param, address in self.flat.ends:
            if param.data_ptr() != address:
                raise ZerolapError(
                    "parameters have left their flat buffer (param.data was set, or the module was moved or cast); "
                    "move the model before it is wrapped in DDP and load into it by copy_ or load_state_dict"
                )
        if common.is_alone:
            return
        assert self.gather is not None
        if self.gathering is not None:
            self.wait(is_lane=True)
        if common.is_lazy:
            self._sealed = Sealed(self.params, self.marks)
        else:
            probe.now.begun.append(perf_counter())
        is_seen = probe.trace is not None or is_profiling()
        try:
            side = common.gather_side
            pending = probe.start("gather", self.index, side, self.gather) if is_seen else side.start(self.gather)
        except RuntimeError as error:
            if isinstance(error, ZerolapError):
                raise  # already names what failed
            raise CollectiveError(
                f"{common.me}, bucket {self.index}: the gather could not be started: {error}"
            ) from error
        probe.gathered_bytes += pending.sent_bytes
        self.gathering = common.in_flight[self.index] = pending

    def wait(self, param: Tensor | None = None, *, is_lane: bool = False) -> None:
        """Return when its parameters have their updated values; on any thread. ``param`` is what somebody is about to use."""
        if self.gathering is None:
            return
        common = self.common
        if common.failures.is_forked:
            raise forked()  # the lock may be held by a thread that is not here
        trace, start = common.probe.trace, perf_counter()
        if trace is None:
            self._wait(is_lane=is_lane)
        else:
            kind, name = ("wait", "gather") if is_lane else ("use", trace.name_of(param))
            with common.probe.noting(kind, self.index, name):
                self._wait(is_lane=is_lane)
        if not is_lane:
            common.probe.now.used.append((start, perf_counter()))

    def _wait(self, *, is_lane: bool) -> None:
        common = self.common
        with self._lock:
            pending = self.gathering
            if pending is None:
                return
            try:
                pending.wait()
                _refuse_early_writes(self)
            except Exception as error:
                failure = common.failures.note(error)
                if is_lane and failure is error:
                    raise
                if is_lane:
                    raise failure from error
                common.raise_failure()
            if common.waits_on_host or common.lane.is_caller():
                if not common.is_lazy:
                    common.probe.now.ended.append(perf_counter())
                self.forget_gather()  # or else the lane or another stream has waited, and the next one must, too

    def forget_gather(self) -> None:
        """Everybody has waited for it."""
        self.common.in_flight.pop(self.index, None)  # first: once it is None the lane may start the next one
        self.gathering = None


def _refuse_early_writes(bucket: Bucket) -> None:
    sealed, bucket._sealed = bucket._sealed, None
    written = set() if sealed is None else sealed.written()
    if written:
        raise ZerolapError(
            f"{bucket.common.me}, bucket {bucket.index}: parameters were written between their update and the end of their gather, which "
            f"is lost on some ranks and not on others: {', '.join(_names_of(bucket, written)[:5])}. Reach them through their modules or "
            "optimizer.param_groups, which wait, or call handle.finish() before you write by references of your own, or use "
            'gather="eager"'
        )


def _names_of(bucket: Bucket, params: Container[Tensor]) -> list[str]:
    names, both = bucket.common.names, zip(bucket.places, bucket.params, strict=True)
    return [names.get(param, f"parameter {place} of the optimizer") for place, param in both if param in params]
