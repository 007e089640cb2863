"""Models and optimizers that are saved and loaded, and all there is to compare of them."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.training import Mlp, iterate
from zerolap import checkpoint

ADAMW = {"lr": 0.01, "weight_decay": 0.1}


def make(kind: dict[str, Any]) -> tuple[DDP, zerolap.ZeroRedundancyOptimizer]:
    """A model and its optimizer, overlapped in some way or not at all."""
    kind = dict(kind)
    model = kind.pop("model", Mlp)()
    ddp = DDP(model.to(kind.pop("dtype", torch.float32)), bucket_cap_mb=kind.pop("cap", 0.002))
    cls = kind.pop("cls", torch.optim.AdamW)
    overlap, hook, options = kind.pop("overlap", "attach"), kind.pop("hook", None), kind.pop("options", ADAMW)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), cls, overlap_with_ddp=overlap != "none", **options)
    if overlap == "attach":
        zerolap.attach(ddp, zero, **kind)
    elif overlap == "hook":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        ddp.register_comm_hook(None, hook(allreduce_hook, ddp, zero, **kind))
    return ddp, zero


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 13, generator=torch.Generator().manual_seed(1000 * step + rank)).to(dtype)


def train(ddp: DDP, zero: Any, first: int, last: int) -> None:
    dtype = next(ddp.parameters()).dtype
    for step in range(first, last):
        iterate(ddp, zero, batch(step, dist.get_rank(), dtype))


def snapshot(ddp: DDP, zero: zerolap.ZeroRedundancyOptimizer) -> bytes | None:
    """Everything there is to compare, of all ranks together."""
    zero.consolidate_state_dict(to=0)
    if dist.get_rank() != 0:
        return None
    return pickle.dumps(
        {
            "model": {name: value.contiguous().clone() for name, value in ddp.module.state_dict().items()},
            "state": {
                index: {key: value.contiguous() if isinstance(value, Tensor) else value for key, value in state.items()}
                for index, state in zero.state_dict()["state"].items()
            },
            "groups": [{**g, "params": len(g["params"])} for g in zero.state_dict()["param_groups"]],
        }
    )


def assert_same(a: Any, b: Any, where: str = "") -> None:
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        for place, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{place}]")
    else:
        assert a == b, where


SECONDS = 6  # how long ranks wait for each other where that is tried; all else waits as long as the whole group does


def short_of_patience(folder: Any) -> tuple[dist.ProcessGroup, Mlp, zerolap.ZeroRedundancyOptimizer]:
    """A model whose optimizer's group has a short timeout, on ranks that are all there and have saved once."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=SECONDS))
    model = Mlp()
    zero = zerolap.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, group)
    dist.barrier()
    checkpoint.async_save(folder, model, zero, step=0).wait()
    dist.barrier()
    return group, model, zero
