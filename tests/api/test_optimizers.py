"""Every optimizer class of torch, and a user's own, sharded inside backward: the plain optimizer's numbers, bit for bit."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import zerolap
from support.ranks import on_ranks
from support.training import HOOK_MAKERS, Mlp, assert_same_params, backward, batches, iterate, overlapped, pair
from zerolap_conformance.ranks import run_ranks, try_ranks

REFUSED = {"LBFGS": "cannot be sharded", "SparseAdam": "sparse gradients are not supported"}

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, {"lr": 0.1, "fused": True}],
    "Adam": [{"lr": 0.01, "amsgrad": True}, {"lr": 0.01, "foreach": True}, {"lr": 0.01, "fused": True}],
    "AdamW": [{"lr": 0.01}, {"lr": torch.tensor(0.01)}, {"lr": 0.01, "fused": True}],
    "RMSprop": [{"lr": 0.01, "momentum": 0.5, "centered": True}],
    "Adagrad": [{"lr": 0.01}, {"lr": 0.01, "fused": True, "initial_accumulator_value": 0.1}],
}


class OddOptimizer(Optimizer):
    """What people write: state in the instance, in the group and in the state, marks on parameters, and no closure."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})
        self.num_steps = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if p.grad is None or not p.requires_grad:
                    continue
                history = self.state[p].setdefault("history", [])
                history.append(p.grad.sum())
                self.state[p]["note"] = f"step {self.num_steps}"
                p.sub_(p.grad, alpha=group["lr"] * getattr(p, "boost", 1.0) / (self.num_steps + group["calls"]))
                p.sub_(history[0], alpha=1e-3)


def _compare(cls: Any, defaults: dict[str, Any], ours: DDP, oracle: DDP, params: Any, hook_maker: Any) -> Any:
    plain = cls(params(oracle), **defaults)
    zero = overlapped(ours, params(ours), cls, hook_maker=hook_maker, shard_buckets=True, **defaults)
    for i, x in enumerate(batches(4)):
        iterate(oracle, plain, x)
        iterate(ours, zero, x)
        assert_same_params(ours, oracle, (cls.__name__, defaults, hook_maker.__name__, f"iteration {i}"))
    zero.consolidate_state_dict(to=0)
    return plain, zero


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def _all_params(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def _every_class() -> list[str]:
    done = []
    for name, cls in sorted(vars(torch.optim).items()):
        if not (inspect.isclass(cls) and issubclass(cls, Optimizer)) or cls is Optimizer or name in REFUSED:
            continue
        for defaults in OPTIONS.get(name, [{"lr": 0.01}]):
            for hook_maker in HOOK_MAKERS:
                oracle, ours = pair()
                params = _matrices if name == "Muon" else _all_params
                plain, zero = _compare(cls, defaults, ours, oracle, params, hook_maker)
                if torch.distributed.get_rank() == 0:
                    theirs, mine = plain.state_dict(), zero.state_dict()
                    torch.testing.assert_close(mine["state"], theirs["state"], rtol=0, atol=0)
                    assert mine["param_groups"] == theirs["param_groups"], name
        done.append(name)
    return done


def test_every_class_of_torch_is_bitwise_the_plain_optimizer() -> None:
    names = set(run_ranks(2, _every_class)[0])
    assert names >= {
        *("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"),
        *("Adafactor", "Muon"),
    }


@on_ranks(2)
def test_a_users_own_class_with_state_everywhere_is_bitwise_the_plain_one() -> None:
    for hook_maker in HOOK_MAKERS:
        oracle, ours = pair()
        for model in (oracle, ours):
            for i, p in enumerate(model.parameters()):
                p.boost = 1 + i / 10
        plain, zero = _compare(OddOptimizer, {"lr": 0.05}, ours, oracle, _all_params, hook_maker)
        assert zero.param_groups[0]["calls"] == plain.param_groups[0]["calls"] == 4
        if torch.distributed.get_rank() == 0:
            assert zero.state_dict()["state"][0]["note"] == "step 4"
            for index, state in plain.state_dict()["state"].items():
                assert zero.state_dict()["state"][index] == state


class HookedSgd(torch.optim.SGD):
    """A class that hooks its own step()."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, foreach=True)
        self.register_step_pre_hook(_halve_rate)


def _halve_rate(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] / 2


@on_ranks(2)
def test_hooks_of_step_are_called_as_with_a_plain_optimizer() -> None:
    ours, oracle = pair(Mlp, bucket_cap_mb=0.0005)
    _compare(HookedSgd, {"lr": 0.1}, ours, oracle, _all_params, HOOK_MAKERS[0])
    called: list[Optimizer] = []
    ours, _ = pair(Mlp, bucket_cap_mb=0.0005)
    hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: called.append(optimizer))
    zero = overlapped(ours, ours.parameters(), torch.optim.SGD, hook_maker=HOOK_MAKERS[0], lr=0.1)
    for x in batches(3):
        iterate(ours, zero, x)
    hook.remove()
    assert called == [zero] * 3


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(1)
def test_classes_that_cannot_be_sharded_are_refused_at_construction(name: str) -> None:
    for overlap in (False, True):
        with pytest.raises(ValueError, match=REFUSED[name]):
            zerolap.ZeroRedundancyOptimizer(Mlp().parameters(), getattr(torch.optim, name), overlap_with_ddp=overlap)


def _sparse_embedding() -> None:
    ddp = DDP(nn.Embedding(10, 4, sparse=True))
    overlapped(ddp, ddp.parameters(), torch.optim.SGD, lr=0.1)


def test_sparse_gradients_are_refused_when_the_hook_is_made() -> None:
    for outcome in try_ranks(2, _sparse_embedding):
        assert outcome.error is not None
        assert "use sparse=False" in outcome.error


# --- classes with modes -------------------------------------------------------------------------------------------------


class Averaging(torch.optim.Optimizer):
    """Trains on one point and is evaluated at another, the average of all of them, as schedule-free classes do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "trains": False, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["trains"], "call train() first"
            group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])
                    average = self.state[param].setdefault("average", param.clone())
                    average.lerp_(param, 1 / group["count"])

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def _switch(self, trains: bool) -> None:
        for group in self.param_groups:
            for param in group["params"] if group["trains"] != trains else ():
                if "average" in self.state[param]:
                    kept = param.clone()
                    param.copy_(self.state[param]["average"])
                    self.state[param]["average"].copy_(kept)
            group["trains"] = trains


@on_ranks(2)
def test_modes_of_a_class_are_switched_on_the_shards_and_seen_on_all_ranks() -> None:
    ways: list[dict[str, Any] | None] = [None, {"gather": "lazy"}, {"schedule": "on_step", "shard_gradients": True}]
    for way in ways:
        oracle, ours = pair()
        plain = Averaging(oracle.parameters())
        zero = zerolap.ZeroRedundancyOptimizer(ours.parameters(), Averaging, overlap_with_ddp=way is not None)
        handle = None if way is None else zerolap.attach(ours, zero, **way)
        for x in batches(4):
            for optimizer, model in ((plain, oracle), (zero, ours)):
                optimizer.train()
                optimizer.zero_grad()
                backward(model, x)
                optimizer.step()
                optimizer.eval()
            assert_same_params(ours, oracle, (way, "evaluated"))
            assert not zero.param_groups[0]["trains"]
            for optimizer in (plain, zero):
                optimizer.train()
            assert_same_params(ours, oracle, (way, "trained"))
        if handle is not None:
            handle.audit()
    assert not hasattr(zerolap.ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD), "train")
