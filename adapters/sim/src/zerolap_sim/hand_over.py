"""Hand-overs between Python threads, made visible to the checker. See "host threads" in csrc/checker.h.

What a thread learned by waiting for the device reaches another thread through whatever the two use to talk. Here that is
``threading.Condition`` and all that is built on it: Event, Queue, Semaphore, Barrier, Future, Thread.start. Whoever enters
a condition learns what those knew that left it before, and what its maker knew when it was made. Not seen: a bare Lock,
SimpleQueue, and threads that talk in C++.
"""

from __future__ import annotations

import functools
import threading
from typing import Any
from weakref import WeakKeyDictionary

from zerolap_sim._extension import HandOver

# By lock, not by condition: a Queue has three conditions on one lock.
_by_lock: WeakKeyDictionary[Any, HandOver] = WeakKeyDictionary()
_guard = threading.RLock()  # reentrant: a finalizer may come here in the middle of it


def _of(condition: Any) -> HandOver:
    found: HandOver | None = condition.__dict__.get("_zerolap_sim_hand_over")
    if found is None:
        with _guard:
            found = _by_lock.setdefault(condition._lock, HandOver())
        condition._zerolap_sim_hand_over = found
    return found


def watch_conditions() -> None:
    """Wrap the four methods by which threads pass through a condition, and the end of a thread."""
    condition: Any = threading.Condition
    make, enter, leave, wait = condition.__init__, condition.__enter__, condition.__exit__, condition.wait
    thread: Any = threading.Thread
    bootstrap, join = thread._bootstrap_inner, thread.join  # run() is overridden by subclasses, this is not

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it takes the place of the method
        make(self, *args, **kwargs)
        _of(self).give()

    @functools.wraps(enter)
    def __enter__(self: Any) -> Any:  # noqa: N807 - it takes the place of the method
        result = enter(self)
        _of(self).take()
        return result

    @functools.wraps(leave)
    def __exit__(self: Any, *error: Any) -> Any:  # noqa: N807 - it takes the place of the method
        _of(self).give()
        return leave(self, *error)

    @functools.wraps(wait)
    def wait_and_take(self: Any, timeout: float | None = None) -> Any:
        _of(self).give()
        result = wait(self, timeout)
        _of(self).take()
        return result

    @functools.wraps(bootstrap)
    def bootstrap_and_give(self: Any) -> None:
        try:
            bootstrap(self)
        finally:
            with self._started._cond:
                pass  # leave what was learned where join() looks for it

    @functools.wraps(join)
    def join_and_take(self: Any, timeout: float | None = None) -> None:
        join(self, timeout)
        if not self.is_alive():
            with self._started._cond:
                pass

    condition.__init__, condition.__enter__, condition.__exit__, condition.wait = (
        __init__,
        __enter__,
        __exit__,
        wait_and_take,
    )
    thread._bootstrap_inner, thread.join = bootstrap_and_give, join_and_take
