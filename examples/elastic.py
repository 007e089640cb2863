"""Elastic training: workers come and go, training continues. On CPU-Gloo; every node runs the same command (docs/elastic.md).

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        examples/elastic.py --folder /a/folder/all/nodes/share

When a worker is lost, or a node added, torchrun starts this program anew on the workers there are now. It loads the latest
checkpoint, whatever number of ranks wrote it, and continues with the same batches in the same order, split over fewer or more ranks.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.resources import files
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from zerolap import checkpoint

TEXT = files("zerolap.cli").joinpath("sonnets.txt").read_text()
SEED, CONTEXT, GLOBAL_BATCH = 0, 16, 32  # the batch over all ranks: more ranks, smaller parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where training is in the data. Saved with every checkpoint, and the same for any number of ranks."""

    epoch: int = 0
    consumed: int = 0  # samples of this epoch, by all ranks together

    def batches(self, num_samples: int) -> Iterator[tuple[Tensor, Position]]:
        """Every batch from here on, for all ranks, and the position after it. An epoch's last one is what is left."""
        epoch, consumed = self.epoch, self.consumed
        while True:
            # Deterministic in seed and epoch: a resumed run draws the same order.
            order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(1_000_003 * SEED + epoch))
            for batch in order[consumed:].split(GLOBAL_BATCH):
                consumed += len(batch)
                is_last = consumed == num_samples
                yield batch, Position(epoch=epoch + is_last, consumed=0 if is_last else consumed)
            epoch, consumed = epoch + 1, 0


def make_model(num_characters: int) -> nn.Module:
    torch.manual_seed(SEED)
    hidden = nn.Linear(16 * CONTEXT, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU()
    return nn.Sequential(nn.Embedding(num_characters, 16), nn.Flatten(), *hidden, nn.Linear(96, num_characters))


def train(args: argparse.Namespace) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    vocabulary = sorted(set(TEXT))
    windows = torch.tensor([vocabulary.index(character) for character in TEXT]).unfold(0, CONTEXT + 1, 3)

    ddp = DDP(make_model(len(vocabulary)), bucket_cap_mb=0.05)  # several buckets, small as this model is
    optimizer = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-3)
    zerolap.attach(ddp, optimizer)

    try:
        loaded = checkpoint.load(args.folder, ddp, optimizer)
        done, start, runs = loaded.step, Position(**loaded.extra["position"]), loaded.extra["runs"]
    except FileNotFoundError:  # raised on all ranks, or on none
        done, start, runs = 0, Position(), []

    # Every start is a run of its own, with a log per rank. A checkpoint names the runs that led to it and the step after which
    # each began: so the logs tell which steps count, and which were lost with their workers and repeated.
    run = torch.tensor(time.time_ns())
    dist.broadcast(run, src=0)
    runs = [*runs, {"name": f"run-{run.item()}", "after_step": done, "world_size": world_size}]
    if rank == 0:
        print(f"{world_size} ranks, after step {done}", flush=True)

    save = checkpoint.async_save if args.async_save else checkpoint.save
    saving: checkpoint.Saving | Path | None = None
    args.folder.mkdir(parents=True, exist_ok=True)
    with open(args.folder / f"run-{run.item()}-rank-{rank}.jsonl", "w", buffering=1) as log:
        for step, (batch, position) in zip(range(done + 1, args.steps + 1), start.batches(len(windows)), strict=False):
            mine = batch.tensor_split(world_size)[rank]  # may be uneven, or empty
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(windows[mine, :-1]), windows[mine, -1], reduction="sum")
            # DDP averages over ranks; this makes it the mean over samples, however many a rank has.
            (loss * world_size / len(batch)).backward()
            optimizer.step()
            log.write(json.dumps({"step": step, "samples": mine.tolist(), "loss": loss.item()}) + "\n")
            if step % args.save_every == 0 or step == args.steps:
                extra = {"position": asdict(position), "runs": runs}
                # overwrite: a rollback to an older checkpoint (load(step=...), or the link `latest`) reaches later steps again.
                saving = save(args.folder, ddp, optimizer, step=step, extra=extra, keep=args.keep, overwrite=True)
                dist.all_reduce(total := loss.detach())
                if rank == 0:
                    print(f"step {step}, epoch {position.epoch}: loss {total.item() / len(batch):.4f}", flush=True)
    if isinstance(saving, checkpoint.Saving):
        saving.wait()


@record
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; the same one for all nodes")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--async-save", action="store_true", help="write checkpoints while training continues")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Short: ranks that wait for a lost one should find out soon.
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
