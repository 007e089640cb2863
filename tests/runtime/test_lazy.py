"""Parameters that are still on their way: whoever reaches them waits, and whoever writes to them too early is told."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

import zerolap
from support.late import Late
from support.ranks import on_ranks
from support.training import assert_same_params, backward, batches, iterate, num_in_flight, pair
from zerolap_conformance.ranks import try_ranks

SCHEDULES = ("interleaved", "after_backward", "on_step")


def _both(schedule: str) -> tuple[tuple[DDP, Any], tuple[DDP, Any], zerolap.Handle]:
    """The oracle with the plain optimizer, and ours with lazy gathers."""
    oracle, ours = pair()
    plain = torch.optim.AdamW(oracle.parameters(), lr=0.01)
    zero = zerolap.ZeroRedundancyOptimizer(
        ours.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.01, fused=False
    )
    handle = zerolap.attach(ours, zero, schedule=schedule, gather="lazy", adapter=Late())  # type: ignore[arg-type]
    return (oracle, plain), (ours, zero), handle


def _num_late(zero: Any) -> int:
    return num_in_flight(zero)


# --- reached through the optimizer ------------------------------------------------------------------------------------

WAYS_IN: dict[str, Callable[[Any], Iterator[Tensor]]] = {
    "item": lambda opt: (p for group in opt.param_groups for p in group["params"]),
    "get": lambda opt: (p for group in opt.param_groups for p in group.get("params")),
    "items": lambda opt: (p for group in opt.param_groups for key, v in group.items() if key == "params" for p in v),
    "values": lambda opt: (p for group in opt.param_groups for v in group.values() if isinstance(v, list) for p in v),
    "dict": lambda opt: (p for group in opt.param_groups for p in dict(group)["params"]),
    "unpacked": lambda opt: (p for group in opt.param_groups for p in {**group}["params"]),
    "copy": lambda opt: (p for group in opt.param_groups for p in group.copy()["params"]),
    "copy.copy": lambda opt: (p for group in opt.param_groups for p in copy.copy(group)["params"]),
    "or": lambda opt: (p for group in opt.param_groups for p in (group | {})["params"]),
    "right or": lambda opt: (p for group in opt.param_groups for p in ({} | group)["params"]),
    "update": lambda opt: (p for group in opt.param_groups for p in _updated(group)["params"]),
    "setdefault": lambda opt: (p for group in opt.param_groups for p in group.setdefault("params", [])),
    "optim": lambda opt: (
        (p for group in opt.param_groups for p in group["params"])
        if isinstance(opt, torch.optim.AdamW)
        else iter(_by_optim(opt))
    ),
    "_all_params": lambda opt: iter(getattr(opt, "_all_params", None) or opt.param_groups[0]["params"]),
}


def _updated(group: Any) -> dict[str, Any]:
    made: dict[str, Any] = {}
    made.update(group)
    return made


def _by_optim(opt: Any) -> list[Tensor]:
    assert opt.optim.param_groups
    return [p for group in opt.param_groups for p in dict.__getitem__(group, "params")]


@on_ranks(2)
def test_every_way_through_the_optimizers_groups_waits() -> None:
    (oracle, plain), (ours, zero), _ = _both("interleaved")
    ways = list(WAYS_IN.items())
    num_late = 0
    for i, x in enumerate(batches(2 * len(ways))):
        name, reach = ways[i % len(ways)]
        for model, optimizer in ((oracle, plain), (ours, zero)):
            iterate(model, optimizer, x)
            if model is ours:
                num_late += bool(_num_late(zero))
            with torch.no_grad():
                for param in reach(optimizer):
                    param.data.clamp_(-0.2, 0.2)  # not seen by autograd: it must have waited
        assert not _num_late(zero), name
        assert_same_params(ours, oracle, name)
    assert num_late > len(ways), "nothing was ever late"


class Lookahead:
    """As its authors' implementations do it: round an optimizer, over its groups."""

    def __init__(self, optimizer: Any, *, every: int = 2, alpha: float = 0.5) -> None:
        self.optimizer, self.param_groups, self.every, self.alpha = optimizer, optimizer.param_groups, every, alpha
        self.num_steps = 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()
        self.num_steps += 1
        if self.num_steps % self.every:
            return
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, q in zip(group["params"], slow, strict=True):
                q.add_(p.data - q, alpha=self.alpha)
                p.data.copy_(q)


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(2)
def test_lookahead_and_moving_averages_round_the_optimizer_are_those_of_the_plain_one(schedule: str) -> None:
    (oracle, plain), (ours, zero), _ = _both(schedule)
    shadows = [[p.detach().clone() for p in model.parameters()] for model in (oracle, ours)]
    averages = [AveragedModel(model.module) for model in (oracle, ours)]
    wrapped = [Lookahead(plain), Lookahead(zero)]
    for x in batches(7):
        for model, optimizer, shadow, average in zip((oracle, ours), wrapped, shadows, averages, strict=True):
            iterate(model, optimizer, x)
            params = list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))
            torch._foreach_lerp_(shadow, [p.detach() for p in params], 0.1)
            average.update_parameters(model.module)
        assert_same_params(ours, oracle, schedule)
    assert all(torch.equal(a, b) for a, b in zip(*shadows, strict=True)), "the moving averages differ"
    assert_same_params(averages[1], averages[0], "AveragedModel")


@on_ranks(2)
def test_schedulers_and_clearing_gradients_wait_for_nothing() -> None:
    (_, _), (ours, zero), handle = _both("on_step")
    scheduler = torch.optim.lr_scheduler.OneCycleLR(zero, max_lr=0.01, total_steps=20)
    for x in batches(4):
        iterate(ours, zero, x)
        expected = _num_late(zero)
        scheduler.step()
        for group in zero.param_groups:
            group["lr"] = group["lr"] * 0.9
            group.update(weight_decay=0.0)
            assert "params" in group
            assert next(iter(group)) == next(iter(group.keys())) == "params"
            assert len(group) > 5
        zero.zero_grad(set_to_none=False)
        zero.zero_grad()
        handle.stats()
        assert repr(zero)
        assert _num_late(zero) == expected > 0, "something waited"
    group = zero.param_groups[0]
    assert isinstance(group, dict)
    for made in (copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert type(made) is dict, "a copy is an ordinary group"
        assert [p.shape for p in made["params"]] == [p.shape for p in ours.parameters()]
    assert not _num_late(zero)
    held = zero.param_groups[0]
    handle.detach()
    assert zero.param_groups[0] is held
    held["lr"] = 0.5
    assert zero.param_groups[0]["lr"] == 0.5


# --- held by the user -------------------------------------------------------------------------------------------------


def _step_another_optimizer(params: list[Tensor], **options: Any) -> None:
    params[2].grad = torch.ones_like(params[2])
    torch.optim.AdamW(params[2:3], lr=0.1, **options).step()
    params[2].grad = None


@torch.inference_mode()
def _in_inference_mode(params: list[Tensor]) -> None:
    params[2].mul_(0.5)


WRITES: dict[str, Callable[[list[Tensor]], object]] = {
    "in place": lambda params: params[2].mul_(0.5),
    "detached": lambda params: params[2].detach().mul_(0.5),
    "a part": lambda params: params[2][:1].zero_(),
    "foreach": lambda params: torch._foreach_mul_([params[2], params[-1]], 0.5),
    "initialised": lambda params: nn.init.normal_(params[2]),
    "another optimizer": _step_another_optimizer,
    "inference mode": _in_inference_mode,
    # Not counted by autograd:
    "data": lambda params: params[2].data.mul_(0.5),
    "data clamped": lambda params: params[2].data.clamp_(-0.05, 0.05),
    "set by NumPy": lambda params: params[2].detach().numpy().fill(0.5),
    "fused": partial(_step_another_optimizer, fused=True),
}


def _write_held(schedule: str, write: str, *, ranks: tuple[int, ...] = (0, 1)) -> None:
    _, (ours, zero), _ = _both(schedule)
    held = list(ours.parameters())
    for i, x in enumerate(batches(6)):
        iterate(ours, zero, x)
        if i == 3 and dist.get_rank() in ranks:
            assert _num_late(zero)
            with torch.no_grad():
                WRITES[write](held)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_held_parameter_that_is_on_its_way_is_refused_on_all_ranks(write: str) -> None:
    schedule = SCHEDULES[list(WRITES).index(write) % 3]
    for outcome in try_ranks(2, _write_held, schedule, write):
        assert "layers.1.weight" in (outcome.error or ""), outcome.error
        assert "between their update and the end of their gather" in (outcome.error or ""), outcome.error
        assert "handle.finish()" in (outcome.error or ""), outcome.error


def test_a_write_by_one_rank_ends_the_others_too() -> None:
    start = time.monotonic()
    writer, other = try_ranks(2, _write_held, "on_step", "in place", ranks=(0,), group_timeout=20)
    assert "between their update and the end of their gather" in (writer.error or ""), writer.error
    assert "CollectiveError" in (other.error or ""), other.error
    assert time.monotonic() - start < 40


def _unused_until_the_next_update(schedule: str) -> None:
    """Nobody waits for the written parameter before the lane does."""
    _, (ours, zero), handle = _both(schedule)
    held = list(ours.parameters())
    for i, x in enumerate(batches(4)):
        zero.zero_grad()
        loss = ours(x).float().square().sum()
        if i == 2:
            del loss
            loss = ours(x).float().square().sum()
        loss.backward()
        zero.step()
    with torch.no_grad():
        torch._foreach_add_(held, 1.0)
    handle.finish()


def test_a_write_that_no_forward_meets_is_refused_by_whoever_waits_next() -> None:
    for outcome in try_ranks(2, _unused_until_the_next_update, "after_backward"):
        assert "between their update and the end of their gather" in (outcome.error or ""), outcome.error


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(2)
def test_a_write_behind_finish_counts(schedule: str) -> None:
    (oracle, plain), (ours, zero), handle = _both(schedule)
    held = [list(model.parameters()) for model in (oracle, ours)]
    for x in batches(6):
        for model, optimizer, params in zip((oracle, ours), (plain, zero), held, strict=True):
            iterate(model, optimizer, x)
            if model is ours:
                handle.finish()
            with torch.no_grad():
                torch._foreach_mul_(params, 0.9)
                params[1].data.add_(0.01)
    assert_same_params(ours, oracle, schedule)
    ours.load_state_dict({name: value + 1 for name, value in oracle.state_dict().items()})
    for x in batches(2):
        iterate(ours, zero, x)


@on_ranks(2)
def test_a_model_that_writes_to_its_own_parameters_is_right() -> None:
    """A model that writes to its own parameters, reached through modules, is nobody's mistake."""

    class Renormed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(13, 40), nn.Linear(40, 50)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.first.weight.clamp_(-0.25, 0.25)
                self.second.weight.mul_(0.999)
            out: Tensor = self.second(self.first(x))
            return out

    oracle, ours = pair(Renormed)
    plain = torch.optim.SGD(oracle.parameters(), lr=0.001)
    zero = zerolap.ZeroRedundancyOptimizer(
        ours.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.001, fused=False
    )
    zerolap.attach(ours, zero, gather="lazy", adapter=Late())
    for x in batches(6):
        for model, optimizer in ((oracle, plain), (ours, zero)):
            optimizer.zero_grad()
            backward(model, x)
            optimizer.step()
    assert_same_params(ours, oracle)


# --- compiled ---------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """A layer, a block, and one whose weight is used by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 40)
        self.block = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))
        self.borrowed = nn.Linear(40, 40)
        self.last = nn.Linear(40, 3)
        self.run_block: Callable[[Tensor], Tensor] = self._run_block
        self.borrow: Callable[[Tensor], Tensor] = self._borrow

    def _run_block(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return out

    def _borrow(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(x, self.borrowed.weight, self.borrowed.bias))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.borrow(self.run_block(self.first(x))))
        return out


def _compile(what: Any) -> Any:
    return torch.compile(what, backend="eager")  # what a backend makes of the graph is no matter here


def _error_of(program: Callable[[str], object], way: str) -> str:
    torch._dynamo.reset()
    try:
        program(way)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


BEFORE = {
    "model": "module",
    "model.compile": "module",
    "block": "module.block",
    "block.compile": "module.block",
    "block.compile on one rank": "module.block",
    "ddp.compile": "ddp itself",
    "scripted block": "module.block",
    "traced block": "module.block",
}


def _compile_before(way: str) -> None:
    model: Any = Blocks()
    match way:
        case "model":
            model = _compile(model)
        case "model.compile":
            model.compile(backend="eager")
        case "block":
            model.block = _compile(model.block)
        case "block.compile":
            model.block.compile(backend="eager")
        case "block.compile on one rank" if dist.get_rank() == 1:
            model.block.compile(backend="eager")
        case "scripted block":
            model.block = torch.jit.script(model.block)
        case "traced block":
            model.block = torch.jit.trace(model.block, torch.zeros(5, 40))
    ddp = DDP(model)
    if way == "ddp.compile":
        ddp.compile(backend="eager")
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    zerolap.attach(ddp, zero, schedule="auto" if way == "model" else "on_step", gather="lazy")


@on_ranks(2)
def test_lazy_gathers_of_what_is_compiled_are_refused_by_attach_on_all_ranks() -> None:
    for way, what in BEFORE.items():
        error = _error_of(_compile_before, way)
        assert 'use gather="eager" with torch.compile' in error, (way, error)
        assert f"which is {what}" in error, (way, error)


AFTER = ("ddp", "ddp, called before", "ddp.compile", "model.compile", "block", "block.compile", "function")


def _compile_after(way: str) -> None:
    ddp = DDP(Blocks(), bucket_cap_mb=0.004)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    called: Any = ddp
    if way == "ddp, called before":
        called = _compile(ddp)
        called(torch.zeros(5, 13))
    zerolap.attach(ddp, zero, gather="lazy", adapter=Late())
    if way != "ddp, called before":
        for x in batches(2):
            iterate(ddp, zero, x)
    match way:
        case "ddp":
            called = _compile(ddp)
        case "ddp.compile":
            ddp.compile(backend="eager")
        case "model.compile":
            ddp.module.compile(backend="eager")
        case "block":
            ddp.module.block = _compile(ddp.module.block)
        case "block.compile":
            ddp.module.block.compile(backend="eager")
        case "function":
            ddp.module.run_block = _compile(ddp.module._run_block)
    iterate(called, zero, torch.zeros(5, 13))


@on_ranks(2)
def test_lazy_gathers_are_refused_by_the_first_forward_of_what_was_compiled_later() -> None:
    torch._dynamo.config.optimize_ddp = False  # it takes no buckets as small as the tests'
    for way in AFTER:
        error = _error_of(_compile_after, way)
        assert 'use gather="eager" with torch.compile' in error, (way, error)


@on_ranks(2)
def test_a_compiled_function_that_uses_a_weight_without_its_module_waits_for_it() -> None:
    torch._dynamo.config.optimize_ddp = False  # it takes no buckets as small as the tests'
    models = []
    for lazy in (False, True):
        torch.manual_seed(0)
        ddp = DDP(Blocks(), bucket_cap_mb=0.004)
        ddp.module.borrow = _compile(ddp.module._borrow)
        opt: Any = torch.optim.SGD(ddp.parameters(), lr=0.1)
        if lazy:
            opt = zerolap.ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1, fused=False
            )
            zerolap.attach(ddp, opt, gather="lazy", adapter=Late())
        for x in batches(5):
            iterate(ddp, opt, x)
        models.append(ddp)
    assert_same_params(models[1], models[0])


@on_ranks(2)
def test_auto_leaves_lazy_gathers_out_where_a_module_was_compiled_after_attach() -> None:
    torch._dynamo.config.optimize_ddp = False  # it takes no buckets as small as the tests'
    ddp = DDP(Blocks(), bucket_cap_mb=0.004)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.01)
    handle = zerolap.attach(ddp, zero, schedule="auto")
    ddp.module.block.compile(backend="eager")
    for x in batches(100):
        iterate(ddp, zero, x)
        assert handle.gather == "eager"
        if handle.is_tuned:
            return
    raise AssertionError("not tuned after 100 iterations")


@pytest.mark.parametrize("kind", ["scripted", "traced"])
@on_ranks(2)
def test_a_part_in_torchscript_trains_as_ever_with_eager_gathers(kind: str) -> None:
    models = []
    for ours in (False, True):
        torch.manual_seed(0)
        model: Any = Blocks()
        block = model.block
        model.block = torch.jit.script(block) if kind == "scripted" else torch.jit.trace(block, torch.zeros(5, 40))
        ddp = DDP(model, bucket_cap_mb=0.004)
        opt: Any = torch.optim.SGD(ddp.parameters(), lr=0.01)
        if ours:
            opt = zerolap.ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.01, fused=False
            )
            zerolap.attach(ddp, opt)
        for x in batches(5):
            iterate(ddp, opt, x)
        models.append(ddp)
    for a, b in zip(models[1].parameters(), models[0].parameters(), strict=True):
        # TorchScript fuses after some runs, which it counts over both models: the last bit may differ.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=kind)
