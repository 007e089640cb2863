"""Memory of this process as the system counts it: all of it, whoever has asked for it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_STATUS = Path("/proc/self/status")


class ProcessMemory(NamedTuple):
    """None where the system does not say."""

    now: int | None
    peak: int | None


def process_memory() -> ProcessMemory:
    """What is resident now, and was at most. Memory that processes share counts for each of them."""
    try:
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if line.startswith("Vm"))
        return ProcessMemory(*(1024 * int(lines[key].split()[0]) for key in ("VmRSS", "VmHWM")))
    except (OSError, KeyError):
        return ProcessMemory(None, None)
