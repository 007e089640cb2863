"""The zerolap adapter for Intel GPUs: torch.xpu over XCCL, or, before torch 2.8, over oneCCL's bindings."""

from __future__ import annotations

import importlib.util
import os

import torch.distributed as dist

from zerolap import Capabilities, GroupSpec, StreamAdapter
from zerolap._torch import Backend, set_timeout

__all__ = ["XpuAdapter"]

# Both register "ccl", and the devices it needs, with torch when they are imported.
_LEGACY = ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch")


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

    def __init__(self, *, device_type: str | None = None, backend: str | None = None) -> None:
        super().__init__(device_type=device_type, backend=backend or (None if _has_xccl() else "ccl"))

    def why_unavailable(self) -> str | None:
        if self.backend == "ccl":
            for module in _LEGACY:
                if importlib.util.find_spec(module) is None:
                    return f"this torch has no XCCL, and {module} is not installed for the way of older ones"
                try:
                    importlib.import_module(module)
                except Exception as error:  # their libraries may be missing, or made for another torch
                    return f"{module} cannot be imported: {error}"
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
        if self.backend == "ccl":
            advice.append("oneCCL's bindings are no longer kept; torch 2.8 and later have XCCL built in")
        return advice


def _has_xccl() -> bool:
    """Whether this torch is of the kind that has XCCL: built for Intel GPUs, or new enough to be."""
    return hasattr(dist, "is_xccl_available")
