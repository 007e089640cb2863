"""What `zerolap plan` does: forecasts every way to train a model, after measuring it if asked to, and shows them."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from zerolap.backend.base import Adapter
from zerolap.backend.registry import resolve_adapter
from zerolap.calibrate.calibrate import Measured, calibrate, measure
from zerolap.calibrate.from_model import workload_of
from zerolap.cli.import_path import attribute
from zerolap.cli.plan_inputs import (
    dtype_of,
    make_model,
    optimizer_classes_of,
    optimizer_options_of,
    params_of,
    precision_of,
    to_bytes_per_second,
    to_operations_per_second,
    to_seconds,
)
from zerolap.cli.plan_options import PlanOptions
from zerolap.errors import AdapterNotFoundError
from zerolap.forecast.forecast import Advice, Compute, Forecast, Link, Pattern, forecast_all, recommend
from zerolap.forecast.workload import Workload, balance_of
from zerolap.schedule.balance import Balance
from zerolap.untrusted.files import printable

NUM_CALIBRATED = 2  # ranks of this machine
_MEASURED_ON = "cpu"
_STEP_SECONDS_PER_ELEMENT = 5e-11  # unless it is given: 28 bytes of memory traffic at 560 GB/s


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What was asked for, the forecast of every way to train, and the one that is advised."""

    wanted: PlanOptions
    workload: Workload
    link: Link
    compute: Compute
    forecasts: list[Forecast]
    balance: Balance
    advice: Advice


def plan(wanted: PlanOptions, *, say: Callable[[str], None]) -> Planned:
    """Forecast what was asked for; ValueError says what is missing or wrong, and what to give instead."""
    params = params_of(wanted)
    options = optimizer_options_of(wanted)
    measured = None
    if wanted.calibrates:
        say(f"measuring on {NUM_CALIBRATED} ranks of this machine ...")
        measured = _measured(wanted)
    adapter = _adapter_for(wanted.exchange)
    workload = workload_of(
        params,
        optimizer_class=optimizer_classes_of(wanted.optimizer),
        optimizer_options=options,
        precision=precision_of(wanted, params),
        bucket_cap_mb=wanted.bucket_cap_mb,
        exact_cut=adapter.capabilities.exact_cut if adapter else 1,
        max_receive_bytes=adapter.max_receive_bytes if adapter else None,
        measured=measured,
    )
    workload = replace(workload, shards_gradients=wanted.shards_gradients)
    link, compute = _link_and_compute(wanted, measured, sum(param.work for param in params))
    if adapter is not None:
        link = replace(link, stage_sizes=adapter.stage_sizes)
    forecasts = forecast_all(workload, world_size=wanted.world_size, link=link, compute=compute)
    return Planned(
        wanted=wanted,
        workload=workload,
        link=link,
        compute=compute,
        forecasts=forecasts,
        balance=balance_of(workload, wanted.world_size),
        advice=recommend(forecasts, changes_gradients=wanted.changes_gradients),
    )


def _adapter_for(exchange: Pattern) -> Adapter | None:
    """Whose exchanges are forecast: a host's are those of its adapter, if one is installed; a ring may be any library's."""
    if exchange is not Pattern.STAGED:
        return None
    try:
        return resolve_adapter(None, device_type=_MEASURED_ON)
    except AdapterNotFoundError:
        return None


def _link_and_compute(wanted: PlanOptions, measured: Measured | None, work: float) -> tuple[Link, Compute]:
    """What was measured, with what was said in its place. All that was said is looked at, also what another option replaces."""
    speed = None if wanted.flops is None else to_operations_per_second(wanted.flops)
    forward = None if wanted.forward is None else to_seconds(wanted.forward)
    backward = None if wanted.backward is None else to_seconds(wanted.backward)
    cores = wanted.cores or (max(1.0, (os.cpu_count() or 1) / NUM_CALIBRATED) if measured else 1.0)
    if measured is not None:
        link, compute = calibrate(measured, cores=cores)
    else:
        if wanted.bandwidth is None:
            raise ValueError(
                "give the link by --bandwidth, for example 100Gbit, or measure this machine by --calibrate"
            )
        link = Link(bytes_per_second=1.0)
        compute = Compute(forward=0.0, backward=0.0, step_seconds_per_element=_STEP_SECONDS_PER_ELEMENT, cores=cores)
    link = replace(link, pattern=wanted.exchange)
    if wanted.bandwidth is not None:
        link = replace(link, bytes_per_second=to_bytes_per_second(wanted.bandwidth))
    if wanted.latency is not None:
        link = replace(link, latency=to_seconds(wanted.latency))
    if wanted.step_ns is not None:
        compute = replace(compute, step_seconds_per_element=1e-9 * wanted.step_ns)
    if wanted.host_us is not None:
        compute = replace(compute, host_seconds_per_bucket=1e-6 * wanted.host_us)
    if wanted.cpu_ns_per_byte is not None:
        compute = replace(compute, cpu_seconds_per_byte=1e-9 * wanted.cpu_ns_per_byte)
    if forward is not None and backward is not None:
        compute = replace(compute, forward=forward, backward=backward)
    elif speed is not None and wanted.tokens is not None:
        # Two operations for each parameter and token forward, twice as many backward.
        seconds = 2 * work * wanted.tokens / speed
        compute = replace(compute, forward=seconds, backward=2 * seconds)
    elif measured is None or wanted.forward or wanted.backward or wanted.flops or wanted.tokens:
        raise ValueError(
            "give the time of computing by --forward and --backward, for example 0.12 and 0.24, or by --flops and --tokens "
            "(operations a second that are reached, and tokens of a rank in a step), or measure it by --calibrate"
        )
    return link, compute


# --- measuring --------------------------------------------------------------------------------------------------------


def _measured(wanted: PlanOptions) -> Measured:
    """Measure the model on ranks of this machine; what fails there is an error here."""
    if wanted.model is None or wanted.batch is None:
        raise ValueError(
            "--calibrate needs --model and --batch MODULE:CALLABLE, which returns what the model is called with"
        )
    attribute(wanted.batch, "--batch")  # for its refusal: sooner, and in clearer words, than from another process
    from torch.multiprocessing.spawn import ProcessRaisedException, spawn

    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_measure, args=(wanted, folder), nprocs=NUM_CALIBRATED)  # type: ignore[no-untyped-call]  # torch's
        except ProcessRaisedException as error:
            raise RuntimeError(str(error).strip().splitlines()[-1]) from error
        raw = json.loads(Path(folder, "measured.json").read_text())
    return Measured(**{name: _tuples(value) for name, value in raw.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


def _measure(rank: int, wanted: PlanOptions, folder: str) -> None:
    assert wanted.model is not None
    assert wanted.batch is not None
    torch.set_num_threads(1)
    dist.init_process_group(
        resolve_adapter(None, device_type=_MEASURED_ON).backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=NUM_CALIBRATED,
        timeout=timedelta(seconds=120),
    )
    module = make_model(wanted.model, device=_MEASURED_ON)
    dtype = dtype_of(wanted.param_dtype)
    module = module if dtype is None else module.to(dtype)
    batch = attribute(wanted.batch, "--batch")()
    arguments = batch if isinstance(batch, tuple) else (batch,)

    def forward(ddp: nn.Module) -> Tensor:
        return _loss_of(ddp(*arguments))

    measured = measure(
        module,
        forward,
        optimizer_class=optimizer_classes_of(wanted.optimizer),
        optimizer_options=optimizer_options_of(wanted),
        bucket_cap_mb=wanted.bucket_cap_mb,
    )
    if rank == 0:
        Path(folder, "measured.json").write_text(json.dumps(asdict(measured)))
    dist.barrier()
    dist.destroy_process_group()


def _loss_of(output: Any) -> Tensor:
    """A number that needs all of it: a loss as it is, anything else summed up."""
    if isinstance(output, Tensor):
        return output if output.ndim == 0 else output.float().square().mean()
    values = output.values() if isinstance(output, dict) else output
    return torch.stack([_loss_of(each) for each in values if isinstance(each, Tensor) and each.requires_grad]).sum()


# --- what is shown ----------------------------------------------------------------------------------------------------


def to_json(planned: Planned) -> dict[str, Any]:
    """For programs."""
    return {
        "num_params": planned.workload.numel,
        "num_tensors": len(planned.workload.params),
        "num_buckets": len(planned.workload.layout),
        "world_size": planned.wanted.world_size,
        "link": _link(planned.link),
        "compute": asdict(planned.compute),
        "balance": planned.balance._asdict(),
        "ways": [_way(each) for each in planned.forecasts],
        "recommended": {**_way(planned.advice.best), "why": planned.advice.why},
    }


def _link(link: Link) -> dict[str, Any]:
    return {
        "bytes_per_second": link.bytes_per_second,
        "latency": link.latency,
        "seconds_per_message": link.seconds_per_message,
        "pattern": link.pattern.value,
    }


def _way(each: Forecast) -> dict[str, Any]:
    return {
        "schedule": each.schedule.value if each.schedule else None,
        "gather": each.gather.value if each.gather else None,
        "step_seconds": each.step_seconds,
        "exposed_seconds": each.exposed_seconds,
        "wire_seconds": each.wire_seconds,
        "sent_bytes": each.sent_bytes,
        "memory_bytes": {**asdict(each.memory), "held": each.memory.held, "peak": each.memory.peak},
    }


def show(planned: Planned, console: Console) -> None:
    """For people."""
    wanted, link, compute, advice = planned.wanted, planned.link, planned.compute, planned.advice
    ddp = planned.forecasts[0]
    console.print(
        f"{planned.workload.numel:,} parameters in {len(planned.workload.params):,} tensors and {len(planned.workload.layout):,} "
        f"buckets, {escape(printable(wanted.optimizer))}, on {wanted.world_size:,} ranks"
    )
    console.print(
        f"link {_si(8 * link.bytes_per_second)}bit/s, latency {_si(link.latency)}s, exchanges {link.pattern.value}; forward "
        f"{_si(compute.forward)}s, backward {_si(compute.backward)}s, update {_si(compute.step_seconds_per_element)}s an element, "
        f"{_si(compute.host_seconds_per_bucket)}s a bucket; {_si(compute.cpu_seconds_per_byte)}s of {compute.cores:g} cores a byte"
    )
    if any(param.cut is None for param in planned.workload.params):
        console.print(
            f"parameters that stay whole: the busiest rank has {planned.balance.state:.2f} of the mean in state, {planned.balance.work:.2f} in the "
            "work of updates"
        )
    if not planned.workload.wire.is_exact:
        console.print(f"wire: {planned.workload.wire}; [bold]the numbers are not those of DDP[/bold]")
    memory = Table("memory of a rank", "zerolap", "DDP", box=None)
    for name in (*asdict(ddp.memory), "held", "peak"):
        ours, theirs = getattr(advice.best.memory, name), getattr(ddp.memory, name)
        if ours or theirs:
            memory.add_row(name, f"{_si(ours)}B", f"{_si(theirs)}B")
    console.print(memory)
    table = Table("a step", "time", "of DDP's", "exposed", "wire busy", "sent", box=None)
    for each in planned.forecasts:
        table.add_row(
            f"[bold]{each.name}[/bold]" if each is advice.best else each.name,
            f"{_si(each.step_seconds)}s",
            f"{each.step_seconds / (ddp.step_seconds or 1):.2f}",
            f"{_si(each.exposed_seconds)}s",
            f"{100 * each.wire_seconds / (each.step_seconds or 1):.0f} %",
            f"{_si(each.sent_bytes)}B",
        )
    console.print(table)
    best = _way(advice.best)
    console.print(f'[bold]schedule="{best["schedule"]}", gather="{best["gather"]}"[/bold]: {advice.why}')


def _si(number: float) -> str:
    """With three digits and a prefix, and a space before what follows."""
    if not number or math.isinf(number):
        return f"{number:g} "
    for prefix, scale in (
        ("P", 1e15),
        ("T", 1e12),
        ("G", 1e9),
        ("M", 1e6),
        ("k", 1e3),
        ("", 1),
        ("m", 1e-3),
        ("u", 1e-6),
        ("n", 1e-9),
    ):
        if abs(number) >= 0.9995 * scale:
            return f"{number / scale:.3g} {prefix}"
    return f"{number / 1e-12:.3g} p"
