"""Importing this installs the simulated device, for whoever can name a module but not call a function first."""

from zerolap_sim.adapter import SimAdapter
from zerolap_sim.install import install

__all__ = ["SimAdapter"]

install()
