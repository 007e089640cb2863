"""Consolidated states travel both ways between zerolap, torch's ZeroRedundancyOptimizer and the plain optimizer."""

from __future__ import annotations

import copy
import io
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as Upstream
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.ranks import on_ranks
from support.training import HOOK_MAKERS, Mlp, assert_same_params, backward, batches, overlapped
from zerolap.runtime.state_transfer import _unpack
from zerolap_conformance.ranks import run_ranks, try_ranks

KINDS = ("plain", "upstream", "zerolap", "overlap 0", "overlap 1")


def _make(kind: str, ddp: DDP, cls: Any, **defaults: Any) -> Any:
    params = list(ddp.parameters())
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.03}]
    match kind:
        case "plain":
            return cls(groups, **defaults)
        case "upstream":
            return Upstream(groups, cls, **defaults)
        case "zerolap":
            return zerolap.ZeroRedundancyOptimizer(groups, cls, **defaults)
        case _:
            return overlapped(ddp, groups, cls, hook_maker=HOOK_MAKERS[int(kind[-1])], **defaults)


def _train(ddp: DDP, optimizer: Any, num: int) -> None:
    for x in batches(num):
        optimizer.zero_grad()
        backward(ddp, x)
        optimizer.step()


def _whole_state(kind: str, optimizer: Any) -> dict[str, Any]:
    """The consolidated state, on every rank."""
    if kind == "plain":
        return optimizer.state_dict()
    optimizer.consolidate_state_dict(to=1)
    message = [optimizer.state_dict() if dist.get_rank() == 1 else None]
    dist.broadcast_object_list(message, src=1)
    assert message[0] is not None
    return message[0]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@on_ranks(2)
def test_states_load_both_ways_and_the_given_dict_stays_as_it_was() -> None:
    num_cases = 0
    options = ((torch.optim.AdamW, {"lr": 0.01, "fused": True}), (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}))
    for (source, target), (cls, defaults) in product(product(KINDS, repeat=2), options):
        if not {source, target} - {"plain", "upstream"}:
            continue
        torch.manual_seed(0)
        first = DDP(Mlp(), bucket_cap_mb=0.004)
        optimizer = _make(source, first, cls, **defaults)
        _train(first, optimizer, 3)
        state = _whole_state(source, optimizer)
        before = copy.deepcopy(state)

        second = DDP(Mlp(), bucket_cap_mb=0.004)
        loader = _make(target, second, cls, **{**defaults, "lr": 9.9})
        _train(second, loader, 3)  # something to be overwritten, and under overlap a plan to be kept
        second.module.load_state_dict(first.module.state_dict())
        loader.load_state_dict(
            copy.deepcopy(state) if target == "upstream" else state
        )  # torch's changes what it is given
        _train(first, optimizer, 2)
        _train(second, loader, 2)
        assert_same_params(second, first, (source, target, cls.__name__))
        if source not in ("plain", "upstream") and target != "plain":  # those share tensors with their state dicts
            assert _same(state, before), f"{target} changed the state dict it was given by {source}"
        assert _same(_whole_state(target, loader), _whole_state(source, optimizer)), (source, target, cls.__name__)
        num_cases += 1
    assert num_cases == 42, num_cases


def _only_the_target_receives() -> tuple[int, bool]:
    torch.manual_seed(0)
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    zero = _make("overlap 1", ddp, torch.optim.AdamW)
    _train(ddp, zero, 3)
    received = 0
    group = zero.process_group
    exchange = type(group).alltoall_base

    def spy(self: Any, into: torch.Tensor, *args: Any) -> Any:
        nonlocal received
        received += into.nbytes
        return exchange(self, into, *args)

    type(group).alltoall_base = spy
    zero.consolidate_state_dict(to=2)
    type(group).alltoall_base = exchange
    has_state = True
    try:
        zero.state_dict()
    except RuntimeError:
        has_state = False
    return received, has_state


def test_only_the_rank_that_asked_receives_states() -> None:
    results = run_ranks(4, _only_the_target_receives)
    state_bytes = 2 * sum(p.nbytes for p in Mlp().parameters())
    for rank, (received, has_state) in enumerate(results):
        assert has_state == (rank == 2)
        if rank == 2:
            assert state_bytes / 4 < received < 2 * state_bytes + 50_000
        else:
            assert received == 0


@on_ranks(2)
def test_a_state_dict_handed_out_does_not_change_with_training() -> None:
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    for kind in ("zerolap", "overlap 1"):
        ddp = DDP(Mlp(), bucket_cap_mb=0.004)
        zero = _make(kind, ddp, torch.optim.AdamW)
        _train(ddp, zero, 2)
        zero.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            snapshot = zero.state_dict()
            before = copy.deepcopy(snapshot)
        _train(ddp, zero, 2)
        if dist.get_rank() == 0:
            assert _same(snapshot, before), f"{kind}: training changed a state dict handed out earlier"


@on_ranks(2)
def test_consolidating_before_the_first_backward_works() -> None:
    """Nothing has been stepped: the state is empty, and loads."""
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    zero = _make("overlap 0", ddp, torch.optim.AdamW)
    zero.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert zero.state_dict()["state"] == {}
    zero.load_state_dict(
        {"state": {}, "param_groups": torch.optim.AdamW(zero.param_groups).state_dict()["param_groups"]}
    )


@on_ranks(2)
def test_before_the_first_step_a_state_dict_is_the_plain_optimizers() -> None:
    """As frameworks do when they are given an optimizer, without consolidating. From the first step on that is refused."""
    for kind in KINDS[2:]:
        ddp = DDP(Mlp(), bucket_cap_mb=0.004)
        zero, plain = (_make(each, ddp, torch.optim.AdamW, fused=True) for each in (kind, "plain"))
        assert _same(zero.state_dict(), plain.state_dict()), kind
        zero.load_state_dict(zero.state_dict())
        assert _same(zero.state_dict(), plain.state_dict()), kind
        _train(ddp, zero, 1)
        with pytest.raises(RuntimeError, match="call consolidate_state_dict"):
            zero.state_dict()
        whole = _whole_state(kind, zero)
        loaded = _make(kind, DDP(Mlp(), bucket_cap_mb=0.004), torch.optim.AdamW, fused=True)
        loaded.load_state_dict(whole)
        with pytest.raises(RuntimeError, match="call consolidate_state_dict"):
            loaded.state_dict()
    with_state = _make("zerolap", ddp, torch.optim.Adagrad)  # a class that makes its state before the first step
    with pytest.raises(RuntimeError, match="call consolidate_state_dict"):
        with_state.state_dict()


class _Evil:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('code from a peer was run')",))


class _EvilOptimizer(torch.optim.SGD):
    """Its state holds an object whose pickle runs code."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["surprise"] = _Evil()
        return super().step(closure)


def _consolidate_evil() -> None:
    zero = zerolap.ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(3)) for _ in range(4)], _EvilOptimizer, lr=0.1)
    zero.step()
    zero.consolidate_state_dict(to=0)


def test_an_object_in_a_peers_state_is_refused_not_executed() -> None:
    outcome = try_ranks(2, _consolidate_evil, limit=60, group_timeout=10)[0]
    assert "is not loaded from another rank" in (outcome.error or ""), outcome.error
    assert "code from a peer was run" not in (outcome.error or "")


def test_a_malicious_message_is_refused_not_executed() -> None:
    buffer = io.BytesIO()
    torch.save({0: {"surprise": _Evil()}}, buffer)
    with pytest.raises(zerolap.ZerolapError, match="is not loaded from another rank"):
        _unpack(torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8))
