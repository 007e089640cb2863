"""The demo: train a small character model twice on the CPU, with DDP + AdamW and with zerolap, and show what it gained.

Run by ``zerolap demo``, by ``ci/demo``, or by ``torchrun --standalone --nproc-per-node 2 examples/demo.py``. It is in the package, not
in examples/, so that an installed zerolap has it, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap

TEXT = (Path(__file__).parent / "sonnets.txt").read_text()
CONTEXT, BATCH, STEPS_PER_ROUND, WARM_UP = 64, 4, 6, 3


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return torch.add(x, self.down(F.gelu(self.up(self.norm_2(x)))))


class CharacterModel(nn.Module):
    """A GPT in small: the next character, given those before it."""

    def __init__(self, num_characters: int, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(num_characters, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads=8) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_characters, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.characters(x) + self.positions.weight[: x.shape[1]]
        return torch.as_tensor(self.head(self.norm(self.blocks(x))))


@dataclass
class Contestant:
    name: str
    model: DDP
    optimizer: torch.optim.Optimizer
    sent_bytes: Callable[[int], float]  # to other ranks, in this many steps
    seconds: list[float] = field(default_factory=list)
    on_network: list[float] = field(default_factory=list)
    loss: float = float("nan")


def bytes_on_loopback() -> int | None:
    """All bytes the ranks have sent each other over the network, as the kernel counted them, so without what they share in memory.

    None where it does not say.
    """
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    counts = [line.split(":")[1].split() for line in lines if line.strip().startswith("lo:")]
    return int(counts[0][8]) if counts else None


def make_model(vocabulary: list[str]) -> DDP:
    torch.manual_seed(0)
    return DDP(CharacterModel(len(vocabulary)))


def train(contestant: Contestant, text: Tensor, first_step: int, num_steps: int) -> None:
    """Train on the data of these steps: the same for both contestants, different on every rank."""
    for step in range(first_step, first_step + num_steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
        window = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        contestant.optimizer.zero_grad()
        logits = contestant.model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        contestant.optimizer.step()
        contestant.loss = loss.item()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    local = optimizer.optim if isinstance(optimizer, zerolap.ZeroRedundancyOptimizer) else optimizer
    return sum(t.nbytes for state in local.state.values() for t in state.values() if isinstance(t, Tensor))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help=f"of {STEPS_PER_ROUND} steps with each")
    parser.add_argument("--json", action="store_true", help="print JSON instead, for programs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(zerolap.find_adapter("cpu").backend)
    console = Console(quiet=dist.get_rank() != 0, stderr=options.json)
    found = race(console, options.rounds)
    if dist.get_rank() == 0 and options.json:
        print(json.dumps(found, indent=1), flush=True)
    elif not options.json:
        show(console, found)
    dist.destroy_process_group()
    if found["largest_difference"] != 0:
        raise SystemExit("the parameters differ: zerolap promises the same numbers")


def race(console: Console, rounds: int) -> dict[str, Any]:
    """Train both in turns, on the same data, and say what was found."""
    vocabulary = sorted(set(TEXT))
    text = torch.tensor([vocabulary.index(character) for character in TEXT])
    plain_model, sharded_model = make_model(vocabulary), make_model(vocabulary)
    plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-3, fused=True)
    # --8<-- [start:change]
    # Two lines change: the optimizer, and what overlaps it with backward.
    sharded = zerolap.ZeroRedundancyOptimizer(
        sharded_model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-3, fused=True
    )
    handle = zerolap.attach(sharded_model, sharded, schedule="interleaved")
    # --8<-- [end:change]
    num_params = sum(p.numel() for p in plain_model.parameters())
    gradient_bytes, num_ranks = sum(p.nbytes for p in plain_model.parameters()), dist.get_world_size()
    contestants = (
        # What an all-reduce sends is known; DDP does not count it.
        Contestant(
            "DDP + AdamW", plain_model, plain, lambda steps: 2 * gradient_bytes * (num_ranks - 1) / num_ranks * steps
        ),
        Contestant("zerolap", sharded_model, sharded, lambda steps: handle.stats().sent_bytes),
    )
    train_in_turns(contestants, text, console, rounds)
    pairs = zip(sharded_model.parameters(), plain_model.parameters(), strict=True)
    num_steps = WARM_UP + rounds * STEPS_PER_ROUND
    return {
        "parameters": num_params,
        "ranks": num_ranks,
        "steps": num_steps,
        "largest_difference": max((a - b).abs().max().item() for a, b in pairs),
        "time_ratios": [b / a for a, b in zip(*(c.seconds for c in contestants), strict=True)],
        "contestants": [
            {
                "name": c.name,
                "loss": c.loss,
                "state_bytes": state_bytes(c.optimizer),
                "sent_bytes": c.sent_bytes(num_steps) / num_steps,
                "network_bytes": statistics.median(c.on_network) if c.on_network else None,
                "seconds": statistics.median(c.seconds),
            }
            for c in contestants
        ],
    }


def train_in_turns(contestants: tuple[Contestant, ...], text: Tensor, console: Console, rounds: int) -> None:
    """Train all contestants, a round of each at a time, and note how long they take and what they send."""
    num_params = sum(p.numel() for p in contestants[0].model.parameters())
    num_ranks = dist.get_world_size()
    console.print(
        f"{num_params / 1e6:.1f} M parameters, {num_ranks} ranks, {len(TEXT)} characters of Shakespeare's "
        "sonnets. Both train in turns, on the same data."
    )
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        tasks = [progress.add_task(c.name, total=WARM_UP + rounds * STEPS_PER_ROUND, loss=c.loss) for c in contestants]
        for number in range(rounds + 1):
            first, num_steps = (
                (0, WARM_UP) if number == 0 else (WARM_UP + (number - 1) * STEPS_PER_ROUND, STEPS_PER_ROUND)
            )
            for contestant, task in zip(contestants, tasks, strict=True):
                dist.barrier()
                sent, start = bytes_on_loopback(), time.perf_counter()
                train(contestant, text, first, num_steps)
                dist.barrier()
                seconds, sent_after = time.perf_counter() - start, bytes_on_loopback()
                if number > 0:  # the first steps connect sockets and fill caches
                    contestant.seconds.append(seconds / num_steps)
                    if sent is not None and sent_after is not None:
                        contestant.on_network.append((sent_after - sent) / num_steps / num_ranks)
                progress.update(task, advance=num_steps, loss=contestant.loss)


def show(console: Console, found: dict[str, Any]) -> None:
    """For people."""
    plain, ours = found["contestants"]
    difference, ratios = found["largest_difference"], found["time_ratios"]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3

    def megabytes(key: str) -> tuple[str, str, str]:
        return f"{plain[key] / 1e6:.2f}", f"{ours[key] / 1e6:.2f}", f"{ours[key] / plain[key]:.2f}"

    table = Table(title="What it gained", title_style="bold")
    for column in ("", plain["name"], ours["name"], "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    is_equal = "" if plain["loss"] != ours["loss"] else "equal"
    table.add_row("loss", f"{plain['loss']:.6f}", f"{ours['loss']:.6f}", is_equal)
    table.add_row("largest difference of a parameter", "", f"{difference:g}", "bit for bit" if difference == 0 else "")
    table.add_row("optimizer state, MB per rank", *megabytes("state_bytes"))
    table.add_row("sent, MB per rank and step", *megabytes("sent_bytes"))
    if plain["network_bytes"] and ours["network_bytes"] is not None:
        table.add_row("  of that over the network", *megabytes("network_bytes"))
    times = (f"{1e3 * contestant['seconds']:.0f}" for contestant in (plain, ours))
    table.add_row("time of a step, ms", *times, f"{middle:.2f} ({low:.2f} to {high:.2f})")
    console.print(table)
    console.print(
        "What ranks of one host send each other by shared memory is no part of what goes over the network. "
        "Times are medians of paired rounds, with quartiles. On loopback sending is CPU work, so there is little to hide; "
        "half the optimizer state is what stays on any network."
    )


if __name__ == "__main__":
    main()
