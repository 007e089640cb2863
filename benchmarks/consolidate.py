"""Time consolidate_state_dict() against torch's ZeroRedundancyOptimizer, interleaved, and see what the other ranks need for it.

    python benchmarks/consolidate.py [--ranks 4] [--millions 100] [--rounds 3]

Both shard the same AdamW state of the same model on the same ranks, over loopback. Memory is the growth of a rank's peak resident
memory during the call, on the ranks that receive nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

import zerolap
from zerolap_conformance.ranks import run_ranks


def resident_bytes() -> int:
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * 4096


class Peak:
    """The highest resident memory while it is entered, sampled, above that at the start."""

    def __enter__(self) -> Peak:
        ctypes.CDLL(None).malloc_trim(0)
        self._start = self.grown = resident_bytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._is_over.wait(0.005):
            self.grown = max(self.grown, resident_bytes())

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.grown -= self._start


def measure(millions: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """For each: (seconds, MB grown) of every round, on this rank."""
    width = 1000
    model = nn.ParameterList([nn.Parameter(torch.zeros(width, 1000)) for _ in range(millions)])
    optimizers: dict[str, Any] = {
        "torch": TorchZero(model.parameters(), torch.optim.AdamW, lr=1e-3),
        "zerolap": zerolap.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3),
    }
    for param in model:
        param.grad = torch.ones(1).expand_as(param)
    for optimizer in optimizers.values():
        optimizer.step()
    for param in model:
        param.grad = None
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in optimizers}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            dist.barrier()
            with Peak() as peak:
                start = time.perf_counter()
                optimizer.consolidate_state_dict(to=0)
                seconds = time.perf_counter() - start
            dist.barrier()
            found[name].append((seconds, peak.grown / 2**20))
            if name == "torch":
                optimizer._all_state_dicts = []
            else:
                optimizer._consolidated = None
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--millions", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    ranks = run_ranks(given.ranks, measure, given.millions, given.rounds, limit=1500, group_timeout=600)
    print(
        f"{given.millions} million parameters, AdamW, {given.ranks} ranks, to rank 0; {given.rounds} rounds, interleaved"
    )
    for name in ("torch", "zerolap"):
        seconds = [max(ranks[r][name][i][0] for r in range(given.ranks)) for i in range(given.rounds)]
        grown = [ranks[r][name][i][1] for r in range(1, given.ranks) for i in range(given.rounds)]
        print(f"{name:8} {statistics.median(seconds):7.2f} s   other ranks grow by {max(grown):6.0f} MB at most")
    ratios = [
        max(ranks[r]["torch"][i][0] for r in range(given.ranks))
        / max(ranks[r]["zerolap"][i][0] for r in range(given.ranks))
        for i in range(given.rounds)
    ]
    print(f"zerolap is {statistics.median(ratios):.1f} times as fast ({min(ratios):.1f} to {max(ratios):.1f})")
