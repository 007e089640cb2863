"""Places in memory that is used in a circle. No memory."""

from __future__ import annotations

from collections import deque


class Ring:
    """Bytes that are taken in order and given back in the same order: ``size`` of them, or as few as will do up to ``most``."""

    def __init__(self, size: int, *, most: int = 0) -> None:
        self.size = size
        self.most = most
        self._head = 0
        self._starts: deque[int] = deque()  # of what is taken, oldest first

    def __len__(self) -> int:
        return len(self._starts)

    def take(self, size: int) -> int | None:
        """Where the next ``size`` bytes may lie; None if there is no room for them yet."""
        start = self._place_for(size)
        if start is None and self.size < self.most:
            self.size = min(self.size + size, self.most)
            start = self._place_for(size)
        if start is not None:
            self._starts.append(start)
            self._head = start + size
        return start

    def free_oldest(self) -> None:
        self._starts.popleft()

    def _place_for(self, size: int) -> int | None:
        if not self._starts:
            return 0 if size <= self.size else None
        oldest = self._starts[0]
        if self._head > oldest:  # free: from the head to the end, and from the beginning to the oldest
            if self._head + size <= self.size:
                return self._head
            return 0 if size <= oldest else None
        return self._head if self._head + size <= oldest else None
