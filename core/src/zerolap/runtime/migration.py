"""Into a new layout: states to their new owners, parameters into flat buffers, an optimizer for every shard. A collective.

Some buckets at a time, for what moves is held twice while it does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from zerolap.backend.base import Adapter
from zerolap.backend.lanes import Lane
from zerolap.runtime.bucket import Bucket
from zerolap.runtime.common import Common
from zerolap.runtime.exchange_strategies import ExchangeStrategy
from zerolap.runtime.flat_buffer import FlatBuffer
from zerolap.runtime.shard_optimizer import LocalOptimizer, ShardBook, stand_in_for
from zerolap.runtime.state_pieces import by_param
from zerolap.runtime.state_transfer import move_states
from zerolap.schedule.ownership import GroupRank, Piece

# When buckets change, states go to their new owners some buckets at a time: with each portion every rank talks to every other one, which
# shall not be more than so many rounds in all, nor for less than so much.
_MOST_ROUNDS = 256
_LEAST_MOVED_BYTES = 2 * 2**20


def migrate(
    book: ShardBook,
    buckets: Sequence[Bucket],
    *,
    common: Common,
    strategy: ExchangeStrategy,
    older: LocalOptimizer | None,
) -> None:
    """Install buckets whose owners are assigned. ``older`` is the optimizer that was stepped last: its counters go on."""
    assert common.group is not None
    migration = _Migration(book, buckets, adapter=common.adapter, group=common.group)
    migration.run(strategy, lane=common.lane, older=older or book.locals[0])


class _Migration:
    """What brings one rank's optimizer states and parameters into the buckets of a layout."""

    def __init__(
        self, book: ShardBook, buckets: Sequence[Bucket], *, adapter: Adapter, group: dist.ProcessGroup
    ) -> None:
        self._book = book
        self._buckets = buckets
        self._adapter = adapter
        self._group = group
        self._before = book.locals
        self._routes: dict[int, list[tuple[int, int, GroupRank]]] = {}  # where a parameter's elements belong
        for bucket in buckets:
            assert bucket.owners is not None, "owners are assigned before states move to them"
            for owner, pieces in bucket.owners.segments():
                for param, start, stop in pieces:
                    self._routes.setdefault(param, []).append((start, stop, owner))

    def run(self, strategy: ExchangeStrategy, *, lane: Lane, older: LocalOptimizer) -> None:
        """Install all buckets; ``older`` is an optimizer whose counters go on."""
        book, params = self._book, self._book.params
        # What DDP does not reduce has no gradient, but keeps its state, where it is.
        outside = set(range(len(params))) - self._routes.keys()
        rest = {
            Piece(i, 0, params[i].numel()): stand_in_for(params[i]) for i in outside if book.owners.get(i) == book.rank
        }
        book.locals = [book.make_local(rest)]
        book.locals[0].inherit(older)
        if outside:
            self._bring(outside, book.locals)
        num_bytes = sum(param.nbytes for bucket in self._buckets for param in bucket.params)
        most_moves = _MOST_ROUNDS // max(1, book.world_size - 1)
        num_moves = max(1, min(most_moves, num_bytes // _LEAST_MOVED_BYTES))
        at_once = max(1, -(-len(self._buckets) // num_moves))
        for first in range(0, len(self._buckets), at_once):
            arriving: list[LocalOptimizer] = []
            portion = self._buckets[first : first + at_once]
            for bucket in portion:
                with lane.as_caller():  # their memory is the model's
                    bucket.flat = FlatBuffer(bucket.params)
                bucket.shard = bucket.marks = bucket.agreed = None
                strategy.install(bucket)
                if bucket.shard is not None:
                    bucket.shard.local.inherit(older)
                    arriving.append(bucket.shard.local)
            self._bring({place for bucket in portion for place in bucket.places}, arriving)
            book.locals += arriving

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
