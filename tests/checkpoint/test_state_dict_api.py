"""``torch.distributed.checkpoint.state_dict`` with a sharded optimizer; checkpoints between zerolap, plain DDP and FSDP2."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.ranks import on_ranks
from support.training import SMALL_BUCKETS, Mlp, assert_same_params, backward, batches, iterate
from zerolap.runtime.param_shards import ParamShards, boxes
from zerolap_conformance.ranks import run_ranks


def test_boxes_hold_each_element_of_a_range_once() -> None:
    for shape in ((7,), (3, 5), (2, 3, 4), (1, 4, 1, 3), (4, 1)):
        numel = math.prod(shape)
        whole = torch.arange(numel).reshape(shape)
        for start in range(numel + 1):
            for stop in range(start, numel + 1):
                found = []
                for box in boxes(start, stop, shape):
                    part = whole[tuple(slice(a, a + b) for a, b in zip(box.offsets, box.sizes, strict=True))]
                    assert part.shape == torch.Size(box.sizes)
                    assert part.reshape(-1)[0] == box.start
                    found += part.reshape(-1).tolist()
                assert found == list(range(start, stop)), (shape, start, stop)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Conv2d(3, 16, 3), nn.Linear(16, 13), nn.Parameter(torch.ones(()))
        self.a.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x.reshape(-1, 3, 5, 5)).mean((2, 3))) * self.scale


def make(kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = Mlp()
    if kind == "fsdp2":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DDP(model, bucket_cap_mb=SMALL_BUCKETS)
    groups = [{"params": list(model.parameters())[:3], "lr": 0.02}, {"params": list(model.parameters())[3:]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    if kind == "zerolap":
        zerolap.shard(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, first: int, num: int) -> None:
    for x in list(batches(first + num))[first:]:
        optimizer.zero_grad()
        backward(model, x)
        optimizer.step()


def whole(model: nn.Module, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Model and optimizer as torch's functions give them whole, on every rank."""
    return get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


def assert_same(ours: Any, theirs: Any, what: object, **bound: float) -> None:
    for mine, expected in zip(ours, theirs, strict=True):
        if "state" not in expected:
            mine, expected = {"state": mine, "param_groups": []}, {"state": expected, "param_groups": []}
        assert mine["state"].keys() == expected["state"].keys(), what
        for name, state in expected["state"].items():
            torch.testing.assert_close(
                mine["state"][name], state, **(bound or {"rtol": 0, "atol": 0}), msg=f"{what}: {name}"
            )
        for a, b in zip(mine["param_groups"], expected["param_groups"], strict=True):
            mine, expected = ((each["lr"], tuple(each["betas"]), each["params"]) for each in (a, b))
            assert mine == expected, (what, mine, expected)


def _save(folder: str, kind: str) -> None:
    model, optimizer = make(kind)
    train(model, optimizer, 0, 3)
    states = get_state_dict(model, optimizer)
    if kind == "zerolap":
        entries = [each for state in states[1]["state"].values() for each in state.values() if each.ndim]
        assert all(isinstance(each, ParamShards) for each in entries)
        held = sum(part.numel() for each in entries for part in each.ranges.values())
        assert held < 0.6 * sum(each.numel() for each in entries)
    dcp.save({"model": states[0], "optim": states[1]}, checkpoint_id=f"{folder}/{kind}")
    expected = whole(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, f"{folder}/{kind}.pt")


def _load(folder: str, kind: str, saved_by: str, num_trained: int) -> None:
    model, optimizer = make(kind, seed=1)
    train(model, optimizer, 5, num_trained)
    states = get_state_dict(model, optimizer)
    dcp.load({"model": states[0], "optim": states[1]}, checkpoint_id=f"{folder}/{saved_by}")
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    expected = torch.load(f"{folder}/{saved_by}.pt")
    assert_same(whole(model, optimizer), expected, (kind, saved_by, num_trained))
    oracle, plain = make("ddp", seed=2)
    set_state_dict(
        oracle,
        plain,
        model_state_dict=expected[0],
        optim_state_dict=expected[1],
        options=StateDictOptions(full_state_dict=True),
    )
    train(model, optimizer, 3, 2)
    train(oracle, plain, 3, 2)
    if kind != "fsdp2":
        if dist.get_world_size() == 2:
            assert_same_params(model, oracle, (kind, saved_by))
        assert_same(whole(model, optimizer), whole(oracle, plain), "trained on", rtol=1e-5, atol=1e-6)


KINDS = ("zerolap", "ddp", "fsdp2")


def _save_all(folder: str) -> None:
    for kind in KINDS:
        _save(folder, kind)


def _load_all(folder: str) -> None:
    for kind, saved_by in product(KINDS, KINDS):
        if "zerolap" in (kind, saved_by):
            for num_trained in (0, 2) if kind == "zerolap" else (0,):
                _load(folder, kind, saved_by, num_trained)


@pytest.mark.parametrize("num_loading", [2, 3])
def test_zerolap_ddp_and_fsdp2_load_each_others_checkpoints(tmp_path: Path, num_loading: int) -> None:
    run_ranks(2, _save_all, str(tmp_path), limit=180)
    run_ranks(num_loading, _load_all, str(tmp_path), limit=180)


@on_ranks(2)
def test_every_option_gives_what_it_gives_with_the_plain_optimizer() -> None:
    for kind in (Mlp, Conv):
        shape = (5, 13) if kind is Mlp else (4, 75)
        made = []
        for is_sharded in (False, True):
            torch.manual_seed(0)
            model = DDP(kind(), bucket_cap_mb=SMALL_BUCKETS)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            if is_sharded:
                zerolap.shard(model, optimizer)
            for x in batches(3, shape):
                iterate(model, optimizer, x)
            made.append((model, optimizer))
        for full, offload, flat in product((True, False), (True, False), (True, False)):
            options = StateDictOptions(full_state_dict=full, cpu_offload=offload, flatten_optimizer_state_dict=flat)
            theirs, ours = (get_optimizer_state_dict(*each, options=options) for each in made)
            assert bool(ours) == bool(theirs)  # on rank 0 only, if they are offloaded
            if full and ours:
                torch.testing.assert_close(
                    ours if flat else ours["state"], theirs if flat else theirs["state"], rtol=0, atol=0
                )
                assert flat or ours["param_groups"] == theirs["param_groups"]
            elif not full:
                assert flat or ours["state"].keys() == theirs["state"].keys()
            if full and flat:
                continue  # which torch's functions give, and do not take, of the plain optimizer either
            torch.manual_seed(1)
            model = DDP(kind(), bucket_cap_mb=SMALL_BUCKETS)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
            zerolap.shard(model, optimizer)
            for x in batches(2, shape):  # DDP has its final buckets, which are those of the parts that are given
                iterate(model, optimizer, x)
            model.load_state_dict(made[1][0].state_dict())
            options = StateDictOptions(
                full_state_dict=full, broadcast_from_rank0=full and offload, flatten_optimizer_state_dict=flat
            )
            set_optimizer_state_dict(model, optimizer, ours, options=options)
            copy, reference = (whole(*each) for each in ((model, optimizer), made[1]))
            assert_same(copy, reference, (full, offload, flat))


@on_ranks(2)
def test_before_the_first_step_nothing_is_stepped_and_several_optimizers_are_told_apart() -> None:
    torch.manual_seed(0)
    model = DDP(Mlp(), bucket_cap_mb=SMALL_BUCKETS)
    first, *rest = model.module.layers
    optimizers = [
        torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW([p for layer in rest for p in layer.parameters()], lr=0.01),
    ]
    zerolap.shard(model, optimizers)
    before = [p.detach().clone() for p in model.parameters()]
    get_state_dict(model, optimizers)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    for x in batches(3):
        for each in optimizers:
            each.zero_grad()
        backward(model, x)
        for each in optimizers:
            each.step()
    state = get_optimizer_state_dict(model, optimizers)["state"]
    assert set(state["layers.0.weight"]) == {"momentum_buffer"}
    assert set(state["layers.1.weight"]) == {"step", "exp_avg", "exp_avg_sq"}


@on_ranks(2)
def test_parts_that_are_owned_by_others_now_are_refused() -> None:
    model, optimizer = make("zerolap")
    states = get_state_dict(model, optimizer)  # of whole parameters, before DDP has its buckets
    train(model, optimizer, 0, 3)
    with pytest.raises(ValueError, match=r"other parts of parameter .* call get_optimizer_state_dict\(\) again"):
        set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
