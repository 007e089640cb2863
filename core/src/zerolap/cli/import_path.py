"""MODULE:NAME, as options take it: what a user's own code calls by that name. No torch."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

from zerolap.untrusted.files import printable


def attribute(path: str, option: str) -> Any:
    """The callable that MODULE:NAME names; ValueError if there is none."""
    found = imported(path, option)
    if not callable(found):
        module, _, name = path.partition(":")
        raise ValueError(f"{option} {path}: {module} has no callable {name!r}")
    return found


def imported(path: str, option: str) -> Any:
    """What MODULE:NAME names, None if the module has no such thing; ValueError if the module cannot be imported."""
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", path) or len(path) > 1000:
        raise ValueError(f"{option} is MODULE:CALLABLE, for example train:make_model, got {path[:200]!r}")
    module, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # what lies here, as with `python -m`
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"{option} {path} cannot be imported: {error}; run this where it can be") from error
    except (Exception, SystemExit) as error:  # the module's own: it is the user who named it
        raise ValueError(f"{option} {path} cannot be imported: {type(error).__name__}: {printable(error)}") from error
