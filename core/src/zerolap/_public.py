"""Public names: each belongs to ``zerolap``, wherever it is defined, and is imported when it is first used. No torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def public_in(module: str) -> Callable[[T], T]:
    """Mark a class or function as a name of ``module``: that is what users, tracebacks and pickles see."""

    def mark(thing: T) -> T:
        thing.__module__ = module
        return thing

    return mark


public = public_in("zerolap")


def lazily(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``module``: imports a name from its home, or what is itself a module, on first use."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home = importlib.import_module(homes[name])
        return home if homes[name] == f"{module}.{name}" else getattr(home, name)

    return get
