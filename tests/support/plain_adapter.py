"""The least an adapter for a device without streams can be."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

import zerolap


class PlainAdapter(zerolap.Adapter):
    name = "plain"
    device_type = "cpu"
    backend = "gloo"
    capabilities = zerolap.Capabilities(
        futures_complete_at_enqueue=False, exact_cut=64, has_float64=True, one_issue_order=False
    )

    def make_backend(self, spec: zerolap.GroupSpec) -> Backend:
        return dist.ProcessGroupGloo(spec.store, spec.rank, spec.size, spec.timeout)
