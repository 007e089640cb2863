"""One rank of the test of a slow wire: many reductions at once, waited for in order, as a lane does."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

import zerolap
from zerolap_cpu_gloo import CpuGlooAdapter

NUM_BUCKETS, MOST_TRIES = 12, 10
SIZES = [2**17 + 64, 2**17 - 64]  # parts are not always equal
BYTES = NUM_BUCKETS * sum(SIZES) * 4 // 2  # that a rank sends


def main(enough: float) -> None:
    """Tries until one took no more than ``enough`` seconds on both ranks: what is measured is the wire, not who else has the cores."""
    with suppress(PermissionError):  # for the same reason
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    adapter = CpuGlooAdapter()
    group = adapter.open_group(dist.group.WORLD, name="pace")
    buckets = [torch.ones(sum(SIZES)) for _ in range(NUM_BUCKETS)]
    taken: list[float] = []
    for number in range(MOST_TRIES):
        dist.barrier()
        start = time.perf_counter()
        under_way = [
            adapter.reduce_scatter(
                zerolap.Parts.of(bucket.split(SIZES)),
                into=torch.empty(SIZES[dist.get_rank()]),
                group=group,
                tag=NUM_BUCKETS * number + place,
                what="reduce",
            )
            for place, bucket in enumerate(buckets)
        ]
        for pending in under_way:
            pending.wait()
        slowest = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        taken.append(slowest.item())
        if taken[-1] <= enough:
            break
    print(json.dumps({"seconds": min(taken), "tries": len(taken)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(float(sys.argv[1]))
