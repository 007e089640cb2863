"""Memory as a user sees it: what a process holds between steps and has at most, beyond the interpreter and the model.

    python benchmarks/memory.py --model lm58 --ranks 2 --ranks 4 --out benchmarks/results

Every way to train runs in a process tree of its own. Held is the proportional set size after a trim of the allocator, peak the high-water
mark of the resident set, both of the rank with the most, less what the process had with the model alone.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parent))

from entries import ABSENT, MODELS, Plain, Zerolap, entries

from zerolap._torch import COMPILER_MODULES

_NUM_STEPS = 8
_FREED = {"shard_gradients": True}
# Peers at their best, by what they are called in ``entries``.
_PEERS = (
    "torch ZeRO, views, fused",
    "FSDP2, not resharding",
    "FSDP2",
    "DeepSpeed ZeRO-2",
    "fairscale OSS + ShardedDDP",
)


def _ways() -> dict[str, Any]:
    made: dict[str, Any] = {
        "DDP + fused AdamW": lambda model: Plain(model, fused=True),
        "DDP + fused AdamW, bucket views": lambda model: Plain(model, fused=True, as_view=True),
    }
    made |= {name: make for name, make in entries(5).items() if name in _PEERS}
    made["zerolap, bucket views"] = Zerolap
    for schedule, gather in (("interleaved", "eager"), ("interleaved", "lazy"), ("on_step", "eager")):
        made[f"zerolap stage 2, {schedule} {gather}"] = lambda model, s=schedule, g=gather: Zerolap(
            model, schedule=s, gather=g, **_FREED
        )
    return made


def _kilobytes(file: str, key: str) -> int:
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _held() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _kilobytes("smaps_rollup", "Pss")


def _run_rank(way: str, model_name: str) -> None:
    """On one rank: train, and print what it took, its sum over the step's terms included."""
    for name in COMPILER_MODULES:  # an optimizer's first step imports them: that counts for nobody
        importlib.import_module(name)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = MODELS[model_name]()
    batch = model.batch(1, torch.Generator().manual_seed(dist.get_rank()))
    before = _held()
    entry = _ways()[way](model)
    for _ in range(_NUM_STEPS):
        entry.step(batch)
    entry.finish()
    held, peak = _held() - before, _kilobytes("status", "VmHWM") - before
    told = [0, 0]
    if isinstance(entry, Zerolap):
        stats = entry.handle.stats()
        told = [stats.held_bytes // 1024, stats.peak_bytes // 1024]
    found = torch.tensor([held, peak, *told, before], dtype=torch.int64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        Path(os.environ["RESULT"]).write_text(json.dumps([round(each / 1024) for each in found.tolist()]))
    dist.barrier()
    os._exit(0)


def _measure(way: str, model: str, num_ranks: int, out: Path) -> list[int] | None:
    result = out / "memory-raw.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [*command, __file__, "--way", way, "--model", model],
        env={**os.environ, "RESULT": str(result.resolve()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    if result.exists():
        found: list[int] = json.loads(result.read_text())
        result.unlink()
        return found
    print(f"{way} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
    return None


def _to_markdown(found: dict[int, dict[str, list[int] | None]], model: str) -> str:
    sizes = sum(param.numel() for param in MODELS[model]().parameters())
    ranks = list(found)
    lines = [
        f"{model}, {sizes / 1e6:.0f} million parameters, {4 * sizes / 2**20:.0f} MiB; AdamW, {_NUM_STEPS} steps; MiB per rank beyond the model and "
        "the interpreter, held / peak; in brackets what `handle.stats()` says.\n",
        f"| way | {' | '.join(f'{n} ranks' for n in ranks)} |",
        "|---" * (len(ranks) + 1) + "|",
    ]
    for way in found[ranks[0]]:
        cells = []
        for num_ranks in ranks:
            each = found[num_ranks][way]
            told = f" ({each[2]} / {each[3]})" if each and each[3] else ""
            cells.append(f"{each[0]} / {each[1]}{told}" if each else "-")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    lines += ["", *(f"Not installed here: {name}." for name in ABSENT)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="lm58")
    parser.add_argument("--ranks", type=int, action="append", help="may be given several times; default 2 and 4")
    parser.add_argument("--only", action="append", help="ways whose name holds this; may be given several times")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    parser.add_argument("--way", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        _run_rank(given.way, given.model)
    given.out.mkdir(parents=True, exist_ok=True)
    chosen = [way for way in _ways() if not given.only or any(part in way for part in given.only)]
    every = [(num_ranks, way) for num_ranks in given.ranks or [2, 4] for way in chosen]
    found: dict[int, dict[str, list[int] | None]] = {}
    for num_ranks, way in track(every, "measuring", console=Console(stderr=True)):
        found.setdefault(num_ranks, {})[way] = _measure(way, given.model, num_ranks, given.out)
    text = _to_markdown(found, given.model)
    print(text)
    (given.out / f"memory-{given.model}.md").write_text(text)
    (given.out / f"memory-{given.model}.json").write_text(
        json.dumps({str(n): each for n, each in found.items()}, indent=1)
    )


if __name__ == "__main__":
    main()
