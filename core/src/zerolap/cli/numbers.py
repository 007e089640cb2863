"""Numbers that options take: finite, and within what a machine can do. A number outside is refused before anything begins."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import typer

_LONGEST = 40  # characters of a number


def number(low: float, high: float) -> Callable[[str | float], float]:
    """A parser of numbers from ``low`` to ``high``."""

    def parse(given: str | float) -> float:
        found = _float(str(given).strip())
        if not low <= found <= high:
            raise typer.BadParameter(f"{str(given)[:_LONGEST]!r} is not a number from {low:g} to {high:g}")
        return found

    return parse


def whole_number(low: int, high: int) -> Callable[[str | int], int]:
    """A parser of whole numbers from ``low`` to ``high``."""

    def parse(given: str | int) -> int:
        text = str(given).strip()
        is_one = len(text) <= _LONGEST and re.fullmatch(r"[+-]?[0-9]+", text) is not None
        if not is_one or not low <= int(text) <= high:
            raise typer.BadParameter(f"{str(given)[:_LONGEST]!r} is not a whole number from {low} to {high}")
        return int(text)

    return parse


def _float(text: str) -> float:
    """Not a number for what is none: also for infinity, and for what Python alone would take, such as 1_0."""
    is_one = len(text) <= _LONGEST and re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", text)
    return float(text) if is_one else math.nan


def in_units(text: str, units: dict[str, float], *, low: float, high: float, what: str) -> float:
    """A number with one of these units behind it; ValueError says ``what`` it should be."""
    found = re.fullmatch(r"\s*([0-9.eE+-]+?)\s*([A-Za-z/]*)\s*", text) if len(text) <= _LONGEST else None
    value = _float(found[1]) * units[found[2]] if found is not None and found[2] in units else math.nan
    if not low <= value <= high:
        raise ValueError(f"{what}, from {low:g} to {high:g}, got {text[:_LONGEST]!r}")
    return value
