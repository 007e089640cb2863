"""Last words: what a failing rank tells the others, through the group's store. Nothing here is used while all is well.

A collective that times out knows what it waited for, but not why the others did not come. That is known to another rank, which ends at
about the same time, or has ended: so each leaves its reason in the store, and adds what it finds there to its own.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch.distributed as dist

from zerolap._torch import PrefixStore, store_of

LAST_WORDS = "last-words"  # before a key in the store
_LISTEN_SECONDS = 2.0  # others whose collectives began a little later time out a little later
_MAX_CHARS = 400
_MAX_RANKS = 8  # more would not be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Where a rank was when it failed, and why."""

    rank: str
    num_backwards: int
    num_steps: int
    error: str

    @property
    def count(self) -> tuple[int, int]:
        return self.num_backwards, self.num_steps

    @property
    def did(self) -> str:
        return f"{self.rank} began {self.num_backwards} backwards and called step() {self.num_steps} times"


class LastWords:
    """Speaks once, and listens for a moment."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Not the group itself, which ends with the last reference to it.
        self._store = PrefixStore(LAST_WORDS, store_of(group))
        self._rank, self._size = group.rank(), group.size()
        self._has_spoken = False

    def exchange(self, mine: Words, *, listen: bool) -> str:
        """Leave our words, and return a sentence on what the others left; empty if there is nothing to say."""
        if self._has_spoken or self._size == 1:
            return ""
        self._has_spoken = True
        heard: dict[int, Words] = {}
        # On a thread of its own: a store in a rank that was stopped never answers, whatever the time limit.
        thread = threading.Thread(target=self._talk, args=(mine, heard, listen), name="zerolap-last-words", daemon=True)
        thread.start()
        thread.join(_LISTEN_SECONDS + 0.5)
        return _account(mine, dict(heard), rank=self._rank, size=self._size) if listen else ""

    def _talk(self, mine: Words, heard: dict[int, Words], listen: bool) -> None:
        with suppress(Exception):  # the store may be gone with the rank that kept it: then nothing is heard
            store, me, size = self._store, self._rank, self._size
            store.set(str(me), json.dumps(asdict(mine)))
            deadline = time.monotonic() + _LISTEN_SECONDS
            waiting = [(me + i) % size for i in range(1, size)] if listen else []
            while waiting and time.monotonic() < deadline:
                for rank in [rank for rank in waiting if store.check([str(rank)])]:
                    heard[rank] = Words(**json.loads(store.get(str(rank))))
                    waiting.remove(rank)
                time.sleep(0.02)


def _account(mine: Words, heard: dict[int, Words], *, rank: int, size: int) -> str:
    account = ""
    differing = [words for words in heard.values() if words.count != mine.count]
    if differing:
        did = ", ".join(words.did for words in [mine, *differing[:_MAX_RANKS]])
        account += f". The ranks have diverged: {did}; all must do the same"
    for _, words in sorted(heard.items())[:_MAX_RANKS]:
        account += f". {words.rank} ended with: {' '.join(words.error.split())[:_MAX_CHARS]}"
    silent = [other for other in range(size) if other not in heard and other != rank]
    if silent:
        names = ", ".join(map(str, silent[:_MAX_RANKS])) + (", ..." if len(silent) > _MAX_RANKS else "")
        account += f". Nothing was heard of group rank {names}: dead, stopped, or busy elsewhere"
    return account
