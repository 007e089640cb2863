"""Odd models and training loops, each bit for bit as with DDP + the plain optimizer, with both hooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.ranks import on_ranks
from support.training import HOOK_MAKERS, Mlp, assert_same_params, backward, batches, iterate, overlapped, pair
from zerolap_conformance.ranks import run_ranks

Iterate = Callable[[nn.Module, Any, Tensor], None]


class Tied(nn.Module):
    """A language model's trick: the output layer uses the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 20)
        self.hidden = nn.Linear(20, 20)
        self.out = nn.Linear(20, 13, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(self.embedding(x.abs().long() % 13))))


class Tiny(nn.Module):
    """A parameter of no elements, one of a single element, one without dimensions, and more to fill a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 4))
        self.one = nn.Parameter(torch.ones(1))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.layer = nn.Linear(13, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.one + self.scalar + self.none.sum()


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(13))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Deep(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(13, 13, bias=False) for _ in range(200)))


class Frozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)


class Images(nn.Module):
    """Convolutions in channels-last memory, with batch norm's buffers and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 5, 3)
        self.turned = nn.Parameter(torch.randn(5, 9).t())
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x.contiguous(memory_format=torch.channels_last))))
        return self.second(x).mean((2, 3)) @ self.turned.t()


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(13, 30).to(torch.bfloat16)
        self.high = nn.Linear(30, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(self.low(x.to(torch.bfloat16)).float())


def _compare(
    make_model: Callable[[], nn.Module],
    *,
    loop: Iterate = iterate,
    cls: Any = torch.optim.AdamW,
    shape: tuple[int, ...] = (5, 13),
    dtype: torch.dtype = torch.float32,
    bucket_cap_mb: float = 0.004,
    num_buckets: Callable[[int], bool] = lambda num: num > 0,
    **ddp_options: Any,
) -> None:
    for hook_maker in HOOK_MAKERS:
        for shard_buckets in (False, True):
            oracle, ddp = pair(make_model, bucket_cap_mb=bucket_cap_mb, **ddp_options)
            plain = cls(oracle.parameters(), lr=0.02, weight_decay=0.1)
            zero = overlapped(
                ddp,
                ddp.parameters(),
                cls,
                hook_maker=hook_maker,
                shard_buckets=shard_buckets,
                lr=0.02,
                weight_decay=0.1,
            )
            for i, x in enumerate(batches(5, shape, dtype)):
                loop(oracle, plain, x)
                loop(ddp, zero, x)
                assert_same_params(ddp, oracle, (hook_maker.__name__, shard_buckets, f"iteration {i}"))
            assert num_buckets(len(zero._engine.layout)), len(zero._engine.layout)


def accumulate(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    for k in range(3):
        with model.no_sync() if k < 2 else nullcontext():
            backward(model, x + k)
    optimizer.step()


def keep_gradients(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    """Nobody clears the gradients: they add up over iterations."""
    backward(model, x)
    optimizer.step()


def zero_in_place(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward(model, x)
    optimizer.step()


def cleared_before_step(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    """Whoever knows that the update is in backward may clear gradients at once, in place or not, and still call step()."""
    backward(model, x)
    if isinstance(optimizer, zerolap.ZeroRedundancyOptimizer):
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    else:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def with_eval_between(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    iterate(model, optimizer, x)
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


def _closures() -> None:
    """step(closure) runs the closure once and returns its loss, as with the plain optimizer."""
    for hook_maker in HOOK_MAKERS:
        oracle, ddp = pair()
        plain = torch.optim.SGD(oracle.parameters(), lr=0.1)
        zero = overlapped(ddp, ddp.parameters(), torch.optim.SGD, hook_maker=hook_maker, lr=0.1)
        for x in batches(4):
            losses = []
            for model, optimizer in ((oracle, plain), (ddp, zero)):

                def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
                    optimizer.zero_grad()
                    loss = model(x).square().sum()  # noqa: B023 - called at once
                    loss.backward()
                    return loss

                losses.append(optimizer.step(closure))
            assert torch.equal(*losses)
            assert_same_params(ddp, oracle)


def _groups_added_later() -> None:
    """add_param_group under overlap: parameters that DDP reduced all along start to be updated."""
    for hook_maker in HOOK_MAKERS:
        oracle, ddp = pair()
        plain, zero = (torch.optim.AdamW(list(oracle.parameters())[:4], lr=0.02), None)
        zero = overlapped(ddp, list(ddp.parameters())[:4], torch.optim.AdamW, hook_maker=hook_maker, lr=0.02)
        for i, x in enumerate(batches(8)):
            if i in (0, 4):  # before the first plan, and after
                span = slice(4, 6) if i == 0 else slice(6, None)
                plain.add_param_group({"params": list(oracle.parameters())[span], "lr": 0.1})
                zero.add_param_group({"params": list(ddp.parameters())[span], "lr": 0.1})
            iterate(oracle, plain, x)
            iterate(ddp, zero, x)
            assert_same_params(ddp, oracle, (hook_maker.__name__, f"iteration {i}"))


def _twice_in_one_process() -> None:
    """Two models, two optimizers, backwards in turn."""
    pairs = []
    for seed in range(2):
        torch.manual_seed(seed)
        oracle = DDP(Mlp(), bucket_cap_mb=0.004)
        torch.manual_seed(seed)
        ddp = DDP(Mlp(), bucket_cap_mb=0.004)
        pairs.append(
            (
                oracle,
                torch.optim.SGD(oracle.parameters(), lr=0.1),
                ddp,
                overlapped(ddp, ddp.parameters(), torch.optim.SGD, lr=0.1),
            )
        )
    for x in batches(5):
        for oracle, plain, ddp, zero in pairs:
            iterate(oracle, plain, x)
            iterate(ddp, zero, x)
            assert_same_params(ddp, oracle)


def _non_trained_parameters_are_left_alone() -> None:
    """The optimizer has some of DDP's parameters; the others are reduced, but nobody updates or moves them."""
    torch.manual_seed(0)
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    params = list(ddp.parameters())
    before = [p.detach().clone() for p in params]
    memory = [p.data_ptr() for p in params]
    zero = overlapped(ddp, params[::2], torch.optim.SGD, lr=0.1)
    for x in batches(3):
        iterate(ddp, zero, x)
    for i, (p, old) in enumerate(zip(params, before, strict=True)):
        assert torch.equal(p, old) == bool(i % 2)
        assert (p.data_ptr() == memory[i]) == bool(i % 2)


CASES: dict[str, tuple[int, Callable[..., None], dict[str, Any]]] = {
    "no_sync accumulation": (2, _compare, {"make_model": Mlp, "loop": accumulate}),
    "no_sync accumulation, gradients as views": (
        2,
        _compare,
        {"make_model": Mlp, "loop": accumulate, "gradient_as_bucket_view": True},
    ),
    "gradients never cleared": (2, _compare, {"make_model": Mlp, "loop": keep_gradients}),
    "gradients zeroed in place": (2, _compare, {"make_model": Mlp, "loop": zero_in_place}),
    "gradients cleared before step": (2, _compare, {"make_model": Mlp, "loop": cleared_before_step}),
    "evaluation in between": (2, _compare, {"make_model": Mlp, "loop": with_eval_between}),
    "closures": (2, _closures, {}),
    "groups added later": (4, _groups_added_later, {}),
    "two models in turn": (2, _twice_in_one_process, {}),
    "parameters of nobody": (2, _non_trained_parameters_are_left_alone, {}),
    "tied weights": (2, _compare, {"make_model": Tied}),
    "frozen layers": (2, _compare, {"make_model": Frozen}),
    "zero-size and one-element parameters": (2, _compare, {"make_model": Tiny}),
    "zero-size and one-element parameters, 4 ranks": (4, _compare, {"make_model": Tiny}),
    "more ranks than parameters": (4, _compare, {"make_model": Single}),
    "one bucket": (2, _compare, {"make_model": Mlp, "bucket_cap_mb": 25, "num_buckets": lambda num: num == 1}),
    "200 buckets": (
        2,
        _compare,
        {"make_model": Deep, "bucket_cap_mb": 0.0005, "num_buckets": lambda num: num == 200},
    ),
    "bf16": (2, _compare, {"make_model": lambda: Mlp(torch.bfloat16), "dtype": torch.bfloat16}),
    "fp64": (2, _compare, {"make_model": lambda: Mlp(torch.float64), "dtype": torch.float64}),
    "mixed dtypes": (2, _compare, {"make_model": MixedDtypes}),
    "channels last and buffers": (2, _compare, {"make_model": Images, "shape": (2, 3, 9, 9)}),
}


def _run_case(name: str) -> None:
    _, run, options = CASES[name]
    run(**options)


@pytest.mark.parametrize("name", CASES)
def test_training_is_bitwise_that_of_ddp_and_the_plain_optimizer(name: str) -> None:
    run_ranks(CASES[name][0], _run_case, name)


@pytest.mark.parametrize("hook_maker", HOOK_MAKERS)
@on_ranks(3)
def test_three_ranks_equal_ddp_with_the_same_hook(hook_maker: Callable[..., Any]) -> None:
    """DDP without a hook multiplies by 1/3, the all-reduce hook divides by 3: the oracle needs the same hook."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    oracle, ddp = pair()
    oracle.register_comm_hook(None, allreduce_hook)
    plain = torch.optim.AdamW(oracle.parameters(), lr=0.02)
    zero = overlapped(ddp, ddp.parameters(), torch.optim.AdamW, hook_maker=hook_maker, lr=0.02)
    for x in batches(5):
        iterate(oracle, plain, x)
        iterate(ddp, zero, x)
        assert_same_params(ddp, oracle)


def _state_is_sharded() -> tuple[int, int]:
    torch.manual_seed(0)
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    zero = overlapped(ddp, ddp.parameters(), torch.optim.AdamW, shard_buckets=True)
    for x in batches(3):
        iterate(ddp, zero, x)
    mine = sum(t.numel() for state in zero.optim.state.values() for t in state.values() if t.ndim)
    assert set(zero.optim.state) == {p for group in zero.optim.param_groups for p in group["params"]}
    return mine, 2 * sum(p.numel() for p in ddp.parameters())


def test_every_rank_holds_its_own_states_only() -> None:
    held = run_ranks(4, _state_is_sharded)
    assert sum(mine for mine, _ in held) == held[0][1]
    assert max(mine for mine, _ in held) < 0.6 * held[0][1]


@on_ranks(2)
def test_only_backwards_with_a_new_layout_are_recorded() -> None:
    from zerolap.runtime.recording import Recording

    recorded = []
    take = Recording.take

    def spy(self: Recording, bucket: dist.GradBucket, **options: Any) -> None:
        recorded[-1] += 1
        take(self, bucket, **options)

    Recording.take = spy  # type: ignore[method-assign]
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    zero = overlapped(ddp, ddp.parameters(), torch.optim.SGD, lr=0.1)
    for x in batches(5):
        recorded.append(0)
        iterate(ddp, zero, x)
    assert isinstance(zero, zerolap.ZeroRedundancyOptimizer)
    assert recorded[0] > 0, recorded
    assert recorded[1] > 0, "DDP rebuilds its buckets before the second backward"
    assert recorded[2:] == [0, 0, 0], recorded
