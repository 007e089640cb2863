"""The adapter contract: what a backend offers and says of itself. None is named here."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap._public import public
from zerolap._torch import (
    Backend,
    BackendOptions,
    GroupName,
    PrefixStore,
    Store,
    group_around,
    group_timeout,
    registered_backend,
    store_of,
)
from zerolap.backend.lanes import HostSide, Lane, Pending, Side, ThreadLane
from zerolap.backend.parts import Parts
from zerolap.errors import CollectiveError, ZerolapError
from zerolap.schedule.ownership import GroupRank

_GRACE_SECONDS = 5.0  # beyond a group's own time limit, whose error says more

Moment = object  # as an adapter takes it: a number on host devices, a timed event on streams


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Facts about a backend. A fact decides what core does; a vendor's name never does."""

    futures_complete_at_enqueue: bool
    """A work's future is done once the work is queued on a stream; waiting for it makes a stream wait, not the host."""

    exact_cut: int
    """Stepping a slice of a parameter is bitwise the slice of stepping it whole if every cut is a multiple of this many
    elements from the parameter's start, and no kernel is shared among threads of the host: then ``attach`` tries what holds."""

    has_float64: bool
    """Tensors of double precision can be computed with, and reduced."""

    one_issue_order: bool
    """Collectives of different groups must be started in one order on all ranks, as those of one group must everywhere."""


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """What a group's backend is made from."""

    store: Store
    rank: GroupRank
    global_ranks: list[int]
    timeout: timedelta
    name: GroupName

    @property
    def size(self) -> int:
        return len(self.global_ranks)


@public
class Recycler(Protocol):
    """Hands memory on, on a device without streams. Tensors stay where they are: it is pages that move. Called by any thread."""

    def discard(self, tensor: Tensor) -> None:
        """Take the memory of a contiguous tensor; its values are lost. It may be written to behind ``refill``."""

    def refill(self, tensor: Tensor) -> None:
        """Give memory to a tensor that was discarded, has not been written to since, and is about to be, all of it."""

    def release(self, most_bytes: int = 0) -> None:
        """Give memory that is kept back to the system, but for this much."""

    @property
    def num_bytes(self) -> int:
        """Of memory that is kept."""


@public
class Adapter:
    """What core needs of a backend: names and capabilities, which an adapter states, and verbs, which it may do better.

    As it stands this is an adapter for a device without streams. Collectives are started by one thread per group, in the same
    order on every rank, on contiguous tensors.
    """

    name: str
    device_type: str
    backend: str  # what init_process_group() is told for this device
    capabilities: Capabilities

    def why_unavailable(self) -> str | None:
        """Why this process cannot use the device, in words; None if it can."""
        if not dist.is_available() or not dist.is_backend_available(self.backend):
            return f"torch.distributed has no backend {self.backend!r}"
        return None

    def is_available(self) -> bool:
        """Whether this process can use the device; never raises."""
        try:
            return self.why_unavailable() is None
        except Exception:  # a probe of something that is not there may do anything; diagnose() says what it did
            return False

    def diagnose(self) -> list[str]:
        """Advice about this process's environment, one sentence each; nothing if all is well."""
        return []

    def lane(self, name: str, *, device: torch.device) -> Lane:
        """A new ordered place to run shard updates and start collectives."""
        return ThreadLane(name)

    def side(self, device: torch.device) -> Side:
        """A new ordered place to start collectives of one kind."""
        return HostSide()

    def check_group(self, group: dist.ProcessGroup) -> None:
        """Refuse, with a ValueError, a process group that this adapter cannot work beside."""

    def open_group(self, like: dist.ProcessGroup, *, name: str) -> dist.ProcessGroup:
        """A group of our own over the ranks of ``like``, in their order; all of them call it with the same unique name.

        Ranks outside ``like`` take no part, and dropping the last reference closes it. CollectiveError if the store has not answered
        by the time limit of ``like``.
        """
        # Made as torch makes them, but not registered with torch: new_group() wants every rank of the job or a count of
        # groups that is the same on all, and splitting wants all ranks of the parent, and loses messages on some backends.
        spec = GroupSpec(
            store=PrefixStore(name, store_of(like)),
            rank=GroupRank(like.rank()),
            global_ranks=dist.get_process_group_ranks(like),
            timeout=self.timeout(like),
            name=GroupName(name),
        )
        kind = dist.Backend.backend_type_map.get(self.backend, dist.ProcessGroup.BackendType.CUSTOM)
        return group_around(
            self._make_in_time(spec),
            store=spec.store,
            rank=spec.rank,
            size=spec.size,
            kind=kind,
            device=torch.device(self.device_type),
            name=spec.name,
        )

    def _make_in_time(self, spec: GroupSpec) -> Backend:
        # On a thread of its own: a store that lives in a rank that was stopped answers nobody, whatever the time limit, and who
        # waits for it cannot be interrupted. That thread is left behind.
        made: list[Backend] = []
        failed: list[BaseException] = []
        device = None if self._is_host else torch.accelerator.current_device_index()

        def make() -> None:
            try:
                if device is not None:
                    torch.accelerator.set_device_index(device)  # a thread's own
                made.append(self.make_backend(spec))
            except BaseException as error:  # raised by whoever waits
                failed.append(error)

        thread = threading.Thread(target=make, name=f"zerolap-open-{spec.name}", daemon=True)
        thread.start()
        seconds = spec.timeout.total_seconds() + _GRACE_SECONDS
        thread.join(seconds)
        if failed:
            raise failed.pop()  # held by nothing else: where it came from would be kept, and the store with it
        if not made:
            raise CollectiveError(
                f"rank {dist.get_rank()}: opening group {spec.name!r} was not done after {seconds:.0f} s: the store, or another rank, did not "
                "answer. Usually the rank that keeps the store (rank 0) is stopped or out of reach; look at it, and start again"
            )
        return made.pop()

    def make_backend(self, spec: GroupSpec) -> Backend:
        """What does the communicating in a group; here, one that was registered with torch under the adapter's name for it."""
        plugin = registered_backend(self.backend)
        if plugin is None:
            raise LookupError(
                f"no backend {self.backend!r} was registered with torch.distributed.Backend.register_backend(); an adapter of "
                "one that is built into torch overrides make_backend()"
            )
        if not plugin.extended_api:
            return cast(Backend, plugin.creator_fn(spec.store, spec.rank, spec.size, spec.timeout))
        options = BackendOptions()
        options.store, options.group_rank, options.group_size = spec.store, spec.rank, spec.size
        options.timeout, options.group_id, options.global_ranks_in_group = spec.timeout, spec.name, spec.global_ranks
        return cast(Backend, plugin.creator_fn(options, None))

    def device(self, local_rank: int) -> torch.device:
        """The device that a process with this local rank trains on."""
        return torch.device(self.device_type) if self._is_host else torch.device(self.device_type, local_rank)

    def synchronize(self) -> None:
        """Wait until the device has done everything given to it; nothing is queued on the host itself."""
        if not self._is_host:
            torch.accelerator.synchronize()

    @property
    def _is_host(self) -> bool:
        return self.device_type == "cpu"

    def timeout(self, group: dist.ProcessGroup) -> timedelta:
        """How long a collective of this group may take."""
        try:
            return group_timeout(group, torch.device(self.device_type))
        except AttributeError as error:
            raise ZerolapError(
                f"the backend of adapter {self.name!r} does not tell its timeout: {error}; give the object that does its communicating a property "
                "`options` with the timeout as `_timeout`, a timedelta, or override timeout() in the adapter"
            ) from error

    def moment(self) -> Moment:
        """Now, as seen by whatever runs what this thread starts: the host, or the current stream."""
        return time.perf_counter()

    def seconds_between(self, start: Moment, end: Moment) -> float:
        """The time from one moment to another."""
        return cast(float, end) - cast(float, start)

    def stage_sizes(self, num_ranks: int) -> tuple[int, ...]:
        """For forecasts: how many ranks exchange with each other in each stage of a collective; they multiply to ``num_ranks``."""
        return (num_ranks,)

    @property
    def max_receive_bytes(self) -> int | None:
        """For forecasts: the most memory that what is received takes; None for that of a whole bucket."""
        return None

    @property
    def kept_bytes(self) -> int:
        """Memory that is kept here between collectives, for what is received."""
        return 0

    def release_memory(self) -> None:
        """Give memory that was freed back to whoever had it, if the device's allocator keeps much of it. Called seldom."""

    def recycler(self) -> Recycler | None:
        """What hands on memory that is not needed for a while; None, as it stands, to leave it where it is.

        For devices without streams: on the others their allocator does it.
        """
        return None

    def close_group(self, group: dist.ProcessGroup) -> None:
        """Give up what ``open_group`` has taken beyond the group object itself."""

    def all_reduce(
        self, tensor: Tensor, *, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, what: str
    ) -> Pending:
        """Reduce ``tensor`` over the group, in place."""
        return Pending([group.allreduce(tensor, op=op)], tensors=(tensor,), what=what)

    def broadcast(self, tensor: Tensor, *, src: GroupRank, group: dist.ProcessGroup, what: str) -> Pending:
        """Copy ``tensor`` from the group's rank ``src`` to all others, in place."""
        return Pending([group.broadcast(tensor, root=src)], tensors=(tensor,), what=what)

    def reduce_scatter(self, parts: Parts, *, into: Tensor, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        """Sum what every rank has as the part of this rank, always in the same order, and leave it in ``into``.

        The r-th part is meant for rank r and is not changed. Collectives of one group that are under way at once have
        different tags.
        """
        me = group.rank()
        # Of a copy: what is reduced is overwritten on the way. One reduction for each rank's part is what every backend has.
        sent = [into.copy_(part) if rank == me else part.clone() for rank, part in enumerate(parts.tensors)]
        works = [group.reduce(part, root=rank) for rank, part in enumerate(sent) if part.numel()]
        return Pending(works, tensors=(sent, into), what=what, sent_bytes=parts.nbytes - into.nbytes)

    def all_gather(self, parts: Parts, *, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        """Send this rank's part to all others and fill in theirs."""
        works = [group.broadcast(part, root=rank) for rank, part in enumerate(parts.tensors) if part.numel()]
        sent_bytes = parts.tensors[group.rank()].nbytes * (group.size() - 1)
        return Pending(works, tensors=(parts,), what=what, sent_bytes=sent_bytes)

    def all_to_all(self, sent: Parts, received: Parts, *, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        """Send the r-th part of ``sent`` to rank r, and fill the r-th of ``received`` with what that sends here.

        Each lies in one piece of memory, in bytes; what a rank has for itself is empty, as is what need not be sent.
        """
        assert sent.whole is not None, "messages lie one behind the other"
        assert received.whole is not None, "messages lie one behind the other"
        sizes = ([part.numel() for part in parts.tensors] for parts in (received, sent))
        works = [group.alltoall_base(received.whole, sent.whole, *sizes)]
        return Pending(works, tensors=(sent, received), what=what, sent_bytes=sent.nbytes)
