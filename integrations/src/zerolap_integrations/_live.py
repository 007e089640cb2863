"""What an attached optimizer does, as numbers for a framework's logger. No framework here."""

from __future__ import annotations

import zerolap


class LivePoints:
    """A handle's stats as a flat dict, each time of what happened since the time before."""

    def __init__(self, handle: zerolap.Handle, *, prefix: str) -> None:
        self.handle = handle
        self._points: dict[str, float] = {}
        self._writer = zerolap.StatsWriter(handle, self, prefix=prefix)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        self._points[tag] = float(scalar_value)

    def take(self, step: int) -> dict[str, float]:
        self._points = {}
        self._writer.write(step)
        return self._points
