"""The zerolap adapter for CPU tensors over Gloo."""

from __future__ import annotations

import ctypes

import torch.distributed as dist
from torch import Tensor

from zerolap import Adapter, Capabilities, GroupSpec, Lane, Parts, Pending, ThreadLane, Waitable
from zerolap._torch import Backend
from zerolap_cpu_gloo.arena import Arena, open_arena
from zerolap_cpu_gloo.exchange import (
    Inbox,
    bytes_of_gather,
    gather_in_stages,
    reduce_in_stages,
    stages_of,
    start_gather_stage,
    start_reduce_stage,
    wait_for_all,
)

__all__ = ["CpuGlooAdapter"]


class CpuGlooAdapter(Adapter):
    name = "cpu_gloo"
    device_type = "cpu"
    backend = "gloo"
    capabilities = Capabilities(
        futures_complete_at_enqueue=False,  # a future is done when a worker thread has moved the bytes
        exact_cut=64,  # vector kernels and their tails round differently; 64 held for every optimizer measured, on one thread
        has_float64=True,
        one_issue_order=False,  # messages of different groups have connections of their own
    )

    def __init__(self, *, shares_memory: bool = True) -> None:
        """Ranks of one host exchange by shared memory, unless told not to: to measure what the network does, for instance."""
        self._shares_memory = shares_memory
        self._inbox = Inbox()
        self._arenas: dict[str, Arena] = {}
        self._progress: dict[str, Lane] = {}

    def why_unavailable(self) -> str | None:
        return None if dist.is_available() and dist.is_gloo_available() else "this torch was built without Gloo"

    def make_backend(self, spec: GroupSpec) -> Backend:
        return dist.ProcessGroupGloo(spec.store, spec.rank, spec.size, spec.timeout)

    @property
    def kept_bytes(self) -> int:
        return self._inbox.num_bytes + sum(arena.num_bytes for arena in self._arenas.values())

    def release_memory(self) -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; it keeps what is freed between other blocks
        if trim is not None:
            trim(0)

    def open_group(self, like: dist.ProcessGroup, *, name: str) -> dist.ProcessGroup:
        group = super().open_group(like, name=name)
        self._arenas[group.group_name] = open_arena(group) if self._shares_memory else Arena(group, {})
        return group

    def close_group(self, group: dist.ProcessGroup) -> None:
        arena = self._arenas.pop(group.group_name, None)
        if arena is not None:
            arena.close()
        self._inbox.forget(group)
        progress = self._progress.pop(group.group_name, None)
        if progress is not None:
            progress.close()

    def reduce_scatter(self, parts: Parts, *, into: Tensor, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        stages, arena = stages_of(group.rank(), group.size()), self._arena_of(group)
        sent = parts.nbytes - parts.tensors[group.rank()].nbytes
        if len(stages) == 1:
            finish = start_reduce_stage(parts.tensors, into, stages[0], tag=tag, inbox=self._inbox, arena=arena)
            return Pending((), tensors=(parts, into), what=what, sent_bytes=sent, finish=finish)
        work = self._progress_of(group).submit(
            lambda: reduce_in_stages(parts, into, stages, tag=tag, inbox=self._inbox, arena=arena)
        )
        return Pending([work], tensors=(parts, into), what=what, sent_bytes=sent)

    def all_gather(self, parts: Parts, *, group: dist.ProcessGroup, tag: int, what: str) -> Pending:
        stages, arena = stages_of(group.rank(), group.size()), self._arena_of(group)
        works: list[Waitable]
        if len(stages) == 1:
            deliveries, works = start_gather_stage(parts.tensors, stages[0], tag=tag, arena=arena)
            if deliveries:  # whoever waits or not: a sender may be waiting for room
                works.append(self._progress_of(group).submit(lambda: wait_for_all(deliveries)))
        else:
            works = [self._progress_of(group).submit(lambda: gather_in_stages(parts, stages, tag=tag, arena=arena))]
        return Pending(works, tensors=(parts,), what=what, sent_bytes=bytes_of_gather(parts, stages))

    def _arena_of(self, group: dist.ProcessGroup) -> Arena:
        return self._arenas.get(group.group_name) or Arena(group, {})  # somebody else's group: nobody is near

    def _progress_of(self, group: dist.ProcessGroup) -> Lane:
        """Where exchanges of several stages run, and what lies in shared memory is copied, whoever waits or not."""
        name = group.group_name
        if name not in self._progress:
            self._progress[name] = ThreadLane(f"progress-{name}")
        return self._progress[name]
