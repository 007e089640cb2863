"""Train the same model with zerolap and its peers, interleaved in one process tree, and compare.

    python benchmarks/compare.py --model lm27 --network 1000 --batch 1 --cap 5 --out results

Each round visits every entry: two steps to get going, then ``--steps`` that are timed. Ratios are paired by round, so that a machine
that is slow for a while is slow for all; given are their median and quartiles. Every entry trains on the same data, and at the end
its parameters are compared with those of DDP + fused AdamW. The bound is max(computing alone, the entry's own CPU time on its core,
its bytes at the wire's rate, with the headers of packets, as the rate limit counts them); the table says which one it was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerolap

sys.path.insert(0, str(Path(__file__).parent))

from entries import ABSENT, ALONE, BY_MESSAGES, MODELS, REFERENCES, Entry, entries, entries_with_muon
from network import open_network, wire_bytes

_MOST_TO_SETTLE = 200


def _sent(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def _peak_bytes() -> int:
    """The most memory this process has ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _held_bytes() -> int:
    """The memory this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _chosen(given: argparse.Namespace) -> dict[str, Callable[[torch.nn.Module], Entry]]:
    every = entries_with_muon(given.cap) if given.optimizer == "muon" else entries(given.cap)
    if given.network != "loopback":
        every.pop(BY_MESSAGES, None)  # they all are
    return {
        name: make
        for name, make in every.items()
        if name in (ALONE, REFERENCES[given.optimizer]) or not given.only or any(part in name for part in given.only)
    }


def _batches(given: argparse.Namespace, source: Any, number: int, count: int) -> list[torch.Tensor]:
    rank = dist.get_rank()
    return [
        source.batch(given.batch, torch.Generator().manual_seed(1000 * number + 10 * step + rank))
        for step in range(count)
    ]


def run_rank(given: argparse.Namespace) -> None:
    """On one rank: measure everything, and let the first rank write what was found."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # one core each, if there are enough
        os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    zerolap.log_to_stderr(ranks=(0,))  # what auto has chosen, and why
    source = MODELS[given.model]()
    alone = os.environ.get("MEMORY_OF")
    found = _memory_of(alone, given, source) if alone else _times(given, source)
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, found)
    if rank == 0:
        Path(os.environ["RESULT"]).write_text(json.dumps(everything))
    dist.destroy_process_group()


def _memory_of(name: str, given: argparse.Namespace, source: Any) -> tuple[int, int]:
    """What one entry needs beyond the process and the model, in a process of its own: at most, and in the end."""
    torch.manual_seed(0)
    model = MODELS[given.model]()
    before = _peak_bytes()
    entry = _chosen(given)[name](model)
    for batch in _batches(given, source, 0, 6):
        entry.step(batch)
    entry.finish()
    return _peak_bytes() - before, _held_bytes() - before


def _times(given: argparse.Namespace, source: Any) -> dict[str, Any]:
    made: dict[str, Entry] = {}
    figures: dict[str, dict[str, list[float]]] = {}
    chosen = _chosen(given)
    early_difference = {}
    for name, make in chosen.items():
        made[name] = _fresh(given, make)
        if not made[name].is_settled:
            early_difference[name] = _settle(
                given, source, made[name], _fresh(given, chosen[REFERENCES[given.optimizer]])
            )
        figures[name] = {"seconds": [], "cpu": [], "sent": [], "wire": []}
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    sharing = int(os.environ["RANKS_PER_HOST"])  # the interface counts what all of them send
    for round_ in range(given.rounds + 1):  # the first is to warm up
        for name, entry in made.items():
            batches = _batches(given, source, round_ + 1, (given.steps if round_ else 1) + 2)
            sent, wire = _sent(interface), wire_bytes(interface)
            for batch in batches[:2]:
                entry.step(batch)
            dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            for batch in batches[2:]:
                entry.step(batch)
            taken, taken_cpu = time.perf_counter() - start, time.process_time() - start_cpu
            entry.finish()
            dist.barrier()
            if round_:
                each = figures[name]
                each["seconds"].append(taken / given.steps)
                each["cpu"].append(taken_cpu / given.steps)
                each["sent"].append((_sent(interface) - sent) / len(batches) / sharing)
                each["wire"].append((wire_bytes(interface) - wire) / len(batches))
            if dist.get_rank() == 0:
                print(f"\rround {round_} of {given.rounds}: {name:40}", end="", file=sys.stderr, flush=True)
    reference = made[REFERENCES[given.optimizer]].params()
    return {
        name: {
            "seconds": figures[name]["seconds"],
            **{kind: statistics.median(figures[name][kind]) for kind in ("cpu", "sent", "wire")},
            "state_bytes": entry.state_bytes(),
            "difference": 0.0
            if name == ALONE
            else early_difference[name]
            if name in early_difference
            else _difference(entry.params(), reference),
            "note": entry.note(),
        }
        for name, entry in made.items()
    }


def _fresh(given: argparse.Namespace, make: Callable[[torch.nn.Module], Entry]) -> Entry:
    torch.manual_seed(0)
    return make(MODELS[given.model]())


def _settle(given: argparse.Namespace, source: Any, entry: Entry, reference: Entry) -> float:
    """Train until an entry has made its choice; returns the difference to DDP after as many steps."""
    batches = _batches(given, source, 100, _MOST_TO_SETTLE)
    num_steps = 0
    while not entry.is_settled:
        entry.step(batches[num_steps])
        num_steps += 1
    for batch in batches[:num_steps]:  # one after the other: what is timed here must not hold the other's steps
        reference.step(batch)
    return _difference(entry.params(), reference.params())


def _difference(params: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(params, reference, strict=True))


def run(given: argparse.Namespace, *, memory_of: str | None = None) -> tuple[list[Any], float | None]:
    """Start the ranks and bring home what they found."""
    with open_network(given.network, given.ranks) as network:
        given.out.mkdir(parents=True, exist_ok=True)
        result = given.out / "raw.json"
        environment = {"RESULT": str(result), **({"MEMORY_OF": memory_of} if memory_of else {})}
        network.run(__file__, _arguments(given), seconds=3600, **environment)
        return json.loads(result.read_text()), network.bytes_per_second


def _arguments(given: argparse.Namespace) -> list[str]:
    names = ("model", "optimizer", "network", "ranks", "batch", "cap", "rounds", "steps", "out")
    arguments = [part for name in names for part in (f"--{name}", str(getattr(given, name)))]
    return arguments + [part for name in given.only or () for part in ("--only", name)]


def rows_of(
    ranks: list[dict[str, Any]], rate: float | None, memory: dict[str, list[int]], *, reference: str
) -> list[dict[str, Any]]:
    def of(name: str, key: str) -> Any:
        return max(rank[name][key] for rank in ranks)

    rounds = {name: [max(each) for each in zip(*(r[name]["seconds"] for r in ranks), strict=True)] for name in ranks[0]}
    compute, compared = statistics.median(rounds[ALONE]), rounds[reference]
    rows = []
    for name, taken in rounds.items():
        ratios = [mine / theirs for mine, theirs in zip(taken, compared, strict=True)]
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        parts = {"compute": compute, "CPU": of(name, "cpu"), "wire": of(name, "wire") / rate if rate else 0.0}
        bound = max(parts, key=lambda part: parts[part])
        rows.append(
            {
                "name": name,
                "seconds": statistics.median(taken),
                "ratio": statistics.median(ratios),
                "quartiles": [quartiles[0], quartiles[2]],
                "rounds": taken,
                "cpu": of(name, "cpu"),
                "exposed": max(0.0, statistics.median(taken) - compute),
                "bound": bound,
                "bound_ratio": statistics.median(taken) / parts[bound],
                "sent_mb": of(name, "sent") / 1e6,
                "wire_mb": of(name, "wire") / 1e6,
                "state_mb": of(name, "state_bytes") / 1e6,
                "peak_mb": memory[name][0] / 1e6 if name in memory else None,
                "held_mb": memory[name][1] / 1e6 if name in memory else None,
                "difference": of(name, "difference"),
                "note": ranks[0][name]["note"],
            }
        )
    return rows


def to_markdown(rows: list[dict[str, Any]]) -> str:
    head = (
        "entry",
        "s/step",
        "of DDP (quartiles)",
        "CPU s",
        "exposed s",
        "of its bound",
        "MB on the network",
        "state MB",
        "held MB",
        "peak MB",
        "differs from DDP by",
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        low, high = row["quartiles"]
        cells = [
            row["name"] + (f" ({row['note']})" if row["note"] else ""),
            f"{row['seconds']:.3f}",
            f"{row['ratio']:.2f} ({low:.2f}-{high:.2f})",
            f"{row['cpu']:.3f}",
            f"{row['exposed']:.3f}",
            f"{row['bound_ratio']:.2f} {row['bound']}",
            f"{row['sent_mb']:.1f}",
            f"{row['state_mb']:.1f}",
            *("-" if row[kind] is None else f"{row[kind]:.0f}" for kind in ("held_mb", "peak_mb")),
            f"{row['difference']:.2g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """One setting: its rows, and what they are of."""
    ranks, rate = run(given)
    memory = {}
    for name in ranks[0] if given.memory else ():
        memory[name] = [max(of_ranks) for of_ranks in zip(*run(given, memory_of=name)[0], strict=True)]
    setting = (
        f"{given.model}, {given.optimizer}, batch {given.batch}, {given.ranks} ranks, network {given.network}, {given.rounds} rounds of "
        f"{given.steps} steps"
    )
    return {
        "setting": setting,
        "rows": rows_of(ranks, rate, memory, reference=REFERENCES[given.optimizer]),
        "options": _arguments(given),
        "rate": rate,
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", choices=list(MODELS), default="lm5")
    made.add_argument("--optimizer", choices=list(REFERENCES), default="adamw", help="alone, or Muon with AdamW")
    made.add_argument(
        "--network",
        default="loopback",
        help="loopback, or Mbit/s of every host: 1000, 100+5ms, two hosts 2x100 (needs root)",
    )
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--batch", type=int, default=1)
    made.add_argument("--cap", type=float, default=5, help="MB a bucket, where it is not the default")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--steps", type=int, default=10, help="timed, per visit")
    made.add_argument("--only", action="append", help="entries whose name holds this; may be given several times")
    made.add_argument("--memory", action="store_true", help="also run every entry by itself, for its peak memory")
    made.add_argument("--out", type=Path, default=Path("benchmark-results"))
    return made


def main() -> None:
    given = parser().parse_args()
    if "RESULT" in os.environ:
        run_rank(given)
        return
    found = measure(given)
    print(file=sys.stderr)
    text = f"{found['setting']}, {machine()}\n\n{to_markdown(found['rows'])}"
    text += "".join(f"\nNot installed here: {name}.\n" for name in ABSENT)
    print(text)
    (given.out / "results.md").write_text(text)
    (given.out / "results.json").write_text(json.dumps(found, indent=1))


def machine() -> str:
    """What it was measured on."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor() or platform.machine(),
    )
    return f"torch {torch.__version__}, {model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


if __name__ == "__main__":
    main()
