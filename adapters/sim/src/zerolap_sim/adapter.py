"""The adapter for the simulated device: the stream base class of zerolap as it is."""

from __future__ import annotations

import torch

from zerolap import Capabilities, StreamAdapter
from zerolap_sim.install import is_installed


class SimAdapter(StreamAdapter):
    name = "sim"
    device_type = "sim"
    backend = "simccl"
    capabilities = Capabilities(
        futures_complete_at_enqueue=True,  # as on the devices it stands in for
        exact_cut=64,  # its kernels are the CPU's, whose vector loops and tails round differently
        has_float64=True,
        one_issue_order=True,  # as on the devices it stands in for
    )

    def why_unavailable(self) -> str | None:
        if not is_installed():
            return "the simulated device is a test tool; call zerolap_sim.install() first"
        return super().why_unavailable()

    def device(self, local_rank: int) -> torch.device:
        return torch.device(self.device_type, 0)  # every process has one of its own
