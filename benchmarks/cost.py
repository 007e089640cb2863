"""What a unit costs: planning a parameter, the host's work for a bucket, one more rank. Writes a table and a picture.

    python benchmarks/cost.py

* Planning: seconds and bytes of a plan for up to 100 000 parameters on 4096 ranks.
* A bucket: CPU time of all threads of a rank, beyond that of the same training without an optimizer, over the number of buckets.
  Buckets are so small (2 KB) that moving them costs next to nothing: what is left is the work per bucket, ours and the backend's.
* A rank: the same on 1, 2, 4 and 8 ranks of this machine. With more ranks than cores they wait for each other; CPU time does not
  count that.
"""

from __future__ import annotations

import json
import statistics
import time
import tracemalloc
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from zerolap.schedule.ownership import Policy, Slot, assign_owners
from zerolap_conformance.ranks import run_ranks

RESULTS = Path(__file__).parent / "results"
WIDTH = 16
NUM_STEPS = 40


def planning(num_params: int, num_ranks: int) -> tuple[float, int]:
    """Seconds to plan, and bytes that the plan holds."""
    sizes = [1000 + 37 * (i % 100) for i in range(num_params)]
    layout = tuple(
        tuple(Slot(i, sizes[i]) for i in range(first, min(first + 50, num_params)))
        for first in range(0, num_params, 50)
    )
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assign_owners(layout, world_size=num_ranks, policy=Policy.BY_ELEMENT, cut=64)
        seconds.append(time.perf_counter() - start)
    tracemalloc.start()
    plan = assign_owners(layout, world_size=num_ranks, policy=Policy.BY_ELEMENT, cut=64)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del plan
    return statistics.median(seconds), held


def _cpu_of_updates(num_layers: int, schedule: str, gather: str) -> tuple[float, int]:
    """CPU seconds of a step beyond computing alone, and the number of buckets."""
    torch.set_num_threads(1)

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))

    alone = model()
    ddp = DDP(model(), bucket_cap_mb=4 * WIDTH * WIDTH / 2**20, gradient_as_bucket_view=True)
    optimizer = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=1e-3, overlap_with_ddp=True)
    handle = zerolap.attach(ddp, optimizer, schedule=schedule, gather=gather)  # type: ignore[arg-type]
    batch = torch.ones(2, WIDTH)

    def step() -> None:
        ddp(batch).square().mean().backward()
        optimizer.step()

    def compute() -> None:
        alone(batch).square().mean().backward()

    for _ in range(4):
        step()
    taken: dict[str, list[float]] = {"step": [], "compute": []}
    for _ in range(NUM_STEPS):
        for name, call in (("step", step), ("compute", compute)):
            dist.barrier()
            start = time.process_time()
            call()
            taken[name].append(time.process_time() - start)
    handle.finish()
    return statistics.median(taken["step"]) - statistics.median(taken["compute"]), handle.stats().num_buckets


def draw(found: dict[str, list[list[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
    (plans, buckets, ranks) = found["planning"], found["buckets"], found["ranks"]
    axes[0].plot([row[0] for row in plans], [1e3 * row[2] for row in plans], "o-", color="#0f766e")
    axes[0].set(xlabel="parameters", ylabel="ms", title="planning for 4096 ranks")
    axes[1].plot([row[0] for row in buckets], [1e6 * row[1] for row in buckets], "o-", color="#0f766e")
    axes[1].set(xlabel="buckets", ylabel="us of CPU a bucket", title="host work on 2 ranks", ylim=(0, None))
    axes[2].plot([row[0] for row in ranks], [1e6 * row[1] for row in ranks], "o-", color="#0f766e")
    axes[2].set(xlabel="ranks", ylabel="us of CPU a bucket", title="host work by ranks", ylim=(0, None))
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def to_markdown(found: dict[str, list[list[float]]]) -> str:
    lines = ["| parameters | ranks | planning, ms | plan, MB |", "|---|---|---|---|"]
    lines += [f"| {p:.0f} | {r:.0f} | {1e3 * s:.1f} | {b / 1e6:.1f} |" for p, r, s, b in found["planning"]]
    lines += ["", "| buckets, 2 ranks | CPU us a bucket |", "|---|---|"]
    lines += [f"| {n:.0f} | {1e6 * s:.0f} |" for n, s in found["buckets"]]
    lines += ["", "| ranks, 40 buckets | CPU us a bucket and rank |", "|---|---|"]
    lines += [f"| {n:.0f} | {1e6 * s:.0f} |" for n, s in found["ranks"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    found: dict[str, list[list[float]]] = {"planning": [], "buckets": [], "ranks": []}
    for num_params in (1000, 10_000, 30_000, 100_000):
        found["planning"].append([num_params, 4096, *planning(num_params, 4096)])
    for num_layers in (5, 20, 40, 80, 160):
        seconds, num_buckets = max(run_ranks(2, _cpu_of_updates, num_layers, "interleaved", "eager"))
        found["buckets"].append([num_buckets, seconds / num_buckets])
    for num_ranks in (1, 2, 4, 8):
        seconds, num_buckets = max(run_ranks(num_ranks, _cpu_of_updates, 40, "interleaved", "eager"))
        found["ranks"].append([num_ranks, seconds / num_buckets])
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "cost.json").write_text(json.dumps(found, indent=1))
    draw(found, RESULTS / "cost.svg")
    print(to_markdown(found))


if __name__ == "__main__":
    main()
