"""Tests whose body runs on every rank."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from zerolap_conformance.ranks import run_ranks


def on_ranks(num_ranks: int, **options: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test's body on this many ranks, with ``run_ranks`` and its options; it fails with what failed on any of them."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def start(**given: Any) -> None:
            run_ranks(num_ranks, _run_body, test.__module__, test.__qualname__, given, **options)

        return start

    return decorate


def _run_body(module: str, name: str, given: dict[str, Any]) -> None:
    """On a rank. Found by its name: the body cannot be sent, as pickle would find the test that starts it instead."""
    test = getattr(importlib.import_module(module), name)
    inspect.unwrap(test)(**given)
