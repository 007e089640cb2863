"""The oracle, and what is compared with it: small models trained with DDP + the plain optimizer, and with zerolap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

import zerolap

HOOK_MAKERS = (zerolap.hook_with_zero_step, zerolap.hook_with_zero_step_interleaved)

SMALL_BUCKETS = 0.004  # MB: several buckets even for the small models here


class Mlp(nn.Module):
    """Four layers of odd sizes; inputs of width 13."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        widths = [13, 40, 37, 50, 3]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Branches(nn.Module):
    """Layers that some or all ranks leave out now and then, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.unused, self.sometimes, self.head = (nn.Linear(13, 13) for _ in range(4))
        self.iteration = 0

    def forward(self, x: Tensor) -> Tensor:
        self.iteration += 1
        x = self.trunk(x)
        return self.head(self.sometimes(x) if dist.get_rank() == 0 and self.iteration % 2 else x)


def pair(
    make_model: Callable[[], nn.Module] = Mlp, *, bucket_cap_mb: float = SMALL_BUCKETS, **ddp_options: Any
) -> list[DDP]:
    """Two equal models: one for the oracle, one for us."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(DDP(make_model(), bucket_cap_mb=bucket_cap_mb, **ddp_options))
    return made


def iterate(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    """One iteration as everybody writes it."""
    optimizer.zero_grad()
    backward(model, x)
    optimizer.step()


def overlapped(
    ddp: DDP,
    params: Any,
    optimizer_class: type[Optimizer],
    *,
    hook_maker: Callable[..., Any] = zerolap.hook_with_zero_step_interleaved,
    hook: Callable[..., Any] = allreduce_hook,
    state: Any = None,
    shard_buckets: bool = False,
    process_group: Any = None,
    **defaults: Any,
) -> zerolap.ZeroRedundancyOptimizer:
    """A sharded optimizer whose hook is registered on ``ddp``."""
    zero = zerolap.ZeroRedundancyOptimizer(
        params, optimizer_class, process_group=process_group, overlap_with_ddp=True, **defaults
    )
    ddp.register_comm_hook(state, hook_maker(hook, ddp, zero, shard_buckets=shard_buckets))
    return zero


def batches(num: int, shape: tuple[int, ...] = (5, 13), dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """Different data on every rank and in every iteration, the same in every run."""
    for i in range(num):
        generator = torch.Generator().manual_seed(1000 * i + dist.get_rank())
        yield torch.randn(shape, generator=generator).to(dtype)


def backward(ddp: nn.Module, x: Tensor) -> None:
    ddp(x).float().square().sum().backward()


def assert_same_params(ours: nn.Module, oracle: nn.Module, what: object = "") -> None:
    """Bitwise: element-wise optimizers do the same arithmetic in the same order on a shard as on the whole."""
    for (name, a), (_, b) in zip(ours.named_parameters(), oracle.named_parameters(), strict=True):
        assert torch.equal(a, b), f"{what}: {name} differs by up to {(a.double() - b.double()).abs().max():.3g}"


def num_in_flight(zero: Any) -> int:
    """Buckets whose parameters are still on their way, or that nobody has waited for."""
    return sum(bucket.gathering is not None for bucket in zero._engine.installed)
