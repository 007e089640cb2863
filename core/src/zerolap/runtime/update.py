"""An update: what its buckets share of each optimizer, and which optimizers were told to make it. Nothing is sent here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from zerolap.errors import ZerolapError
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


class StepCalls:
    """Which optimizers were told to step since backward. Several on one DDP make their update together, when the last one is told."""

    def __init__(self, num_optimizers: int) -> None:
        self._num_optimizers = num_optimizers
        self._left_out: dict[int, bool] = {}  # by the number of the optimizer

    def note(self, number: int, update: OptimizerUpdate, *, is_left_out: bool) -> None:
        if number not in self._left_out:
            self._left_out[number] = is_left_out
            update.begin()  # with its options as they are now

    def __contains__(self, number: int) -> bool:
        return number in self._left_out

    @property
    def are_all(self) -> bool:
        return len(self._left_out) == self._num_optimizers

    def take(self) -> list[bool]:
        """Which of all optimizers are left out; then none was told to step."""
        left_out = [self._left_out[number] for number in range(self._num_optimizers)]
        self._left_out.clear()
        return left_out

    def refuse_some(self) -> None:
        """ZerolapError if some optimizers were told to step after the last backward, and others were not."""
        if not self._left_out:
            return
        missing = [number for number in range(self._num_optimizers) if number not in self._left_out]
        raise ZerolapError(
            f"after the last backward step() was called on optimizers {sorted(self._left_out)} of those that were attached together, and not "
            f"on {missing}: they update together. Call step() on all of them or on none"
        )
