"""A plain optimizer is enough: ``zerolap.shard`` makes a sharded one of it, with its state, options, schedulers and hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.ranks import on_ranks
from support.training import Mlp, assert_same_params, batches, iterate, pair
from zerolap_conformance.ranks import run_ranks, try_ranks

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, 0.01, (0.8, 0.99), amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
    "unusual": lambda params: Unusual(params, torch.tensor(0.5), name="x"),
}


class Unusual(torch.optim.Optimizer):
    """What cannot be told from its defaults: arguments that its constructor only keeps, and a hook of its own."""

    def __init__(self, params: Any, decay: Tensor, *, name: str) -> None:
        super().__init__(params, {"lr": 0.1})
        self.decay, self.name, self.seen = decay, name, 0
        self.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        assert isinstance(self, Unusual)
        self.seen += 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["mean"] = state.get("mean", 0) * self.decay + param.grad
                param -= group["lr"] * state["mean"] / (1 + self.seen)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    layers = model.module.layers
    return [
        {"params": list(layers[0].parameters()), "tag": "first"},
        {"params": [each for layer in layers[1:] for each in layer.parameters()], "lr": 0.02},
    ]


def _assert_share(optimizer: Any, whole: int) -> None:
    """About 1/n of the state is here: fails where the optimizer was not sharded."""
    held = sum(t.nbytes for state in optimizer.optim.state.values() for t in state.values() if isinstance(t, Tensor))
    assert 0 < held <= 0.6 * whole, (held, whole)


def num_bytes(optimizer: Any) -> int:
    return sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))


def _all_ways(name: str) -> None:
    for num_before, is_loaded in ((0, False), (2, False), (2, True)):
        oracle, ours = pair()
        plain, mine = (MAKERS[name](groups_of(model)) for model in (oracle, ours))
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (plain, mine)]
        seen: list[int] = []
        mine.register_step_post_hook(lambda *_, seen=seen: seen.append(1))
        for x in batches(num_before):
            for model, optimizer, scheduler in zip((oracle, ours), (plain, mine), schedulers, strict=True):
                iterate(model, optimizer, x)
                scheduler.step()
        if is_loaded:
            mine.load_state_dict(copy.deepcopy(mine.state_dict()))
        groups, num_seen = mine.param_groups, len(seen)
        sharded = zerolap.shard(ours, mine)
        assert sharded is mine
        assert mine.param_groups is groups
        assert type(mine) is zerolap.ZeroRedundancyOptimizer
        assert not mine.state
        assert mine.handle.schedule == "on_step"
        assert mine.param_groups[0]["tag"] == "first"
        for x in batches(4):
            for model, optimizer, scheduler in zip((oracle, ours), (plain, mine), schedulers, strict=True):
                iterate(model, optimizer, x)
                scheduler.step()
            assert_same_params(ours, oracle, (name, num_before, is_loaded))
        assert [group["lr"] for group in mine.param_groups] == [group["lr"] for group in plain.param_groups]
        assert mine.param_groups[0]["lr"] < 0.1
        assert len(seen) == num_seen + 4
        _assert_share(mine, num_bytes(plain))
        mine.consolidate_state_dict(to=1)
        if dist.get_rank() == 1:
            saved, expected = mine.state_dict(), plain.state_dict()
            for group, whole in zip(saved["param_groups"], expected["param_groups"], strict=True):
                assert group == {**group, **whole}  # torch adds "differentiable" to what it loads


@pytest.mark.parametrize("name", MAKERS)
def test_a_plain_optimizer_becomes_a_sharded_one_at_any_time(name: str) -> None:
    run_ranks(2, _all_ways, name)


@on_ranks(2)
def test_without_the_line_the_share_is_all_of_it() -> None:
    (ours, _) = pair()
    plain = MAKERS["AdamW"](ours.parameters())
    iterate(ours, plain, next(batches(1)))
    plain.optim = plain  # as a sharded one shows its part
    with pytest.raises(AssertionError):
        _assert_share(plain, num_bytes(plain))


@on_ranks(2)
def test_several_plain_optimizers_with_every_schedule_and_option_of_attach() -> None:
    for how in (
        {"schedule": "interleaved", "gather": "lazy"},
        {"schedule": "after_backward"},
        {"shard_gradients": True},
    ):
        oracle, ours = pair()
        both = []
        for model in (oracle, ours):
            first, second = groups_of(model)
            both.append([MAKERS["SGD"]([first]), MAKERS["AdamW"]([second])])
        plain, mine = both
        sharded = zerolap.shard(ours, mine, **how)
        assert sharded is mine
        assert mine[0].handle is mine[1].handle
        for x in batches(3):
            oracle(x).sum().backward()
            ours(x).sum().backward()
            for optimizer in (*plain, *mine):
                optimizer.step()
            for optimizer in (*plain, *mine):
                optimizer.zero_grad()
            mine[0].handle.finish()
            assert_same_params(ours, oracle, how)


class Keeping(torch.optim.SGD):
    """Keeps a parameter, as an optimizer over all of them might."""

    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        super().__init__(params, lr=lr)
        self.first = {"of": params[:1]}


def _refused(what: str) -> None:
    ddp = DDP(Mlp())
    params = list(ddp.parameters())
    plain: Any = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    options: dict[str, Any] = {}
    if what == "part":
        plain = torch.optim.SGD(params[1:], lr=0.1)
    elif what == "option" and dist.get_rank() == 1:
        options["gather"] = "sometimes"
    elif what == "unknown":
        options["stage"] = 3
    elif what == "lr" and dist.get_rank() == 1:
        plain.param_groups[0]["lr"] = 0.2
    elif what == "state" and dist.get_rank() == 1:
        plain.state[params[0]]["momentum_buffer"] = torch.zeros_like(params[0])
    elif what == "keeps":
        plain = Keeping(params, lr=0.1)
    elif what == "replaced":
        plain.step = print
    elif what == "class":
        plain = torch.optim.SGD
    elif what == "sharded":
        plain = zerolap.ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    elif what == "twice":
        plain = [plain, plain]
    elif what == "lbfgs":
        plain = torch.optim.LBFGS(params)
    elif what == "module":
        ddp = ddp.module
    is_instance = isinstance(plain, torch.optim.Optimizer)
    groups = plain.param_groups if is_instance else []
    before = (type(plain), dict(vars(plain)), list(groups), [dict(each) for each in groups]) if is_instance else ()
    try:
        zerolap.shard(ddp, plain, **options)
    finally:
        if is_instance and what != "sharded":
            after = (type(plain), dict(vars(plain)), list(groups), [dict(each) for each in groups])
            assert after == before
            assert all(a is b for a, b in zip(after[2], before[2], strict=True))
            if what not in ("keeps", "replaced", "module", "lbfgs", "part"):  # trains as if nothing was
                iterate(ddp, plain, next(batches(1)))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("part", "trainable parameters of this DDP are not in the optimizer"),
        ("option", "gather must be one of"),
        ("unknown", "stage"),
        ("lr", "lr of param group 0 is 0.1 and 0.2"),
        ("state", "states differ between ranks"),
        ("keeps", "some of its parameters in its attribute 'first'"),
        ("replaced", "SGD.step was replaced on this optimizer by builtins.print"),
        ("class", "got the class SGD"),
        ("sharded", "is sharded already"),
        ("twice", "listed twice"),
        ("lbfgs", "LBFGS cannot be sharded"),
        ("module", "wrap the model first"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_on_all_ranks_and_stays_as_it_was(what: str, words: str) -> None:
    outcomes = try_ranks(2, _refused, what)
    assert all(outcome.error for outcome in outcomes), outcomes
    assert any(words in outcome.error for outcome in outcomes), outcomes


@on_ranks(2)
def test_a_step_by_an_old_reference_is_noticed() -> None:
    ddp = DDP(Mlp())
    plain = MAKERS["unusual"](ddp.parameters())
    old_step, old_state, old_group = plain.step, plain.state, plain.param_groups[0]
    iterate(ddp, plain, next(batches(1)))
    zerolap.shard(ddp, plain)
    assert not old_state
    assert not old_group
    ddp(next(batches(1))).sum().backward()
    before = [param.detach().clone() for param in ddp.parameters()]
    with pytest.raises((RuntimeError, AttributeError, AssertionError)):
        old_step()
    assert all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
    plain.step()


@on_ranks(1)
def test_one_rank_and_the_scheduler_does_not_warn() -> None:
    ddp = DDP(Mlp())
    plain = MAKERS["AdamW"](ddp.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(plain, max_lr=0.1, total_steps=10)
    zerolap.shard(ddp, plain)
    for x in batches(3):
        iterate(ddp, plain, x)
        scheduler.step()  # warnings are errors
    assert plain.param_groups[0]["lr"] == pytest.approx(scheduler.get_last_lr()[0])
