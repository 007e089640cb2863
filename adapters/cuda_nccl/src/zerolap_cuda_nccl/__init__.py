"""The zerolap adapter for CUDA devices over NCCL, and for ROCm devices, which torch calls by the same names."""

from __future__ import annotations

import os

import torch.distributed as dist

from zerolap import Capabilities, GroupSpec, StreamAdapter
from zerolap._torch import Backend, set_timeout

__all__ = ["CudaNcclAdapter"]


class CudaNcclAdapter(StreamAdapter):
    name = "cuda_nccl"
    device_type = "cuda"
    backend = "nccl"
    capabilities = Capabilities(
        futures_complete_at_enqueue=True,  # a work's future is completed under the communication stream, when it is queued
        exact_cut=1,  # element-wise kernels have no tails that round differently
        has_float64=True,
        one_issue_order=True,  # two communicators whose kernels wait for each other's would never end
    )
    lane_priority = -1  # updates of a bucket must not wait behind all of backward

    def make_backend(self, spec: GroupSpec) -> Backend:
        if self.backend != "nccl":  # a stand-in
            return super().make_backend(spec)
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        set_timeout(options, spec.timeout)
        options.group_name = spec.name
        options.global_ranks_in_group = spec.global_ranks
        return dist.ProcessGroupNCCL(spec.store, spec.rank, spec.size, options)

    def diagnose(self) -> list[str]:
        advice = super().diagnose()
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            advice.append(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 runs kernels of all streams in the order of their launch, so little is "
                "overlapped; unset it"
            )
        if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
            advice.append("TORCH_NCCL_ASYNC_ERROR_HANDLING=0 lets a failed collective hang for ever; unset it")
        if os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1":
            advice.append("TORCH_NCCL_BLOCKING_WAIT=1 makes the host wait for every collective; unset it")
        return advice
