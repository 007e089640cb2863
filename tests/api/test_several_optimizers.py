"""Several optimizers on one DDP, and optimizers that need whole parameters: the numbers of DDP + the plain ones, evenly shared.

Bitwise for 1 and 2 ranks. With more, gradients are summed in another order than DDP's, and Muon's update, computed in bfloat16, turns a
difference in the last place into one of up to 2^-8 of it: a step of lr 0.02 moves an element by less than 0.02, so six steps differ by
less than 1e-3.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.ranks import on_ranks
from support.training import assert_same_params, pair
from support.versions import NEEDS_MUON
from zerolap import checkpoint
from zerolap_conformance.ranks import run_ranks, try_ranks

pytestmark = NEEDS_MUON
SCHEDULES = ("interleaved", "after_backward", "on_step")


class Blocks(nn.Module):
    """Matrices for Muon, and an embedding, norms and biases for AdamW, in turns in the same buckets."""

    def __init__(self, depth: int = 3, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 31)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out

    def matrices(self) -> list[Tensor]:
        return [param for param in self.blocks.parameters() if param.ndim == 2]

    def others(self) -> list[Tensor]:
        matrices = set(self.matrices())
        return [param for param in self.parameters() if param not in matrices]


def tokens(num: int, *, first: int = 0) -> list[Tensor]:
    generators = [torch.Generator().manual_seed(1000 * i + dist.get_rank()) for i in range(first, first + num)]
    return [torch.randint(0, 31, (4, 6), generator=generator) for generator in generators]


def plain(model: Any) -> list[Any]:
    return [
        torch.optim.Muon(model.module.matrices(), lr=0.02),
        torch.optim.AdamW(model.module.others(), lr=0.01, fused=True),
    ]


def sharded(model: Any, *, overlap: bool = True) -> list[Any]:
    both = (
        (model.module.matrices(), torch.optim.Muon, {"lr": 0.02}),
        (model.module.others(), torch.optim.AdamW, {"lr": 0.01} if overlap else {"lr": 0.01, "fused": True}),
    )
    return [zerolap.ZeroRedundancyOptimizer(params, cls, overlap_with_ddp=overlap, **kw) for params, cls, kw in both]


def attached(model: Any, **how: Any) -> tuple[list[Any], zerolap.Handle]:
    optimizers = sharded(model)
    return optimizers, zerolap.attach(model, optimizers, **how)


def iterate(model: DDP, optimizers: list[Any], x: Tensor) -> None:
    """As many people write it: each optimizer is cleared right behind its step."""
    model(x).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def assert_like(ours: DDP, oracle: DDP, what: object = "") -> None:
    if dist.get_world_size() <= 2:
        assert_same_params(ours, oracle, what)
        return
    for (name, a), (_, b) in zip(ours.named_parameters(), oracle.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3, msg=lambda m, n=name: f"{what}: {n}: {m}")


def _sweep() -> None:
    for schedule, gather, shards_gradients in product(SCHEDULES, ("eager", "lazy"), (False, True)):
        oracle, ours = pair(Blocks)
        theirs = plain(oracle)
        mine, handle = attached(ours, schedule=schedule, gather=gather, shard_gradients=shards_gradients)
        for i, x in enumerate(tokens(5)):
            iterate(oracle, theirs, x)
            iterate(ours, mine, x)
            handle.finish()
            assert_like(ours, oracle, (schedule, gather, shards_gradients, i))
        assert handle.stats().num_updates == 5


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_muon_and_adamw_give_the_numbers_of_ddp_in_every_way(world_size: int) -> None:
    run_ranks(world_size, _sweep)


@on_ranks(2)
def test_muon_and_adamw_under_the_hooks_and_without_overlap() -> None:
    for maker, shard_buckets in product(
        (zerolap.hook_with_zero_step, zerolap.hook_with_zero_step_interleaved), (False, True)
    ):
        oracle, ours = pair(Blocks)
        theirs, mine = plain(oracle), sharded(ours)
        for group in mine[1].param_groups:
            group["fused"] = True  # hooks leave it to the user
        ours.register_comm_hook(
            None,
            maker(torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook, ours, mine, shard_buckets),
        )
        for x in tokens(4):
            iterate(oracle, theirs, x)
            iterate(ours, mine, x)
            assert_like(ours, oracle, (maker.__name__, shard_buckets))
    oracle, ours = pair(Blocks)
    theirs, mine = plain(oracle), sharded(ours, overlap=False)
    for x in tokens(4):
        iterate(oracle, theirs, x)
        iterate(ours, mine, x)
        assert_like(ours, oracle, "without overlap")


@on_ranks(2)
def test_schedulers_masters_and_precisions_of_each() -> None:
    for schedule, how in (
        ("interleaved", {}),
        ("on_step", {"shard_gradients": True}),
        ("interleaved", {"audit_every": 1, "track_grad_norm": True}),
    ):
        oracle, ours = pair(Blocks)
        theirs = plain(oracle)
        mine, _ = attached(ours, schedule=schedule, **how)
        rates = [
            [torch.optim.lr_scheduler.StepLR(a, 2, 0.5), torch.optim.lr_scheduler.OneCycleLR(b, 0.05, total_steps=8)]
            for a, b in (theirs, mine)
        ]
        for x in tokens(5):
            for model, optimizers, schedulers in ((oracle, theirs, rates[0]), (ours, mine, rates[1])):
                model(x).square().mean().backward()
                for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                    optimizer.step()
                    scheduler.step()  # before the other optimizer steps
                    optimizer.zero_grad()
            assert_like(ours, oracle, (schedule, how))
    for model in pair(lambda: Blocks().bfloat16()):
        mine, handle = attached(model, master_weights=True, reduce_dtype=torch.float32)
        for x in tokens(3):
            iterate(model, mine, x)
        handle.audit()


@on_ranks(2)
def test_clipping_over_all_or_one_and_norms() -> None:
    for number in (None, 0, 1):
        oracle, ours = pair(Blocks)
        theirs = plain(oracle)
        mine, handle = attached(ours, schedule="on_step")
        for x in tokens(4):
            for model in (oracle, ours):
                (100 * model(x).square().mean()).backward()
            params = list(oracle.parameters()) if number is None else theirs[number].param_groups[0]["params"]
            whole = torch.nn.utils.get_total_norm([p.grad for p in oracle.parameters()])
            torch.testing.assert_close(handle.grad_norm(), whole)
            expected = torch.nn.utils.clip_grad_norm_(params, 0.7)
            norm = handle.clip_grad_norm_(0.7) if number is None else mine[number].clip_grad_norm_(0.7)
            torch.testing.assert_close(norm, expected)
            after = torch.nn.utils.get_total_norm([p.grad for p in oracle.parameters()])
            torch.testing.assert_close(handle.grad_norm(), after)
            for optimizer in (*theirs, *mine):
                optimizer.step()
                optimizer.zero_grad()
            for a, b in zip(ours.parameters(), oracle.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-3)  # of Muon's bfloat16, as above


@on_ranks(2)
def test_a_scaler_leaves_out_the_optimizer_whose_gradients_are_not_finite() -> None:
    for shards_gradients, broken in product((False, True), ("blocks.1.1.weight", "head.bias", None)):
        oracle, ours = pair(Blocks)
        theirs = plain(oracle)
        mine, handle = attached(ours, schedule="on_step", shard_gradients=shards_gradients)
        scalers = [torch.amp.GradScaler("cpu", init_scale=256.0), zerolap.GradScaler("cpu", init_scale=256.0)]
        for i, x in enumerate(tokens(5)):
            for model, optimizers, scaler in ((oracle, theirs, scalers[0]), (ours, mine, scalers[1])):
                loss = scaler.scale(model(x).square().mean())
                if i in (1, 3) and dist.get_rank() == 1:
                    for name, param in model.module.named_parameters():
                        if broken in (name, None):
                            loss = loss + param.reshape(-1)[0] * float("inf")
                loss.backward()
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            assert_like(ours, oracle, (shards_gradients, broken, i))
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert handle.stats().num_updates == (3 if broken is None else 5)


@on_ranks(4)
def test_whole_parameters_are_shared_evenly_whatever_bucket_they_are_in() -> None:
    """Each matrix is a bucket of its own, or half of one, and its bytes go to its owner alone."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))
    for cap, shards_gradients in ((0.01, False), (0.03, True)):
        ddp = DDP(model, bucket_cap_mb=cap)
        optimizer = zerolap.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Muon, lr=0.01, overlap_with_ddp=True
        )
        handle = zerolap.attach(ddp, optimizer, shard_gradients=shards_gradients)
        for _ in range(3):
            ddp(torch.randn(4, 64)).sum().backward()
        before = handle.stats().sent_bytes
        ddp(torch.randn(4, 64)).sum().backward()
        stats, num_bytes = handle.stats(), 4 * 12 * 64 * 64
        assert stats.state_bytes == num_bytes // 4
        assert stats.sent_bytes - before == 2 * num_bytes * 3 // 4, (stats.sent_bytes - before, num_bytes)
        assert (stats.state_balance, stats.work_balance) == (1.0, 1.0)
        handle.detach()


def _train(kind: str, folder: str, num_ranks: int, first: int, last: int) -> dict[str, list[float]]:
    (ddp,) = pair(Blocks)[:1]
    optimizers, handle = attached(ddp, schedule="on_step")
    if first and kind == "sharded":
        checkpoint.load(folder, ddp, optimizers)
    elif first:
        whole = torch.load(Path(folder) / "whole.pt")
        ddp.module.load_state_dict(whole["model"])
        for optimizer, state in zip(optimizers, whole["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    for x in tokens(last - first, first=first):
        iterate(ddp, optimizers, x if num_ranks == 2 else tokens(1, first=7)[0])
    handle.finish()
    if not first and kind == "sharded":
        checkpoint.save(folder, ddp, optimizers, step=last)
    elif not first:
        for optimizer in optimizers:
            optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            whole = {"model": ddp.module.state_dict(), "optimizers": [each.state_dict() for each in optimizers]}
            torch.save(whole, Path(folder) / "whole.pt")
    return {name: param.detach().flatten().tolist() for name, param in ddp.module.named_parameters()}


@pytest.mark.parametrize("kind", ["sharded", "consolidated"])
def test_training_resumes_bitwise_and_on_other_numbers_of_ranks(kind: str, tmp_path: Path) -> None:
    uninterrupted = run_ranks(2, _train, "none", str(tmp_path), 2, 0, 6)[0]
    run_ranks(2, _train, kind, str(tmp_path), 2, 0, 3)
    resumed = run_ranks(2, _train, kind, str(tmp_path), 2, 3, 6)[0]
    for name, value in uninterrupted.items():
        assert resumed[name] == value, name
    # The same data on every rank: the same means, whatever their number, as far as sums of equal numbers are exact.
    one, four = (run_ranks(n, _train_alike, kind, str(tmp_path))[0] for n in (1, 4))
    for name, value in one.items():
        torch.testing.assert_close(
            torch.tensor(four[name]), torch.tensor(value), rtol=0, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


def _train_alike(kind: str, folder: str) -> dict[str, list[float]]:
    (ddp,) = pair(Blocks)[:1]
    optimizers, handle = attached(ddp)
    if kind == "sharded":
        checkpoint.load(folder, ddp, optimizers)
    else:
        whole = torch.load(Path(folder) / "whole.pt")
        ddp.module.load_state_dict(whole["model"])
        for optimizer, state in zip(optimizers, whole["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    x = torch.randint(0, 31, (4, 6), generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        iterate(ddp, optimizers, x)
    handle.finish()
    return {name: param.detach().flatten().tolist() for name, param in ddp.module.named_parameters()}


def _duplicate() -> None:
    (ddp,) = pair(Blocks)[:1]
    params = ddp.module.matrices()
    optimizers = [
        zerolap.ZeroRedundancyOptimizer(each, torch.optim.SGD, overlap_with_ddp=True)
        for each in (params, list(ddp.parameters()))
    ]
    zerolap.attach(ddp, optimizers)


def _incomplete() -> None:
    (ddp,) = pair(Blocks)[:1]
    zerolap.attach(ddp, sharded(ddp)[:1])


def _none() -> None:
    zerolap.attach(pair(Blocks)[0], [])


def _other_number() -> None:
    (ddp,) = pair(HalfFrozen)[:1]
    made = [
        zerolap.ZeroRedundancyOptimizer(params, torch.optim.SGD, overlap_with_ddp=True)
        for params in (ddp.module.one.parameters(), ddp.module.frozen.parameters())
    ]
    zerolap.attach(ddp, made[: 1 + dist.get_rank()])


class HalfFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(self.one(x))
        return out


def _steps_one() -> None:
    (ddp,) = pair(Blocks)[:1]
    optimizers, _ = attached(ddp, schedule="on_step")
    for x in tokens(2):
        ddp(x).sum().backward()
        optimizers[0].step()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (_duplicate, "blocks.0.1.weight is in optimizers 0 and 1"),
        (_incomplete, "trainable parameters of this DDP are not in the optimizer"),
        (_none, "at least one optimizer"),
        (_other_number, "there are 1 and 2 of them"),
        (_steps_one, "step() was called on optimizers [0] of those that were attached together, and not on [1]"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(program: Any, words: str) -> None:
    for outcome in try_ranks(2, program, limit=60, group_timeout=10):
        assert words in (outcome.error or "finished"), outcome.error
