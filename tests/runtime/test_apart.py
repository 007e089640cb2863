"""Single lines that keep numbers right: waits, the scale before a sum, what a step that was left out leaves behind.

The oracle runs apart from ours, not between our steps: there its all-reduce would hold up ranks until late gathers have arrived.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.late import Late
from support.ranks import on_ranks
from support.training import SMALL_BUCKETS, Mlp, batches, num_in_flight
from zerolap.backend.lanes import Pending


class Recurrent(nn.Module):
    """Uses its weights by references of its own, and a parameter of the outermost module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(13))
        self.held = [self.scale]
        self.lstm = nn.LSTM(13, 11, num_layers=2)
        self.head = nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x * self.held[0])[0])


def _train(make_model: Any, wrap: Any, *, num_steps: int = 6) -> tuple[list[float], list[Tensor]]:
    """The losses, and the parameters after the last step: nothing looks at them in between."""
    torch.manual_seed(0)
    ddp = DDP(make_model(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer, losses = wrap(ddp), []
    for step, x in enumerate(batches(num_steps)):
        if dist.get_rank() == step % dist.get_world_size():
            time.sleep(0.01)  # ranks are not in step
        loss = ddp(x).square().sum()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, [param.detach().clone() for param in ddp.parameters()]


def _lazy(ddp: DDP, *, schedule: Any, cls: Any = torch.optim.AdamW, adapter: Any = None, **defaults: Any) -> Any:
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), cls, overlap_with_ddp=True, **defaults)
    zerolap.attach(ddp, zero, schedule=schedule, gather="lazy", adapter=adapter or Late())
    return zero


@on_ranks(2)
def test_forward_waits_for_parameters_whoever_holds_them() -> None:
    options: dict[str, Any] = {"lr": 0.01, "fused": False}
    for make_model in (Recurrent, Mlp):
        expected = _train(make_model, lambda ddp: torch.optim.AdamW(ddp.parameters(), **options))
        for schedule in ("interleaved", "after_backward", "on_step"):
            seen = _train(make_model, lambda ddp, way=schedule: _lazy(ddp, schedule=way, **options))
            assert seen[0] == expected[0], (make_model.__name__, schedule)
            assert all(torch.equal(a, b) for a, b in zip(seen[1], expected[1], strict=True)), schedule


class _Counted(Pending):
    """Takes a while, and notes how often it was waited for."""

    __slots__ = ("num_waits",)

    def wait(self) -> None:
        self.num_waits = getattr(self, "num_waits", 0) + 1
        time.sleep(0.3)
        super().wait()


class _Slow(Late):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[_Counted] = []

    def all_gather(self, parts: Any, **options: Any) -> Pending:
        pending = super().all_gather(parts, **options)
        self.made.append(_Counted([pending], tensors=(), what="", sent_bytes=pending.sent_bytes))
        return self.made[-1]


@on_ranks(2)
def test_of_two_threads_that_use_a_parameter_one_waits_for_its_gather_and_the_other_for_that_one() -> None:
    adapter = _Slow()
    ddp = DDP(Mlp())
    zero = _lazy(ddp, schedule="on_step", adapter=adapter, lr=0.1)
    for x in batches(3):
        zero.zero_grad()
        ddp(x).square().sum().backward()
        zero.step()
    (*_, last), seen = adapter.made, []
    assert num_in_flight(zero) == 1
    old = zero._engine.installed[0].params[0].detach().clone()

    def use() -> None:
        seen.append(ddp.module.layers[0].weight.detach().clone())

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert last.num_waits == 1, "both have waited for one gather: the second may take the next one for finished"
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], old), "the parameters were not on their way"


class Weight(nn.Module):
    """Gradients are the input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@on_ranks(2)
def test_halves_are_scaled_before_they_are_summed_as_ddp_does_it() -> None:
    large = torch.tensor([40000.0, -49984.0, 65504.0, 1.0, 2**-14])  # twice the first three is infinite in 16 bits
    for dtype, reduced_in in ((torch.float16, None), (torch.float32, torch.float16)):
        results = []
        for cls in (torch.optim.SGD, zerolap.ZeroRedundancyOptimizer):
            ddp = DDP(Weight(dtype))
            if cls is torch.optim.SGD:
                optimizer = cls(ddp.parameters(), lr=2**-10)
            else:
                optimizer = cls(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=2**-10)
                zerolap.attach(ddp, optimizer, reduce_dtype=reduced_in)
            for _ in range(3):
                optimizer.zero_grad()
                ddp(large.to(dtype)).backward()
                optimizer.step()
            results.append(ddp.module.weight.detach().clone())
        assert torch.equal(*results), (dtype, results)
        assert bool(torch.isfinite(results[0]).all())


def _clip(optimizer: Any, ddp: DDP, most: float) -> float:
    if isinstance(optimizer, zerolap.ZeroRedundancyOptimizer):
        return optimizer.clip_grad_norm_(most).item()
    return torch.nn.utils.clip_grad_norm_(ddp.parameters(), most).item()


def _clipped(wrap: Any) -> tuple[list[float], list[Tensor]]:
    """Clip in every iteration, and leave the step out in some: by not calling it, and as a loss scaler does."""
    torch.manual_seed(0)
    ddp = DDP(Mlp(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer, norms = wrap(ddp), []
    scaler = (zerolap.GradScaler if isinstance(optimizer, zerolap.ZeroRedundancyOptimizer) else torch.amp.GradScaler)(
        "cpu", init_scale=8.0, growth_interval=1000
    )
    for step, x in enumerate(batches(10)):
        factor = float("inf") if step in (4, 7) else 1.0
        optimizer.zero_grad()
        scaler.scale(ddp(x).square().sum() * factor).backward()
        scaler.unscale_(optimizer)
        norm = _clip(optimizer, ddp, 0.05)
        if step not in (4, 7):
            norms.append(norm)
        if step not in (1, 5):
            scaler.step(optimizer)
        scaler.update(8.0)
    return norms, [param.detach().clone() for param in ddp.parameters()]


@on_ranks(2)
def test_a_step_that_was_left_out_leaves_no_clipping_to_the_next() -> None:
    options: dict[str, Any] = {"lr": 0.1, "fused": True}  # its kernels divide gradients themselves
    expected = _clipped(lambda ddp: torch.optim.SGD(ddp.parameters(), **options))
    seen = _clipped(lambda ddp: _lazy(ddp, schedule="on_step", cls=torch.optim.SGD, **options))
    torch.testing.assert_close(seen[0], expected[0], rtol=1e-4, atol=0)
    # A fused kernel divides where torch multiplies, and norms of shards are added up in another order.
    torch.testing.assert_close(seen[1], expected[1], rtol=1e-4, atol=1e-6)
