"""Where adapters are found: by device type or by name, among the installed packages' entry points."""

from __future__ import annotations

import importlib.metadata
from functools import cache
from typing import NamedTuple

from zerolap._logging import logger_of
from zerolap._public import public
from zerolap.backend.base import Adapter
from zerolap.errors import AdapterNotFoundError

logger = logger_of(__name__)

ENTRY_POINT_GROUP = "zerolap.adapters"


@public
class AdapterInfo(NamedTuple):
    """An installed adapter, and why it cannot be used, in words; None if it can."""

    name: str
    device_type: str | None  # None if it cannot be loaded
    why_unusable: str | None


@cache
def _load(entry_point: importlib.metadata.EntryPoint) -> type[Adapter] | Exception:
    """Load a plug-in once. One that is broken must not break the others: its error is kept for whoever asks for it."""
    try:
        loaded = entry_point.load()
        if not (isinstance(loaded, type) and issubclass(loaded, Adapter)):
            raise TypeError(f"entry point {entry_point.value!r} is not a subclass of zerolap.Adapter")
    except Exception as error:
        logger.warning("zerolap adapter %r cannot be loaded: %s", entry_point.name, error)
        return error
    return loaded


@public
def installed_adapters() -> dict[str, type[Adapter] | Exception]:
    """Every registered adapter by name; for one that cannot be loaded, the error."""
    return {ep.name: _load(ep) for ep in sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))}


@public
def load_adapter(name: str) -> Adapter:
    """The adapter of this name; AdapterNotFoundError if there is none or it is broken."""
    installed = installed_adapters()
    adapter = installed.get(name)
    if isinstance(adapter, Exception):
        raise AdapterNotFoundError(f"adapter {name!r} is installed, but cannot be loaded: {adapter}") from adapter
    if adapter is None:
        raise AdapterNotFoundError(f"no adapter {name!r}; installed: {', '.join(installed) or 'none'}")
    return adapter()


def resolve_adapter(given: Adapter | str | None, *, device_type: str) -> Adapter:
    """The adapter that was asked for, or the one for the device; refused if it does not fit the device."""
    if given is None:
        return find_adapter(device_type)
    adapter = load_adapter(given) if isinstance(given, str) else given
    if not isinstance(adapter, Adapter):
        raise TypeError(f"adapter must be a name or a zerolap.Adapter, got {type(adapter).__name__}")
    if adapter.device_type != device_type:
        raise ValueError(
            f"adapter {adapter.name!r} is for device type {adapter.device_type!r}, the parameters are on {device_type!r}"
        )
    why = adapter.why_unavailable()
    if why is not None:
        raise AdapterNotFoundError(f"adapter {adapter.name!r} cannot be used: {why}")
    return adapter


@public
def find_adapter(device_type: str) -> Adapter:
    """The adapter for a device type; AdapterNotFoundError says what is installed and what to do."""
    installed = installed_adapters()
    for name, adapter in installed.items():
        if isinstance(adapter, type) and adapter.device_type == device_type:
            why = _describe(name, adapter).why_unusable
            if why is not None:
                raise AdapterNotFoundError(
                    f"adapter {name!r} is installed for {device_type!r}, but cannot be used: {why}"
                )
            return adapter()
    described = ", ".join(
        f"{name} (broken: {adapter})" if isinstance(adapter, Exception) else f"{name} ({adapter.device_type})"
        for name, adapter in installed.items()
    )
    raise AdapterNotFoundError(
        f"no zerolap adapter for device type {device_type!r}; installed: {described or 'none'}. "
        f"Install the adapter package for this device (pip install zerolap-{device_type}-<backend>; "
        "the README's adapter table has the names), or move the parameters to a device that has one"
    )


@public
def adapters() -> list[AdapterInfo]:
    """Every installed adapter, and whether it can be used here."""
    return [_describe(name, adapter) for name, adapter in installed_adapters().items()]


def _describe(name: str, adapter: type[Adapter] | Exception) -> AdapterInfo:
    if isinstance(adapter, Exception):
        return AdapterInfo(name, None, f"cannot be loaded: {adapter}")
    try:
        why = adapter().why_unavailable()
    except Exception as error:
        why = f"its probe failed: {type(error).__name__}: {error}"
    return AdapterInfo(name, adapter.device_type, why)
