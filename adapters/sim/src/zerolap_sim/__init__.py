"""A simulated accelerator for torch: asynchronous streams on the CPU, a process group, and a race checker.

Importing this does nothing; ``install()`` compiles the device once and registers it in this process.
"""

from zerolap_sim.adapter import SimAdapter
from zerolap_sim.build import BuildError
from zerolap_sim.install import (
    configure,
    device_name,
    inject,
    install,
    is_installed,
    make_backend,
    take_reports,
)
from zerolap_sim.reports import Access, Report

__all__ = [
    "Access",
    "BuildError",
    "Report",
    "SimAdapter",
    "configure",
    "device_name",
    "inject",
    "install",
    "is_installed",
    "make_backend",
    "take_reports",
]
