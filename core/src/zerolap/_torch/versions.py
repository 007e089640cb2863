"""Which versions of torch zerolap was tried with, and what is said of others. They are not refused."""

from __future__ import annotations

import re
import warnings
from functools import cache

OLDEST = (2, 6)
NEWEST = (2, 15)


def untried(version: str) -> str | None:
    """What there is to say of a version of torch that is outside of the range that was tried."""
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found else None
    if number is not None and OLDEST <= number <= NEWEST:
        return None
    name = f"{number[0]}.{number[1]}" if number else version
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    return (
        f"zerolap was not tried with torch {name}, but with {oldest} to {newest}: compare a few training steps with DDP and the plain "
        "optimizer, or run `zerolap doctor --try`"
    )


@cache
def warn_if_untried(version: str) -> None:
    """Say so once in a process."""
    message = untried(version)
    if message is not None:
        warnings.warn(message, stacklevel=4)
