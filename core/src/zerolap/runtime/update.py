"""One update: what the steps of its buckets share, of each optimizer. When it is made, and with which gradients, is decided elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from zerolap.runtime.books import Books
from zerolap.runtime.param_groups import NOT_OPTIONS, Options
from zerolap.runtime.shard_optimizer import LocalOptimizer, Shard, ShardBook


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
