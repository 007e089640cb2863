"""Places in memory that is used in a circle. No memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Ring:
    """Bytes that are taken in order and given back in the same order: ``size`` of them, or as few as will do up to ``most``.

    ``may_grow``, if given, is asked before there are so many; once it has said no, there are never more than at that time.
    """

    def __init__(self, size: int, *, most: int = 0, may_grow: Callable[[int], bool] | None = None) -> None:
        self.size = size
        self.most = most
        self._may_grow = may_grow
        self._is_refused = False
        self._head = 0
        self._starts: deque[int] = deque()  # of what is taken, oldest first

    def __len__(self) -> int:
        return len(self._starts)

    def take(self, size: int) -> int | None:
        """Where the next ``size`` bytes may lie; None if there is no room for them yet."""
        start = self._place_for(size)
        if start is None and self.size < self.most and not self._is_refused:
            self._grow_to(min(self.size + size, self.most))
            start = self._place_for(size)
        if start is not None:
            self._starts.append(start)
            self._head = start + size
        return start

    def free_oldest(self) -> None:
        self._starts.popleft()

    def _grow_to(self, size: int) -> None:
        if self._may_grow is None or self._may_grow(size):
            self.size = size
        else:
            self._is_refused = True

    def _place_for(self, size: int) -> int | None:
        if not self._starts:
            return 0 if size <= self.size else None
        oldest = self._starts[0]
        if self._head > oldest:  # free: from the head to the end, and from the beginning to the oldest
            if self._head + size <= self.size:
                return self._head
            return 0 if size <= oldest else None
        return self._head if self._head + size <= oldest else None
