"""The zerolap adapter for CPU tensors over Gloo."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from zerolap import Adapter, Capabilities, Lane, Pending, ThreadLane

__all__ = ["CpuGlooAdapter"]


def _exchange(into: Sequence[Tensor], parts: Sequence[Tensor], group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
    """Receive into one tensor from each other rank, in rank order, and send ``parts[r]`` to each other rank r."""
    others = [r for r in range(group.size()) if r != group.rank()]
    works = [group.recv([tensor], r, tag) for r, tensor in zip(others, into, strict=True) if tensor.numel()]
    return works + [group.send([parts[r]], r, tag) for r in others if parts[r].numel()]


class CpuGlooAdapter(Adapter):
    name = "cpu_gloo"
    device_type = "cpu"
    backend = "gloo"
    capabilities = Capabilities(
        futures_complete_at_enqueue=False,  # a future is done when a worker thread has moved the bytes
        exact_cut=64,  # vector kernels and their scalar tails round differently; 64 held for every optimizer measured
    )

    def __init__(self) -> None:
        # Buffers to receive into, by size: as many as were ever needed at once. New large ones each time would cost more
        # in page faults than the copy itself.
        self._spare: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def _take_spare(self, like: Tensor) -> Tensor:
        spare = self._spare.get((like.numel(), like.dtype))
        return spare.pop() if spare else torch.empty_like(like)

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

    def reduce_scatter(
        self, parts: Sequence[Tensor], *, into: Tensor, group: dist.ProcessGroup, tag: int, what: str
    ) -> Pending:
        # By point-to-point messages: Gloo's own reduce_scatter is an all-reduce underneath, with twice the bytes.
        me, mine = group.rank(), parts[group.rank()]
        received = [mine if r == me else self._take_spare(mine) for r in range(group.size())]
        works = _exchange([p for p in received if p is not mine], parts, group, tag)

        def add_up() -> None:
            if len(received) == 1:
                into.copy_(mine)
            else:
                torch.add(received[0], received[1], out=into)
            for other in received[2:]:
                into.add_(other)
            self._spare.setdefault((mine.numel(), mine.dtype), []).extend(p for p in received if p is not mine)

        sent = sum(part.nbytes for r, part in enumerate(parts) if r != me)
        return Pending(works, tensors=(*parts, *received, into), what=what, sent_bytes=sent, finish=add_up)

    def all_gather(self, parts: Sequence[Tensor], *, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        me, mine = group.rank(), parts[group.rank()]
        others = [part for r, part in enumerate(parts) if r != me]
        works = _exchange(others, [mine] * group.size(), group, tag)
        return Pending(works, tensors=parts, what=what, sent_bytes=mine.nbytes * len(others))

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""
