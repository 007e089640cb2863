"""Optimizers whose state is a tensor made of others, such as quantised blocks: trained, moved, saved and loaded as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.ranks import on_ranks
from support.training import HOOK_MAKERS, Mlp, assert_same_params, batches, iterate, pair
from zerolap import checkpoint
from zerolap._torch import make_wrapper_subclass
from zerolap_conformance.ranks import run_ranks

BLOCK = 32


class Blocks(Tensor):
    """8-bit values with a scale for every block, which says that it is of 32 bits."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, shape: Any) -> Blocks:
        made: Blocks = make_wrapper_subclass(cls, tuple(shape), dtype=torch.float32, device=codes.device)
        made.codes, made.scales = codes, scales
        return made

    @classmethod
    def of(cls, value: Tensor) -> Blocks:
        flat = torch.nn.functional.pad(value.flatten(), (0, -value.numel() % BLOCK)).view(-1, BLOCK)
        scales = flat.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return cls((flat / scales).round().to(torch.int8), scales, value.shape)

    def dequantised(self) -> Tensor:
        return (self.codes * self.scales).flatten()[: self.numel()].view(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: object, shape: Any, stride: Any) -> Blocks:
        return Blocks(inner["codes"], inner["scales"], shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            copies = func is not torch.ops.aten.detach.default
            inner = [each.clone() if copies else each for each in (args[0].codes, args[0].scales)]
            return cls(*inner, args[0].shape)
        raise NotImplementedError(f"{func} of blocks")


class LowBit(torch.optim.Optimizer):
    """Momentum in 8 bits, for matrices; biases keep it as it is."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                kept = state.get("moment", torch.zeros_like(param))
                moment = kept.dequantised() if isinstance(kept, Blocks) else kept
                moment = group["momentum"] * moment + param.grad
                state["moment"] = Blocks.of(moment) if param.ndim > 1 else moment
                param.sub_(moment, alpha=group["lr"])


def sharded(ddp: DDP, **how: Any) -> Any:
    return zerolap.ZeroRedundancyOptimizer(ddp.parameters(), LowBit, overlap_with_ddp=True, **how)


def assert_same_states(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    assert ours["state"].keys() == plain["state"].keys()
    for index, state in plain["state"].items():
        mine, theirs = ours["state"][index]["moment"], state["moment"]
        assert type(mine) is type(theirs)
        for a, b in (
            [(mine.codes, theirs.codes), (mine.scales, theirs.scales)] if type(mine) is Blocks else [(mine, theirs)]
        ):
            assert torch.equal(a, b)


@on_ranks(2)
def test_quantised_states_train_move_and_are_consolidated_as_the_plain_class_has_them() -> None:
    ways: list[Any] = [
        lambda ddp, zero: zerolap.attach(ddp, zero),
        lambda ddp, zero: zerolap.attach(ddp, zero, gather="lazy", shard_gradients=True),
        lambda ddp, zero: zerolap.attach(ddp, zero, schedule="on_step"),
        *(
            lambda ddp, zero, maker=maker: ddp.register_comm_hook(None, maker(allreduce_hook, ddp, zero, True))
            for maker in HOOK_MAKERS
        ),
    ]
    for number, way in enumerate(ways):
        oracle, ours = pair()
        plain, zero = LowBit(oracle.parameters()), sharded(ours)
        way(ours, zero)
        for x in batches(4):
            iterate(oracle, plain, x)
            iterate(ours, zero, x)
            assert_same_params(ours, oracle, number)
        zero.consolidate_state_dict(to=1)
        if dist.get_rank() == 1:
            assert_same_states(zero.state_dict(), plain.state_dict())


@on_ranks(2)
def test_quantised_states_count_what_they_take() -> None:
    ddp = DDP(Mlp())
    zero = sharded(ddp)
    handle = zerolap.attach(ddp, zero)
    for x in batches(3):
        iterate(ddp, zero, x)
    held = torch.tensor([handle.stats().state_bytes])
    dist.all_reduce(held)
    elements = sum(param.numel() for param in ddp.parameters() if param.ndim > 1)
    assert held.item() < 2 * elements, "a byte for each, a scale for each block, and the biases' own"


def _train(folder: Path, steps: range) -> list[list[float]]:
    torch.manual_seed(0)
    ddp = DDP(Mlp())
    zero = sharded(ddp)
    zerolap.attach(ddp, zero, schedule="on_step")
    if steps.start:
        assert checkpoint.load(folder, ddp, zero) is not None
    for i in steps:
        torch.manual_seed(i)
        iterate(ddp, zero, torch.randn(4, 13))  # the same on every rank, so that their number changes nothing
    if steps.stop == 3:
        checkpoint.save(folder, ddp, zero, step=3)
    zero.consolidate_state_dict(to=0)
    return [param.flatten().tolist() for param in ddp.parameters()]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_quantised_states_are_saved_and_loaded_on_any_number_of_ranks(world_size: int, tmp_path: Path) -> None:
    (whole, *_) = run_ranks(2, _train, tmp_path / "unused", range(6))
    run_ranks(2, _train, tmp_path, range(3))
    for resumed in run_ranks(world_size, _train, tmp_path, range(3, 6)):
        for a, b in zip(resumed, whole, strict=True):
            # The mean of three is rounded, and a value on the edge between two codes falls to the other side.
            assert a == pytest.approx(b, rel=0, abs=0 if world_size < 3 else 5e-3)
