"""How much work the update of one parameter is, in numbers that ranks are balanced by: of classes that are known, or that say so."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from zerolap.schedule.balance import COST_PER_ELEMENT

Shape = tuple[int, ...]


def _elementwise(shape: Shape) -> int:
    return COST_PER_ELEMENT * prod(shape)


def _orthogonalizing(shape: Shape) -> int:
    """Some products of a matrix with its transpose, the shorter way round."""
    rows, columns = _sides(shape)
    return rows * columns * (COST_PER_ELEMENT + min(rows, columns))


def _preconditioning(shape: Shape) -> int:
    """Products with a square matrix on each side."""
    rows, columns = _sides(shape)
    return rows * columns * (COST_PER_ELEMENT + rows + columns)


def _sides(shape: Shape) -> tuple[int, int]:
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))


_KNOWN: dict[str, Callable[[Shape], int]] = {
    "muon": _orthogonalizing,
    "soap": _preconditioning,
    "shampoo": _preconditioning,
}


def update_cost(optimizer_class: type, shape: Shape) -> int:
    """Of a parameter of this shape. A class may have a function ``update_cost(shape)`` of its own, in the same unit or any other."""
    own: Any = getattr(optimizer_class, "update_cost", None)
    if callable(own):
        cost = own(shape)
        if not isinstance(cost, int | float) or not 0 <= cost < float("inf"):
            raise ValueError(
                f"{optimizer_class.__name__}.update_cost({shape}) must be a number from 0 on, got {cost!r}"
            )
        return int(cost)
    name = optimizer_class.__name__.lower()
    of_shape = next((cost for known, cost in _KNOWN.items() if known in name), _elementwise)
    return of_shape(shape)
