"""What ranks run on the simulated device to try the stream path: training by every way, compared with the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
import zerolap_sim
from support.sim_programs import Transformer, device_group, small_batch, small_model, text_batch
from zerolap.runtime.codec import Blocks, Codec, Noise
from zerolap.schedule.wire_format import BLOCK, WireFormat
from zerolap_conformance.support import busy

SCHEDULES = ("interleaved", "after_backward", "on_step")
GATHERS = ("eager", "lazy")
SGD = {"lr": 0.1, "momentum": 0.9, "fused": False}


def sim_device() -> torch.device:
    return torch.device(zerolap_sim.device_name(), 0)


def train(
    device: torch.device,
    group: dist.ProcessGroup,
    overlap: Callable[[DDP, zerolap.ZeroRedundancyOptimizer], object] | None,
    *,
    num_steps: int = 5,
    make_model: Callable[[], nn.Module] = small_model,
    cls: type[torch.optim.Optimizer] = torch.optim.SGD,
    between: Callable[[Any], object] = lambda optimizer: None,
    **defaults: Any,
) -> list[Tensor]:
    """The parameters after some steps; without ``overlap`` by DDP and the plain optimizer."""
    ddp = DDP(make_model().to(device), process_group=group, bucket_cap_mb=0.02)
    optimizer: Any
    if overlap is None:
        optimizer = cls(ddp.parameters(), **(defaults or SGD))
    else:
        optimizer = zerolap.ZeroRedundancyOptimizer(
            ddp.parameters(), cls, process_group=group, overlap_with_ddp=True, **(defaults or SGD)
        )
        overlap(ddp, optimizer)
    for step in range(num_steps):
        x, y = small_batch(step, device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x.to(next(ddp.module.parameters()).dtype)).float(), y).backward()
        between(optimizer)
        optimizer.step()
    return [param.detach().cpu().clone() for param in ddp.module.parameters()]


class Attached:
    """Overlap by attach(), with an adapter made on the rank."""

    def __init__(self, adapter: Callable[[], zerolap.Adapter], **options: Any) -> None:
        self._adapter = adapter
        self._options = options

    def __call__(self, ddp: DDP, optimizer: zerolap.ZeroRedundancyOptimizer) -> zerolap.Handle:
        return zerolap.attach(ddp, optimizer, adapter=self._adapter(), **self._options)


class Hooked:
    """Overlap by one of torch's two hooks; the adapter is found by the device's name."""

    def __init__(self, make_hook: Callable[..., Any], *, shard_buckets: bool) -> None:
        self._make_hook = make_hook
        self._shard_buckets = shard_buckets

    def __call__(self, ddp: DDP, optimizer: zerolap.ZeroRedundancyOptimizer) -> None:
        hook = self._make_hook(allreduce_hook, ddp, optimizer, shard_buckets=self._shard_buckets)
        ddp.register_comm_hook(ddp.process_group, hook)


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def every_way(ways: dict[str, Any], backend: str = "simccl") -> dict[str, tuple[float, float, list[str]]]:
    """For each way: the difference to the CPU, that of asynchronous to synchronous mode, and the checker's reports."""
    group, found = device_group(backend), {}
    expected = train(torch.device("cpu"), group, None)
    for name, way in ways.items():
        zerolap_sim.configure(synchronous=False)
        ours = train(sim_device(), group, way)
        torch.accelerator.synchronize()
        reports = [str(report) for report in zerolap_sim.take_reports()]
        zerolap_sim.configure(synchronous=True)
        in_order = train(sim_device(), group, way)
        torch.accelerator.synchronize()
        zerolap_sim.take_reports()
        found[name] = largest_difference(ours, expected), largest_difference(ours, in_order), reports
    return found


# --- the rest of attach() on streams ----------------------------------------------------------------------------------


def _bf16_model() -> nn.Module:
    return small_model().bfloat16()


def _clip(optimizer: Any) -> None:
    if isinstance(optimizer, zerolap.ZeroRedundancyOptimizer):
        optimizer.clip_grad_norm_(0.1)
    else:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)


def both_modes(**options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters after training asynchronously and synchronously."""
    group, results = device_group(), []
    for synchronous in (False, True):
        zerolap_sim.configure(synchronous=synchronous)
        results.append(train(sim_device(), group, **options))
    return results[0], results[1]


def several(make: Callable[[], zerolap.Adapter], **options: Any) -> tuple[float, float, float]:
    """Muon for matrices and AdamW for the rest: to the CPU's DDP, to synchronous mode, and the bytes sent by what must be."""
    group = device_group()
    expected, _ = _train_two(torch.device("cpu"), group, None)
    zerolap_sim.configure(synchronous=False)
    ours, sent = _train_two(sim_device(), group, make, **options)
    torch.accelerator.synchronize()
    reports = zerolap_sim.take_reports()
    assert not reports, reports[0]
    zerolap_sim.configure(synchronous=True)
    in_order, _ = _train_two(sim_device(), group, make, **options)
    return largest_difference(ours, expected), largest_difference(ours, in_order), sent


def _train_two(
    device: torch.device, group: dist.ProcessGroup, make: Callable[[], zerolap.Adapter] | None, **options: Any
) -> tuple[list[Tensor], float]:
    ddp = DDP(small_model().to(device), process_group=group, bucket_cap_mb=0.02)
    matrices = [param for param in ddp.parameters() if param.ndim == 2]
    others = [param for param in ddp.parameters() if param.ndim != 2]
    parts: list[tuple[list[nn.Parameter], Any, Any]] = [
        (matrices, torch.optim.Muon, {"lr": 0.02}),
        (others, torch.optim.AdamW, {"lr": 0.01, "fused": False}),
    ]
    optimizers: list[Any]
    share = 0.0
    if make is None:
        optimizers = [cls(params, **defaults) for params, cls, defaults in parts]
    else:
        optimizers = [
            zerolap.ZeroRedundancyOptimizer(params, cls, process_group=group, overlap_with_ddp=True, **defaults)
            for params, cls, defaults in parts
        ]
        handle = zerolap.attach(ddp, optimizers, adapter=make(), **options)
    for step in range(5):
        x, y = small_batch(step, device)
        nn.functional.cross_entropy(ddp(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if make is not None:
        num_ranks, num_bytes = group.size(), sum(param.nbytes for param in ddp.parameters())
        sent = torch.tensor([float(handle.stats().sent_bytes)], dtype=torch.float64)
        dist.all_reduce(sent)
        share = sent.item() / num_ranks / handle.stats().num_updates / (2 * num_bytes * (num_ranks - 1) / num_ranks)
        handle.detach()
    return [param.detach().cpu().clone() for param in ddp.module.parameters()], share


def precisions(make: Callable[[], zerolap.Adapter], schedule: str, gather: str) -> float:
    """Master weights, and other dtypes on the wire: asynchronous against synchronous, the worst of all."""
    worst = 0.0
    for master_weights, reduce_dtype, gather_dtype in (
        (True, None, None),
        (True, torch.float32, None),
        (True, torch.float16, torch.float16),
    ):
        way = Attached(
            make,
            schedule=schedule,
            gather=gather,
            master_weights=master_weights,
            reduce_dtype=reduce_dtype,
            gather_dtype=gather_dtype,
        )
        for make_model in (small_model, _bf16_model):
            worst = max(worst, largest_difference(*both_modes(overlap=way, make_model=make_model)))
    return worst


def clipped(make: Callable[[], zerolap.Adapter]) -> tuple[float, float]:
    """Clipping on streams: to the CPU's DDP and torch's own clipping, and to synchronous mode."""
    expected = train(torch.device("cpu"), device_group(), None, between=_clip)
    ours, in_order = both_modes(overlap=Attached(make, schedule="on_step"), between=_clip)
    return largest_difference(ours, expected), largest_difference(ours, in_order)


def scaled(make: Callable[[], zerolap.Adapter]) -> tuple[int, list[float], bool]:
    """Losses that overflow on one rank in two of eight iterations."""
    ddp = DDP(small_model().to(sim_device()), process_group=device_group(), bucket_cap_mb=0.02)
    optimizer = zerolap.ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, process_group=ddp.process_group, overlap_with_ddp=True, **SGD
    )
    handle = zerolap.attach(ddp, optimizer, schedule="on_step", adapter=make())
    scaler, scales = zerolap.GradScaler(sim_device().type, init_scale=1024.0), []
    for step in range(8):
        x, y = small_batch(step, sim_device())
        factor = float("inf") if step in (2, 5) and dist.get_rank() == 1 else 1.0
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(ddp(x), y) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    is_finite = all(bool(torch.isfinite(param).all()) for param in ddp.parameters())
    return handle.stats().num_updates, scales, is_finite


def freed_bytes(make: Callable[[], zerolap.Adapter], schedule: str) -> tuple[int, int, int, int]:
    """Bytes that gradients take on the device after a step, and at most in one; those of the model, and of its largest bucket."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(24))).to(sim_device())
    ddp = DDP(model, process_group=device_group(), bucket_cap_mb=0.125)
    optimizer = zerolap.ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, process_group=ddp.process_group, overlap_with_ddp=True, lr=0.01
    )
    zerolap.attach(ddp, optimizer, schedule=schedule, adapter=make(), shard_gradients=True)  # type: ignore[arg-type]
    x = torch.ones(2, 128, device=sim_device())
    before, peak, memory = 0, 0, torch.get_device_module(sim_device())
    for step in range(4):
        torch.accelerator.synchronize()
        start = memory.memory_allocated()
        memory.reset_peak_memory_stats()
        optimizer.zero_grad()
        ddp(x).sum().backward()
        optimizer.step()
        torch.accelerator.synchronize()
        before, peak = start, memory.max_memory_allocated() - start
        assert step < 3 or memory.memory_allocated() == start, "it grows"
    params = sum(param.nbytes for param in ddp.parameters())
    buckets = [bucket.buffer.nbytes for bucket in optimizer._engine.layout]  # type: ignore[union-attr]
    flat = sum(bucket.flat.buffer.nbytes for bucket in optimizer._engine.installed)  # type: ignore[union-attr]
    return before - flat - x.nbytes, peak, params, max(buckets)


def handled(make: Callable[[], zerolap.Adapter]) -> dict[str, Any]:
    """A trace, detaching, attaching again, and the whole state."""
    group = device_group()
    expected = train(torch.device("cpu"), group, None, num_steps=4)
    ddp = DDP(small_model().to(sim_device()), process_group=group, bucket_cap_mb=0.02)
    optimizer = zerolap.ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, process_group=group, overlap_with_ddp=True, **SGD
    )
    spans = []
    for first, gather in ((0, "lazy"), (2, "eager")):
        handle = zerolap.attach(ddp, optimizer, gather=gather, adapter=make())  # type: ignore[arg-type]
        with handle.trace() as trace:
            for step in range(first, first + 2):
                x, y = small_batch(step, sim_device())
                optimizer.zero_grad()
                nn.functional.cross_entropy(ddp(x), y).backward()
        spans += trace.spans
        handle.detach()
    optimizer.consolidate_state_dict(to=0)
    return {
        "difference": largest_difference([p.detach().cpu() for p in ddp.module.parameters()], expected),
        "kinds": {span.kind for span in spans},
        "is_ordered": all(0 <= span.start <= span.end for span in spans),
        "states": len(optimizer.state_dict()["state"]) if dist.get_rank() == 0 else None,
    }


def written(make: Callable[[], zerolap.Adapter]) -> tuple[float, list[int], str]:
    """Lazy gathers, and parameters clamped after every step through the optimizer's groups, against the plain optimizer; bytes that
    a parameter's storage has beyond its own; and what becomes of a write by a reference that was held."""
    group, results = device_group(), []
    for ours in (False, True):
        device = sim_device() if ours else torch.device("cpu")
        ddp = DDP(small_model().to(device), process_group=group, bucket_cap_mb=0.02)
        held = list(ddp.parameters())
        optimizer: Any = torch.optim.SGD(held, **SGD)
        if ours:
            optimizer = zerolap.ZeroRedundancyOptimizer(
                held, torch.optim.SGD, process_group=group, overlap_with_ddp=True, **SGD
            )
            zerolap.attach(ddp, optimizer, gather="lazy", adapter=make())
        for step in range(5):
            x, y = small_batch(step, device)
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            for given in optimizer.param_groups:
                for param in given["params"]:
                    param.data.clamp_(-0.1, 0.1)
        results.append([param.detach().cpu().clone() for param in ddp.module.parameters()])
    beyond = [param.untyped_storage().nbytes() - param.nbytes for param in ddp.module.parameters()]
    nn.functional.cross_entropy(ddp(x), y).backward()
    torch._foreach_mul_([param.detach() for param in held], 0.5)
    try:
        ddp(x)
    except zerolap.ZerolapError as error:
        return largest_difference(*results), beyond, str(error)
    return largest_difference(*results), beyond, ""


class SometimesUnused(nn.Module):
    """In every other iteration a layer is left out, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor, skipped: int | None) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) if place != skipped else x
        return x


def with_unused(make: Callable[[], zerolap.Adapter], schedule: str, gather: str) -> float:
    group, results = device_group(), []
    for device, way in ((torch.device("cpu"), None), (sim_device(), Attached(make, schedule=schedule, gather=gather))):
        torch.manual_seed(0)
        ddp = DDP(SometimesUnused().to(device), process_group=group, bucket_cap_mb=0.005, find_unused_parameters=True)
        optimizer: Any = torch.optim.SGD(ddp.parameters(), **SGD)
        if way is not None:
            optimizer = zerolap.ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.SGD, process_group=group, overlap_with_ddp=True, **SGD
            )
            way(ddp, optimizer)
        for step in range(6):
            skipped = 2 if step in (1, 4) else 1 if step == 3 and dist.get_rank() == 0 else None
            optimizer.zero_grad()
            ddp(small_batch(step, device)[0], skipped).square().sum().backward()
            optimizer.step()
        results.append([param.detach().cpu() for param in ddp.module.parameters()])
    return largest_difference(*results)


def train_fsdp2(num_steps: int) -> float:
    """The same without us: torch's own sharding, which has streams of its own."""
    mesh = DeviceMesh.from_group(device_group(), sim_device().type)
    torch.manual_seed(0)
    model = Transformer().to(sim_device())
    for layer in model.encoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(num_steps):
        x, y = text_batch(step, sim_device())
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def train_transformer(way: Any, num_steps: int) -> float:
    """With pinned inputs and accumulation; without a way, by DDP and the plain optimizer. Returns the last loss."""
    group = device_group()
    torch.manual_seed(0)
    ddp = DDP(Transformer().to(sim_device()), process_group=group, bucket_cap_mb=0.02)
    optimizer: Any = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    if way is not None:
        optimizer = zerolap.ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, process_group=group, overlap_with_ddp=True, lr=1e-3
        )
        way(ddp, optimizer)
    for step in range(num_steps):
        x, y = text_batch(step, sim_device())
        if step % 5 == 4:
            with ddp.no_sync():
                nn.functional.cross_entropy(ddp(x).flatten(0, 1), y.flatten()).backward()
        loss = nn.functional.cross_entropy(ddp(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def failing(make: Callable[[], zerolap.Adapter], collective: str, kind: Any, schedule: str) -> None:
    """One rank's collective goes wrong in the middle of training."""
    group = device_group(timeout=4)
    ddp = DDP(small_model().to(sim_device()), process_group=group, bucket_cap_mb=0.02)
    optimizer = zerolap.ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, process_group=group, overlap_with_ddp=True, **SGD
    )
    Attached(make, schedule=schedule)(ddp, optimizer)
    for step in range(40):
        if step == 3 and dist.get_rank() == 1:
            zerolap_sim.inject(collective, kind)
        x, y = small_batch(step, sim_device())
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        if step % 4 == 3:
            torch.accelerator.synchronize()


def joined(make: Callable[[], zerolap.Adapter], schedule: str) -> float:
    """Ranks with different numbers of inputs."""
    group, results = device_group(), []
    for device in (torch.device("cpu"), sim_device()):
        ddp = DDP(small_model().to(device), process_group=group, bucket_cap_mb=0.02)
        optimizer: Any = torch.optim.SGD(ddp.parameters(), **SGD)
        joinables: list[Any] = [ddp]
        if device.type != "cpu":
            optimizer = zerolap.ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.SGD, process_group=group, overlap_with_ddp=True, **SGD
            )
            Attached(make, schedule=schedule)(ddp, optimizer)
            joinables.append(optimizer)
        with Join(joinables):
            for step in range(4 + dist.get_rank()):
                x, y = small_batch(step, device)
                optimizer.zero_grad()
                nn.functional.cross_entropy(ddp(x), y).backward()
                optimizer.step()
        results.append([param.detach().cpu() for param in ddp.module.parameters()])
    # The oracle's plain optimizer did not step on ranks that had joined; the last rank's parameters are the ones to have.
    return largest_difference(*results) if dist.get_rank() == dist.get_world_size() - 1 else 0.0


def refused(make: Callable[[], zerolap.Adapter]) -> None:
    group = dist.new_group(backend="gloo")
    ddp = DDP(small_model(), process_group=group)
    ddp.module.to(sim_device())
    optimizer = zerolap.ZeroRedundancyOptimizer(
        ddp.module.parameters(), torch.optim.SGD, process_group=group, overlap_with_ddp=True, **SGD
    )
    zerolap.attach(ddp, optimizer, adapter=make())


def rounds_behind_a_busy_stream() -> list[bool]:
    """For each format whether the device was still busy with what came before when the host had asked for rounding and decoding."""
    device, found = sim_device(), []
    values, owed = torch.randn(5000).to(device), torch.zeros(40 * BLOCK, device=device)
    for form in WireFormat:
        codec, blocks = Codec(form, kept_as=torch.float32, at_once=None), Blocks(values, [(0, 5000)], at_once=None)
        noise = Noise((1,), torch.arange(40, dtype=torch.int32).to(device))
        torch.accelerator.synchronize()
        busy(device, 1.0)
        before = torch.Event(device=device)
        before.record()
        message = torch.empty(codec.num_bytes(blocks.numel), dtype=torch.uint8, device=device)
        codec.encode(blocks, message, owed=owed, noise=noise)
        codec.encode_difference(values[: 39 * BLOCK], values[: 39 * BLOCK], message[: codec.num_bytes(39 * BLOCK)])
        into = torch.empty(blocks.numel, device=device)
        codec.mean([message, message], into)
        codec.add(message, into)
        found.append(not before.query())
        torch.accelerator.synchronize()
    return found
