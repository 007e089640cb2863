"""What `zerolap doctor` finds: versions, adapters and their devices, advice, and whether two ranks can train."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from zerolap.untrusted.files import printable

PACKAGES = ("torch", "zerolap", "zerolap-conformance")


def examine() -> dict[str, Any]:
    """Everything there is to say without starting a process, as plain data. Works without torch, too."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "adapters": [],
    }
    if found["packages"]["torch"] is None:
        return found
    from zerolap._torch.versions import untried
    from zerolap.backend.registry import adapters, load_adapter

    found["untried"] = untried(found["packages"]["torch"])

    for info in adapters():
        described: dict[str, Any] = {
            "name": info.name,
            "device_type": info.device_type,
            "why_unusable": info.why_unusable,
        }
        if info.device_type is not None:
            adapter = load_adapter(info.name)
            devices = _devices(adapter) if info.why_unusable is None else []
            described |= {"devices": devices, "capabilities": asdict(adapter.capabilities), "advice": _advice(adapter)}
        found["adapters"].append(described)
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(adapter: Any) -> list[str]:
    """What this process sees of the adapter's devices, by name; each may train one rank, and a CPU any number."""
    import torch

    if adapter.device_type == "cpu":
        return [f"cpu: {os.cpu_count()} cores"]
    module = torch.get_device_module(adapter.device_type)
    name_of = getattr(module, "get_device_name", lambda index: "of unknown name")
    return [f"{adapter.device_type}:{index}: {name_of(index)}" for index in range(module.device_count())]


def _advice(adapter: Any) -> list[str]:
    try:
        return list(adapter.diagnose())
    except Exception as error:
        return [f"its diagnose() failed: {type(error).__name__}: {error}"]


def exit_code(found: dict[str, Any]) -> int:
    usable = [adapter for adapter in found["adapters"] if adapter["why_unusable"] is None]
    return 0 if usable and all(adapter.get("tried", "ok") == "ok" for adapter in usable) else 1


def show(found: dict[str, Any], console: Console) -> None:
    """For people."""
    versions = ", ".join(f"{name} {version or 'is not installed'}" for name, version in found["packages"].items())
    console.print(f"Python {found['python']} on {found['platform']}; {versions}")
    if found["packages"]["torch"] is None:
        console.print("[red]torch is missing:[/red] pip install torch")
        return
    if found["untried"] is not None:
        console.print(f"[yellow]advice:[/yellow] {_shown(found['untried'])}")
    if not found["adapters"]:
        console.print("[red]no adapter is installed:[/red] install the one for your device; the README lists them")
        return
    for adapter in found["adapters"]:
        why = adapter["why_unusable"]
        usable = "[green]usable[/green]" if why is None else f"[yellow]not usable:[/yellow] {_shown(why)}"
        console.print(
            f"[bold]{_shown(adapter['name'])}[/bold] ({_shown(adapter['device_type'] or 'unknown device')}): {usable}"
        )
        for device in adapter.get("devices", ()):
            console.print(f"    {_shown(device)}")
        if "tried" in adapter:
            console.print(f"    trained on two ranks: {_shown(adapter['tried'])}")
        if "capabilities" in adapter:
            console.print("    " + ", ".join(f"{name}={value}" for name, value in adapter["capabilities"].items()))
        for advice in adapter.get("advice", ()):
            console.print(f"    advice: {_shown(advice)}")


def _shown(text: object) -> str:
    return escape(printable(text))


def attempt(adapter: str) -> str:
    """Train a few steps on two ranks, beside DDP and the plain optimizer: "ok", or what went wrong."""
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_train, args=(adapter, str(Path(folder, "store"))), nprocs=2)  # type: ignore[no-untyped-call]  # torch's
        except Exception as error:
            return (str(error).strip() or type(error).__name__).splitlines()[-1]
    return "ok"


def _train(rank: int, name: str, store: str) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    import zerolap
    from zerolap.backend.registry import load_adapter

    adapter = load_adapter(name)
    device = adapter.device(rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    models = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        ddp = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(device))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        if is_ours:
            optimizer = zerolap.ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.01
            )
            zerolap.attach(ddp, optimizer, adapter=adapter)
        for step in range(5):
            optimizer.zero_grad()
            torch.manual_seed(10 * step + rank)
            ddp(torch.randn(4, 64).to(device)).square().mean().backward()
            optimizer.step()
        models.append(ddp)
    for plain, ours in zip(models[0].parameters(), models[1].parameters(), strict=True):
        difference = (plain - ours).abs().max().item()
        if difference > 1e-6:
            raise ArithmeticError(f"parameters differ by {difference:.3g} from DDP and the plain optimizer")
    adapter.synchronize()
    dist.destroy_process_group()
