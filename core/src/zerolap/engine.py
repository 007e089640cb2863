"""The engine: drives one rank's overlap machine. It turns actions into adapter calls and decides nothing itself.

Two threads meet here. DDP calls ``on_bucket`` on the thread that runs backward: there the machine is fed, and reductions
are started. Everything that may wait runs on the lane, in the order the machine asked for it. Futures carry results, and
errors, back to DDP, which waits for them at the end of backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from zerolap.adapter import Adapter, Pending
from zerolap.errors import CollectiveError, IllegalEventError, ZerolapError
from zerolap.exchange import move_states
from zerolap.lane import Waiter
from zerolap.machine import Action, Agreement, Machine, Phase, Schedule, Verb
from zerolap.plan import Plan, Policy, Slot, make_plan
from zerolap.shards import (
    BucketShard,
    FlatParams,
    GradSlot,
    LocalOptimizer,
    Options,
    ShardBook,
    options_of,
    stand_in_for,
    strides_in_bucket,
)

# A collective's own timeout says more than ours, so it gets this much longer to speak first.
_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """What DDP's bucket holds of the optimizer's parameters, and where their gradients lie in it."""

    # Kept, so that no other bucket can ever get its identity: the same buffer means the same bucket.
    buffer: Tensor
    indices: tuple[int, ...]
    params: tuple[Tensor, ...]
    slots: tuple[GradSlot, ...]


@dataclass(slots=True, kw_only=True)
class _Arrival:
    """A bucket of the backward at hand. ``reduced`` is set by the lane once the reduction is done."""

    recorded: _Recorded
    reduction: Waiter[Tensor]
    used: list[bool] | None
    reduced: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class _Installed:
    """A planned bucket, ready to be updated. ``used`` is None while every parameter was used by some rank."""

    flat: FlatParams | None
    shard: BucketShard | None
    used: list[bool] | None = None


class Engine:
    """Overlaps one optimizer with one DDP on this rank."""

    def __init__(
        self,
        book: ShardBook,
        *,
        adapter: Adapter,
        group: dist.ProcessGroup,
        schedule: Schedule,
        policy: Policy,
        agreement: Agreement,
        on_update: Callable[[], None],
    ) -> None:
        self._book = book
        self._adapter = adapter
        self._group = group
        self._policy = policy
        self._agreement = agreement
        self._on_update = on_update
        self._machine = Machine(schedule, agreement=agreement)
        self._lane = adapter.lane("update")
        self._timeout = adapter.timeout(group).total_seconds() + _GRACE_SECONDS
        self._me = f"rank {dist.get_rank()}"

        # The layout at hand and the one planned for: written by backward's thread only.
        self._recording: list[_Recorded] = []
        self._layout: list[_Recorded] = []
        self._plan: Plan | None = None
        self._index_of: dict[Tensor, int] = {}
        self._outside: list[Tensor] = []
        self._failure: BaseException | None = None

        # The backward at hand: filled by backward's thread, used and emptied by the lane.
        self._arrivals: list[_Arrival] = []

        # Written by the lane only.
        self._installed: list[_Installed] = []
        self._options: list[Options] | None = None
        self._stepped: LocalOptimizer | None = None
        self._pending: list[Pending] = []

        self._on_lane: dict[Verb, Callable[[int], None]] = {
            Verb.REDUCE: self._finish_reduce,
            Verb.AGREE: self._agree,
            Verb.STEP: self._step,
            Verb.GATHER: self._start_gather,
        }

    @property
    def has_seen_buckets(self) -> bool:
        return bool(self._layout or self._recording)

    @property
    def phase(self) -> Phase:
        return self._machine.phase

    def on_bucket(self, bucket: GradBucket, start_reduce: Callable[[], Future[Tensor]]) -> Future[Tensor]:
        """Take a bucket from DDP. The future gives the reduced gradients; the last one also means that all is updated."""
        index = bucket.index()
        self.raise_if_failed()
        try:
            actions = self._machine.bucket_ready(index, is_last=bucket.is_last(), is_known=self._is_known(bucket))
            if Action(Verb.RECORD, index) in actions:
                self._record(bucket)
            self._start_reduce(index, start_reduce)
            if bucket.is_last():
                self._refuse_thawed()
            if self._machine.phase is Phase.LAYOUT_SEEN:
                actions += self._close_recording()
        except Exception as error:
            raise self._fail(error, f"bucket {index}") from error
        return self._lane.submit(partial(self._do_on_lane, actions, index))

    def step_called(self) -> None:
        """The user called step(): the update has happened inside backward, so there is nothing left to do."""
        self.raise_if_failed()
        try:
            self._machine.step_called()
        except IllegalEventError as error:
            raise self._fail(error, "step() after a backward that did not finish") from error

    def forget_layout(self) -> None:
        """Plan anew at the end of the next backward: the optimizer's parameters have changed."""
        self._layout = []

    def raise_if_failed(self) -> None:
        if self._failure is not None:
            self._machine.failed()
            self.close()  # not by the lane itself: a job put behind the end of the lane would never be answered
            raise ZerolapError(
                f"{self._me}: the overlap failed earlier, parameters may differ between ranks; "
                f"start again from a checkpoint. First error: {self._failure}"
            ) from self._failure

    def close(self) -> None:
        """End the progress thread; the group closes with the last reference to it."""
        self._lane.close()

    # --- on backward's thread -----------------------------------------------------------------------------------------

    def _is_known(self, bucket: GradBucket) -> bool:
        """Whether this is the very bucket the plan was made for; a rank that joined early gets new ones every time."""
        index = bucket.index()
        return (
            self._machine.phase is not Phase.DDP_HAS_REBUILT_BUCKETS
            and index < len(self._layout)
            and bucket.buffer() is self._layout[index].buffer
        )

    def _record(self, bucket: GradBucket) -> None:
        if bucket.index() == 0:
            self._recording = []
            self._index_of = {param: index for index, param in enumerate(self._book.params)}
        buffer = bucket.buffer()
        if buffer.layout is not torch.strided:
            raise ValueError("sparse gradients cannot be updated inside backward; use sparse=False")
        # bucket.gradients() has the right offsets, but row-by-row strides even where DDP laid a gradient out otherwise.
        held = [
            (
                index,
                param,
                GradSlot(param.size(), strides_in_bucket(param), int(grad.storage_offset() - buffer.storage_offset())),
            )
            for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
            if (index := self._index_of.get(param)) is not None  # DDP may reduce for another optimizer, too
        ]
        indices, params, slots = zip(*held, strict=True) if held else ((), (), ())
        self._recording.append(_Recorded(buffer=buffer, indices=indices, params=params, slots=slots))

    def _start_reduce(self, index: int, start_reduce: Callable[[], Future[Tensor]]) -> None:
        recorded = (self._recording or self._layout)[index]
        # Read now: once the bucket is reduced DDP gives a gradient to parameters that only other ranks used.
        used = None if self._agreement is Agreement.NEVER else [param.grad is not None for param in recorded.params]
        self._arrivals.append(_Arrival(recorded=recorded, reduction=Waiter(start_reduce()), used=used))

    def _close_recording(self) -> tuple[Action, ...]:
        recording, self._recording = self._recording, []
        is_changed = [b.indices for b in recording] != [b.indices for b in self._layout]
        actions = self._machine.layout_seen(is_changed=is_changed)
        self._layout = recording
        if is_changed:
            layout = tuple(
                tuple(Slot(index, param.numel()) for index, param in zip(b.indices, b.params, strict=True))
                for b in recording
            )
            self._plan = make_plan(
                layout, world_size=self._book.world_size, policy=self._policy, cut=self._adapter.capabilities.exact_cut
            )
            inside = {index for b in recording for index in b.indices}
            self._outside = [param for param, index in self._index_of.items() if index not in inside]
            self._refuse_thawed()
        return actions

    def _refuse_thawed(self) -> None:
        thawed = sum(param.requires_grad for param in self._outside)
        if thawed:
            raise ValueError(
                f"{thawed} trainable parameters of the optimizer are in none of DDP's buckets, so their gradients are not "
                "reduced; wrap the model in DDP again after changing requires_grad, and attach a new optimizer to it"
            )

    def _fail(self, error: Exception, where: str) -> ZerolapError:
        self._failure = ZerolapError(f"{self._me}, {where}: {type(error).__name__}: {error}")
        self._machine.failed()
        self.close()
        return self._failure

    # --- on the lane --------------------------------------------------------------------------------------------------

    def _do_on_lane(self, actions: Sequence[Action], index: int) -> Tensor:
        """Do what may wait; return the reduced gradients of the bucket that brought these actions."""
        result = self._arrivals[index]
        for verb, bucket in actions:
            try:
                if verb in self._on_lane:
                    assert bucket is not None
                    self._on_lane[verb](bucket)
                elif verb is Verb.MIGRATE:
                    self._install()
                elif verb is Verb.WAIT:
                    self._finish_update()
            except Exception as error:
                where = f"{self._me}, {'all buckets' if bucket is None else f'bucket {bucket}'}, {verb.name.lower()}"
                self._failure = (
                    error
                    if isinstance(error, CollectiveError)
                    else ZerolapError(f"{where}: {type(error).__name__}: {error}")
                )
                raise self._failure from error
        assert result.reduced is not None, "every bucket's actions start with its reduction"
        return result.reduced

    def _finish_reduce(self, index: int) -> None:
        arrival = self._arrivals[index]
        try:
            arrival.reduced = arrival.reduction.wait(self._timeout)
        except Exception as error:
            raise CollectiveError(
                f"{self._me}, bucket {index}: the wrapped hook's reduction failed: {error}"
            ) from error

    def _agree(self, index: int) -> None:
        used = self._arrivals[index].used
        if not used:
            return
        votes = torch.tensor(used, dtype=torch.uint8, device=self._arrivals[index].recorded.buffer.device)
        what = f"{self._me}, bucket {index}: all-reduce of which parameters were used"
        self._adapter.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, what=what).wait()
        agreed = [bool(vote) for vote in votes.tolist()]
        self._installed[index].used = None if all(agreed) else agreed

    def _step(self, index: int) -> None:
        installed, arrival = self._installed[index], self._arrivals[index]
        if installed.shard is None:
            return
        assert arrival.reduced is not None, "a bucket is reduced before it is stepped"
        # Like DDP, take a result of another dtype: some compressing hooks return what they sent.
        reduced = arrival.reduced.to(arrival.recorded.buffer.dtype)
        installed.shard.set_grads(reduced, arrival.recorded.slots, installed.used)
        self._step_local(installed.shard.local)

    def _step_local(self, local: LocalOptimizer) -> None:
        if self._options is None:
            # Every bucket of a backward sees the same options, even if the optimizer itself changes them in its step.
            self._options = [options_of(group) for group in self._book.groups]
        local.take_options(self._options)
        local.optimizer.step()
        self._stepped = local

    def _start_gather(self, index: int) -> None:
        flat = self._installed[index].flat
        if flat is None:
            return
        if not flat.is_intact():
            raise ZerolapError(
                "parameters have left their flat buffer (param.data was set, or the module was moved or cast); "
                "move the model before it is wrapped in DDP and load into it by copy_ or load_state_dict"
            )
        if self._book.world_size == 1:
            return
        assert self._plan is not None
        first = 0
        for owner, pieces in self._plan.buckets[index].segments():
            part = flat.slice(first, first + len(pieces))
            first += len(pieces)
            if part.numel():
                what = f"{self._me}, bucket {index}: broadcast of updated parameters from group rank {owner}"
                self._pending.append(self._adapter.broadcast(part, src=owner, group=self._group, what=what))

    def _finish_update(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        if self._options is None:
            self._step_local(self._book.locals[0])  # nothing here is ours: step over nothing, so that counters go on
        assert self._options is not None
        assert self._stepped is not None
        # What the optimizer itself changed or added shows in the exposed groups, as with a plain optimizer.
        for exposed, before, after in zip(self._book.groups, self._options, self._stepped.options(), strict=True):
            exposed.update((key, value) for key, value in after.items() if before.get(key, self) is not value)
        self._options = None
        self._arrivals = []
        self._on_update()

    def _install(self) -> None:
        """Bring states to their new owners, parameters into flat buffers, and an optimizer to every shard."""
        assert self._plan is not None
        book = self._book
        params = book.params
        owners = book.owners | self._plan.owner_of_whole_params()
        states = move_states(
            book.states(), owners=owners, group=self._group, device=params[0].device, what="moving optimizer states"
        )
        inside = {index for recorded in self._layout for index in recorded.indices}
        older = self._stepped or book.locals[0]
        # What DDP does not reduce has no gradient, but keeps its state.
        rest = {i: stand_in_for(params[i]) for i, owner in owners.items() if owner == book.rank and i not in inside}
        book.owners, book.locals = owners, [book.make_local(rest)]
        self._installed = []
        for recorded, planned in zip(self._layout, self._plan.buckets, strict=True):
            flat = FlatParams(recorded.params) if recorded.params else None
            held = dict(zip(recorded.indices, recorded.params, strict=True))
            shard = book.make_bucket_shard(held, owned=planned.owned_by(book.rank))
            self._installed.append(_Installed(flat=flat, shard=shard))
            if shard is not None:
                book.locals.append(shard.local)
        for local in book.locals:
            local.inherit(older)
        book.load(states)
