"""Compare the ways in which the CPU adapter can exchange a bucket: in how many stages, for how many ranks.

    python benchmarks/exchange.py

Each line is a number of ranks on this machine, and the time of each choice as a ratio to that of one stage, interleaved.
"""

from __future__ import annotations

import statistics
import time
from itertools import chain

import torch
import torch.distributed as dist

import zerolap
from zerolap_conformance.ranks import run_ranks
from zerolap_cpu_gloo import adapter
from zerolap_cpu_gloo.memory import Inbox, SharedMemory

CHOICES: dict[int, list[tuple[int, ...]]] = {
    4: [(4,), (2, 2)],
    8: [(8,), (2, 4), (2, 2, 2)],
    12: [(12,), (3, 4), (2, 2, 3)],
    16: [(16,), (4, 4), (2, 2, 2, 2)],
    24: [(24,), (4, 6), (2, 2, 2, 3)],
    32: [(32,), (4, 8), (2, 2, 2, 2, 2)],
}
NUM_BUCKETS = 4
NUM_ROUNDS = 7


def measure(megabytes: float, choices: list[tuple[int, ...]]) -> list[float]:
    group, inbox = dist.group.WORLD, Inbox()
    assert group is not None
    memory = SharedMemory(group, {})  # by messages: shared memory needs no stages
    rank, size = group.rank(), group.size()
    numel = int(megabytes * 2**18) // size
    buckets = [list(torch.full((numel * size,), float(rank + 1)).chunk(size)) for _ in range(NUM_BUCKETS)]

    def run(stages: tuple[adapter.Stage, ...]) -> None:
        if len(stages) == 1:  # all buckets at once
            finishes = [
                adapter.start_reduce_stage(parts, parts[rank], stages[0], tag=tag, inbox=inbox, memory=memory)
                for tag, parts in enumerate(buckets)
            ]
            for finish in finishes:
                finish()
            works = [
                adapter.start_gather_stage(parts, stages[0], tag=t, memory=memory) for t, parts in enumerate(buckets)
            ]
            for work in chain.from_iterable(of_bucket for _, of_bucket in works):  # there are no neighbours
                work.wait()
        else:
            for tag, parts in enumerate(buckets):
                adapter.reduce_in_stages(
                    zerolap.Parts.of(parts), parts[rank], stages, tag=tag, inbox=inbox, memory=memory
                )
            for tag, parts in enumerate(buckets):
                adapter.gather_in_stages(zerolap.Parts.of(parts), stages, tag=tag, memory=memory)

    times: list[list[float]] = [[] for _ in choices]
    for _ in range(NUM_ROUNDS + 1):
        for taken, sizes in zip(times, choices, strict=True):
            dist.barrier()
            start = time.perf_counter()
            run(adapter.stages_of(rank, size, sizes))
            dist.barrier()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken[1:]) for taken in times]


if __name__ == "__main__":
    for megabytes in (0.25, 4):
        for num_ranks, choices in CHOICES.items():
            times = run_ranks(num_ranks, measure, megabytes, choices)[0]
            ratios = ", ".join(
                f"{' x '.join(map(str, sizes))}: {taken / times[0]:.2f}"
                for sizes, taken in zip(choices, times, strict=True)
            )
            print(f"{megabytes} MB, {num_ranks:2} ranks: {ratios}", flush=True)
