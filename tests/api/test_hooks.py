"""Any DDP communication hook can be wrapped: the gradients it makes are what the shards are updated with.

Annotations are real here, not strings: DDP compares those of hooks.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

from support.ranks import on_ranks
from support.training import HOOK_MAKERS, assert_same_params, batches, iterate, overlapped, pair


def own_tensor_hook(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Returns a tensor of its own, new every time, instead of DDP's buffer."""
    copy = bucket.buffer() / dist.get_world_size()
    return dist.all_reduce(copy, async_op=True).get_future().then(lambda f: f.value()[0] * 0.5)


def no_communication_hook(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(bucket.buffer().zero_().add_(0.01))
    return future


def one_at_a_time(hook: Callable[..., Any]) -> Callable[..., Any]:
    """For the oracle: on Gloo, DDP itself hangs with a hook that waits inside callbacks when there are many buckets."""

    def waiting(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        future = hook(state, bucket)
        future.wait()
        return future

    return waiting


def _no_state() -> None:
    return None


def _power_sgd_state() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
    )


HOOKS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "allreduce": (default_hooks.allreduce_hook, _no_state),
    "fp16": (default_hooks.fp16_compress_hook, _no_state),
    "bf16": (default_hooks.bf16_compress_hook, _no_state),
    "bf16 around allreduce": (default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook), _no_state),
    "powerSGD": (powerSGD_hook.powerSGD_hook, _power_sgd_state),
    "own tensor": (own_tensor_hook, _no_state),
    "no communication": (no_communication_hook, _no_state),
}


@pytest.mark.parametrize("name", HOOKS)
@on_ranks(2)
def test_a_wrapped_hook_gives_the_numbers_of_ddp_with_that_hook(name: str) -> None:
    hook, make_state = HOOKS[name]
    for hook_maker in HOOK_MAKERS:
        oracle, ours = pair(bucket_cap_mb=0.0005)
        oracle.register_comm_hook(make_state(), one_at_a_time(hook))
        plain = torch.optim.SGD(oracle.parameters(), lr=0.05, momentum=0.9)
        zero = overlapped(
            ours,
            ours.parameters(),
            torch.optim.SGD,
            hook_maker=hook_maker,
            hook=hook,
            state=make_state(),
            lr=0.05,
            momentum=0.9,
        )
        for i, x in enumerate(batches(8)):
            iterate(oracle, plain, x)
            iterate(ours, zero, x)
            assert_same_params(ours, oracle, (name, hook_maker.__name__, f"iteration {i}"))
        assert len(zero._engine.layout) >= 4  # enough to starve Gloo's two workers
