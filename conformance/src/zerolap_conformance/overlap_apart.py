"""Tier 3: overlapped training and its oracle one after the other, with nothing between our steps that would make ranks wait.

An oracle that is trained beside ours makes ranks meet between any two steps, and who reads a parameter waits for it: so late gathers go
unseen. Here only the losses are kept, and the parameters are looked at when all is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import zerolap
from zerolap import Adapter
from zerolap_conformance.cuts import dtypes_of
from zerolap_conformance.overlap import ADAMW, BUCKET_MB, SGD, Model, _NotElementwise
from zerolap_conformance.requirements import requirement
from zerolap_conformance.support import device_of, expect_close, expect_equal

NUM_STEPS = 7
Wrap = Callable[[DistributedDataParallel], Any]


def _train(
    adapter: Adapter,
    wrap: Wrap,
    *,
    make_model: Callable[[], nn.Module] = Model,
    dtype: torch.dtype = torch.float32,
    num_steps: int = NUM_STEPS,
    numel: int = 31,
) -> tuple[list[Tensor], list[Tensor], Any]:
    """The loss of each step, the parameters behind the last, and the optimizer. Ranks are late in turn."""
    device, rank, size = device_of(adapter), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(make_model().to(device, dtype), bucket_cap_mb=BUCKET_MB)
    optimizer, losses = wrap(ddp), []
    for step in range(num_steps):
        if rank == step % size:
            time.sleep(0.004)
        dice = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(4, numel, generator=dice).to(device, dtype)
        loss = ddp(x).square().sum()
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, [param.detach().clone() for param in ddp.parameters()], optimizer


def _plainly(cls: type[torch.optim.Optimizer], **options: Any) -> Wrap:
    def wrap(ddp: DistributedDataParallel) -> torch.optim.Optimizer:
        ddp.register_comm_hook(None, allreduce_hook)
        return cls(ddp.parameters(), **options)

    return wrap


def _overlapped(adapter: Adapter, cls: type[torch.optim.Optimizer], *, how: dict[str, Any], **options: Any) -> Wrap:
    def wrap(ddp: DistributedDataParallel) -> zerolap.ZeroRedundancyOptimizer:
        zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), cls, overlap_with_ddp=True, **options)
        zerolap.attach(ddp, zero, adapter=adapter, **how)
        return zero

    return wrap


def _expect_same(ours: Any, theirs: Any, what: str, dtype: torch.dtype = torch.float32) -> None:
    """Bitwise on 2 ranks; on more, sums may be taken in another order than the oracle's all-reduce takes them."""
    for kind, place in (("the loss of step", 0), ("parameter", 1)):
        for number, (a, b) in enumerate(zip(ours[place], theirs[place], strict=True)):
            if dist.get_world_size() <= 2:
                expect_equal(a, b, f"{what}: {kind} {number}")
            else:
                size = max(1.0, b.detach().cpu().double().abs().max().item())
                expect_close(a, b, f"{what}: {kind} {number}", tolerance=200 * torch.finfo(dtype).eps * size)


@requirement(
    "OVL-19",
    "Training at which nobody looks until its end gives the losses and parameters of DDP + the plain optimizer.",
    tier=3,
    seconds=120,
)
def trains_unseen(adapter: Adapter) -> None:
    for cls, options in ((torch.optim.AdamW, ADAMW), (_NotElementwise, SGD)):
        expected = _train(adapter, _plainly(cls, **options))
        for schedule, gather in product(("interleaved", "after_backward", "on_step"), ("lazy", "eager")):
            how = {"schedule": schedule, "gather": gather}
            seen = _train(adapter, _overlapped(adapter, cls, how=how, **options))
            _expect_same(seen, expected, f"{cls.__name__}, {schedule}, {gather}")


@requirement(
    "OVL-20",
    "The implementation that is chosen by default gives what the plain optimizer gives with it, in every dtype.",
    tier=3,
    seconds=120,
)
def chooses_an_implementation(adapter: Adapter) -> list[str]:
    chosen = {}
    dtypes = list(dtypes_of(device_of(adapter))) + ([torch.float64] if adapter.capabilities.has_float64 else [])
    adamw = {"lr": 1e-3, "eps": 1e-4}  # which 16 bits can hold
    for (cls, options), dtype in product(((torch.optim.AdamW, adamw), (torch.optim.SGD, {"lr": 1e-3})), dtypes):
        seen = _train(adapter, _overlapped(adapter, cls, how={}, **options), dtype=dtype, num_steps=4)
        fused = seen[2].param_groups[0].get("fused")
        chosen[f"{cls.__name__} in {dtype}"] = fused
        what = f"{cls.__name__} in {dtype}, fused={fused}"
        _expect_same(
            seen, _train(adapter, _plainly(cls, **options, fused=fused), dtype=dtype, num_steps=4), what, dtype
        )
        usual = _train(adapter, _plainly(cls, **options), dtype=dtype, num_steps=4)[1]
        for number, (a, b) in enumerate(zip(seen[1], usual, strict=True)):
            size = max(1.0, b.detach().cpu().double().abs().max().item())
            limit = 40 * torch.finfo(dtype).eps * size
            expect_close(a, b, f"{what}, parameter {number}, beside the plain optimizer as it is", tolerance=limit)
    turned_on = [name for name, fused in chosen.items() if fused]
    return [f"fused=True is chosen for {', '.join(turned_on)}"] if turned_on else []


class _Long(nn.Module):
    """A parameter that several threads step together, of a length that no vector divides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(200_003))
        self.scale = nn.Parameter(torch.ones(31))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.mean() + self.weight * 0.1) * (self.scale * x[0]).sum()


@requirement(
    "OVL-21",
    "Shards of a long parameter are stepped as the whole is, by 1, 2 and 4 threads of the host.",
    tier=3,
    seconds=120,
)
def cuts_for_any_number_of_threads(adapter: Adapter) -> None:
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 4):
            torch.set_num_threads(num_threads)
            for cls, dtype in product((torch.optim.AdamW, torch.optim.SGD), (torch.float32, torch.bfloat16)):
                lr: dict[str, Any] = {"lr": 1e-3}
                seen = _train(
                    adapter, _overlapped(adapter, cls, how={}, **lr), make_model=_Long, dtype=dtype, num_steps=3
                )
                fused = seen[2].param_groups[0].get("fused")
                theirs = _train(adapter, _plainly(cls, **lr, fused=fused), make_model=_Long, dtype=dtype, num_steps=3)
                _expect_same(seen, theirs, f"{cls.__name__} in {dtype}, fused={fused}, {num_threads} threads", dtype)
    finally:
        torch.set_num_threads(before)
