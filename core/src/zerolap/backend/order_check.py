"""``ZEROLAP_DEBUG``: checks that cost too much to be always on. Without it nothing here is ever called.

``order``: before each collective that zerolap starts, all ranks compare what it is, through the store of the group and not
through the collectives under test.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from zerolap._torch import PrefixStore, Store
from zerolap.backend.base import Adapter
from zerolap.backend.lanes import Pending, ThreadLane, Waiter
from zerolap.backend.parts import Parts
from zerolap.errors import CollectiveError
from zerolap.schedule.ownership import GroupRank

MODES = ("order",)
_GRACE_SECONDS = 2.0


def debug_modes() -> tuple[str, ...]:
    """What ``ZEROLAP_DEBUG`` asks for, several separated by commas."""
    asked = tuple(mode for mode in os.environ.get("ZEROLAP_DEBUG", "").replace(" ", "").split(",") if mode)
    unknown = [mode for mode in asked if mode not in MODES]
    if unknown:
        raise ValueError(f"ZEROLAP_DEBUG={','.join(asked)}: unknown {', '.join(unknown)}; known: {', '.join(MODES)}")
    return asked


def with_checked_order(adapter: Adapter, *, store: Store) -> Adapter:
    """``adapter``, with every collective compared between ranks before it starts."""
    return cast(Adapter, _OrderChecked(adapter, store))  # all that it does not do itself is the adapter's


class _OrderChecked:
    def __init__(self, adapter: Adapter, store: Store) -> None:
        self._adapter = adapter
        self._store = store
        self._sequences: dict[str, _Sequence] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def reduce_scatter(self, parts: Parts, *, into: Tensor, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        self._check(group, f"reduce-scatter of bucket {tag}, {_size(parts)}")
        return self._adapter.reduce_scatter(parts, into=into, group=group, tag=tag, what=what)

    def all_gather(self, parts: Parts, *, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        self._check(group, f"all-gather of bucket {tag}, {_size(parts)}")
        return self._adapter.all_gather(parts, group=group, tag=tag, what=what)

    def all_to_all(self, sent: Parts, received: Parts, *, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        self._check(group, f"all-to-all of bucket {tag}")  # how much it is differs between ranks
        return self._adapter.all_to_all(sent, received, group=group, tag=tag, what=what)

    def all_reduce(
        self, tensor: Tensor, *, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, what: str
    ) -> Pending:
        self._check(group, f"all-reduce ({_purpose(what)}), {tensor.numel()} elements of {tensor.dtype}")
        return self._adapter.all_reduce(tensor, op=op, group=group, what=what)

    def broadcast(self, tensor: Tensor, *, src: GroupRank, group: dist.ProcessGroup, what: str) -> Pending:
        self._check(group, f"broadcast ({_purpose(what)}), {tensor.numel()} elements of {tensor.dtype}")
        return self._adapter.broadcast(tensor, src=src, group=group, what=what)

    def close_group(self, group: dist.ProcessGroup) -> None:
        self._sequences.clear()
        self._adapter.close_group(group)

    def _check(self, group: dist.ProcessGroup, what: str) -> None:
        # Where groups have threads of their own, only those of one group have an order.
        name = "all" if self._adapter.capabilities.one_issue_order else group.group_name
        if name not in self._sequences:
            self._sequences[name] = _Sequence(PrefixStore(name, self._store), group, self._adapter.timeout(group))
        self._sequences[name].check(what)


def _size(parts: Parts) -> str:
    return f"{sum(part.numel() for part in parts.tensors)} elements of {parts.tensors[0].dtype}"


def _purpose(what: str) -> str:
    return re.sub(r"^rank \d+[,:] ", "", what)


class _Sequence:
    """Collectives that all ranks start in one order, numbered from 1 on."""

    def __init__(self, store: Store, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._rank, self._ranks = group.rank(), range(group.size())
        self._timeout = timeout
        self._num = 0
        # A connection and a thread of its own: another wait would hold up the store's one connection, and a store that lives in
        # a rank that was stopped never answers, whatever the time limit.
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # torch's types do not know it
        self._lane = ThreadLane("order")

    def check(self, what: str) -> None:
        self._num += 1
        mine = f"rank {dist.get_rank()} starts collective {self._num}: {what}"
        try:
            said = self._run(lambda: self._exchange(mine), self._timeout.total_seconds() + _GRACE_SECONDS)
        except Exception as error:
            raise CollectiveError(f"{mine}; the store does not answer: {error}") from error
        missing = [str(rank) for rank, theirs in enumerate(said) if not theirs]
        if missing:
            raise CollectiveError(
                f"{mine}; group rank {', '.join(missing)} has not started its own after {self._timeout.total_seconds():g} s"
            )
        other = next((theirs for theirs in said if _what(theirs) != _what(said[0])), None)
        if other is not None:
            with suppress(Exception):  # the store may end with its rank, so that one stays until all have read
                self._run(lambda: self._gather("read", "yes", timedelta(seconds=_GRACE_SECONDS)), 2 * _GRACE_SECONDS)
            raise CollectiveError(f"the ranks start different collectives: {said[0]}; {other}")

    def _run(self, fn: Callable[[], list[str]], seconds: float) -> list[str]:
        return Waiter(self._lane.submit(fn)).wait(seconds)

    def _exchange(self, mine: str) -> list[str]:
        said = self._gather(str(self._num), mine, self._timeout)
        # Who has begun this one has read the one before, and so have all: never more than two keys a rank.
        self._store.delete_key(f"{self._num - 1}/{self._rank}")
        return said

    def _gather(self, name: str, mine: str, timeout: timedelta) -> list[str]:
        """What every rank has put under ``name``; nothing for those who did not in time."""
        self._store.set(f"{name}/{self._rank}", mine)
        keys = [f"{name}/{rank}" for rank in self._ranks]
        with suppress(dist.DistError, RuntimeError):  # a timeout: who is missing is seen below
            self._store.wait(keys, timeout)
        return [self._store.get(key).decode() if self._store.check([key]) else "" for key in keys]


def _what(said: str) -> str:
    return said.partition(": ")[2]
