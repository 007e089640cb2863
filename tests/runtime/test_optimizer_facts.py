"""What an optimizer class does is tried before it is believed: a default, a claim or a table never changes the numbers."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

import zerolap
from support.ranks import on_ranks
from support.training import HOOK_MAKERS, Mlp, assert_same_params, backward, batches, iterate, pair
from zerolap.runtime import optimizer_facts
from zerolap_conformance.ranks import run_ranks, try_ranks

HALVES = (torch.bfloat16, torch.float16)

# --- fused implementations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("defaults", [{"lr": 0.05}, {"lr": 0.05, "momentum": 0.9}], ids=["plain", "momentum"])
@on_ranks(2)
def test_sgd_trains_in_16_bits_as_the_plain_one_does(defaults: dict[str, Any]) -> None:
    for dtype in HALVES:
        oracle, ours = pair(lambda dtype=dtype: Mlp(dtype))
        start = [param.detach().clone() for param in oracle.parameters()]
        zero = zerolap.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.SGD, overlap_with_ddp=True, **defaults)
        zerolap.attach(ours, zero)
        fused = zero.param_groups[0]["fused"]  # rounds otherwise, where it trains at all
        plain = torch.optim.SGD(oracle.parameters(), **defaults, fused=fused)
        for x in batches(4, dtype=dtype):
            iterate(oracle, plain, x)
            iterate(ours, zero, x)
        assert_same_params(ours, oracle, dtype)
        moved = sum(int((a != b).sum()) for a, b in zip(start, oracle.parameters(), strict=True))
        assert moved > 0.5 * sum(param.numel() for param in start), "the oracle trains"


def _chosen_fused(cls: Any, dtype: torch.dtype, defaults: dict[str, Any], **options: Any) -> Any:
    ddp = DDP(Mlp(dtype))
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), cls, overlap_with_ddp=True, **defaults)
    zerolap.attach(ddp, zero, **options)
    return zero.param_groups[0]["fused"]


def _fused_sgd_trains_halves() -> bool:
    """On the CPU it does nothing in many versions of torch."""
    param = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    torch.optim.SGD([param], lr=0.5, fused=True).step()
    return bool((param == 0.5).all())


class Own(torch.optim.AdamW):
    """A subclass, which may do anything with its options."""


@on_ranks(2)
def test_fused_is_the_default_where_it_gives_the_same() -> None:
    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    chosen = {
        "in full precision": _chosen_fused(adamw, torch.float32, {"lr": 1e-3}),
        "by masters": _chosen_fused(sgd, torch.bfloat16, {"lr": 0.1}, master_weights=True),
        "16 bits": _chosen_fused(sgd, torch.bfloat16, {"lr": 0.1}),
        "a small rate": _chosen_fused(sgd, torch.bfloat16, {"lr": 1e-7}),
        "as the user says": _chosen_fused(adamw, torch.float32, {"lr": 1e-3, "fused": False}),
        "foreach": _chosen_fused(adamw, torch.float32, {"lr": 1e-3, "foreach": True}),
        "another class": _chosen_fused(Own, torch.float32, {"lr": 1e-3}),
    }
    assert chosen == {
        "in full precision": True,
        "by masters": True,
        "16 bits": True if _fused_sgd_trains_halves() else None,
        "a small rate": True if _fused_sgd_trains_halves() else None,
        "as the user says": False,
        "foreach": None,
        "another class": None,
    }, chosen


@on_ranks(3)
def test_all_ranks_use_what_all_of_them_have_found() -> None:
    if dist.get_rank() == 1:
        module: Any = importlib.import_module("zerolap.api.attach")
        module.fused_is_same = lambda *args, **kwargs: False
    assert _chosen_fused(torch.optim.AdamW, torch.float32, {"lr": 1e-3}) is None


# --- cuts ---------------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Parameters so large that torch shares a kernel among threads, at odd places."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(n).to(dtype)) for n in (100_003, 70_001))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a * x[:1]).sum() + (self.b * x[1:2]).sum()


def _train_on_threads(num_threads: int) -> dict[str, Any]:
    torch.set_num_threads(num_threads)
    shares = {}
    for dtype in (torch.float32, *HALVES):
        for cls, defaults in (
            (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": False}),
            (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
            (torch.optim.AdamW, {"lr": 0.01, "fused": False}),
        ):
            if dtype is torch.float16 and cls is not torch.optim.SGD:
                continue  # the oracle itself divides by zero: their eps is none in this dtype
            oracle, ours = pair(lambda dtype=dtype: Wide(dtype), bucket_cap_mb=0.1)
            plain = cls(oracle.parameters(), **defaults)
            zero = zerolap.ZeroRedundancyOptimizer(ours.parameters(), cls, overlap_with_ddp=True, **defaults)
            zerolap.attach(ours, zero)
            for x in batches(4, (2,), dtype):
                for model, optimizer in ((oracle, plain), (ours, zero)):
                    optimizer.zero_grad()
                    # gradients of every element its own
                    (
                        model(x).float() + (model.module.a.float() ** 2).sum() + (model.module.b.float() ** 2).sum()
                    ).backward()
                    optimizer.step()
            assert_same_params(ours, oracle, (num_threads, dtype, cls.__name__))
            shares[f"{dtype} {cls.__name__}"] = sum(
                tensor.numel() for state in zero.optim.state.values() for tensor in state.values() if tensor.ndim
            )
    return shares


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_shards_are_bitwise_the_whole_for_any_number_of_threads(num_threads: int) -> None:
    shares = run_ranks(2, _train_on_threads, num_threads, limit=240)
    for name in shares[0]:
        one, other = (each[name] for each in shares)
        is_even = 0.98 < one / other < 1.02
        # Only where vectors and tails round differently, and threads make tails, are parameters left whole.
        assert is_even == (num_threads == 1 or "float32" in name or "AdamW" in name), (name, one, other)


@on_ranks(1)
def test_the_table_of_known_classes_is_what_trying_them_finds() -> None:
    torch.set_num_threads(1)
    wrong = []
    params = [nn.Parameter(torch.randn(shape)) for shape in ((64, 31), (9,), (5, 80))]
    known = optimizer_facts._SEPARABLE
    optimizer_facts._SEPARABLE = frozenset()
    for cls in known:
        mine = [param for param in params if param.ndim == 2 or cls.__name__ != "Muon"]
        given = cls(mine).param_groups
        factory: Callable[..., Any] = cls
        optimizer_facts.refuse_inseparable(factory, given)
        optimizer_facts.refuse_immovable(factory, given)
        for dtype in (torch.float32, torch.float64, *HALVES):
            cast = [
                {**group, "params": [nn.Parameter(p.detach().to(dtype)) for p in group["params"]]} for group in given
            ]
            cuts = optimizer_facts.exact_cuts(factory, cast, cut=64, stepped_as=lambda dtype: dtype)
            if (cuts[dtype] == 64) != (cls in optimizer_facts._ELEMENTWISE):
                wrong.append(f"{cls.__name__} {dtype}: {cuts}")
    assert wrong == [], wrong


class SaysItIsElementwise(torch.optim.SGD):
    """Scales every parameter's update by its norm, so it is not."""

    is_elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * (group["lr"] * param.norm() / (1 + param.grad.norm())))


class IsElementwise(torch.optim.SGD):
    is_elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                    moment.lerp_(param.grad, 0.1)
                    param.sub_(moment.sign() * group["lr"])


@on_ranks(2)
def test_a_claim_to_be_elementwise_is_tried_before_it_is_believed() -> None:
    has_parts = []  # of each class, whether this rank has a part of a parameter
    for cls in (SaysItIsElementwise, IsElementwise):
        oracle, ours = pair()
        plain = cls(oracle.parameters(), lr=0.01)
        zero = zerolap.ZeroRedundancyOptimizer(ours.parameters(), cls, overlap_with_ddp=True, lr=0.01)
        zerolap.attach(ours, zero)
        for x in batches(4):
            iterate(oracle, plain, x)
            iterate(ours, zero, x)
        assert_same_params(ours, oracle, cls.__name__)
        sizes = [param.numel() for param in ours.parameters()]
        pieces = [piece for local in zero._book.locals for piece in local.pieces]
        has_parts.append(any(piece.stop - piece.start < sizes[piece.param] for piece in pieces))
    assert has_parts == [False, True], has_parts


# --- what cannot be sharded, or moved -----------------------------------------------------------------------------------


class OverAll(Optimizer):
    """A class with one number over all parameters, such as those that look for their learning rate have."""

    def __init__(self, params: Any, lr: float = 1.0, kind: str = "distance", dtype: Any = None) -> None:
        super().__init__(params, {"lr": lr, "kind": kind, "d": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not held:
            return
        kind = held[0][0]["kind"]
        if kind == "norm":  # clipped by the norm of all gradients
            scale = 1 / max(1.0, float(torch.stack([p.grad.float().norm() for _, p in held]).norm()))
        elif kind == "distance":
            for _, p in held:
                self.state[p].setdefault("start", p.clone())
            inner = sum(float((p.grad * (self.state[p]["start"] - p)).sum()) for _, p in held)
            length = sum(float(p.grad.abs().sum()) for _, p in held)
            held[0][0]["d"] = scale = max(held[0][0]["d"], 10 * inner / length)
        else:  # counts its parameters
            scale = 1 / sum(p.numel() for _, p in held)
        for group, p in held:
            p.sub_(p.grad, alpha=group["lr"] * scale)


class AloneInItsState(Tensor):
    """A tensor with an inside of its own, as quantised states have."""


class Immovable(torch.optim.SGD):
    """State that is more than numbers, or is kept where nobody finds it."""

    def __init__(self, params: Any, lr: float, kind: str) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["kind"] = kind
        self.moments: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if group["kind"] == "subclass":
                    state.setdefault("moment", torch.zeros_like(param).as_subclass(AloneInItsState))
                elif group["kind"] == "object":
                    state.setdefault("helper", logging.getLogger("helper"))
                else:
                    moment = self.moments.setdefault(id(param), torch.zeros_like(param))
                    moment.mul_(0.9).add_(param.grad)
                    param.sub_(moment, alpha=group["lr"])
                param.sub_(param.grad, alpha=group["lr"])


def _refused(make: Callable[[], object]) -> str:
    try:
        make()
    except ValueError as error:
        return str(error)
    return "accepted"


@on_ranks(2)
def test_a_class_with_a_number_over_all_parameters_is_refused_at_construction() -> None:
    said = []
    for kind in ("distance", "norm", "count"):
        for dtype in (torch.float32, torch.bfloat16):
            for overlap in (False, True):
                ddp = DDP(Mlp(dtype))
                said.append(
                    _refused(
                        lambda ddp=ddp, kind=kind, overlap=overlap: zerolap.ZeroRedundancyOptimizer(
                            ddp.parameters(), OverAll, overlap_with_ddp=overlap, kind=kind
                        )
                    )
                )
    for message in said:
        assert "OverAll cannot be sharded: its update of one parameter depends on others" in message, message


@on_ranks(2)
def test_states_that_cannot_be_moved_are_refused_when_overlap_begins() -> None:
    said: dict[str, list[str]] = {}
    for kind in ("subclass", "object", "hidden"):
        for attach in (zerolap.attach, *HOOK_MAKERS):
            ddp = DDP(Mlp())
            zero = zerolap.ZeroRedundancyOptimizer(
                ddp.parameters(), Immovable, overlap_with_ddp=True, lr=0.1, kind=kind
            )
            args = (ddp, zero) if attach is zerolap.attach else (allreduce_hook, ddp, zero)
            said.setdefault(kind, []).append(_refused(lambda attach=attach, args=args: attach(*args)))
        plain = Mlp()
        zero = zerolap.ZeroRedundancyOptimizer(plain.parameters(), Immovable, lr=0.1, kind=kind)
        backward(plain, next(batches(1)))
        zero.step()  # states stay where they are
    for message in said["subclass"]:
        assert "its 'moment' is not a plain tensor but a AloneInItsState" in message, message
    for message in said["object"]:
        assert "the state of Immovable cannot be moved between ranks" in message, message
    for message in said["hidden"]:
        assert "it keeps something outside of its state" in message, message


@on_ranks(2)
def test_complex_parameters_are_refused_under_overlap() -> None:
    said = []
    for overlap in (False, True):
        params = [nn.Parameter(torch.randn(3, dtype=torch.complex64))]
        said.append(
            _refused(
                lambda params=params, overlap=overlap: zerolap.ZeroRedundancyOptimizer(
                    params, torch.optim.SGD, lr=0.1, overlap_with_ddp=overlap
                )
            )
        )
    alone, overlapping = said
    assert alone == "accepted", alone
    assert "complex parameters cannot be updated inside backward" in overlapping, overlapping


@on_ranks(2)
def test_trying_a_class_leaves_no_trace() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    ddp = DDP(nn.Linear(3, 3))
    torch.manual_seed(5)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), IsElementwise, overlap_with_ddp=True, lr=0.1)
    zerolap.attach(ddp, zero)
    assert torch.equal(torch.rand(3), expected)
    assert all(param.grad is None for param in ddp.parameters())


# --- options ------------------------------------------------------------------------------------------------------------


class PerKind(torch.optim.SGD):
    """A class whose groups have other defaults by kind, as those of matrix optimizers that bring an AdamW for the rest."""

    def __init__(self, params: Any, lr: float = 0.02, other_lr: float = 0.003) -> None:
        groups = list(params)
        for group in groups:
            group["lr"] = group.get("lr", lr if group["is_matrix"] else other_lr)
        super().__init__(groups, lr=lr)


@on_ranks(2)
def test_the_class_itself_fills_in_what_a_group_does_not_say() -> None:
    oracle, ours = pair()

    def groups(model: DDP) -> list[dict[str, Any]]:
        return [
            {"params": [p for p in model.parameters() if (p.ndim == 2) == is_matrix], "is_matrix": is_matrix}
            for is_matrix in (True, False)
        ]

    for defaults in ({}, {"lr": 0.05}):
        plain = PerKind(groups(oracle), **defaults)
        zero = zerolap.ZeroRedundancyOptimizer(groups(ours), PerKind, overlap_with_ddp=True, **defaults)
        assert [g["lr"] for g in zero.param_groups] == [g["lr"] for g in plain.param_groups]
        assert zero.defaults == plain.defaults
    plain, ours_alone = PerKind(groups(oracle)), zerolap.ZeroRedundancyOptimizer(groups(ours), PerKind)
    for optimizer in (plain, ours_alone):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))], "is_matrix": True, "momentum": 0.5})
    assert [{**g, "params": 0} for g in ours_alone.param_groups] == [{**g, "params": 0} for g in plain.param_groups]


def _differ_at_construction(what: str) -> None:
    is_second = dist.get_rank() == 1
    cls: Any = torch.optim.AdamW
    options: dict[str, Any] = {"lr": 0.01}
    if what == "class" and is_second:
        cls = torch.optim.Adam
    elif what == "lr" and is_second:
        options["lr"] = 0.1
    elif what == "tensor" and is_second:
        options["lr"] = torch.tensor(0.01)
    elif what == "betas":
        options["betas"] = (0.9, 0.95 if is_second else 0.999)
    zerolap.ZeroRedundancyOptimizer(Mlp().parameters(), cls, overlap_with_ddp=True, **options)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("class", "the optimizer's class is torch.optim.adamw.AdamW and torch.optim.adam.Adam"),
        ("lr", "lr of param group 0 is 0.01 and 0.1"),
        ("tensor", "lr of param group 0 is 0.01 and ['tensor'"),
        ("betas", "betas of param group 0 is ['0.9', '0.999'] and ['0.9', '0.95']"),
    ],
)
def test_class_and_options_that_differ_between_ranks_are_refused_at_construction(what: str, expected: str) -> None:
    for outcome in try_ranks(2, _differ_at_construction, what):
        assert outcome.error is not None
        assert "the optimizers of group ranks 0 and 1 differ" in outcome.error
        assert expected in outcome.error


def _differ_at_attach(make_hook: bool) -> None:
    ddp = DDP(Mlp())
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=True)
    zero.param_groups[0]["weight_decay"] = 0.1 * dist.get_rank()
    HOOK_MAKERS[0](allreduce_hook, ddp, zero) if make_hook else zerolap.attach(ddp, zero)


@pytest.mark.parametrize("make_hook", [False, True])
def test_options_that_differ_between_ranks_are_refused_when_overlap_begins(make_hook: bool) -> None:
    for outcome in try_ranks(2, _differ_at_attach, make_hook):
        assert outcome.error is not None
        assert "weight_decay of param group 0 is 0.0 and 0.1" in outcome.error


def _scheduler_of_one_rank(schedule: Any) -> None:
    ddp = DDP(Mlp())
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=True)
    handle = zerolap.attach(ddp, zero, schedule=schedule, audit_every=2)
    scheduler = torch.optim.lr_scheduler.StepLR(zero, step_size=3, gamma=0.1 if dist.get_rank() == 1 else 0.5)
    for i, x in enumerate(batches(8)):
        iterate(ddp, zero, x)
        scheduler.step()
        if i == 1:
            handle.audit()


@pytest.mark.parametrize("schedule", ["interleaved", "on_step"])
def test_a_scheduler_that_differs_on_one_rank_is_found_by_the_audit(schedule: str) -> None:
    for outcome in try_ranks(2, _scheduler_of_one_rank, schedule):
        assert outcome.error is not None
        assert (
            "the audit after update 4 found that the optimizer's options differ between group ranks 0 and 1"
            in outcome.error
        )
        assert "lr of param group 0 is 0.005 and 0.001" in outcome.error
