"""Gradients that are changed between backward and step() have no effect there: whoever changes any of them is told."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.ranks import on_ranks
from support.training import (
    HOOK_MAKERS,
    SMALL_BUCKETS,
    Mlp,
    assert_same_params,
    backward,
    batches,
    iterate,
    overlapped,
    pair,
)
from zerolap_cpu_gloo import CpuGlooAdapter

CHANGED = "gradients were changed between backward and step()"


def _zero_one(ddp: DDP) -> None:
    ddp.module.layers[2].weight.grad.zero_()


def _remove_one(ddp: DDP) -> None:
    ddp.module.layers[1].bias.grad = None


def _replace_one(ddp: DDP) -> None:
    ddp.module.layers[3].bias.grad = torch.ones(3)


def _mask_a_row(ddp: DDP) -> None:
    ddp.module.layers[0].weight.grad[-1] = 0


def _clip(ddp: DDP) -> None:
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)


def _clip_nothing(ddp: DDP) -> None:
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)


def _clear(ddp: DDP) -> None:
    ddp.zero_grad()


def _clear_in_place(ddp: DDP) -> None:
    ddp.zero_grad(set_to_none=False)


def _look(ddp: DDP) -> None:
    sum(float(param.grad.norm()) for param in ddp.parameters())


def _said(schedule: Any, change: Callable[[DDP], None], **options: Any) -> str:
    ddp = DDP(Mlp(), bucket_cap_mb=SMALL_BUCKETS, **options)
    if schedule in ("interleaved", "after_backward", "on_step"):
        zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
        zerolap.attach(ddp, zero, schedule=schedule)
    else:
        zero = overlapped(ddp, ddp.parameters(), torch.optim.SGD, hook_maker=HOOK_MAKERS[schedule], lr=0.1)
    for x in batches(3):
        iterate(ddp, zero, x)
    zero.zero_grad()
    backward(ddp, next(batches(1)))
    change(ddp)
    try:
        zero.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("as_view", [False, True])
@on_ranks(2)
def test_any_gradient_that_is_changed_before_step_is_noticed(as_view: bool) -> None:
    changes = (_zero_one, _remove_one, _replace_one, _mask_a_row, _clip, _clip_nothing, _clear, _clear_in_place, _look)
    for schedule, change in product(("interleaved", "after_backward", "on_step", 0, 1), changes):
        message = _said(schedule, change, gradient_as_bucket_view=as_view)
        has_effect = change not in (_look, _clip_nothing, _clear, _clear_in_place)
        has_effect |= (
            as_view and change is _clip_nothing
        )  # a bucket that was written to has nothing to be compared with
        has_effect &= schedule != "on_step"  # there step() uses what it finds
        assert (CHANGED in message) == has_effect, (schedule, change, message)
        if has_effect:
            assert 'schedule="on_step"' in message, message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_remove_one, "that of parameter 3, of shape (37,), was removed"),
        (_mask_a_row, "that of parameter 0, of shape (40, 13), was changed"),
    ],
    ids=["removed", "changed"],
)
@on_ranks(2)
def test_the_message_names_the_gradient(change: Callable[[DDP], None], words: str) -> None:
    said = _said("after_backward", change)
    assert words in said, said


@on_ranks(2)
def test_accumulated_gradients_are_not_taken_for_changed_ones() -> None:
    oracle, ours = pair()
    plain = torch.optim.SGD(oracle.parameters(), lr=0.1)
    zero = zerolap.ZeroRedundancyOptimizer(
        ours.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True, fused=False
    )
    zerolap.attach(ours, zero, schedule="on_step")
    for x in batches(4):
        for model, optimizer in ((oracle, plain), (ours, zero)):
            optimizer.zero_grad()
            with model.no_sync():
                backward(model, x)
            backward(model, 2 * x)
            optimizer.step()
        assert_same_params(ours, oracle)


class Looking(CpuGlooAdapter):
    """Counts which of DDP's first buckets are still there when memory is given back."""

    def __init__(self) -> None:
        super().__init__()
        self.first: list[weakref.ref[torch.Tensor]] = []
        self.num_alive: list[int] = []

    def release_memory(self) -> None:
        if self.first:
            self.num_alive.append(sum(ref() is not None for ref in self.first))
        super().release_memory()


@on_ranks(2)
def test_buckets_that_ddp_has_given_up_are_not_kept_for_comparison() -> None:
    adapter = Looking()
    ddp = DDP(Mlp(), bucket_cap_mb=SMALL_BUCKETS)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    handle = zerolap.attach(ddp, zero, adapter=adapter)
    for i, x in enumerate(batches(3)):
        iterate(ddp, zero, x)
        if i == 0:
            adapter.first = [weakref.ref(bucket.buffer) for bucket in handle._engine.layout]
    assert adapter.num_alive[0] == 0, adapter.num_alive
