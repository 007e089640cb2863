"""Installing the simulated device in this process, and setting it up."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.utils import backend_registration

from zerolap._torch import Backend, PrefixStore, Store, register_device_module, spare_device_name
from zerolap_sim import build
from zerolap_sim.reports import Access, Report

# Set once: torch lets a process rename its one spare device type once, too.
_installed: tuple[str, str] | None = None

COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)


def is_installed() -> bool:
    return _installed is not None


def device_name() -> str:
    """The device type, as in ``torch.device(zerolap_sim.device_name())``."""
    return _require()[0]


def _require() -> tuple[str, str]:
    if _installed is None:
        raise RuntimeError("the simulated device is not installed in this process; call zerolap_sim.install() first")
    return _installed


def install(name: str = "sim", backend: str = "simccl", *, num_devices: int | None = None) -> None:
    """Compile if need be, then register device type ``name`` and process group backend ``backend`` in this process."""
    global _installed
    if _installed is not None and _installed != (name, backend):
        raise RuntimeError(
            f"the simulated device is installed in this process as {_installed[0]!r} with backend {_installed[1]!r}, and "
            f"cannot become {name!r} with {backend!r}: torch allows one name per process; use a process of its own"
        )
    if _installed is None:
        taken = spare_device_name()
        if taken not in ("privateuseone", name):
            raise RuntimeError(f"torch's spare device type is already taken in this process, by {taken!r}")
        build.load()
        # Shapes come from meta kernels, for the first of which torch imports sympy: seconds, better here than in a launch.
        torch.add(torch.empty(1, device="meta"), 1, out=torch.empty(1, device="meta"))
        backend_registration.rename_privateuse1_backend(name)
        backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
        from zerolap_sim import device, hand_over

        register_device_module(name, device)
        dist.Backend.register_backend(backend, make_backend, devices=[name])
        hand_over.watch_conditions()
        _installed = (name, backend)
        _leave_cleanly(os.getpid())
    if num_devices is not None:
        configure(num_devices=num_devices)


def _leave_cleanly(owner: int) -> None:
    from zerolap_sim import _extension

    def drain() -> None:
        if os.getpid() == owner:
            _extension.drain(5.0)  # bounded: a collective whose peer is gone must not hold up the exit

    atexit.register(drain)
    os.register_at_fork(
        after_in_child=lambda: _extension.fail(
            "this process was forked from one that uses the simulated device, and has none of its streams; "
            "start processes by spawn or forkserver"
        )
    )


def make_backend(store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    """The process group backend on its own, for a ``ProcessGroup`` that is put together by hand."""
    from zerolap_sim import _extension

    inner = dist.ProcessGroupGloo(PrefixStore("zerolap_sim", store), rank, size, timeout)
    return _extension.SimBackend(inner, _require()[1], timeout)


def configure(
    *,
    delay_us: int | None = None,
    delay_probability: float | None = None,
    seed: int | None = None,
    synchronous: bool | None = None,
    stacks: bool | None = None,
    checker: bool | None = None,
    execute: bool | None = None,
    track_pinned: bool | None = None,
    num_devices: int | None = None,
) -> None:
    """Change settings of this process' simulated device; what is not given stays as it is.

    ``delay_us``, ``delay_probability``, ``seed``: before a kernel, with this probability, sleep up to so long; the
    sequence of each stream is fixed by the seed. ``synchronous``: each launch runs to its end before the call returns.
    ``stacks``: record the Python stack of each launch. ``execute=False``: queue everything, run nothing.
    ``num_devices``: before the first use only.
    """
    _require()
    from zerolap_sim import _extension

    if delay_us is not None and delay_us < 0:
        raise ValueError(f"delay_us must not be negative, got {delay_us}")
    if delay_probability is not None and not 0 <= delay_probability <= 1:
        raise ValueError(f"delay_probability must be between 0 and 1, got {delay_probability}")
    if num_devices is not None:
        _extension.set_num_devices(num_devices)
    given = {
        "delay_us": delay_us,
        "delay_probability": delay_probability,
        "seed": seed,
        "synchronous": synchronous,
        "stacks": stacks,
        "checker": checker,
        "execute": execute,
        "track_pinned": track_pinned,
    }
    settings = _extension.settings()
    settings.update({key: value for key, value in given.items() if value is not None})  # type: ignore[typeddict-item]
    _extension.configure(**settings)


def inject(collective: str, kind: Literal["failure", "timeout"] = "failure", *, after: int = 0) -> None:
    """Let this rank's next collective of that name go wrong, ``after`` so many that still succeed.

    ``"failure"``: it raises. ``"timeout"``: it never completes, until its timeout strikes.
    """
    _require()
    from zerolap_sim import _extension

    if collective not in COLLECTIVES:
        raise ValueError(f"no collective {collective!r}; there are {', '.join(COLLECTIVES)}")
    if kind not in ("failure", "timeout"):
        raise ValueError(f"kind must be 'failure' or 'timeout', got {kind!r}")
    if after < 0:
        raise ValueError(f"after must not be negative, got {after}")
    _extension.inject(collective, kind == "timeout", after)


def take_reports() -> list[Report]:
    """What the checker has found since the last call, in the order found, the like counted together."""
    _require()
    _extension = sys.modules[build.MODULE]
    return [
        Report(kind=kind, first=Access.from_record(first), second=Access.from_record(second), count=count)
        for kind, first, second, count in _extension.take_reports()
    ]
