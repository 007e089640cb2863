"""The zerolap adapter for CPU tensors over Gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from zerolap import Adapter, Capabilities, Lane, ThreadLane

__all__ = ["CpuGlooAdapter"]


class CpuGlooAdapter(Adapter):
    name = "cpu_gloo"
    device_type = "cpu"
    backend = "gloo"
    capabilities = Capabilities(
        futures_complete_at_enqueue=False,  # a future is done when a worker thread has moved the bytes
        exact_cut=64,  # vector kernels and their scalar tails round differently; 64 held for every optimizer measured
    )

    def is_available(self) -> bool:
        return dist.is_available() and dist.is_gloo_available()

    def lane(self, name: str) -> Lane:
        return ThreadLane(name)

    def open_group(self, like: dist.ProcessGroup, *, name: str) -> dist.ProcessGroup:
        # Made as torch makes them, but not registered with torch: new_group() wants every rank of the job or a count of
        # groups that is the same on all, and split_group() lost messages of its first collective.
        store = PrefixStore(name, like.get_group_store())
        backend = dist.ProcessGroupGloo(store, like.rank(), like.size(), self.timeout(like))
        group = dist.ProcessGroup(store, like.rank(), like.size())
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        group._set_group_name(dist.GroupName(name))
        return group

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""
