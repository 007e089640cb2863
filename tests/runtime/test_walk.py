"""The way of one bucket through the code: which files it passes, and how often it crosses from one to another. Counted, not timed."""

from __future__ import annotations

import collections
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
import zerolap_cpu_gloo
from zerolap_conformance.ranks import run_ranks

OURS = tuple(f"{Path(str(package.__file__)).parent}{os.sep}" for package in (zerolap, zerolap_cpu_gloo))
NUM_LAYERS, WIDTH, NUM_STEPS = 24, 256, 5  # in buckets of 1 MB: six, of eight parameters each

# Files, and crossings for a bucket, what is done once a step included: 7 and 32, 9 and 57 when this was written. Where a bucket is gathered
# lazily, whoever uses its parameters is on the way, and so is the adapter.
MOST = {"hook": (7, 33), "attach": (10, 62)}


class Walk:
    """Notes every call of a function of ours, and the file that each thread was in before."""

    def __init__(self) -> None:
        self.is_on = False
        self.files: collections.Counter[str] = collections.Counter()
        self.num_crossings = 0
        self._last: dict[int, str] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if not self.is_on or event not in ("call", "return") or not file.startswith(OURS):
            return
        thread = threading.get_ident()
        if event == "call":
            self.files[os.sep.join(Path(file).parts[-2:])] += 1
        else:
            caller = frame.f_back
            is_ours = caller is not None and caller.f_code.co_filename.startswith(OURS)
            file = caller.f_code.co_filename if is_ours and caller is not None else self._last.get(thread, file)
        self.num_crossings += self._last.get(thread, file) != file
        self._last[thread] = file


def _walk(way: str) -> tuple[list[str], float]:
    walk = Walk()
    threading.setprofile(walk)  # for the lanes, which start later
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))), bucket_cap_mb=1)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3, overlap_with_ddp=True)
    if way == "attach":
        zerolap.attach(ddp, zero, schedule="interleaved", gather="lazy")
    else:
        ddp.register_comm_hook(None, zerolap.hook_with_zero_step_interleaved(allreduce_hook, ddp, zero))
    threading.setprofile(None)
    batch = torch.ones(4, WIDTH)

    def step() -> None:
        zero.zero_grad()
        ddp(batch).square().mean().backward()
        zero.step()

    for _ in range(4):
        step()
    sys.setprofile(walk)
    walk.is_on = True
    for _ in range(NUM_STEPS):
        step()
    walk.is_on = False
    sys.setprofile(None)
    assert zero._engine is not None
    return sorted(walk.files), walk.num_crossings / NUM_STEPS / len(zero._engine.layout)


@pytest.mark.parametrize("way", MOST)
def test_a_bucket_passes_few_files(way: str) -> None:
    most_files, most_crossings = MOST[way]
    for files, num_crossings in run_ranks(2, _walk, way):
        print(f"{way}: {len(files)} files, {num_crossings:.1f} crossings a bucket: {', '.join(files)}")
        assert len(files) <= most_files, files
        assert num_crossings <= most_crossings
