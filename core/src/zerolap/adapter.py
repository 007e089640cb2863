"""The adapter contract: what a backend offers and says of itself, and where adapters are found. None is named here."""

from __future__ import annotations

import importlib.metadata
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import ClassVar, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap.errors import AdapterNotFoundError, CollectiveError
from zerolap.lane import Lane
from zerolap.plan import GroupRank
from zerolap.trace import Moment

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "zerolap.adapters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Facts about a backend. A fact decides what core does; a vendor's name never does."""

    futures_complete_at_enqueue: bool
    """A work's future is done once the work is queued on a stream; waiting for it makes a stream wait, not the host."""

    exact_cut: int
    """Stepping a slice of a parameter is bitwise the slice of stepping it whole if every cut is a multiple of this many
    elements from the parameter's start."""


class Waitable(Protocol):
    def wait(self) -> object: ...


class Pending:
    """A collective under way. Keeps its tensors alive, and knows how to call itself when it fails."""

    __slots__ = ("_finish", "_what", "_works", "sent_bytes", "tensors")

    def __init__(
        self,
        works: Sequence[Waitable],
        *,
        tensors: Sequence[Tensor],
        what: str,
        sent_bytes: int = 0,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._works = works
        self._finish = finish  # what is left to do once everything has arrived
        self.sent_bytes = sent_bytes  # by this rank
        # Held until waited for: freed earlier, the allocator may hand the memory to the next bucket while it is sent.
        self.tensors = tensors
        self._what = what

    def wait(self) -> None:
        """Return when the tensors may be read and written by the caller; CollectiveError if it failed or timed out."""
        try:
            for work in self._works:
                work.wait()
            if self._finish is not None:
                self._finish()
        except Exception as error:
            raise CollectiveError(f"{self._what} failed: {error}") from error
        self._works, self._finish, self.tensors = (), None, ()


class Adapter(ABC):
    """What core needs of a backend. Under ten verbs; most come with this class.

    Collectives are started by one thread per group, in the same order on every rank, on contiguous tensors.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]
    backend: ClassVar[str]  # what init_process_group() is told for this device
    capabilities: ClassVar[Capabilities]

    @abstractmethod
    def is_available(self) -> bool:
        """Whether this process can use the device; never raises."""

    @abstractmethod
    def lane(self, name: str) -> Lane:
        """A new ordered place to run shard updates and start collectives."""

    @abstractmethod
    def open_group(self, like: dist.ProcessGroup, *, name: str) -> dist.ProcessGroup:
        """A group of our own over the ranks of ``like``, in their order; all of them call it with the same unique name.

        Ranks outside ``like`` take no part, and dropping the last reference closes it.
        """

    def device(self, local_rank: int) -> torch.device:
        """The device that a process with this local rank trains on."""
        return torch.device(self.device_type, local_rank)

    def synchronize(self) -> None:
        """Wait until the device has done everything given to it."""
        torch.accelerator.synchronize()

    def timeout(self, group: dist.ProcessGroup) -> timedelta:
        """How long a collective of this group may take."""
        # torch has no public reader for it; the setter is public.
        timeout: timedelta = group._get_backend(torch.device(self.device_type)).options._timeout
        return timeout

    def moment(self) -> Moment:
        """Now, as seen by whatever runs what this thread starts: the host, or the current stream."""
        return time.perf_counter()

    def seconds_between(self, start: Moment, end: Moment) -> float:
        """The time from one moment to another."""
        return cast(float, end) - cast(float, start)

    def close_group(self, group: dist.ProcessGroup) -> None:  # noqa: B027 - most have taken nothing
        """Give up what ``open_group`` has taken beyond the group object itself."""

    def all_reduce(
        self, tensor: Tensor, *, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, what: str
    ) -> Pending:
        """Reduce ``tensor`` over the group, in place."""
        return Pending([group.allreduce(tensor, op=op)], tensors=(tensor,), what=what)

    def broadcast(self, tensor: Tensor, *, src: GroupRank, group: dist.ProcessGroup, what: str) -> Pending:
        """Copy ``tensor`` from the group's rank ``src`` to all others, in place."""
        return Pending([group.broadcast(tensor, root=src)], tensors=(tensor,), what=what)

    @abstractmethod
    def reduce_scatter(
        self, parts: Sequence[Tensor], *, into: Tensor, group: dist.ProcessGroup, tag: int, what: str
    ) -> Pending:
        """Sum, in rank order, what every rank has as the part of this rank, and leave it in ``into``.

        ``parts[r]`` is meant for rank r and is not changed; parts may differ in size and be empty. Collectives of one group
        that are under way at once have different tags.
        """

    @abstractmethod
    def all_gather(self, parts: Sequence[Tensor], *, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        """Send this rank's part to all others and fill in theirs; parts may differ in size and be empty."""


@cache
def _load(entry_point: importlib.metadata.EntryPoint) -> type[Adapter] | Exception:
    """Load a plug-in once. One that is broken must not break the others: its error is kept for whoever asks for it."""
    try:
        loaded = entry_point.load()
        if not (isinstance(loaded, type) and issubclass(loaded, Adapter)):
            raise TypeError(f"entry point {entry_point.value!r} is not a subclass of zerolap.Adapter")
    except Exception as error:
        logger.warning("zerolap adapter %r cannot be loaded: %s", entry_point.name, error)
        return error
    return loaded


def installed_adapters() -> dict[str, type[Adapter] | Exception]:
    """Every registered adapter by name; for one that cannot be loaded, the error."""
    return {ep.name: _load(ep) for ep in sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))}


def load_adapter(name: str) -> Adapter:
    """The adapter of this name; AdapterNotFoundError if there is none or it is broken."""
    installed = installed_adapters()
    adapter = installed.get(name)
    if isinstance(adapter, Exception):
        raise AdapterNotFoundError(f"adapter {name!r} is installed, but cannot be loaded: {adapter}") from adapter
    if adapter is None:
        raise AdapterNotFoundError(f"no adapter {name!r}; installed: {', '.join(installed) or 'none'}")
    return adapter()


def resolve_adapter(given: Adapter | str | None, *, device_type: str) -> Adapter:
    """The adapter that was asked for, or the one for the device; refused if it does not fit the device."""
    if given is None:
        return find_adapter(device_type)
    adapter = load_adapter(given) if isinstance(given, str) else given
    if not isinstance(adapter, Adapter):
        raise TypeError(f"adapter must be a name or a zerolap.Adapter, got {type(adapter).__name__}")
    if adapter.device_type != device_type:
        raise ValueError(
            f"adapter {adapter.name!r} is for device type {adapter.device_type!r}, the parameters are on {device_type!r}"
        )
    if not adapter.is_available():
        raise AdapterNotFoundError(f"adapter {adapter.name!r} finds no device of type {device_type!r}")
    return adapter


def find_adapter(device_type: str) -> Adapter:
    """The adapter for a device type; AdapterNotFoundError says what is installed and what to do."""
    installed = installed_adapters()
    for name, adapter in installed.items():
        if isinstance(adapter, type) and adapter.device_type == device_type:
            found = adapter()
            if not found.is_available():
                raise AdapterNotFoundError(
                    f"adapter {name!r} is installed for {device_type!r}, but finds no such device"
                )
            return found
    described = ", ".join(
        f"{name} (broken: {adapter})" if isinstance(adapter, Exception) else f"{name} ({adapter.device_type})"
        for name, adapter in installed.items()
    )
    raise AdapterNotFoundError(
        f"no zerolap adapter for device type {device_type!r}; installed: {described or 'none'}. "
        f"Install the adapter package for this device (pip install zerolap-{device_type}-<backend>; "
        "the README's adapter table has the names), or move the parameters to a device that has one"
    )
