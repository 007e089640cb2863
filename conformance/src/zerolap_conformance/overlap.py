"""Tier 3: training overlapped by zerolap against DDP + the plain optimizer, on the same device."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import zerolap
from zerolap import Adapter
from zerolap_conformance.requirements import requirement
from zerolap_conformance.support import device_of, expect, expect_close

NUM_STEPS = 6
BUCKET_MB = 0.003  # less than a layer
ADAMW: dict[str, Any] = {"lr": 0.01, "fused": False}  # on both sides: fused kernels round otherwise
SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "fused": False}


class Model(nn.Module):
    """Layers of odd sizes, in a bucket each, so that ranks' parts differ in size; one of the square ones can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((31, 37, 29, 29, 29, 41, 31)))

    def forward(self, x: Tensor, skipped: int | None = None) -> Tensor:
        for place, layer in enumerate(self.layers):
            if place != skipped:
                x = torch.tanh(layer(x))
        return x


def _tolerance() -> float:
    """Bitwise on 2 ranks; for more, a sum over ranks may be taken in another order than the oracle's all-reduce takes it."""
    return 0.0 if dist.get_world_size() <= 2 else 1e-5


def _compare(
    adapter: Adapter,
    overlap: Callable[[DistributedDataParallel, zerolap.ZeroRedundancyOptimizer], object],
    *,
    cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
    options: dict[str, Any] = ADAMW,
    iterate: Callable[[DistributedDataParallel, Any, Tensor, int], None] | None = None,
    tolerance: float | None = None,
    make_model: Callable[[], nn.Module] = Model,
    **ddp_options: Any,
) -> None:
    """Train a model and its oracle side by side and compare after every step."""
    device = device_of(adapter)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(DistributedDataParallel(make_model().to(device), bucket_cap_mb=BUCKET_MB, **ddp_options))
    oracle, ours = models
    oracle.register_comm_hook(None, allreduce_hook)
    plain = cls(oracle.parameters(), **options)
    zero = zerolap.ZeroRedundancyOptimizer(ours.parameters(), cls, overlap_with_ddp=True, **options)
    overlap(ours, zero)
    for step in range(NUM_STEPS):
        x = torch.randn(4, 31, generator=torch.Generator().manual_seed(100 * step + dist.get_rank())).to(device)
        for model, optimizer in ((oracle, plain), (ours, zero)):
            (iterate or _iterate)(model, optimizer, x, step)
        for (name, a), b in zip(ours.module.named_parameters(), oracle.module.parameters(), strict=True):
            limit = _tolerance() if tolerance is None else tolerance
            expect_close(a, b, f"step {step}, {name}", tolerance=limit)


def _iterate(model: DistributedDataParallel, optimizer: Any, x: Tensor, step: int) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def _attached(adapter: Adapter, **options: Any) -> Callable[[DistributedDataParallel, Any], object]:
    return lambda ddp, zero: zerolap.attach(ddp, zero, adapter=adapter, **options)


class _SlowOnOneRank(torch.optim.SGD):
    """Its parameters come late: whoever does not wait for them uses old ones."""

    is_elementwise = True

    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(0.005)
        return super().step(closure)


def _native(schedule: str, gather: str) -> Callable[[Adapter], None]:
    def check(adapter: Adapter) -> None:
        for cls, options in ((torch.optim.AdamW, ADAMW), (torch.optim.SGD, SGD), (_SlowOnOneRank, SGD)):
            _compare(adapter, _attached(adapter, schedule=schedule, gather=gather), cls=cls, options=options)

    return check


for _place, (_schedule, _gather) in enumerate(
    product(("interleaved", "after_backward", "on_step"), ("eager", "lazy")), 1
):
    requirement(
        f"OVL-{_place}",
        f"`attach` with schedule `{_schedule}` and gather `{_gather}` gives the numbers of DDP + the plain optimizer.",
        tier=3,
    )(_native(_schedule, _gather))


def _hooked(make_hook: Callable[..., Any], shard_buckets: bool) -> Callable[[Adapter], None]:
    def check(adapter: Adapter) -> None:
        def overlap(ddp: DistributedDataParallel, zero: zerolap.ZeroRedundancyOptimizer) -> None:
            hook = make_hook(allreduce_hook, ddp, zero, shard_buckets=shard_buckets, adapter=adapter)
            ddp.register_comm_hook(None, hook)

        _compare(adapter, overlap)

    return check


for _place, (_make_hook, _shard) in enumerate(
    product((zerolap.hook_with_zero_step, zerolap.hook_with_zero_step_interleaved), (False, True)), 1
):
    _kind = "`shard_buckets`" if _shard else "whole buckets"
    requirement(
        f"HOOK-{_place}",
        f"`{_make_hook.__name__}` with {_kind} gives the numbers of DDP + the plain optimizer.",
        tier=3,
    )(_hooked(_make_hook, _shard))


class _NotElementwise(torch.optim.SGD):
    """A class of the user's own, whose parameters are not cut."""


@requirement(
    "OVL-7", "An optimizer that needs whole parameters gives the numbers of DDP + the plain optimizer.", tier=3
)
def keeps_parameters_whole(adapter: Adapter) -> None:
    _compare(adapter, _attached(adapter), cls=_NotElementwise, options=SGD)


@requirement(
    "OVL-8", "Parameters that no rank used are left alone, and those that some ranks used are updated.", tier=3
)
def leaves_unused_alone(adapter: Adapter) -> None:
    def iterate(model: DistributedDataParallel, optimizer: Any, x: Tensor, step: int) -> None:
        skipped = 2 if step in (1, 4) else 3 if step == 2 and dist.get_rank() == 0 else None
        optimizer.zero_grad()
        model(x, skipped).square().sum().backward()
        optimizer.step()

    _compare(adapter, _attached(adapter, schedule="after_backward"), iterate=iterate, find_unused_parameters=True)


@requirement("OVL-9", "Gradients accumulated under no_sync() are counted.", tier=3)
def accumulates(adapter: Adapter) -> None:
    def iterate(model: DistributedDataParallel, optimizer: Any, x: Tensor, step: int) -> None:
        optimizer.zero_grad()
        with model.no_sync():
            model(x * 0.5).square().sum().backward()
        model(x).square().sum().backward()
        optimizer.step()

    _compare(adapter, _attached(adapter, gather="lazy"), iterate=iterate)


@requirement("OVL-10", "Clipping in `on_step` gives torch's norm and torch's update.", tier=3)
def clips(adapter: Adapter) -> None:
    norms: list[float] = []

    def iterate(model: DistributedDataParallel, optimizer: Any, x: Tensor, step: int) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        if isinstance(optimizer, zerolap.ZeroRedundancyOptimizer):
            norms.append(optimizer.clip_grad_norm_(0.5).item())
        else:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()

    _compare(
        adapter,
        _attached(adapter, schedule="on_step"),
        iterate=iterate,
        options=SGD,
        cls=torch.optim.SGD,
        tolerance=1e-5,
    )
    for theirs, ours in zip(norms[::2], norms[1::2], strict=True):
        assert abs(ours / theirs - 1) < 1e-4, f"the norm: torch's is {theirs}, ours {ours}"


@requirement("OVL-11", "An overflow on one rank skips the same step on all.", tier=3)
def skips_together(adapter: Adapter) -> None:
    device = device_of(adapter)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Model().to(device), bucket_cap_mb=BUCKET_MB)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, **SGD)
    handle = zerolap.attach(ddp, zero, schedule="on_step", adapter=adapter)
    scaler = zerolap.GradScaler(device.type, init_scale=64.0)
    for step in range(6):
        factor = float("inf") if step == 3 and dist.get_rank() == dist.get_world_size() - 1 else 1.0
        zero.zero_grad()
        scaler.scale(ddp(torch.ones(2, 31, device=device)).sum() * factor).backward()
        scaler.step(zero)
        scaler.update()
    expect(handle.stats().num_updates, 5, "updates in 6 iterations, one of which overflowed")
    expect(all(bool(torch.isfinite(p).all()) for p in ddp.parameters()), True, "whether all parameters are finite")


@requirement("OVL-12", "Master weights keep what parameters of 16 bits lose.", tier=3)
def keeps_masters(adapter: Adapter) -> None:
    device, num_ranks = device_of(adapter), dist.get_world_size()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model().to(device, torch.bfloat16))
    ddp, oracle = DistributedDataParallel(models[0], bucket_cap_mb=BUCKET_MB), models[1]
    options: dict[str, Any] = {"lr": 1e-4, "fused": False}
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, **options)
    zerolap.attach(ddp, zero, adapter=adapter, master_weights=True, reduce_dtype=torch.float32)
    masters = [nn.Parameter(p.detach().float()) for p in oracle.parameters()]
    plain = torch.optim.SGD(masters, **options)
    before = [p.detach().cpu().clone() for p in oracle.parameters()]
    for step in range(40):  # each is less than a 16-bit parameter can hold
        x = torch.randn(2, 31, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        for model in (ddp, oracle):
            model.zero_grad()
            model(x.to(device, torch.bfloat16)).float().sum().backward()
        for param, master in zip(oracle.parameters(), masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
            dist.all_reduce(master.grad)
            master.grad.mul_(1 / num_ranks)
        plain.step()
        with torch.no_grad():
            for param, master in zip(oracle.parameters(), masters, strict=True):
                param.copy_(master)
    has_moved = any(not torch.equal(p.detach().cpu(), old) for p, old in zip(ddp.parameters(), before, strict=True))
    expect(has_moved, True, "whether 40 small steps moved any parameter: without masters they do not")
    # Where sums are taken in another order than the oracle's, a parameter may be rounded to its neighbour.
    limit = 0.0 if num_ranks <= 2 else 2**-8
    for (name, ours), theirs in zip(ddp.module.named_parameters(), oracle.parameters(), strict=True):
        expect_close(ours, theirs, name, tolerance=limit)


@requirement("OVL-13", "State that is consolidated is that of the plain optimizer.", tier=3)
def consolidates(adapter: Adapter) -> None:
    held: dict[str, Any] = {}

    def iterate(model: DistributedDataParallel, optimizer: Any, x: Tensor, step: int) -> None:
        _iterate(model, optimizer, x, step)
        held["ours" if isinstance(optimizer, zerolap.ZeroRedundancyOptimizer) else "plain"] = optimizer

    _compare(adapter, _attached(adapter), iterate=iterate)
    held["ours"].consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        states = held["ours"].state_dict()["state"]
        for index, state in held["plain"].state_dict()["state"].items():
            for key in ("exp_avg", "exp_avg_sq"):
                expect_close(states[index][key], state[key], f"{key} of parameter {index}", tolerance=_tolerance())


@requirement("OVL-14", "After detach() DDP averages gradients again, and the optimizer can be attached anew.", tier=3)
def detaches(adapter: Adapter) -> None:
    handles: list[zerolap.Handle] = []

    def overlap(ddp: DistributedDataParallel, zero: zerolap.ZeroRedundancyOptimizer) -> None:
        handles.append(zerolap.attach(ddp, zero, adapter=adapter))

    def iterate(model: DistributedDataParallel, optimizer: Any, x: Tensor, step: int) -> None:
        if step == 3 and isinstance(optimizer, zerolap.ZeroRedundancyOptimizer):
            handles[0].detach()
            zerolap.attach(model, optimizer, adapter=adapter, schedule="on_step", gather="lazy")
        _iterate(model, optimizer, x, step)

    _compare(adapter, overlap, iterate=iterate)


@requirement("OVL-15", "Gradients that are freed once they were used leave the numbers as they are.", tier=3)
def frees_gradients(adapter: Adapter) -> None:
    for schedule, gather in (("interleaved", "eager"), ("interleaved", "lazy"), ("on_step", "eager")):
        freed = _attached(adapter, schedule=schedule, gather=gather, shard_gradients=True)
        _compare(adapter, freed, cls=torch.optim.SGD, options=SGD, make_model=_Large)
    _compare(adapter, _attached(adapter, schedule="after_backward", shard_gradients=True))


class _Large(Model):
    """Layers of more than some pages of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((31, 1537, 389, 1021, 31)))


@requirement(
    "OVL-16",
    "Two optimizers of one model, of which one needs whole parameters, give the numbers of DDP + the plain ones.",
    tier=3,
)
def takes_several_optimizers(adapter: Adapter) -> None:
    for options in (
        {"schedule": "interleaved", "gather": "lazy"},
        {"schedule": "after_backward", "shard_gradients": True},
        {"schedule": "on_step", "gather": "lazy"},
    ):
        _compare_two(adapter, **options)


def _compare_two(adapter: Adapter, **options: Any) -> zerolap.Handle:
    """Matrices by one class and the rest by another, beside DDP + the plain ones."""
    device = device_of(adapter)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(DistributedDataParallel(Model().to(device), bucket_cap_mb=2 * BUCKET_MB))
    oracle, ours = models
    oracle.register_comm_hook(None, allreduce_hook)
    plain: list[Any] = []
    sharded: list[Any] = []
    for number, (cls, how) in enumerate(((_NotElementwise, SGD), (torch.optim.AdamW, ADAMW))):
        theirs, mine = ([p for p in model.parameters() if (p.ndim == 2) == (number == 0)] for model in models)
        plain.append(cls(theirs, **how))
        sharded.append(zerolap.ZeroRedundancyOptimizer(mine, cls, overlap_with_ddp=True, **how))
    handle = zerolap.attach(ours, sharded, adapter=adapter, **options)
    for step in range(NUM_STEPS):
        x = torch.randn(4, 31, generator=torch.Generator().manual_seed(100 * step + dist.get_rank())).to(device)
        for model, optimizers in ((oracle, plain), (ours, sharded)):
            model(x).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for (name, a), b in zip(ours.module.named_parameters(), oracle.module.parameters(), strict=True):
            expect_close(a, b, f"{options}, step {step}, {name}", tolerance=_tolerance())
    return handle


@requirement(
    "OVL-17",
    "Of parameters that stay whole no rank keeps, or sends, much more than the others.",
    tier=3,
    min_ranks=2,
)
def shares_whole_parameters_evenly(adapter: Adapter) -> list[str]:
    device, num_ranks = device_of(adapter), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32, bias=False) for _ in range(4 * num_ranks)]
    ddp = DistributedDataParallel(nn.Sequential(*layers).to(device), bucket_cap_mb=BUCKET_MB)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), _NotElementwise, overlap_with_ddp=True, **SGD)
    handle = zerolap.attach(ddp, zero, adapter=adapter)
    for _ in range(4):
        ddp(torch.ones(2, 32, device=device)).sum().backward()
        zero.step()
        zero.zero_grad()
    stats = handle.stats()
    held = torch.tensor([stats.state_bytes, stats.sent_bytes], dtype=torch.int64)
    most = held.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(held)
    state, sent = (most * num_ranks / held).tolist()
    expect_close(torch.tensor(state), torch.tensor(1.0), "the state of the busiest rank, by the mean", tolerance=0.05)
    assert sent <= 1.3, f"the rank that sends most sends {sent:.2f} of the mean"
    return [f"busiest rank: {state:.2f} of the mean in state, {sent:.2f} in bytes sent"]
