"""The zerolap adapter for Intel GPUs: torch.xpu over XCCL, which is built into torch 2.8 and newer."""

from __future__ import annotations

import os

import torch.distributed as dist

from zerolap import Capabilities, GroupSpec, StreamAdapter
from zerolap._torch import Backend, set_timeout

__all__ = ["XpuAdapter"]


class XpuAdapter(StreamAdapter):
    name = "xpu"
    device_type = "xpu"
    backend = "xccl"
    capabilities = Capabilities(
        futures_complete_at_enqueue=True,  # a work's future is completed under the communication stream, when it is queued
        exact_cut=1,  # element-wise kernels have no tails that round differently
        has_float64=False,  # not all of the devices have it
        one_issue_order=True,  # communicators share the device's engines, and may wait for each other
    )

    def why_unavailable(self) -> str | None:
        options = getattr(getattr(dist, "ProcessGroupXCCL", None), "Options", None)
        if self.backend == "xccl" and options is not None and not hasattr(options, "global_ranks_in_group"):
            return "the XCCL of this torch takes no ranks of a group; use torch 2.8 or newer"
        return super().why_unavailable()

    def make_backend(self, spec: GroupSpec) -> Backend:
        if self.backend != "xccl":
            return super().make_backend(spec)
        options = dist.ProcessGroupXCCL.Options()
        set_timeout(options, spec.timeout)
        options.group_name = spec.name
        options.global_ranks_in_group = spec.global_ranks
        return dist.ProcessGroupXCCL(spec.store, spec.rank, spec.size, options)

    def diagnose(self) -> list[str]:
        advice = super().diagnose()
        if self.backend == "xccl" and os.environ.get("TORCH_XCCL_HIGH_PRIORITY") != "1":
            advice.append(
                "set TORCH_XCCL_HIGH_PRIORITY=1 before the process starts: it is the only way to give communication a stream "
                "of high priority"
            )
        return advice
