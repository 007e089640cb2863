"""Tier 3: training whose exchanges are rounded, against itself and against exact exchanges."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import zerolap
from zerolap import Adapter
from zerolap_conformance.overlap import ADAMW, BUCKET_MB, NUM_STEPS, Model
from zerolap_conformance.requirements import requirement
from zerolap_conformance.support import device_of, expect_close, expect_equal


@requirement(
    "OVL-18",
    "What is sent in 8 bits leaves the same parameters on all ranks, with every schedule and gather, near those of exact exchanges.",
    tier=3,
)
def rounds_alike_on_all_ranks(adapter: Adapter) -> None:
    exact = _rounded(adapter, None, "interleaved", "eager")
    for wire in ("int8", zerolap.Wire(gradients="int8", parameters="int8", gradient_feedback=True, seed=1)):
        first: Tensor | None = None
        for schedule, gather in (("interleaved", "eager"), ("after_backward", "lazy"), ("on_step", "eager")):
            found = _rounded(adapter, wire, schedule, gather)
            what = f"wire={wire}, schedule={schedule!r}, gather={gather!r}"
            first = found if first is None else first
            expect_equal(found, first, what)
            expect_close(found, exact, what, tolerance=0.05)


def _rounded(adapter: Adapter, wire: Any, schedule: Any, gather: Any) -> Tensor:
    """All parameters after some steps, which are the same on all ranks."""
    device = device_of(adapter)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Model().to(device), bucket_cap_mb=2 * BUCKET_MB)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **ADAMW)
    handle = zerolap.attach(ddp, zero, adapter=adapter, wire=wire, schedule=schedule, gather=gather)
    for step in range(NUM_STEPS):
        zero.zero_grad()
        ddp(
            torch.randn(4, 31, generator=torch.Generator().manual_seed(100 * step + dist.get_rank())).to(device)
        ).square().mean().backward()
        zero.step()
    handle.audit()  # raises if ranks differ
    found = torch.cat([param.detach().flatten() for param in ddp.parameters()]).cpu()
    handle.detach()
    return found
