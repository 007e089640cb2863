"""The adapters for devices that are not here, on the simulated device: their own classes, with the simulation's facts where those
differ. For ``zerolap conformance --adapter support.stand_ins:cuda_nccl``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import zerolap
import zerolap_sim
from zerolap_ascend_hccl import AscendHcclAdapter
from zerolap_cuda_nccl import CudaNcclAdapter
from zerolap_xpu import XpuAdapter


def _standing_in(cls: type[zerolap.StreamAdapter], **names: Any) -> zerolap.Adapter:
    class StandIn(cls):  # type: ignore[misc, valid-type]
        # Its kernels are the CPU's, whose vector loops and tails round differently.
        capabilities = dataclasses.replace(cls.capabilities, exact_cut=64)

        def device(self, local_rank: int) -> torch.device:
            return torch.device(self.device_type, 0)  # every process has one of its own

    zerolap_sim.install(names.get("device_type", cls.device_type), names.get("backend", cls.backend))
    made: zerolap.Adapter = StandIn(**names)
    return made


def cuda_nccl() -> zerolap.Adapter:
    return _standing_in(CudaNcclAdapter, device_type="sim", backend="simccl")


def xpu() -> zerolap.Adapter:
    return _standing_in(XpuAdapter, device_type="sim", backend="simccl")


def ascend_hccl() -> zerolap.Adapter:
    return _standing_in(AscendHcclAdapter)
