"""Overlap gives the numbers of DDP + the plain optimizer, bit for bit, after every iteration from the first on."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from support.training import HOOK_MAKERS, assert_same_params, backward, batches, iterate, overlapped, pair
from zerolap_conformance.ranks import run_ranks

OPTIMIZERS = (
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01}),
)


def _sweep() -> int:
    num_cases = 0
    for hook_maker, shard_buckets, as_view, static_graph, (cls, defaults) in product(
        HOOK_MAKERS, (False, True), (False, True), (False, True), OPTIMIZERS
    ):
        case = (hook_maker.__name__, shard_buckets, as_view, static_graph, cls.__name__)
        oracle, ours = pair(gradient_as_bucket_view=as_view, static_graph=static_graph)
        plain = cls(oracle.parameters(), **defaults)
        zero = overlapped(ours, ours.parameters(), cls, hook_maker=hook_maker, shard_buckets=shard_buckets, **defaults)
        for i, x in enumerate(batches(6)):
            iterate(oracle, plain, x)
            zero.zero_grad()
            backward(ours, x)  # and no step(): the update is in backward
            assert_same_params(ours, oracle, (*case, f"iteration {i}"))
            for a, b in zip(ours.parameters(), oracle.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad), (*case, f"gradient, iteration {i}")
        num_cases += 1
    return num_cases


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_overlap_equals_ddp_and_plain_optimizer_bit_for_bit(world_size: int) -> None:
    assert run_ranks(world_size, _sweep) == [32] * world_size
