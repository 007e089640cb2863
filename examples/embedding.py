"""zerolap embedded in a training stack with its own adapter, process group and logging. Everything is an argument.

    torchrun --standalone --nproc-per-node 2 examples/embedding.py

No command line, no entry points, nothing is registered. Acme's devices are the CPU here, and its communication library is Gloo.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Backend
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap


class AcmeAdapter(zerolap.Adapter):
    """See VENDORS.md. For a device with streams it is a zerolap.StreamAdapter, and shorter."""

    name = "acme"
    device_type = "cpu"
    backend = "gloo"
    capabilities = zerolap.Capabilities(
        futures_complete_at_enqueue=False, exact_cut=64, has_float64=True, one_issue_order=False
    )

    def __init__(self, on_bytes: Callable[[int], None]) -> None:
        self._on_bytes = on_bytes  # Acme's own instrument: adapters may keep what they like

    def make_backend(self, spec: zerolap.GroupSpec) -> Backend:
        return dist.ProcessGroupGloo(spec.store, spec.rank, spec.size, spec.timeout)

    def reduce_scatter(self, parts: zerolap.Parts, **options: Any) -> zerolap.Pending:
        pending = super().reduce_scatter(parts, **options)
        self._on_bytes(pending.sent_bytes)
        return pending


class AcmeSgd(torch.optim.SGD):
    """Acme's optimizer. zerolap does not know it, so it gets whole parameters, unless it says that it is element-wise."""


class AcmeError(Exception):
    """What Acme's users see."""


class AcmeTrainer:
    def __init__(self, model: nn.Module, *, group: dist.ProcessGroup, log: logging.Logger) -> None:
        self.num_bytes = 0
        self._log = log
        # All of zerolap logs below this name, and prints nothing.
        theirs = logging.getLogger("zerolap")
        theirs.setLevel(log.getEffectiveLevel())
        theirs.handlers, theirs.propagate = log.handlers, False
        self._ddp = DDP(model, process_group=group)
        self._optimizer = zerolap.ZeroRedundancyOptimizer(
            self._ddp.parameters(), AcmeSgd, process_group=group, overlap_with_ddp=True, lr=0.05, momentum=0.9
        )
        self._handle = zerolap.attach(
            self._ddp, self._optimizer, adapter=AcmeAdapter(self._count), schedule="on_step", nonfinite="raise"
        )

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def step(self, x: Tensor, y: Tensor) -> float:
        self._optimizer.zero_grad()
        loss = nn.functional.mse_loss(self._ddp(x), y)
        loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        try:
            self._optimizer.clip_grad_norm_(1.0)
            self._optimizer.step()
        except zerolap.ZerolapError as error:
            raise AcmeError(f"training cannot go on: {error}") from error
        return loss.item()

    def close(self) -> zerolap.Stats:
        """Give up threads and connections; the model stays as it is."""
        stats = self._handle.stats()
        self._handle.detach()
        self._log.info("%s updates, %s bytes of state", stats.num_updates, stats.state_bytes)
        return stats


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.new_group(timeout=timedelta(minutes=5))
    assert group is not None
    log = logging.getLogger("acme.training")
    log.addHandler(logging.StreamHandler(sys.stdout))
    log.setLevel(logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    torch.manual_seed(0)
    trainer = AcmeTrainer(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)), group=group, log=log)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(10):
        x = torch.randn(16, 32)
        loss = trainer.step(x, x[:, :8])
    log.info("loss %.4f, %s bytes of gradients sent", loss, trainer.num_bytes)
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
