"""Options of ``zerolap.attach`` among those of a framework: told apart by their names, which no framework uses. No framework here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import zerolap


def names() -> list[str]:
    """All that ``attach`` takes besides DDP and optimizer."""
    return [name for name in inspect.signature(zerolap.attach).parameters if name not in ("ddp", "optimizer")]


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of ``attach``, and the others."""
    ours = names()
    return {k: v for k, v in given.items() if k in ours}, {k: v for k, v in given.items() if k not in ours}
