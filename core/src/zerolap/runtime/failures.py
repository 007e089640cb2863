"""What has failed on this rank: kept for the training thread, told to the other ranks. Nothing here is used while all is well.

[Note: failures]
An error that crosses DDP's C++ in a future loses its type, and one raised by the hook leaves DDP in the middle of a backward. So
neither happens: a failure is kept, DDP gets its own gradients back and ends in order, and behind it, in the last callback of that
backward, the failure is raised to whoever called it. Any thread may note one; the machine hears of it from the training thread.
"""

from __future__ import annotations

import os
import weakref

import torch.distributed as dist

from zerolap.errors import CollectiveError, ZerolapError, forked
from zerolap.runtime.failure_report import LastWords, Words
from zerolap.runtime.probe import Probe

_all: weakref.WeakSet[Failures] = weakref.WeakSet()


def _note_fork() -> None:
    """A child has neither the threads nor the connections that its copies of engines rely on."""
    for failures in list(_all):
        failures.first, failures.is_forked = forked(), True


os.register_at_fork(after_in_child=_note_fork)


class Failures:
    """The first failure of an engine, and who has heard of it."""

    def __init__(self, me: str, group: dist.ProcessGroup, probe: Probe) -> None:
        self.first: ZerolapError | None = None
        self.is_forked = False  # this process is a child of the one that trains
        self._untold: ZerolapError | None = None  # the first, until it was raised on the training thread
        self._me = me
        self._probe = probe  # which counts how far this rank has come
        self._last_words = LastWords(group)
        _all.add(self)

    def note_at(self, error: Exception, where: str) -> None:
        """Note what has failed on the training thread, and where."""
        kind = CollectiveError if isinstance(error, CollectiveError) else ZerolapError
        named = kind(f"{self._me}, {where}: {type(error).__name__}: {error}")
        named.__cause__ = error
        self.note(named)

    def note(self, error: Exception) -> ZerolapError:
        """Keep the first failure for the training thread, and tell the other ranks of it; returns the first."""
        if self.first is None:
            named, cause = error, error.__cause__
            if not isinstance(named, ZerolapError):
                named, cause = ZerolapError(f"{self._me}: {type(error).__name__}: {error}"), error
            failure = self._explained(named)
            failure.__cause__ = cause
            self.first = self._untold = failure
        return self.first

    def raise_untold(self) -> None:
        """Raise the first failure as it is, if the training thread has not heard of it yet."""
        failure, self._untold = self._untold, None
        if failure is not None and not self.is_forked:
            # A copy: an error keeps alive whoever it is raised to, and this one is kept.
            raise type(failure)(str(failure)) from failure.__cause__

    def raise_earlier(self) -> None:
        """Raise the first failure, if there is one, as what has failed earlier."""
        if self.first is None:
            return
        if self.is_forked:
            raise forked()
        self._untold = None
        raise ZerolapError(
            f"{self._me}: the overlap failed earlier, parameters may differ between ranks; "
            f"start again from a checkpoint. First error: {self.first}"
        ) from self.first

    def _explained(self, error: ZerolapError) -> ZerolapError:
        """Tell the other ranks of it, and if it is them who did not come, add what became of them."""
        mine = Words(
            rank=self._me,
            num_backwards=self._probe.num_backwards,
            num_steps=self._probe.num_steps,
            error=f"{type(error).__name__}: {error}",
        )
        is_theirs = isinstance(error, CollectiveError)
        account = self._last_words.exchange(mine, listen=is_theirs)
        return CollectiveError(f"{error}{account}") if account else error
