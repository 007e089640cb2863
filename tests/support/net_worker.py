"""One rank of the test between two network namespaces: train, and print what the interface and the handle have counted."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap

NUM_STEPS = 5


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    counter = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics/tx_bytes")
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(*(nn.Linear(600, 600) for _ in range(4))), bucket_cap_mb=1)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True)
    handle = zerolap.attach(ddp, zero, schedule=sys.argv[1], gather=sys.argv[2])  # type: ignore[arg-type]

    def step() -> None:
        zero.zero_grad()
        ddp(torch.randn(2, 600)).sum().backward()
        zero.step()

    for _ in range(3):  # until DDP's buckets have settled
        step()
    handle.finish()
    dist.barrier()
    before, sent_before = int(counter.read_text()), handle.stats().sent_bytes
    for _ in range(NUM_STEPS):
        step()
    handle.finish()
    dist.barrier()  # a message counts as sent when the kernel has it; here the other rank has it, too
    sent, counted = handle.stats().sent_bytes - sent_before, int(counter.read_text()) - before
    print(
        json.dumps(
            {
                "sent": sent / NUM_STEPS,
                "counted": counted / NUM_STEPS,
                "params": sum(p.numel() for p in ddp.parameters()),
            }
        )
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
