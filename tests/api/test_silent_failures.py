"""What torch's own overlap gets silently wrong. Each case equals the oracle with zerolap, and fails with torch's version.

torch's hook refuses Gloo; that refusal is bypassed here, so that what fails is the flaw and not the refusal.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.training import HOOK_MAKERS, SMALL_BUCKETS, Mlp, assert_same_params, backward, batches
from zerolap_conformance.ranks import run_ranks, try_ranks


class Implementation(NamedTuple):
    optimizer: Any
    hook_maker: Callable[..., Any]


def ours(which: int) -> Implementation:
    return Implementation(zerolap.ZeroRedundancyOptimizer, HOOK_MAKERS[which])


def torchs() -> Implementation:
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class Disguise(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return (lambda *_: "nccl") if name == "get_backend" else getattr(dist, name)

    ddp_zero_hook.dist = Disguise("dist")
    return Implementation(ZeroRedundancyOptimizer, ddp_zero_hook.hook_with_zero_step)


class Pair:
    """The oracle and the implementation under test, on equal models."""

    def __init__(
        self,
        implementation: Implementation,
        make_model: Callable[[], nn.Module],
        cls: Any = torch.optim.AdamW,
        *,
        groups: Callable[[nn.Module], Any] = lambda model: model.parameters(),
        process_group: Any = None,
        defaults: dict[str, Any] | None = None,
        **ddp_options: Any,
    ) -> None:
        defaults = defaults if defaults is not None else {"lr": 0.05, "weight_decay": 0.1}
        torch.manual_seed(0)
        self.oracle = DDP(make_model(), bucket_cap_mb=SMALL_BUCKETS, process_group=process_group, **ddp_options)
        torch.manual_seed(0)
        self.ddp = DDP(make_model(), bucket_cap_mb=SMALL_BUCKETS, process_group=process_group, **ddp_options)
        self.plain = cls(groups(self.oracle), **defaults)
        self.zero = implementation.optimizer(
            groups(self.ddp), cls, process_group=process_group, overlap_with_ddp=True, **defaults
        )
        self.ddp.register_comm_hook(process_group, implementation.hook_maker(allreduce_hook, self.ddp, self.zero))

    def iterate(self, x: Tensor, what: object) -> None:
        for model, optimizer in ((self.oracle, self.plain), (self.ddp, self.zero)):
            optimizer.zero_grad()
            backward(model, x)
            optimizer.step()
        assert_same_params(self.ddp, self.oracle, what)


class Branches(nn.Module):
    """A trunk, a branch that nobody uses, and one that only rank 0 uses, and that only in some iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(13, 30)
        self.unused = nn.Linear(30, 30)
        self.sometimes = nn.Linear(30, 30)
        self.head = nn.Linear(30, 3)
        self.iteration = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        if dist.get_rank() == 0 and self.iteration % 2:
            x = self.sometimes(x)
        self.iteration += 1
        return self.head(x)


def unused_parameters(implementation: Implementation) -> None:
    pair = Pair(implementation, Branches, find_unused_parameters=True)
    before = [p.detach().clone() for p in pair.ddp.module.unused.parameters()]
    for i, x in enumerate(batches(6)):
        pair.iterate(x, f"iteration {i}")
    for p, old in zip(pair.ddp.module.unused.parameters(), before, strict=True):
        assert torch.equal(p, old), "a parameter that no rank used has changed"
        assert not pair.plain.state.get(p)
    pair.zero.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert sorted(pair.zero.state_dict()["state"]) == sorted(pair.plain.state_dict()["state"])


def sub_group(implementation: Implementation) -> None:
    group = dist.new_group([2, 3])
    if dist.get_rank() < 2:
        return
    pair = Pair(implementation, Mlp, process_group=group)
    for i, x in enumerate(batches(5)):
        pair.iterate(x, f"iteration {i}")


def lr_scheduler(implementation: Implementation) -> None:
    pair = Pair(implementation, Mlp)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5) for o in (pair.plain, pair.zero)]
    for i, x in enumerate(batches(6)):
        pair.iterate(x, f"iteration {i}")
        for scheduler in schedulers:
            scheduler.step()


def _two_groups(model: nn.Module) -> Any:
    return [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim != 2], "lr": 0.002, "weight_decay": 0.0},
    ]


def _three_groups(model: nn.Module) -> Any:
    params = list(model.parameters())
    return [
        {"params": params[:2], "betas": (0.5, 0.6), "amsgrad": True},
        {"params": params[2:7], "lr": 0.3, "maximize": True},
        {"params": params[7:], "eps": 1e-3},
    ]


def two_param_groups(implementation: Implementation) -> None:
    pair = Pair(implementation, Mlp, torch.optim.SGD, groups=_two_groups, defaults={"lr": 0.05, "momentum": 0.9})
    for i, x in enumerate(batches(5)):
        pair.iterate(x, f"iteration {i}")


def three_param_groups(implementation: Implementation) -> None:
    pair = Pair(implementation, Mlp, groups=_three_groups)
    for i, x in enumerate(batches(5)):
        pair.iterate(x, f"iteration {i}")


def first_iterations(implementation: Implementation) -> None:
    for static_graph in (False, True):
        pair = Pair(implementation, Mlp, static_graph=static_graph)
        for i, x in enumerate(batches(4)):
            pair.iterate(x, f"static_graph={static_graph}, iteration {i}")


SCENARIOS: dict[str, tuple[int, Callable[[Implementation], None]]] = {
    "unused_parameters": (2, unused_parameters),
    "sub_group": (4, sub_group),
    "lr_scheduler": (2, lr_scheduler),
    "two_param_groups": (2, two_param_groups),
    "three_param_groups": (2, three_param_groups),
    "first_iterations": (2, first_iterations),
}


def _run_ours(name: str) -> None:
    for which in range(len(HOOK_MAKERS)):
        SCENARIOS[name][1](ours(which))


def _run_torchs(name: str) -> None:
    SCENARIOS[name][1](torchs())


@pytest.mark.parametrize("name", SCENARIOS)
def test_zerolap_equals_the_oracle_where_torch_fails(name: str) -> None:
    world_size, _ = SCENARIOS[name]
    run_ranks(world_size, _run_ours, name)
    outcomes = try_ranks(world_size, _run_torchs, name, limit=60, group_timeout=10)
    assert any(outcome.error for outcome in outcomes), "torch's version passes: the claim in the docs is out of date"


def _save_after_three(folder: str, which: int) -> None:
    pair = Pair(ours(which), Mlp, groups=_two_groups)
    for i, x in zip(range(3), batches(6), strict=False):
        pair.iterate(x, i)
    pair.zero.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        torch.save({"model": pair.ddp.module.state_dict(), "optimizer": pair.zero.state_dict()}, Path(folder, "saved"))


def _load_and_continue(folder: str, which: int) -> None:
    saved = torch.load(Path(folder, "saved"), weights_only=True)
    fresh = Pair(ours(which), Mlp, groups=_two_groups)
    fresh.ddp.module.load_state_dict(saved["model"])
    fresh.zero.load_state_dict(saved["optimizer"])  # before the first backward: no bucket has been seen yet
    for i, x in enumerate(batches(6)):
        fresh.plain.zero_grad()
        backward(fresh.oracle, x)
        fresh.plain.step()
        if i < 3:
            continue  # the oracle never stopped
        fresh.zero.zero_grad()
        backward(fresh.ddp, x)
        assert_same_params(fresh.ddp, fresh.oracle, f"iteration {i}")


@pytest.mark.parametrize("which", [0, 1])
def test_a_checkpoint_under_overlap_continues_bit_for_bit_in_fresh_processes(tmp_path: Path, which: int) -> None:
    run_ranks(2, _save_after_three, str(tmp_path), which)
    run_ranks(2, _load_and_continue, str(tmp_path), which)
    run_ranks(4, _load_only, str(tmp_path))


def _load_only(folder: str) -> None:
    """The same file serves another number of ranks, and the plain optimizer."""
    saved = torch.load(Path(folder, "saved"), weights_only=True)
    pair = Pair(ours(0), Mlp, groups=_two_groups)
    for model, optimizer in ((pair.oracle, pair.plain), (pair.ddp, pair.zero)):
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for i, x in enumerate(batches(3)):
        pair.iterate(x, f"iteration {i} at 4 ranks")


def _consolidate_with_torchs() -> None:
    implementation = torchs()
    pair = Pair(implementation, Mlp)
    for x in batches(4):
        pair.zero.zero_grad()
        backward(pair.ddp, x)
    pair.zero.consolidate_state_dict(to=0)


def test_torch_cannot_save_a_checkpoint_under_overlap() -> None:
    outcomes = try_ranks(2, _consolidate_with_torchs, limit=60, group_timeout=10)
    assert any("AttributeError" in (outcome.error or "") for outcome in outcomes)
