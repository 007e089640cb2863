"""Train a small language model on real text with exact and with rounded exchanges, and compare validation losses.

    python benchmarks/quality.py --ranks 2 --seed 0 --out results/quality
    python benchmarks/quality.py --draw --out results/quality
    python benchmarks/quality.py --blocks

The text is the sources of Python's own library, by bytes; some files are held out for validation. All ways of one run begin with the same
parameters and see the same batches. ``--blocks`` shows what rounding takes from gradients and updates of the model, by the size of blocks. ``--draw`` puts all runs of a folder together: a table, and the curves as docs/pictures/wire-quality.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap

PICTURE = Path(__file__).parent.parent / "docs/pictures/wire-quality.svg"
CONTEXT, WIDTH, NUM_LAYERS, BATCH = 32, 64, 1, 16  # of all ranks together
EVERY = 100
NO_FEEDBACK = "int8, without error feedback"
WAYS: dict[str, Any] = {
    "exact": None,
    "int8": "int8",
    "int8, gradients' feedback": zerolap.Wire(gradients="int8", parameters="int8", gradient_feedback=True),
    "fp8": "fp8",
    "bf16": "bf16",
    NO_FEEDBACK: "int8",
}


class Lm(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        x = self.tokens(text[:, :-1]) + self.places.weight
        logits = self.head(self.norm(self.layers(x, mask=mask, is_causal=True)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def corpus() -> tuple[Tensor, Tensor]:
    """Bytes to train on and to validate with: every tenth file."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [b"\n".join(p.read_bytes() for i, p in enumerate(files) if (i % 10 == 0) is held) for held in (False, True)]
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, held_out


def draw_batch(text: Tensor, size: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=generator)
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()


@torch.no_grad()
def loss_on(model: nn.Module, batches: list[Tensor]) -> float:
    return statistics.fmean(float(model(batch)) for batch in batches)


def run_way(name: str, *, seed: int, num_steps: int, texts: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Losses of one way, every so many steps."""
    torch.manual_seed(seed)
    ddp = DDP(Lm(), bucket_cap_mb=1)
    zero = zerolap.ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=1e-3, weight_decay=0.01, overlap_with_ddp=True
    )
    handle = zerolap.attach(ddp, zero, wire=WAYS[name])
    schedule = torch.optim.lr_scheduler.LambdaLR(zero, _rate(num_steps))
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    held_out = torch.Generator().manual_seed(0)
    few, many = ([draw_batch(texts[1], 32, held_out) for _ in range(count)] for count in (4, 40))
    losses, start = [], time.perf_counter()
    for step in range(num_steps):
        zero.zero_grad()
        ddp(draw_batch(texts[0], BATCH // dist.get_world_size(), generator)).backward()
        zero.step()
        schedule.step()
        if name == NO_FEEDBACK:
            handle.refresh_masters()  # owners forget what was rounded off
        if (step + 1) % EVERY == 0:
            losses.append(loss_on(ddp.module, few))
    handle.audit()
    found = {"losses": losses, "final": loss_on(ddp.module, many), "seconds": time.perf_counter() - start}
    found["sent_bytes"] = handle.stats().sent_bytes
    handle.detach()
    return found


def _rate(num_steps: int) -> Callable[[int], float]:
    return lambda step: min(1.0, (step + 1) / 100) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / num_steps)))


def run_rank(rank: int, given: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=given.ranks)
    texts, path = corpus(), given.out / f"{given.ranks}-{given.seed}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in given.only or WAYS:
        if name in found:
            continue
        found[name] = run_way(name, seed=given.seed, num_steps=given.steps, texts=texts)
        if rank == 0:
            print(f"{given.ranks} ranks, seed {given.seed}, {name}: {found[name]['final']:.4f}", flush=True)
            path.write_text(json.dumps(found))
    dist.destroy_process_group()


# --- the size of blocks ----------------------------------------------------------------------------------------------


def errors_by_block() -> str:
    """Root-mean-square errors of rounding, of one step's gradients and updates behind some others, against what is rounded."""
    (text, _), generator = corpus(), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model, before = Lm(), list[Tensor]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(80):
        optimizer.zero_grad()
        model(draw_batch(text, 8, generator)).backward()
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.step()
    gradients = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
    updates = [(param.detach() - old).flatten() for param, old in zip(model.parameters(), before, strict=True)]
    lines = ["| block | bytes each | error of gradients | of updates |", "|---|---|---|---|"]
    for block in (32, 64, 128, 256, 512, 2048):
        errors = (100 * _error(tensors, block, torch.int8, 127.0) for tensors in (gradients, updates))
        lines.append(
            f"| int8, {block} | {1 + 4 / block:.3f} | " + " | ".join(f"{each:.2f} %" for each in errors) + " |"
        )
    errors = (100 * _error(tensors, 128, torch.float8_e4m3fn, 448.0) for tensors in (gradients, updates))
    lines.append(f"| fp8, 128 | {1 + 4 / 128:.3f} | " + " | ".join(f"{each:.2f} %" for each in errors) + " |")
    errors = (100 * _error(tensors, 1, torch.bfloat16, None) for tensors in (gradients, updates))
    lines.append("| bf16 | 2 | " + " | ".join(f"{each:.2f} %" for each in errors) + " |")
    return "\n".join(lines)


def _error(tensors: list[Tensor], block: int, dtype: torch.dtype, largest: float | None) -> float:
    lost = whole = 0.0
    for tensor in tensors:
        values = nn.functional.pad(tensor, (0, -len(tensor) % block)).view(-1, block)
        scale = torch.ones(1) if largest is None else (values.abs().amax(1, keepdim=True) / largest).clamp_min(1e-38)
        by_scale = values / scale
        rounded = (by_scale.round() if dtype is torch.int8 else by_scale).to(dtype).float() * scale
        lost += float((rounded - values).square().sum())
        whole += float(values.square().sum())
    return math.sqrt(lost / whole)


# --- putting runs together --------------------------------------------------------------------------------------------


def read_runs(folder: Path) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """All runs, by number of ranks and way."""
    runs: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for path in sorted(folder.glob("*-*.json")):
        for name, found in json.loads(path.read_text()).items():
            runs.setdefault(int(path.stem.split("-")[0]), {}).setdefault(name, []).append(found)
    return runs


def table(runs: dict[int, dict[str, list[dict[str, Any]]]]) -> str:
    lines = [
        "| ranks | exchange | final validation loss, by seed | mean | against exact | bytes |",
        "|---|---|---|---|---|---|",
    ]
    for num_ranks, ways in runs.items():
        exact = statistics.fmean(each["final"] for each in ways["exact"])
        for name, found in ways.items():
            finals = [each["final"] for each in found]
            mean, sent = statistics.fmean(finals), found[0]["sent_bytes"] / ways["exact"][0]["sent_bytes"]
            by_seed = ", ".join(f"{each:.4f}" for each in finals)
            lines.append(
                f"| {num_ranks} | {name} | {by_seed} | {mean:.4f} | {100 * (mean / exact - 1):+.2f} % | {sent:.2f}x |"
            )
    return "\n".join(lines)


COLOURS = ("#222222", "#d62728", "#ff9896", "#9467bd", "#1f77b4", "#2ca02c")


def picture(runs: dict[int, dict[str, list[dict[str, Any]]]]) -> str:
    """The mean curves over seeds, one panel for each number of ranks, as SVG."""
    width, height, left, top = 420, 300, 60, 30
    body = []
    for panel, (num_ranks, ways) in enumerate(runs.items()):
        curves = {
            name: [statistics.fmean(at) for at in zip(*(f["losses"] for f in found), strict=True)]
            for name, found in ways.items()
        }
        low, high = min(map(min, curves.values())) - 0.02, statistics.fmean(curve[2] for curve in curves.values())
        count, at_x = len(next(iter(curves.values()))), left + panel * (width + left)
        body.append(f'<text x="{at_x}" y="{top - 10}" font-weight="bold">{num_ranks} ranks</text>')
        for tick in range(5):
            value, y = low + (high - low) * tick / 4, top + height - height * tick / 4
            body.append(f'<line x1="{at_x}" x2="{at_x + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            body.append(f'<text x="{at_x - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
            body.append(
                f'<text x="{at_x + width * tick / 4:.1f}" y="{top + height + 18}" text-anchor="middle">{count * EVERY * tick // 4}</text>'
            )
        for colour, (name, curve) in zip(COLOURS, curves.items(), strict=False):
            points = " ".join(
                f"{at_x + width * (i + 1) / count:.1f},{top + height - height * (loss - low) / (high - low):.1f}"
                for i, loss in enumerate(curve)
                if loss <= high
            )
            body.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"><title>{name}</title></polyline>'
            )
    for place, (colour, name) in enumerate(zip(COLOURS, next(iter(runs.values())), strict=False)):
        x, y = left + (place % 3) * 300, top + height + 50 + 20 * (place // 3)
        body.append(f'<line x1="{x}" x2="{x + 24}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="3"/>')
        body.append(f'<text x="{x + 30}" y="{y}">{name}</text>')
    total = (len(runs) * (width + left) + 20, top + height + 90)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total[0]} {total[1]}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>", ""])


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--steps", type=int, default=2000)
    made.add_argument("--only", action="append", choices=list(WAYS))
    made.add_argument("--draw", action="store_true")
    made.add_argument("--blocks", action="store_true")
    made.add_argument("--out", type=Path, default=Path("benchmark-results/quality"))
    given = made.parse_args()
    if given.blocks:
        print(errors_by_block())
        return
    given.out.mkdir(parents=True, exist_ok=True)
    if given.draw:
        runs = read_runs(given.out)
        PICTURE.write_text(picture(runs))
        print(table(runs))
        return
    store = given.out / f".store-{os.getpid()}"
    mp.spawn(run_rank, (given, str(store.resolve())), given.ranks)
    store.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
