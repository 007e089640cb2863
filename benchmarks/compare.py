"""Train the same model with zerolap and its peers, interleaved in one process tree, and compare.

    python benchmarks/compare.py --model lm27 --network 1000 --batch 1 --cap 5 --out results

Each round visits every entry: two steps to get going, then ``--steps`` that are timed. Ratios are paired by round, so that a machine
that is slow for a while is slow for all; given are their median and quartiles. Every entry trains on the same data, and at the end
its parameters are compared with those of DDP + fused AdamW. The bound is max(computing alone, the entry's own CPU time on its core,
its bytes at the wire's rate).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from entries import ABSENT, MODELS, entries
from network import open_network

REFERENCE = "DDP + fused AdamW"


def _sent(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def run_rank(given: argparse.Namespace) -> None:
    """On one rank: measure everything, and let the first rank write what was found."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # one core each, if there are enough
        os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    chosen = {
        name: make for name, make in entries(given.cap).items() if not given.only or any(o in name for o in given.only)
    }
    chosen = {name: make for name, make in entries(given.cap).items() if name in ("compute alone", REFERENCE)} | chosen
    made, seconds, cpu, sent = {}, {}, {}, {}
    for name, make in chosen.items():
        torch.manual_seed(0)
        made[name] = make(MODELS[given.model]())
        seconds[name], cpu[name], sent[name] = [], [], []
    source = MODELS[given.model]()
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    for round_ in range(given.rounds + 1):  # the first is to warm up
        for name, entry in made.items():
            batches = [
                source.batch(given.batch, torch.Generator().manual_seed(1000 * round_ + 10 * step + rank))
                for step in range(given.steps + 2)
            ]
            for batch in batches[:2]:
                entry.step(batch)
            dist.barrier()
            start, start_cpu, start_sent = time.perf_counter(), time.process_time(), _sent(interface)
            for batch in batches[2:]:
                entry.step(batch)
            taken, taken_cpu = time.perf_counter() - start, time.process_time() - start_cpu
            entry.finish()
            dist.barrier()
            if round_:
                seconds[name].append(taken / given.steps)
                cpu[name].append(taken_cpu / given.steps)
                sharing = given.ranks if interface == "lo" else 1  # loopback counts everybody's
                sent[name].append((_sent(interface) - start_sent) / given.steps / sharing)
            if rank == 0:
                print(f"\rround {round_} of {given.rounds}: {name:40}", end="", file=sys.stderr, flush=True)
    reference = made[REFERENCE].params()
    found = {}
    for name, entry in made.items():
        differences = [0.0]
        if name != "compute alone":
            params = entry.params()
            differences = [(a - b).abs().max().item() for a, b in zip(params, reference, strict=True)]
        found[name] = {
            "seconds": seconds[name],
            "cpu": statistics.median(cpu[name]),
            "sent": statistics.median(sent[name]),
            "state_bytes": entry.state_bytes(),
            "difference": max(differences),
        }
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, found)
    if rank == 0:
        Path(os.environ["RESULT"]).write_text(json.dumps(everything))
    dist.destroy_process_group()


def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the ranks and bring home what they found, row by row."""
    with open_network(given.network, given.ranks) as network:
        given.out.mkdir(parents=True, exist_ok=True)
        result = given.out / "raw.json"
        ranks = []
        for rank in range(given.ranks):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(given.ranks),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": network.address,
                "MASTER_PORT": str(20_000 + os.getpid() % 20_000),
                "GLOO_SOCKET_IFNAME": network.interfaces[rank],
                "OMP_NUM_THREADS": "1",
                "RESULT": str(result),
            }
            ranks.append(subprocess.Popen(network.command(rank, Path(__file__), *sys.argv[1:]), env=environment))
        try:
            codes = [rank.wait(timeout=3600) for rank in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(codes):
            sys.exit(f"ranks ended with {codes}")
        return rows_of(json.loads(result.read_text()), network.bytes_per_second)


def rows_of(ranks: list[dict[str, Any]], rate: float | None) -> list[dict[str, Any]]:
    def of(name: str, key: str) -> Any:
        return max(rank[name][key] for rank in ranks)

    rounds = {name: [max(each) for each in zip(*(r[name]["seconds"] for r in ranks), strict=True)] for name in ranks[0]}
    compute, reference = statistics.median(rounds["compute alone"]), rounds[REFERENCE]
    rows = []
    for name, taken in rounds.items():
        ratios = [mine / theirs for mine, theirs in zip(taken, reference, strict=True)]
        bound = max(compute, of(name, "cpu"), of(name, "sent") / rate if rate else 0.0)
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        rows.append(
            {
                "name": name,
                "seconds": statistics.median(taken),
                "ratio": statistics.median(ratios),
                "quartiles": [quartiles[0], quartiles[2]],
                "exposed": max(0.0, statistics.median(taken) - compute),
                "bound_ratio": statistics.median(taken) / bound,
                "sent_mb": of(name, "sent") / 1e6,
                "state_mb": of(name, "state_bytes") / 1e6,
                "difference": of(name, "difference"),
            }
        )
    return rows


def to_markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| entry | s/step | of DDP + fused (quartiles) | exposed s | of the bound | MB sent | state MB | differs from DDP by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {row['seconds']:.3f} | {row['ratio']:.2f} ({row['quartiles'][0]:.2f}-{row['quartiles'][1]:.2f}) "
        f"| {row['exposed']:.3f} | {row['bound_ratio']:.2f} | {row['sent_mb']:.1f} | {row['state_mb']:.1f} | {row['difference']:.2g} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="lm5")
    parser.add_argument("--network", default="loopback", help="loopback, or Mbit/s, as in 1000 or 100+5ms (needs root)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--cap", type=float, default=5, help="MB a bucket, where it is not the default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="timed, per visit")
    parser.add_argument("--only", action="append", help="entries whose name holds this; may be given several times")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    given = parser.parse_args()
    if "RESULT" in os.environ:
        run_rank(given)
        return
    rows = run(given)
    print(file=sys.stderr)
    head = (
        f"{given.model}, batch {given.batch}, {given.ranks} ranks, network {given.network}, {given.rounds} rounds of {given.steps} "
        f"steps, torch {torch.__version__}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    )
    text = f"{head}\n\n{to_markdown(rows)}" + "".join(f"\nNot installed here: {name}.\n" for name in ABSENT)
    print(text)
    (given.out / "results.md").write_text(text)
    (given.out / "results.json").write_text(json.dumps({"setting": head, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
