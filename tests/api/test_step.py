"""Without overlap: step() shards the plain optimizer, gives its numbers, and keeps torch's surface."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer as Upstream
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.ranks import on_ranks
from support.training import HOOK_MAKERS, Mlp, assert_same_params, batches, iterate, overlapped, pair
from zerolap_conformance.ranks import run_ranks

Zero = zerolap.ZeroRedundancyOptimizer


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:3], "weight_decay": 0.2}, {"params": iter(params[3:]), "lr": 0.004}]


@pytest.mark.parametrize("as_view", [False, True], ids=["own-memory", "bucket-view"])
@on_ranks(2)
def test_step_is_bitwise_the_plain_optimizers(as_view: bool) -> None:
    for cls, defaults in ((torch.optim.AdamW, {"lr": 0.01}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})):
        oracle, ours = pair()
        plain = cls(_groups(oracle), **defaults)
        zero = Zero(_groups(ours), cls, parameters_as_bucket_view=as_view, **defaults)
        schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=8) for o in (plain, zero)]
        for i, x in enumerate(batches(5)):
            if i == 3:  # a model moved or copied into other memory
                for p in ours.parameters():
                    p.data = p.data.clone()
            iterate(oracle, plain, x)
            iterate(ours, zero, x)
            assert_same_params(ours, oracle, (as_view, cls.__name__, i))
            for scheduler in schedulers:
                scheduler.step()


@pytest.mark.parametrize("as_view", [False, True], ids=["own-memory", "bucket-view"])
@on_ranks(2)
def test_memory_formats_are_kept(as_view: bool) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 3)).to(memory_format=torch.channels_last)

    oracle, ours = pair(make)
    plain = torch.optim.AdamW(oracle.parameters())
    zero = Zero(ours.parameters(), torch.optim.AdamW, parameters_as_bucket_view=as_view)
    for x in batches(3, (2, 3, 7, 7)):
        iterate(oracle, plain, x)
        iterate(ours, zero, x)
        assert_same_params(ours, oracle, as_view)
        assert ours.module[0].weight.is_contiguous(memory_format=torch.channels_last)


@on_ranks(2)
def test_closures_and_keywords_reach_the_optimizers_step() -> None:
    class Loud(torch.optim.SGD):
        def step(self, closure: Any = None, *, said: list[str] | None = None) -> Any:
            if said is not None:
                said.append("hello")
            self.param_groups[0]["added"] = 0.5
            return super().step(closure)

    oracle, ours = pair()
    plain, zero = Loud(oracle.parameters(), lr=0.1), Zero(ours.parameters(), Loud, lr=0.1)
    said: list[str] = []
    for x in batches(3):
        losses = []
        for model, optimizer in ((oracle, plain), (ours, zero)):

            def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().sum()  # noqa: B023 - called at once
                loss.backward()
                return loss

            losses.append(optimizer.step(closure, said=said))
        assert torch.equal(*losses)
        assert_same_params(ours, oracle)
    assert len(said) == 6
    assert zero.param_groups[0]["added"] == 0.5, "what the optimizer adds to its groups is exposed"


@pytest.mark.parametrize("as_view", [False, True], ids=["own-memory", "bucket-view"])
@on_ranks(2)
def test_layers_may_be_frozen_and_thawed(as_view: bool) -> None:
    oracle, ours = pair(find_unused_parameters=True)
    plain = torch.optim.AdamW(oracle.parameters(), weight_decay=0.3)
    zero = Zero(ours.parameters(), torch.optim.AdamW, parameters_as_bucket_view=as_view, weight_decay=0.3)
    for i, x in enumerate(batches(8)):
        for model in (oracle, ours):
            model.module.layers[1].requires_grad_(i % 3 != 1)
        iterate(oracle, plain, x)
        iterate(ours, zero, x)
        assert_same_params(ours, oracle, (as_view, i))


@pytest.mark.parametrize("as_view", [False, True], ids=["own-memory", "bucket-view"])
@on_ranks(4)
def test_groups_may_be_added_later(as_view: bool) -> None:
    oracle, ours = pair()
    theirs, mine = list(oracle.parameters()), list(ours.parameters())
    plain = torch.optim.AdamW(theirs[:3])
    zero = Zero(mine[:3], torch.optim.AdamW, parameters_as_bucket_view=as_view)
    optim = zero.optim
    for i, x in enumerate(batches(5)):
        if i == 2:
            plain.add_param_group({"params": theirs[3:], "lr": 0.2})
            zero.add_param_group({"params": mine[3:], "lr": 0.2})
        iterate(oracle, plain, x)
        iterate(ours, zero, x)
        assert_same_params(ours, oracle, (as_view, i))
    assert zero.optim is optim
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 2
    assert len(zero._all_params) == len(mine)


@on_ranks(4)
def test_the_partition_is_upstreams() -> None:
    sizes = [[9, 7, 5, 3, 100, 1, 0, 3], [2, 2, 50, 4]]
    groups = [{"params": [nn.Parameter(torch.zeros(n)) for n in s]} for s in sizes]
    theirs = Upstream([dict(g) for g in groups], torch.optim.SGD, lr=0.1)
    ours = Zero([dict(g) for g in groups], torch.optim.SGD, lr=0.1)
    for a, b in zip(theirs.optim.param_groups, ours.optim.param_groups, strict=True):
        assert {id(p) for p in a["params"]} == {id(p) for p in b["params"]}


@on_ranks(4)
def test_a_group_of_some_ranks_is_sharded_among_them() -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return
    oracle, ours = pair(process_group=group)
    plain = torch.optim.AdamW(oracle.parameters())
    zero = Zero(ours.parameters(), torch.optim.AdamW, process_group=group)
    assert (zero.rank, zero.global_rank) == (dist.get_rank() // 2, dist.get_rank())
    for x in batches(3):
        iterate(oracle, plain, x)
        iterate(ours, zero, x)
        assert_same_params(ours, oracle)


@on_ranks(4)
def test_there_may_be_more_ranks_than_parameters() -> None:
    oracle, ours = pair(lambda: nn.Linear(13, 2, bias=False))
    plain = torch.optim.SGD(oracle.parameters(), lr=0.1)
    zero = Zero(ours.parameters(), torch.optim.SGD, lr=0.1)
    for x in batches(3):
        iterate(oracle, plain, x)
        iterate(ours, zero, x)
        assert_same_params(ours, oracle)


# --- Join: uneven inputs ----------------------------------------------------------------------------------------------


def _join_without_overlap() -> list[float]:
    """Rank r has r extra inputs. Gradients come from DDP, which shadows its reductions for ranks that have joined."""
    oracle, ours = pair()
    plain = torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9)
    zero = Zero(ours.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    inputs = list(batches(3 + dist.get_rank()))
    with Join([oracle]):
        for x in inputs:
            iterate(oracle, plain, x)
    with Join([ours, zero]):
        for x in inputs:
            iterate(ours, zero, x)
    assert zero.join_device == torch.device("cpu")
    assert zero.join_process_group is dist.group.WORLD
    # A rank that has joined keeps stepping its shard, but with the gradients it last saw, as with torch's own ZeRO;
    # what counts here is that nobody hangs and that all ranks end with the same parameters.
    return [p.sum().item() for p in ours.parameters()]


def test_join_without_overlap_ends_with_equal_parameters_on_all_ranks() -> None:
    results = run_ranks(4, _join_without_overlap)
    assert all(result == results[0] for result in results)


def _join_under_overlap(which: int) -> list[list[float]]:
    """The joined ranks' shards are updated too, with the others' gradients.

    SGD without momentum: with any state, DDP + plain itself diverges in a second epoch, for ranks that joined early have
    missed steps.
    """
    sums = []
    for num_extra in (1, 2):
        oracle, ours = pair(bucket_cap_mb=0.004)
        oracle.register_comm_hook(None, allreduce_hook)
        plain = torch.optim.SGD(oracle.parameters(), lr=0.1)
        zero = overlapped(ours, ours.parameters(), torch.optim.SGD, hook_maker=HOOK_MAKERS[which], lr=0.1)
        for epoch in range(3):  # DDP rebuilds its buckets while rank 0 has joined; then all start again
            inputs = list(batches(1 + num_extra * dist.get_rank()))
            with Join([oracle]):
                for x in inputs:
                    iterate(oracle, plain, x)
            with Join([ours, zero]):
                for x in inputs:
                    iterate(ours, zero, x)
            assert_same_params(ours, oracle, (which, num_extra, f"epoch {epoch}"))
        sums.append([p.sum().item() for p in ours.parameters()])
    return sums


@pytest.mark.parametrize("which", [0, 1])
def test_join_under_overlap_equals_ddp_and_plain(which: int) -> None:
    results = run_ranks(3, _join_under_overlap, which)
    assert all(result == results[0] for result in results)


@on_ranks(1)
def test_join_with_the_optimizer_first_is_refused_under_overlap() -> None:
    ddp = DDP(Mlp())
    zero = overlapped(ddp, ddp.parameters(), torch.optim.SGD, lr=0.1)
    with Join([zero, ddp], enable=True), pytest.raises(RuntimeError, match="give DDP to Join before the optimizer"):
        zero.step()
