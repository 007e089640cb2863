"""One rank of the test of a slow wire: many reductions at once, waited for in order, as a lane does."""

from __future__ import annotations

import json
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import zerolap
from zerolap_cpu_gloo import CpuGlooAdapter

NUM_BUCKETS, NUM_TRIES = 12, 3
SIZES = [2**17 + 64, 2**17 - 64]  # parts are not always equal


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    adapter = CpuGlooAdapter()
    group = adapter.open_group(dist.group.WORLD, name="pace")
    buckets = [torch.ones(sum(SIZES)) for _ in range(NUM_BUCKETS)]
    taken = []
    for number in range(NUM_TRIES):
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
        taken.append(time.perf_counter() - start)
    print(json.dumps({"seconds": min(taken), "bytes": NUM_BUCKETS * sum(SIZES) * 4 // 2}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
