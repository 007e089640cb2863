"""Programs that ranks run on the simulated device: each installs it first, for it can be installed once per process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap_sim
from zerolap._torch import under


def on_device(
    program: Callable[..., Any], *args: Any, name: str = "sim", collectives: str = "simccl", **settings: Any
) -> Any:
    """Install the device, then run the program; what the checker reports is returned beside its value, as text."""
    zerolap_sim.install(name, collectives)
    zerolap_sim.configure(**settings)
    torch.manual_seed(0)
    value = program(*args)
    torch.accelerator.synchronize()
    return value, [str(report) for report in zerolap_sim.take_reports()]


def device_group(backend: str = "simccl", timeout: float = 60) -> dist.ProcessGroup:
    both = f"cpu:gloo,{zerolap_sim.device_name()}:{backend}"
    group = dist.new_group(backend=both, timeout=timedelta(seconds=timeout))
    assert group is not None
    return group


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)
    )


def small_batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(16, 32, generator=generator)
    y = torch.randint(0, 10, (16,), generator=generator)
    return x.to(device), y.to(device)


class Transformer(nn.Module):
    """Embedding, two encoder layers, a head: what people train, in small."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(50, 32)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.encoder(self.embed(tokens)))
        return result


def text_batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(77 * step + dist.get_rank())
    tokens = torch.randint(0, 50, (4, 9), generator=generator)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if device.type == "cpu":
        return x, y
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)


def train_ddp(
    device: torch.device, group: dist.ProcessGroup, *, steps: int = 4, hook: Any = None, **options: Any
) -> list[torch.Tensor]:
    """Plain DDP with SGD on several small buckets; the parameters afterwards."""
    ddp = DDP(small_model().to(device), process_group=group, bucket_cap_mb=0.02, **options)
    if hook is not None:
        ddp.register_comm_hook(group, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = small_batch(step, device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    return [p.detach().cpu().clone() for p in ddp.parameters()]


def train_text(model: nn.Module, device: torch.device, *, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        x, y = text_batch(step, device)
        nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def step_in_hook(device: torch.device, group: dist.ProcessGroup, mistake: str, *, steps: int = 3) -> None:
    """Reduce-scatter, step on a shard on a side stream, all-gather, overlapped with the rest: one wait may be missing."""
    ddp = DDP(small_model().to(device), process_group=group, bucket_cap_mb=0.02, gradient_as_bucket_view=True)
    side, main = torch.Stream(device=device), torch.accelerator.current_stream()
    events: list[torch.Event] = []

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, and these would be strings
        buffer, size = bucket.buffer(), group.size()
        padded = -(-buffer.numel() // size) * size
        flat, full = torch.zeros(padded, device=device), torch.empty(padded, device=device)
        shard, event = torch.empty(padded // size, device=device), torch.Event(device=device)
        flat[: buffer.numel()].copy_(buffer)
        scattered = dist.reduce_scatter_tensor(shard, flat, async_op=True, group=group)
        assert scattered is not None
        with under(side):
            if mistake != "no wait after reduce-scatter":
                scattered.wait()
            shard.mul_(-0.1 / size)
        with under(main if mistake == "gather from the wrong stream" else side):
            gathered = dist.all_gather_into_tensor(full, shard, async_op=True, group=group)
        assert gathered is not None
        if mistake == "event too early":
            event.record(side)
        with under(side):
            if mistake != "no wait after all-gather":
                gathered.wait()
            parts = full[: buffer.numel()].split([p.numel() for p in bucket.parameters()])
            for parameter, part in zip(bucket.parameters(), parts, strict=True):
                parameter.data.add_(part.view_as(parameter))
        if mistake != "event too early":
            event.record(side)
        if mistake != "no record_stream":
            for tensor in (flat, shard, full):
                tensor.record_stream(side)
        events.append(event)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    ddp.register_comm_hook(None, hook)
    for step in range(steps):
        if mistake != "no wait before forward":
            for event in events:
                main.wait_event(event)
        events.clear()
        x, y = small_batch(step, device)
        nn.functional.cross_entropy(ddp(x), y).backward()
        ddp.zero_grad()
    torch.accelerator.synchronize()
