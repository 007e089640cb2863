"""Into a new layout: states to their new owners, parameters into flat buffers, an optimizer for every shard. A collective.

Some buckets at a time, for what moves is held twice while it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from zerolap.backend.base import Adapter
from zerolap.runtime.books import Books
from zerolap.runtime.bucket import Bucket, Update
from zerolap.runtime.common import Common
from zerolap.runtime.exchange_strategies import ExchangeStrategy
from zerolap.runtime.reduced_gradients import ReducedGradients
from zerolap.runtime.shard_optimizer import LocalOptimizer, stand_in_for
from zerolap.runtime.state_pieces import by_param
from zerolap.runtime.state_transfer import move_states
from zerolap.schedule.ownership import GroupRank, Piece

# When buckets change, states go to their new owners some buckets at a time: with each portion every rank talks to every other one, which
# shall not be more than so many rounds in all, nor for less than so much.
_MOST_ROUNDS = 256
_LEAST_MOVED_BYTES = 2 * 2**20


class HasLayout(Protocol):
    """An engine."""

    books: Books
    common: Common
    strategy: ExchangeStrategy
    update: Update
    gradients: ReducedGradients
    at_hand: list[Bucket]
    installed: list[Bucket]
    bucket_of: dict[Tensor, Bucket]


def install_layout(engine: HasLayout) -> None:
    """Put the buckets at hand, whose owners are assigned, in the place of those that are installed."""
    for bucket in engine.installed:
        bucket.uninstall()
    engine.installed[:] = engine.at_hand
    older = [each.last for each in engine.update.of]
    migrate(engine.books, engine.installed, common=engine.common, strategy=engine.strategy, older=older)
    engine.bucket_of.clear()
    engine.bucket_of.update((param, bucket) for bucket in engine.installed for param in bucket.params)
    engine.gradients.carry_over(engine.bucket_of)


def migrate(
    books: Books,
    buckets: Sequence[Bucket],
    *,
    common: Common,
    strategy: ExchangeStrategy,
    older: Sequence[LocalOptimizer | None],
) -> None:
    """Install buckets whose owners are assigned. ``older`` are the optimizers that were stepped last: their counters go on."""
    assert common.group is not None
    states = [
        _States(books, number, buckets, older=last, adapter=common.adapter, group=common.group)
        for number, last in enumerate(older)
    ]
    for each in states:
        each.begin()
    num_bytes = sum(param.nbytes for bucket in buckets for param in bucket.params)
    most_moves = _MOST_ROUNDS // max(1, books.world_size - 1)
    num_moves = max(1, min(most_moves, num_bytes // _LEAST_MOVED_BYTES))
    at_once = max(1, -(-len(buckets) // num_moves))
    for first in range(0, len(buckets), at_once):
        portion = buckets[first : first + at_once]
        for bucket in portion:
            with common.lane.as_caller():  # their memory is the model's
                bucket.lay_out()
            strategy.install(bucket)
        for each in states:
            each.bring(portion)


class _States:
    """What brings the states of one optimizer to where a layout has them, on one rank."""

    def __init__(
        self,
        books: Books,
        number: int,
        buckets: Sequence[Bucket],
        *,
        older: LocalOptimizer | None,
        adapter: Adapter,
        group: dist.ProcessGroup,
    ) -> None:
        self._book = books.books[number]
        self._number = number
        self._books = books
        self._adapter = adapter
        self._group = group
        self._before = self._book.locals
        self._older = older or self._before[0]  # whose counters go on
        self._routes: dict[int, list[tuple[int, int, GroupRank]]] = {}  # where a parameter's elements belong
        for bucket in buckets:
            assert bucket.owners is not None, "owners are assigned before states move to them"
            for owner, pieces in bucket.owners.segments():
                for place, start, stop in pieces:
                    if books.number_of(place) == number:
                        self._routes.setdefault(books.index_of(place), []).append((start, stop, owner))

    def begin(self) -> None:
        """Bring what DDP does not reduce: it has no gradient, but keeps its state, where it is."""
        book, params = self._book, self._book.params
        outside = set(range(len(params))) - self._routes.keys()
        rest = {
            Piece(i, 0, params[i].numel()): stand_in_for(params[i]) for i in outside if book.owners.get(i) == book.rank
        }
        book.locals = [book.make_local(rest)]
        book.locals[0].inherit(self._older)
        if outside:
            self._bring(outside, book.locals)

    def bring(self, buckets: Sequence[Bucket]) -> None:
        """Bring those of buckets that are installed."""
        arriving = [
            local
            for bucket in buckets
            if bucket.shard is not None and (local := bucket.shard.locals.get(self._number)) is not None
        ]
        for local in arriving:
            local.inherit(self._older)
        wanted = {
            self._books.index_of(place)
            for bucket in buckets
            for place in bucket.places
            if self._books.number_of(place) == self._number
        }
        if wanted:
            self._bring(wanted, arriving)
        self._book.locals += arriving

    def _bring(self, wanted: set[int], locals_: Sequence[LocalOptimizer]) -> None:
        """States of these parameters to those who have them now."""
        book, params = self._book, self._book.params
        moved = move_states(
            {piece: state for local in self._before for piece, state in local.take_states(wanted).items()},
            routes=lambda i: self._routes.get(i) or [(0, params[i].numel(), book.owners[i])],
            group=self._group,
            device=params[0].device,
            what="moving optimizer states",
        )
        states = by_param(moved)
        for local in locals_:
            local.load(states, copies=False)
        del moved, states
        self._adapter.release_memory()
