"""The zerolap adapter for Ascend NPUs over HCCL, by way of torch_npu."""

from __future__ import annotations

import importlib.util
import os
import sys

import torch

from zerolap import Capabilities, StreamAdapter

__all__ = ["AscendHcclAdapter"]


class AscendHcclAdapter(StreamAdapter):
    name = "ascend_hccl"
    device_type = "npu"
    backend = "hccl"
    capabilities = Capabilities(
        futures_complete_at_enqueue=True,  # a work's future is completed under the communication stream, when it is queued
        exact_cut=1,  # element-wise kernels have no tails that round differently
        has_float64=False,  # only the newest cards reduce it
        one_issue_order=True,  # communicators share the card's tasks, and may wait for each other
    )

    def __init__(self, *, device_type: str | None = None, backend: str | None = None) -> None:
        if device_type not in (None, "npu"):
            raise ValueError(
                f"ascend_hccl drives Huawei's HCCL, on device type 'npu', not on {device_type!r}; another vendor's library has "
                "the same name, and other rules"
            )
        super().__init__(device_type=device_type, backend=backend)

    def why_unavailable(self) -> str | None:
        if not hasattr(torch, "npu"):
            if importlib.util.find_spec("torch_npu") is None:
                return "torch_npu is not installed; pip install 'zerolap-ascend-hccl[npu]'"
            try:
                importlib.import_module("torch_npu")
            except Exception as error:  # without the CANN libraries its import fails, in more than one way
                return f"torch_npu cannot be imported: {error}"
        return super().why_unavailable()

    def diagnose(self) -> list[str]:
        advice = super().diagnose()
        version = getattr(sys.modules.get("torch_npu"), "__version__", None)
        if version is not None and version.split(".")[:2] != torch.__version__.split(".")[:2]:
            advice.append(
                f"torch_npu {version} is made for another torch than {torch.__version__}; install the same version"
            )
        if os.environ.get("TORCH_HCCL_HIGH_PRIORITY") != "1":
            advice.append(
                "set TORCH_HCCL_HIGH_PRIORITY=1 before the process starts: it is the only way to give communication a stream "
                "of high priority, and torch_npu has it from 2.8 on"
            )
        for name in ("TORCH_HCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING"):  # the second is the older name
            if os.environ.get(name) == "0":
                advice.append(f"{name}=0 lets a failed collective hang; unset it")
        for name in ("TORCH_HCCL_BLOCKING_WAIT", "HCCL_BLOCKING_WAIT"):
            if os.environ.get(name) == "1":
                advice.append(f"{name}=1 makes the host wait for every collective; unset it")
        return advice
