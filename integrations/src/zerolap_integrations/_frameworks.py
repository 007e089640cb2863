"""Frameworks are optional: what is said where one is missing, and what stands for their classes. Imports none of them."""

from __future__ import annotations

import importlib.util
from typing import Any

Unknown: Any = object  # the base of what is put before a class of a framework, whose attributes it has, too


def need(framework: str) -> None:
    """ModuleNotFoundError that says how to install ``framework``, if it is not there."""
    name = framework.replace("_", "-")
    if importlib.util.find_spec(framework) is None:
        raise ModuleNotFoundError(
            f"zerolap_integrations.{framework} needs {name}, which is not installed; pip install {name}", name=framework
        )
