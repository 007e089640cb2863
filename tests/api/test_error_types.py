"""Whatever fails, the training loop gets a ZerolapError on every rank, and DDP is left in order."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.sim_programs import device_group, on_device, small_model
from support.stream_programs import sim_device
from support.training import Mlp, backward, batches, overlapped
from zerolap_conformance.ranks import run_ranks
from zerolap_cpu_gloo import CpuGlooAdapter
from zerolap_sim import SimAdapter, build

NUM_GOOD = 2  # iterations before something goes wrong


class Guilty:
    """Whose fault it is: rank 1's, unless all fail alike."""

    are_all = False


def is_guilty() -> bool:
    return Guilty.are_all or dist.get_rank() == 1


class Unlucky(torch.optim.SGD):
    """Fails once told so."""

    def step(self, closure: Any = None) -> Any:
        if is_guilty() and InTime.is_due:
            raise ArithmeticError("out of luck")
        return super().step(closure)


def failing_adapter(base: Any, verb: str) -> Any:
    """An adapter one of whose collectives cannot be started, or cannot be finished, once told so."""

    class Failing(base):  # type: ignore[misc]
        is_due = False

        def _try(self, name: str, start: Callable[[], zerolap.Pending]) -> zerolap.Pending:
            if name not in verb or not (self.is_due and is_guilty()):
                return start()
            if "end" not in verb:
                raise OSError("out of luck")
            pending = start()

            def fail() -> None:
                pending.wait()
                raise OSError("out of luck")

            return zerolap.Pending([], tensors=(), what="rank 1, bucket 0: a gather", finish=fail)

        def reduce_scatter(self, *args: Any, **kwargs: Any) -> zerolap.Pending:
            return self._try("reduce", lambda: super(Failing, self).reduce_scatter(*args, **kwargs))

        def all_gather(self, *args: Any, **kwargs: Any) -> zerolap.Pending:
            return self._try("gather", lambda: super(Failing, self).all_gather(*args, **kwargs))

    return Failing()


class InTime(torch.autograd.Function):
    """Gradients of rank 1 that are not finite, from some iteration on."""

    is_due = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float("inf") if InTime.is_due and dist.get_rank() == 1 else grad


# What fails, and how it is attached.
FAULTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("optimizer", {"schedule": "interleaved", "gather": "eager"}),
    ("optimizer", {"schedule": "after_backward", "gather": "lazy"}),
    ("optimizer", {"schedule": "on_step", "gather": "eager"}),
    ("reduce", {"schedule": "interleaved", "gather": "eager"}),
    ("reduce", {"schedule": "on_step", "gather": "lazy"}),
    ("gather", {"schedule": "interleaved", "gather": "eager"}),
    ("gather", {"schedule": "on_step", "gather": "lazy"}),
    ("gather's end", {"schedule": "after_backward", "gather": "lazy"}),
    ("gather's end", {"schedule": "interleaved", "gather": "eager"}),
    ("gather's end", {"schedule": "on_step", "gather": "eager"}),
    ("gradients", {"schedule": "after_backward", "nonfinite": "raise"}),
    ("gradients", {"schedule": "on_step", "nonfinite": "raise"}),
)


def _fail(fault: str, options: dict[str, Any], ddp: DDP, group: Any, base: Any, data: Any) -> tuple[str, str]:
    """Train until something fails; what the loop has caught, after which DDP works as if nothing had happened."""
    cls = Unlucky if fault == "optimizer" else torch.optim.SGD
    adapter = failing_adapter(base, fault)
    InTime.is_due = False
    zero = zerolap.ZeroRedundancyOptimizer(
        ddp.parameters(), cls, process_group=group, overlap_with_ddp=True, lr=0.01, momentum=0.9, fused=False
    )
    handle = zerolap.attach(ddp, zero, adapter=adapter, **options)
    try:
        for i in range(8):
            adapter.is_due = InTime.is_due = i >= NUM_GOOD
            InTime.apply(ddp(data(i))).square().sum().backward()
            zero.step()
            zero.zero_grad()
        caught: BaseException = AssertionError("training went on to the end")
    except Exception as error:
        caught = error
    first = f"{type(caught).__name__}: {caught}"
    try:
        zero.step()
        caught = AssertionError("nothing was raised")
    except Exception as error:
        caught = error
    # At once, so that the other rank need not wait for its timeout: connections are closed.
    handle.detach()
    assert not handle.is_attached
    ddp.zero_grad()
    InTime.is_due = False
    ddp(data(0)).square().sum().backward()  # which averages gradients again
    return first, f"{type(caught).__name__}: {caught}"


def _check(seen: list[list[tuple[str, str]]], faults: Any, *, are_all: bool = False) -> None:
    for rank, caught in enumerate(seen):
        for (fault, options), (first, again) in zip(faults, caught, strict=True):
            what = f"{fault}, {options}, rank {rank}: {first} | {again}"
            assert re.match(r"(ZerolapError|CollectiveError): rank \d", first), what
            if fault != "gradients" or rank == 1:
                assert "bucket" in first, what
            if fault != "gradients" and (rank == 1 or are_all):
                assert "out of luck" in first, what
            if options["schedule"] != "on_step" or fault != "gradients":  # which has changed nothing
                assert re.match(r"ZerolapError: rank \d: the overlap failed earlier", again), what


def _on_host() -> list[tuple[str, str]]:
    def data(i: int) -> Tensor:
        return torch.randn(5, 13, generator=torch.Generator().manual_seed(10 * i + dist.get_rank()))

    return [
        _fail(fault, options, DDP(Mlp(), bucket_cap_mb=0.004), None, CpuGlooAdapter, data) for fault, options in FAULTS
    ]


def test_the_loop_gets_our_error_on_every_rank() -> None:
    _check(run_ranks(2, _on_host, group_timeout=15), FAULTS)


ON_STREAMS = tuple(each for each in FAULTS if each[0] in ("optimizer", "reduce", "gradients"))


def _on_streams() -> list[tuple[str, str]]:
    """All ranks fail alike: a device on which a collective has failed runs nothing more, and says so in its own words."""
    group, found, Guilty.are_all = device_group(timeout=20), [], True

    def data(i: int) -> Tensor:
        return torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * i + dist.get_rank())).to(sim_device())

    for fault, options in ON_STREAMS:
        ddp = DDP(small_model().to(sim_device()), process_group=group, bucket_cap_mb=0.02)
        found.append(_fail(fault, options, ddp, group, SimAdapter, data))
    return found


# --- hooks ------------------------------------------------------------------------------------------------------------


def _raises(state: Any, bucket):  # type: ignore[no-untyped-def]
    state["count"] += 1
    if dist.get_rank() == 1 and state["count"] > 9:
        raise OSError("out of luck")
    return allreduce_hook(state["group"], bucket)


def _fails_later(state: Any, bucket):  # type: ignore[no-untyped-def]
    def check(future: Future[Tensor]) -> Tensor:
        state["count"] += 1
        if dist.get_rank() == 1 and state["count"] > 9:
            raise OSError("out of luck")
        return future.value()

    return allreduce_hook(state["group"], bucket).then(check)


def _hooked(hook: Any, maker: Any) -> str:
    group: Any = dist.new_group(timeout=timedelta(seconds=3))
    ddp = DDP(Mlp(), bucket_cap_mb=0.004, process_group=group)
    zero = overlapped(
        ddp,
        ddp.parameters(),
        torch.optim.SGD,
        hook=hook,
        hook_maker=maker,
        state={"count": 0, "group": group},
        process_group=group,
        lr=0.1,
    )
    try:
        for x in batches(8):
            backward(ddp, x)
    except Exception as error:
        with pytest.raises(zerolap.ZerolapError, match="the overlap failed earlier"):
            zero.step()
        return f"{type(error).__name__}: {error}"
    return "training went on to the end"


@pytest.mark.parametrize(
    ("hook", "maker"),
    [(_raises, zerolap.hook_with_zero_step_interleaved), (_fails_later, zerolap.hook_with_zero_step)],
    ids=["raises", "future"],
)
def test_the_loop_gets_our_error_with_a_hook_of_ones_own(hook: Any, maker: Any) -> None:
    for rank, said in enumerate(run_ranks(2, _hooked, hook, maker)):
        assert re.match(rf"(ZerolapError|CollectiveError): rank {rank}, bucket \d", said), said
        assert rank == 0 or "out of luck" in said, said


# --- the simulated device ---------------------------------------------------------------------------------------------


def test_the_loop_gets_our_error_on_streams() -> None:
    build.build()
    seen = run_ranks(2, on_device, _on_streams, group_timeout=20)
    _check([found for found, _ in seen], ON_STREAMS, are_all=True)
