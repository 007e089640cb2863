"""The code in the docs runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from training import Mlp, batches
from zerolap_conformance.ranks import run_ranks

ROOT = Path(__file__).parent.parent


def _blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def _sharded(ddp: DDP) -> zerolap.ZeroRedundancyOptimizer:
    return zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True)


def _run_blocks(folder: str) -> None:
    (readme,) = _blocks("README.md")
    names: dict[str, Any] = {"model": Mlp(), "loader": list(batches(3)), "loss_of": lambda out: out.square().sum()}
    before = [p.detach().clone() for p in names["model"].parameters()]
    exec(readme, names)
    assert not any(torch.equal(p, old) for p, old in zip(names["model"].parameters(), before, strict=True))

    choosing, clipping, tracing = _blocks("docs/attach.md")
    ddp = DDP(Mlp())
    exec(choosing, {"zerolap": zerolap, "ddp": ddp, "opt": _sharded(ddp)})
    ddp = DDP(Mlp())
    opt = _sharded(ddp)
    handle = zerolap.attach(ddp, opt, schedule="on_step")
    exec(clipping, {"zerolap": zerolap, "opt": opt, "loss": ddp(next(batches(1))).square().mean()})
    assert handle.stats().num_updates == 1
    exec(tracing, {"handle": handle, "ddp": ddp, "opt": opt, "batch": next(batches(1))})
    assert handle.stats().num_updates == 2
    assert dist.get_world_size() == 2

    saving, plain = _blocks("docs/checkpoints.md")
    ddp = DDP(Mlp())
    names = {"zerolap": zerolap, "ddp": ddp, "opt": _sharded(ddp), "batch": next(batches(1)), "folder": folder}
    exec(saving, names)
    assert names["loaded"].step == 4
    exec(plain, names | {"plain": f"{folder}/plain"})


def test_code_in_the_docs_runs(tmp_path: Path) -> None:
    run_ranks(2, _run_blocks, str(tmp_path))


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
