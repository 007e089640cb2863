"""Tier 0: facts about the adapter and its device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolap import Adapter, Capabilities
from zerolap._torch import devices_with_fused_kernels
from zerolap_conformance.cuts import stepped
from zerolap_conformance.exchanges import MOVED, can_hold
from zerolap_conformance.requirements import NotDeclaredError, requirement
from zerolap_conformance.support import busy, device_of, expect, expect_equal, own_group


@requirement("DEV-1", "The adapter finds its device and says so.", tier=0)
def finds_its_device(adapter: Adapter) -> None:
    expect(adapter.why_unavailable(), None, "why_unavailable()")
    expect(adapter.is_available(), True, "is_available()")


@requirement("DEV-2", "Name, device type and backend are stated, and the device is of that type.", tier=0)
def states_its_names(adapter: Adapter) -> None:
    for field in ("name", "device_type", "backend"):
        value = getattr(adapter, field)
        assert isinstance(value, str), f"{field} must be a string, seen {value!r}"
        assert value, f"{field} is empty"
    expect(device_of(adapter).type, adapter.device_type, "the type of device()")


@requirement("DEV-3", "Every capability is stated, with a value of its type.", tier=0)
def states_its_capabilities(adapter: Adapter) -> None:
    assert isinstance(adapter.capabilities, Capabilities), f"capabilities are {adapter.capabilities!r}"
    for field in dataclasses.fields(Capabilities):
        value = getattr(adapter.capabilities, field.name)
        kind = int if field.name == "exact_cut" else bool
        assert type(value) is kind, f"{field.name} must be of type {kind.__name__}, seen {value!r}"
    assert adapter.capabilities.exact_cut >= 1, f"exact_cut must be at least 1, seen {adapter.capabilities.exact_cut}"


@requirement("DEV-4", "Tensors made on the device stay there, and compute what a CPU computes.", tier=0)
def computes(adapter: Adapter) -> list[str]:
    device = device_of(adapter)
    missing = [dtype for dtype in MOVED if not can_hold(device, dtype)]
    for dtype, numel in ((torch.float32, 1000), (torch.bfloat16, 100), (torch.int32, 1000)):
        if dtype in missing:
            continue
        x = torch.arange(numel).to(dtype).to(device)
        y = x * 2 + 1
        for what, tensor in (("a tensor that was moved there", x), ("what was computed from it", y)):
            expect(tensor.device.type, device.type, f"the device of {what}")
        expect_equal(y, torch.tensor([2 * i + 1 for i in range(numel)], dtype=dtype), f"2x + 1 in {dtype}")
    return [f"the device has no {', '.join(map(str, missing))}: tried without"] if missing else []


@requirement("DEV-5", "diagnose() gives sentences, and never raises.", tier=0)
def diagnoses(adapter: Adapter) -> list[str]:
    advice = adapter.diagnose()
    assert isinstance(advice, list), f"diagnose() gave {advice!r}"
    assert all(isinstance(sentence, str) and sentence for sentence in advice), f"diagnose() gave {advice!r}"
    return advice


@requirement("DEV-6", "synchronize() returns when everything given to the device is done.", tier=0)
def synchronizes(adapter: Adapter) -> None:
    device = device_of(adapter)
    lane = adapter.lane("conformance", device=device)
    if device.type == "cpu":
        lane.run(lambda: busy(device))
        adapter.synchronize()  # nothing is left to do there, but it can be called
    else:
        busy(device)  # calibrates itself, which waits for the device
        for where, start in (("current stream", lambda fn: fn()), ("lane", lane.submit)):
            event = torch.Event(device=device)

            def work(event: torch.Event = event) -> None:
                busy(device, 0.05)
                event.record()

            start(work)
            adapter.synchronize()
            assert event.query(), f"work is left on the {where} after synchronize()"
    lane.close()


@requirement(
    "DEV-7",
    "Stepping slices of a parameter that are cut at multiples of `exact_cut` is bitwise the slice of stepping it whole.",
    tier=0,
)
def cuts_exactly(adapter: Adapter) -> None:
    device, cut, numel = device_of(adapter), adapter.capabilities.exact_cut, 10_007
    makers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
        "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    }
    if device.type in devices_with_fused_kernels():
        makers["fused SGD"] = lambda params: torch.optim.SGD(
            params, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True
        )
    for name, make in makers.items():
        for dtype in (torch.float32, torch.bfloat16):
            for at in (cut, 5 * cut, numel // 2 // cut * cut):
                whole, pieces = stepped(make, device, numel, [at], dtype)
                expect_equal(pieces, whole, f"{name} in {dtype}, cut at {at}")


@requirement("DEV-8", "Double precision is computed with and reduced.", tier=0, capability="has_float64", min_ranks=2)
def has_float64(adapter: Adapter) -> list[str]:
    def attempt() -> Tensor:
        x = torch.full((3,), 1 + 2**-40, dtype=torch.float64).to(device_of(adapter))
        adapter.all_reduce(x, op=dist.ReduceOp.SUM, group=own_group(adapter), what="sum in double precision").wait()
        return x.cpu()

    if not adapter.capabilities.has_float64:
        raise NotDeclaredError(
            "the adapter declares has_float64=False: norms of gradients are taken in single precision"
        )
    expect_equal(attempt(), torch.full((3,), dist.get_world_size() * (1 + 2**-40), dtype=torch.float64), "sum")
    return []
