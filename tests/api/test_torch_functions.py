"""torch's own functions between backward and ``step()``, with ``schedule="on_step"``: loops that stay as they are, against DDP + the plain optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.ranks import on_ranks
from support.training import Branches, Mlp, assert_same_params, backward, batches, pair
from zerolap.runtime.grad_tensor import MeanGradient
from zerolap_conformance.ranks import run_ranks

FREED = (False, True)
# The norm is added up in double precision over shards, and by torch in single precision over parameters.
BOUND = {"rtol": 2e-6, "atol": 2e-7}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def both(
    make: Callable[[nn.Module], Any] = sgd, model: Callable[[], nn.Module] = Mlp, *, options: Any = None, **ddp: Any
) -> list[tuple[DDP, Any]]:
    """DDP + the plain optimizer, and the same with one line more."""
    made = [(each, make(each)) for each in pair(model, **ddp)]
    zerolap.shard(*made[1], **(options or {}))
    return made


def assert_close_params(ours: nn.Module, oracle: nn.Module, what: object = "", **bound: float) -> None:
    for (name, a), (_, b) in zip(ours.named_parameters(), oracle.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, **(bound or BOUND), msg=lambda said, name=name: f"{what}: {name}: {said}")


# --- clipping ---------------------------------------------------------------------------------------------------------

CLIPS: dict[str, Callable[[DDP], Any]] = {
    "2": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5),
    "1": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5, norm_type=1.0),
    "3.5": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=3.5),
    "inf": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05, norm_type=float("inf")),
    "one by one": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5, foreach=False),
    "at once": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5, foreach=True, error_if_nonfinite=True),
    "one layer": lambda m: nn.utils.clip_grad_norm_(m.module.layers[1].parameters(), 0.01),
    "in two parts": lambda m: nn.utils.clip_grads_with_norm_(
        m.parameters(), 0.5, nn.utils.get_total_norm([p.grad for p in m.parameters()])
    ),
    "by hand": lambda m: clip_by_hand(m, 0.5),
    "value": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01),
    "value, one by one": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01, foreach=False),
    "value, then norm": lambda m: (
        nn.utils.clip_grad_value_(m.parameters(), 0.01),
        nn.utils.clip_grad_norm_(m.parameters(), 0.02),
    ),
}


def clip_by_hand(model: DDP, most: float) -> float:
    total = sum(p.grad.data.norm(2).item() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5
    for p in model.parameters():
        if p.grad is not None and total > most:
            p.grad.data.mul_(most / (total + 1e-6))
    return total


def _clip() -> None:
    for freed, (name, clip) in product(FREED, CLIPS.items()):
        (oracle, plain), (ours, mine) = both(options={"shard_gradients": freed})
        for i, x in enumerate(batches(2)):
            norms = []
            for model, optimizer in ((oracle, plain), (ours, mine)):
                optimizer.zero_grad()
                backward(model, x)
                norms.append(clip(model))
                optimizer.step()
            if isinstance(norms[0], Tensor | float):
                torch.testing.assert_close(norms[1], norms[0], **BOUND)
            assert_close_params(ours, oracle, (freed, name, i))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_torchs_clipping_is_that_of_ddp(world_size: int) -> None:
    run_ranks(world_size, _clip)


@on_ranks(2)
def test_what_is_not_clipped_and_what_is_clipped_by_value_is_bitwise() -> None:
    for freed, clip in product(
        FREED, (lambda p: nn.utils.clip_grad_norm_(p, 1e9), lambda p: nn.utils.clip_grad_value_(p, 0.01))
    ):
        (oracle, plain), (ours, mine) = both(adamw, options={"shard_gradients": freed})
        for x in batches(3):
            for model, optimizer in ((oracle, plain), (ours, mine)):
                optimizer.zero_grad()
                backward(model, x)
                clip(model.parameters())
                optimizer.step()
            assert_same_params(ours, oracle, freed)


@on_ranks(2)
def test_clipping_halves_and_what_is_reduced_in_another_dtype() -> None:
    for freed, options in product(FREED, ({}, {"master_weights": True, "reduce_dtype": torch.float32})):
        made = both(model=lambda: Mlp(torch.bfloat16), options={"shard_gradients": freed, **options})
        for x in batches(2, dtype=torch.bfloat16):
            norms = []
            for model, optimizer in made:
                optimizer.zero_grad()
                backward(model, x)
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
            assert norms[0].dtype is norms[1].dtype is torch.bfloat16
            torch.testing.assert_close(norms[1], norms[0], rtol=0.01, atol=0)


# --- everything else that loops do with gradients ---------------------------------------------------------------------


def _replace(model: DDP) -> None:
    for p in model.parameters():
        p.grad = p.grad * 0.5


def _noise(model: DDP) -> None:
    generator = torch.Generator().manual_seed(7)
    for p in model.parameters():
        p.grad.add_(torch.randn(p.shape, generator=generator), alpha=0.1)


def _centralize(model: DDP) -> None:
    for p in model.parameters():
        if p.ndim > 1:
            p.grad.add_(-p.grad.mean(dim=1, keepdim=True))


def _views(model: DDP) -> None:
    layers = model.module.layers
    layers[0].weight.grad[-1] = 0
    layers[0].weight.grad[:3].mul_(2)
    layers[1].weight.grad[layers[1].weight > 0] = 0
    layers[2].weight.grad.view(-1)[::2] = 0.25
    layers[3].bias.grad.data[0] += 1
    layers[3].bias.grad.mul_(2)


def _lists(model: DDP) -> None:
    grads = [p.grad for p in model.parameters()]
    torch._foreach_mul_(grads, 0.5)
    torch._foreach_add_(grads, [p.detach() for p in model.parameters()], alpha=0.1)
    torch._foreach_clamp_max_(grads, 0.3)
    torch._foreach_div_(grads, [2.0] * len(grads))


def _one_by_one(model: DDP) -> None:
    for p in model.parameters():
        p.grad.clamp_(-0.2, 0.2).mul_(torch.tensor(3.0)).nan_to_num_().sub_(p.detach()).div_(torch.full((1,), 1.5))


def _from_another(model: DDP) -> None:
    layers = model.module.layers
    layers[1].weight.grad.copy_(torch.ones_like(layers[1].weight))
    layers[2].weight.grad.mul_(layers[2].weight.grad)
    layers[2].bias.grad.fill_(0.5)
    layers[3].weight.grad.zero_()


def _without_the_last_layer(model: DDP) -> None:
    for p in model.module.layers[3].parameters():
        p.grad = None


def _own(model: DDP) -> None:
    model.module.layers[3].bias.grad = torch.full((3,), 0.5)


def _all_removed(model: DDP) -> None:
    model.zero_grad()


def _all_cleared(model: DDP) -> None:
    model.zero_grad(set_to_none=False)


CHANGES = (_replace, _noise, _centralize, _views, _lists, _one_by_one, _from_another, _without_the_last_layer, _own)
CLEARS = (_all_removed, _all_cleared)


@on_ranks(2)
def test_whatever_is_done_to_gradients_before_step_has_the_effect_that_it_has_with_ddp() -> None:
    for freed, change in product(FREED, CHANGES + CLEARS):
        (oracle, plain), (ours, mine) = both(options={"shard_gradients": freed})
        for x in batches(3):
            for model, optimizer in ((oracle, plain), (ours, mine)):
                optimizer.zero_grad()
                backward(model, x)
                change(model)
                optimizer.step()
            assert_same_params(ours, oracle, (freed, change.__name__))


@on_ranks(2)
def test_with_views_of_ddps_buckets_and_channels_last_and_odd_ownership() -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 3), nn.Conv2d(5, 7, 1), nn.Linear(7, 3)])
            self.to(memory_format=torch.channels_last)

        def forward(self, x: Tensor) -> Tensor:
            x = x.reshape(-1, 3, 5, 5)
            for layer in self.layers[:3]:
                x = torch.tanh(layer(x))
            return self.layers[3](x.mean((2, 3)))

    for change in (_noise, _views, _lists, _one_by_one, CLIPS["2"]):
        (oracle, plain), (ours, mine) = both(model=Conv, gradient_as_bucket_view=True)
        for x in batches(3, (4, 75)):
            for model, optimizer in ((oracle, plain), (ours, mine)):
                optimizer.zero_grad()
                backward(model, x)
                change(model)
                optimizer.step()
            assert_close_params(ours, oracle, change)


def _read(model: DDP) -> list[Any]:
    found: list[Any] = []
    for p in model.parameters():
        grad = p.grad
        found += [
            grad.norm().item(),
            grad.abs().mean().item(),
            grad.clone(),
            grad.detach().cpu().numpy().copy(),
            bool(torch.isnan(grad).any()),
            float(grad.max()),
            grad.tolist(),
            (grad**2).sum(),
            copy.deepcopy(grad),
            grad.to(torch.float64),
            torch.zeros_like(p).lerp_(grad, 0.1),
            grad.t() if grad.ndim == 2 else grad[1:],
        ]
    found.append(torch.cat([p.grad.view(-1) for p in model.parameters()]))
    found.append(nn.utils.parameters_to_vector([p.grad for p in model.parameters()]).norm())
    found.append(sum(p.grad.pow(2).sum() for p in model.parameters()))
    return found


@on_ranks(2)
def test_who_reads_a_gradient_sees_the_mean() -> None:
    for freed in FREED:
        (oracle, plain), (ours, mine) = both(options={"shard_gradients": freed})
        for x in batches(3):
            seen = []
            for model, optimizer in ((oracle, plain), (ours, mine)):
                optimizer.zero_grad()
                backward(model, x)
                seen.append(_read(model))
                optimizer.step()
            for theirs, our in zip(*seen, strict=True):
                torch.testing.assert_close(our, theirs, rtol=1e-6, atol=1e-7)
            assert_same_params(ours, oracle, freed)
        held = {type(p.grad) for p in ours.parameters()}
        assert held == {MeanGradient}
        if dist.get_rank() == 0:  # no collective
            assert "called by all ranks" in repr(next(ours.parameters()).grad)


@on_ranks(2)
def test_what_cannot_be_read_any_more_is_refused() -> None:
    for freed in FREED:
        (_, _), (ours, mine) = both(options={"shard_gradients": freed})
        kept = []
        for x in batches(2):
            mine.zero_grad()
            backward(ours, x)
            kept.append(next(ours.parameters()).grad)
            mine.step()
        with pytest.raises(RuntimeError, match=r"earlier backward.*full_tensor"):
            kept[0].norm()
        if freed:
            with pytest.raises(RuntimeError, match=r"freed by step\(\)"):
                kept[1].norm()
            with pytest.raises(RuntimeError, match=r"call zero_grad\(\) before the next backward"):
                backward(ours, x)
        else:
            kept[1].norm()
            mine.zero_grad()
            backward(ours, x)
            next(ours.parameters()).grad = kept[1]
            with pytest.raises(RuntimeError, match="of another parameter or of an earlier backward"):
                mine.step()
        mine.handle.detach()
        assert all(p.grad is None for p in ours.parameters())
        with pytest.raises(RuntimeError, match=r"detached or dropped|earlier backward"):
            kept[1].norm()


# --- several backwards ------------------------------------------------------------------------------------------------


def _accumulate(model: DDP, x: Tensor, how: str) -> None:
    for k, each in enumerate(how):
        if each == "n":
            with model.no_sync():
                backward(model, (k + 1) * x)
        elif each == "0":
            model.zero_grad()
        elif each == "z":
            model.zero_grad(set_to_none=False)
        elif each == "h":
            for p in model.parameters():
                p.grad.mul_(0.5)
        elif each == "c":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            backward(model, (k + 1) * x)


# s: a backward; n: under no_sync(); 0, z: cleared by the module, to None or to zero; h: halved; c: clipped
SEQUENCES = ("ns", "ss", "sss", "nsns", "sns", "s0s", "szs", "sz0s", "shs", "scs", "snhs", "snzs", "ssc", "zs")


def _accumulated() -> None:
    kinds: tuple[dict[str, Any], ...] = ({}, {"gradient_as_bucket_view": True})
    for freed, kind, clears, how in product(FREED, kinds, (True, False), SEQUENCES):
        if freed and (kind or not clears):
            continue
        if how[0] == "z" and not clears:
            continue
        (oracle, plain), (ours, mine) = both(options={"shard_gradients": freed}, **kind)
        for i, x in enumerate(batches(3)):
            for model, optimizer in ((oracle, plain), (ours, mine)):
                if clears:
                    optimizer.zero_grad()
                _accumulate(model, x, how)
                optimizer.step()
            assert_close_params(ours, oracle, (freed, kind, how, i), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_backwards_add_up_as_with_ddp() -> None:
    _accumulated()


@on_ranks(2)
def test_cleared_in_place_is_bitwise() -> None:
    for freed in FREED:
        (oracle, plain), (ours, mine) = both(adamw, options={"shard_gradients": freed})
        for x in batches(4):
            for model, optimizer in ((oracle, plain), (ours, mine)):
                optimizer.zero_grad(set_to_none=False)
                backward(model, x)
                optimizer.step()
            assert_same_params(ours, oracle, freed)


@on_ranks(2)
def test_parameters_that_are_not_always_used() -> None:
    for freed in FREED:
        (oracle, plain), (ours, mine) = both(
            model=Branches, options={"shard_gradients": freed}, find_unused_parameters=True, bucket_cap_mb=0.0004
        )
        for i, x in enumerate(batches(6)):
            for model, optimizer in ((oracle, plain), (ours, mine)):
                optimizer.zero_grad()
                backward(model, x)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            assert_close_params(ours, oracle, (freed, i))


@on_ranks(2)
def test_a_backward_under_no_sync_behind_the_last_one_is_refused() -> None:
    for freed in FREED:
        (_, _), (ours, mine) = both(options={"shard_gradients": freed})
        x = next(batches(1))
        backward(ours, x)
        with ours.no_sync():
            backward(ours, x)
        with pytest.raises(RuntimeError, match=r"under no_sync\(\): use it after a backward"):
            nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        with pytest.raises(RuntimeError, match="make the last backward before step"):
            mine.step()


@on_ranks(2)
def test_under_join_torchs_clipping_is_refused_on_all_ranks() -> None:
    (_, _), (ours, mine) = both(adamw)
    with Join([ours, mine]):
        backward(ours, next(batches(1)))
        with pytest.raises(RuntimeError, match="under Join some may have no inputs"):
            nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        mine.step()


# --- loss scaling -----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_torchs_loss_scaler_skips_the_steps_that_it_skips_with_ddp() -> None:
    for freed, unscales in product(FREED, (True, False)):
        made = both(adamw, options={"shard_gradients": freed})
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in made]
        for i, x in enumerate(batches(7)):
            factor = float("inf") if i in (0, 4) and dist.get_rank() == 1 else 1.0
            for (model, optimizer), scaler in zip(made, scalers, strict=True):
                scaler.scale((model(x) * factor).square().sum()).backward()
                if unscales:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert_same_params(made[1][0], made[0][0], (freed, unscales, i))
            assert scalers[0].get_scale() == scalers[1].get_scale()
        assert made[1][1].handle.stats().num_updates == 5


@on_ranks(2)
def test_torchs_loss_scaler_leaves_out_one_of_several_optimizers() -> None:
    for freed, order, unscales in product(FREED, ((0, 1), (1, 0)), (True, False)):
        models = pair()
        made: list[list[Any]] = []
        for model in models:
            first, *rest = model.module.layers
            rest = [p for layer in rest for p in layer.parameters()]
            made.append([torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.AdamW(rest, lr=0.01)])
        zerolap.shard(models[1], made[1], shard_gradients=freed)
        scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in models]
        for i, x in enumerate(batches(6)):
            for model, optimizers, scaler in zip(models, made, scalers, strict=True):
                for each in optimizers:
                    each.zero_grad()
                spoil = model.module.layers[0].bias if i in (1, 3) else None
                loss = model(x).square().sum()
                if spoil is not None:
                    loss = loss + (spoil.sum() * 0 + 1).log() + spoil.sum() * float("inf")
                scaler.scale(loss).backward()
                for k in order if unscales else ():
                    scaler.unscale_(optimizers[k])
                for k in order:
                    scaler.step(optimizers[k])
                scaler.update()
            assert_same_params(models[1], models[0], (freed, order, unscales, i))


# --- a loop as everybody writes it ------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.blocks, self.head = (
            nn.Linear(13, 16),
            nn.ModuleList(Block(16) for _ in range(2)),
            nn.Linear(16, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decay = [p for p in self.parameters() if p.ndim >= 2]
        rest = [p for p in self.parameters() if p.ndim < 2]
        return torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=3e-3
        )


LOOP = """
torch.manual_seed(0)
model = Small()
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
optimizer = model.configure_optimizers()
model = torch.compile(model, backend=backend)
model = DDP(model)
raw_model = model.module
for x in data:
    for micro_step in range(2):
        model.require_backward_grad_sync = micro_step == 1
        loss = (model(x + micro_step) - 1).square().mean() / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    norms.append(norm.item())
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
"""
TWO_LINES = LOOP.replace("\ntorch.manual_seed(0)", "\nimport zerolap\ntorch.manual_seed(0)", 1).replace(
    "raw_model = model.module\n", "raw_model = model.module\nzerolap.shard(model, optimizer, **options)\n"
)


def run_loop(loop: str, **given: Any) -> dict[str, Any]:
    names = {"torch": torch, "DDP": DDP, "Small": Small, "norms": [], "data": list(batches(5)), **given}
    exec(compile(loop, "<loop>", "exec"), names)  # a test's own text, of which lines are counted
    return names


def _loop() -> None:
    assert len(TWO_LINES.splitlines()) == len(LOOP.splitlines()) + 2
    late = (
        "        scaler.scale(loss).backward()\n",
        "        if not micro_step:\n            optimizer.zero_grad()\n        scaler.scale(loss).backward()\n",
    )
    for options, grad_clip in (({}, 1e9), ({"shard_gradients": True}, 0.3)):
        one, two = LOOP, TWO_LINES
        if options:  # gradients are cleared behind the first forward, which is compiled while the old ones are there
            one, two = (
                each.replace(*late).replace("    optimizer.zero_grad(set_to_none=True)\n", "") for each in (one, two)
            )
        theirs = run_loop(one, backend="aot_eager", grad_clip=grad_clip)
        ours = run_loop(two, backend="aot_eager", grad_clip=grad_clip, options=options)
        if grad_clip == 1e9:
            assert_same_params(ours["model"], theirs["model"], options)
        else:
            assert max(theirs["norms"]) > grad_clip
            # Adam divides by the root of what it squares, so an error of the norm does not grow.
            assert_close_params(ours["model"], theirs["model"], options)
        torch.testing.assert_close(ours["norms"], theirs["norms"], **BOUND)
        held = sum(t.numel() for state in ours["optimizer"].optim.state.values() for t in state.values() if t.ndim)
        assert held < 0.55 * 2 * sum(p.numel() for p in ours["model"].parameters())


def test_a_loop_with_clipping_scaling_accumulation_and_a_compiled_model_needs_two_lines() -> None:
    run_ranks(2, _loop, limit=180)
