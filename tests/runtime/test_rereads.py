"""Activation checkpointing with updates inside backward: what is computed again with new values is refused, and nothing else is."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import zerolap
from support.ranks import on_ranks
from support.training import HOOK_MAKERS, assert_same_params, overlapped
from zerolap_conformance.ranks import try_ranks

WIDTH = 16
Region = Callable[..., Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Affine(nn.Module):
    """Its last parameter has a gradient before anything is computed again, and is read all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.shift = Block(), nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.scale, self.shift
        return self.inner(x) * scale + shift


class Recurrent(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Stack(nn.Module):
    """Blocks, each of them a region that is computed again, between two layers."""

    def __init__(self, again: Region, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.again = again
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place, block in enumerate(self.blocks):
            x = self.again(partial(self.region, block, place), x)
        return self.head(x)

    def region(self, block: nn.Module, place: int, x: Tensor) -> Tensor:
        return block(x)


class TiedHead(Stack):
    def __init__(self, again: Region) -> None:
        super().__init__(again)
        self.head.weight = self.first.weight


class Shared(Stack):
    """One block, four times."""

    def __init__(self, again: Region) -> None:
        super().__init__(again)
        self.blocks = nn.ModuleList([self.blocks[0]] * 4)


class Neighbours(Stack):
    """A region uses its own block, and a layer of the next one."""

    def region(self, block: nn.Module, place: int, x: Tensor) -> Tensor:
        return block(x) + self.blocks[(place + 1) % 4].up(x).mean()  # type: ignore[operator, union-attr]


class Nested(Stack):
    def region(self, block: nn.Module, place: int, x: Tensor) -> Tensor:
        return self.again(block, x) + block(x)


class WithoutEarlyStop(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            return super().forward(x)


class AllInOne(Stack):
    def forward(self, x: Tensor) -> Tensor:
        def all_blocks(x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

        return self.head(self.again(all_blocks, self.first(x)))


class WatchedGradients(Stack):
    """Hooks that look at gradients inside backward, after they are complete."""

    def __init__(self, again: Region) -> None:
        super().__init__(again)
        self.seen: list[float] = []
        for block in self.blocks:
            block.register_full_backward_hook(self.look)

    def look(self, *_: Any) -> None:
        assert self.head.weight.grad is not None
        self.seen.append(self.head.weight.grad.norm().item())


RIGHT: dict[str, Callable[[Region], nn.Module]] = {
    "blocks": Stack,
    "affine": partial(Stack, block=Affine),
    "recurrent": partial(Stack, block=Recurrent),
    "encoder-layers": partial(Stack, block=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0)),
    "tied-head": TiedHead,
    "shared": Shared,
    "neighbours": Neighbours,
    "nested": Nested,
    "without-early-stop": WithoutEarlyStop,
    "all-in-one": AllInOne,
    "watched-gradients": WatchedGradients,
}
USED_TWICE = {"tied-head", "shared", "neighbours", "nested"}  # which reentrant regions can only be with a static graph


# --- constants --------------------------------------------------------------------------------------------------------


class Detached(Stack):
    def region(self, block: nn.Module, place: int, x: Tensor) -> Tensor:
        return block(x) * (1 + self.head.weight.detach().mean(0))


class Data(Stack):
    def region(self, block: nn.Module, place: int, x: Tensor) -> Tensor:
        return block(x) * (1 + self.head.weight.data.mean(0))


class NoGrad(Stack):
    def region(self, block: nn.Module, place: int, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(self.head(x))
        return block(x) * gate


class Mask(Stack):
    def region(self, block: nn.Module, place: int, x: Tensor) -> Tensor:
        return block(x) * (nn.functional.linear(x, self.head.weight) > 0)


class TiedBlock(Stack):
    """A region's own block is an ordinary one, and the gate of the next region a constant of it."""

    def region(self, block: nn.Module, place: int, x: Tensor) -> Tensor:
        other = self.blocks[place + 1].up.bias.detach().mean() if place < 3 else 1  # type: ignore[union-attr]
        return block(x) * other


class Remembering(torch.autograd.Function):
    """Reads a parameter of a module in its backward, without having said so to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        return x @ layer.weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.layer.weight, None


class OwnFunction(Stack):
    def region(self, block: nn.Module, place: int, x: Tensor) -> Tensor:
        return block(x) + Remembering.apply(x, self.head)


class Front(Stack):
    """What is computed again last has no parameters of its own: even when all gradients are there, one is read."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.again(lambda x: torch.tanh(x * self.head.weight.detach()[0]).exp(), x))


WRONG: dict[str, type[Stack]] = {
    "detached": Detached,
    "data": Data,
    "no-grad": NoGrad,
    "mask": Mask,
    "tied-block": TiedBlock,
    "own-function": OwnFunction,
    "front": Front,
}


# --- training ---------------------------------------------------------------------------------------------------------


def _region(is_reentrant: bool) -> Region:
    return partial(checkpoint, use_reentrant=is_reentrant)


def _make(make: Callable[[Region], nn.Module], again: Region, **options: Any) -> DDP:
    torch.manual_seed(0)
    # Nearly every parameter has a bucket of its own: whatever can be too late is.
    return DDP(make(again), bucket_cap_mb=0.0005, **options)


def _iterate(ddp: nn.Module, optimizer: Any, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    x = torch.randn(8, WIDTH, generator=generator).requires_grad_()
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()
    assert x.grad is not None
    return x.grad


def _attach(ddp: DDP, **options: Any) -> tuple[Any, zerolap.Handle]:
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.05)
    return zero, zerolap.attach(ddp, zero, **options)


def _compare(
    make: Callable[[Region], nn.Module], again: Region, schedule: str, gather: str, **options: Any
) -> tuple[DDP, zerolap.Handle]:
    oracle, ours = _make(make, again, **options), _make(make, again, **options)
    plain = torch.optim.AdamW(oracle.parameters(), lr=0.05, fused=True)
    zero, handle = _attach(ours, schedule=schedule, gather=gather)
    for number in range(6):
        gradients = [_iterate(ddp, optimizer, number) for ddp, optimizer in ((oracle, plain), (ours, zero))]
        assert torch.equal(*gradients), number
    handle.finish()
    assert_same_params(ours, oracle)
    return ours, handle


@pytest.mark.parametrize("name", RIGHT)
@on_ranks(2)
def test_what_is_computed_again_with_gradients_has_the_same_numbers(name: str) -> None:
    ways = [("interleaved", "eager"), ("interleaved", "lazy"), ("after_backward", "eager")]
    for (schedule, gather), is_reentrant in product(ways, (False, True)):
        options = {"static_graph": is_reentrant and name in USED_TWICE}
        ours, handle = _compare(RIGHT[name], _region(is_reentrant), schedule, gather, **options)
        handle.detach()
        for module in ours.module.modules():
            assert type(module._parameters) is dict, "nobody watches any more"
            assert not module._forward_pre_hooks


def _train(name: str, is_reentrant: bool, schedule: str, gather: str) -> None:
    ddp = _make(WRONG[name], _region(is_reentrant))
    zero, _ = _attach(ddp, schedule=schedule, gather=gather)
    for number in range(6):
        _iterate(ddp, zero, number)


CASES = [
    *((name, is_reentrant, "interleaved", "eager") for name in WRONG for is_reentrant in (False, True)),
    ("detached", False, "interleaved", "lazy"),
    ("no-grad", True, "interleaved", "lazy"),
    ("front", False, "after_backward", "eager"),
    ("front", True, "after_backward", "lazy"),
]


def _assert_refused(outcomes: list[Any], parameter: str) -> None:
    for outcome in outcomes:
        assert outcome.error is not None
        assert outcome.error.strip().splitlines()[-1].startswith("zerolap.ZerolapError: rank "), outcome.error
        assert f"{parameter} is read again inside backward after its gradient was complete" in outcome.error
        assert 'schedule="on_step"' in outcome.error


@pytest.mark.parametrize(("name", "is_reentrant", "schedule", "gather"), CASES)
def test_a_constant_that_is_read_again_after_its_update_is_refused_on_all_ranks(
    name: str, is_reentrant: bool, schedule: str, gather: str
) -> None:
    outcomes = try_ranks(2, _train, name, is_reentrant, schedule, gather, limit=60, group_timeout=20)
    _assert_refused(outcomes, "blocks.3.up.bias" if name == "tied-block" else "head.weight")
    assert max(outcome.seconds for outcome in outcomes) < 19, "nobody has waited for the other"


def _train_by_hook(number: int) -> None:
    ddp = _make(Detached, _region(False))
    zero = overlapped(ddp, ddp.parameters(), torch.optim.AdamW, hook_maker=HOOK_MAKERS[number], lr=0.05)
    for i in range(6):
        _iterate(ddp, zero, i)


def test_the_hooks_refuse_it_too() -> None:
    _assert_refused(try_ranks(2, _train_by_hook, 1, limit=60, group_timeout=20), "head.weight")


@on_ranks(2)
def test_the_remedy_has_the_same_numbers() -> None:
    for make in WRONG.values():
        _compare(make, _region(False), "on_step", "eager")
    for make in (Detached, Data, NoGrad, Mask, TiedBlock):
        _compare(make, _region(False), "after_backward", "eager")


@on_ranks(2)
def test_a_copy_made_inside_backward_is_an_ordinary_module() -> None:
    """Whoever copies a module in the middle of a watched backward gets an ordinary one."""
    ddp = _make(Stack, _region(False))
    zero, _ = _attach(ddp)
    made: list[nn.Module] = []

    def copy_head(*_: Any) -> None:
        head = ddp.module.head
        if type(head._parameters) is not dict:
            made.extend([copy.deepcopy(head), pickle.loads(pickle.dumps(head))])

    ddp.module.blocks[0].register_full_backward_hook(copy_head)
    for number in range(4):
        _iterate(ddp, zero, number)
    assert made
    for head in made:
        assert type(head._parameters) is dict
        head(torch.ones(2, WIDTH)).sum().backward()


@pytest.mark.parametrize("schedule", ["interleaved", "after_backward"])
@on_ranks(2)
def test_modules_are_as_they_were_after_an_update_that_failed_while_they_were_watched(schedule: str) -> None:
    ddp = DDP(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), bucket_cap_mb=0.0003)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=1e-6)
    handle = zerolap.attach(ddp, zero, schedule=schedule)  # type: ignore[arg-type]
    for i in range(3):
        if i == 2:  # the layout is known, so that this backward is watched; its second bucket cannot be reduced

            def fail() -> Any:
                raise RuntimeError("out of luck")

            assert zero._engine is not None
            zero._engine.layout[1].scatter = fail
            with pytest.raises(zerolap.ZerolapError, match="out of luck"):
                ddp(torch.ones(2, 8)).sum().backward()
        else:
            ddp(torch.ones(2, 8)).sum().backward()
    assert all(type(module._parameters) is dict for module in ddp.module.modules())
    assert not any(module._forward_pre_hooks for module in ddp.module.modules())
    handle.detach()
    zerolap.attach(ddp, zero, schedule=schedule)  # type: ignore[arg-type]
    for _ in range(4):
        ddp(torch.ones(2, 8)).sum().backward()
    assert torch.isfinite(ddp(torch.ones(2, 8))).all()
