"""Collectives under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from zerolap.errors import CollectiveError


class Waitable(Protocol):
    def wait(self) -> object: ...


class Pending:
    """A collective under way. Keeps its tensors alive, and knows how to call itself when it fails."""

    __slots__ = ("_finish", "_what", "_works", "sent_bytes", "tensors")

    def __init__(
        self,
        works: Sequence[Waitable],
        *,
        tensors: Sequence[object],
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
        except CollectiveError:
            raise  # it knows more
        except Exception as error:
            raise CollectiveError(f"{self._what} failed: {error}") from error
        self._works, self._finish, self.tensors = (), None, ()
