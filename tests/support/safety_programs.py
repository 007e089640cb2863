"""Programs with a fault on rank 1, for test_safety.py. As a script, under torchrun: one that just ends, or raises."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.training import Mlp, backward, batches, overlapped

GUILTY, WHEN = 1, 4  # the rank, and the iteration

# how the optimizer is overlapped: options of attach(), or None for the hook
WAYS: dict[str, dict[str, Any] | None] = {
    "interleaved": {"schedule": "interleaved"},
    "after_backward": {"schedule": "after_backward"},
    "on_step": {"schedule": "on_step"},
    "hook_with_zero_step": None,
}


def connect(ddp: DDP, way: str, **options: Any) -> tuple[zerolap.ZeroRedundancyOptimizer, zerolap.Handle | None]:
    how = WAYS[way]
    if how is None:
        maker = zerolap.hook_with_zero_step
        return overlapped(ddp, ddp.parameters(), torch.optim.SGD, hook_maker=maker, lr=0.1), None
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    return zero, zerolap.attach(ddp, zero, **(how | options))


class _Signals(torch.autograd.Function):
    """Sends a signal to its own process, in the middle of a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Any) -> Tensor:
        ctx.send = send
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.send()
        return grad, None


class Faulty(Mlp):
    send: Any = None  # what is called in the middle of the next backward
    is_shortened = False  # whether the next forward leaves layers out

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if self.send is not None and i == 2:
                x = _Signals.apply(x, self.send)
            if not (self.is_shortened and 0 < i < 3):
                x = torch.tanh(layer(x))
            elif i == 2:
                x = x[:, :1].expand(-1, 50)
        return x


def fail(case: str, way: str, folder: str) -> None:
    """Train until rank 1 does what ``case`` says. Notes when that was, and when each rank got its error."""
    rank = dist.get_rank()
    notes = Path(folder)
    (notes / f"pid{rank}").write_text(str(os.getpid()))

    def note_fault(number: int | None = None) -> None:
        (notes / "fault").write_text(str(time.monotonic()))
        if number is not None:
            os.kill(os.getpid(), number)

    torch.manual_seed(0)
    try:
        if case == "other buckets":
            layers = [nn.Linear(512, 512) for _ in range(4)]
            cap = 25 if rank == GUILTY else 1  # with one layout for good: DDP makes others equal, from rank 0's
            unequal = DDP(nn.Sequential(*layers), bucket_cap_mb=cap, find_unused_parameters=True)
            note_fault()
            connect(unequal, way)
        model = Faulty()
        ddp = DDP(model, bucket_cap_mb=0.004)
        zero, handle = connect(ddp, way)
        for i, x in enumerate(batches(10)):
            is_fault = rank == GUILTY and i == WHEN
            if is_fault and case in ("killed", "stopped"):
                model.send = lambda: note_fault(signal.SIGKILL if case == "killed" else signal.SIGSTOP)
            if is_fault and case == "other graph":
                note_fault()
                model.is_shortened = True
            zero.zero_grad()
            backward(ddp, x)
            model.send = None
            if is_fault and case == "extra backward":
                note_fault()
                backward(ddp, x)
            if is_fault and case == "other order":
                note_fault()
                assert handle is not None
                if way == "on_step":
                    zero.clip_grad_norm_(1.0)
                else:
                    handle.audit()
            if is_fault and case == "skipped step":
                note_fault()
            else:
                zero.step()
    except Exception as error:
        (notes / f"error{rank}").write_text(f"{time.monotonic()}\n{error}")
        raise
    raise AssertionError("training went on to the end")


def _script(case: str) -> None:
    """Everything stays attached: who ends it is the interpreter."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    made = []
    for way, options in (("interleaved", {"gather": "lazy"}), ("on_step", {}), ("hook_with_zero_step", {})):
        ddp = DDP(Mlp(), bucket_cap_mb=0.004)
        made.append((ddp, *connect(ddp, way, **options)))
    for i, x in enumerate(batches(6)):
        for ddp, zero, _ in made:
            if case == "raises" and i == WHEN and dist.get_rank() == GUILTY:
                raise ArithmeticError("the program is out of luck")
            zero.zero_grad()
            backward(ddp, x)
            zero.step()
    os.write(1, f"{os.getpid()} {time.monotonic()}\n".encode())  # in one piece: both ranks write here


if __name__ == "__main__":
    _script(sys.argv[1])
