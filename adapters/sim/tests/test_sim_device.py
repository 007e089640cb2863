"""The simulated device: it computes what a CPU computes, it is as asynchronous as a card, and it reports every race.

Each program runs in processes of its own (a process can install the device once). The first run compiles it.
"""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import zerolap_sim
from support.sim_programs import Transformer, device_group, on_device, small_model, step_in_hook, train_ddp, train_text
from zerolap._torch import store_of, under
from zerolap_conformance.ranks import run_ranks, try_ranks
from zerolap_sim import build

DEVICE = torch.device("privateuseone", 0)  # what "sim:0" is called in a process that has not installed it


def _coalesces_messages() -> bool:
    """Whether batch_isend_irecv() makes one launch of its messages; older versions of torch do that for a few backends by name."""
    return hasattr(dist._Backend, "supports_coalescing")


def _memory() -> Any:
    """Memory statistics: those of the device's module, which torch.accelerator has in newer versions only."""
    return torch.get_device_module(DEVICE)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    build.build()  # outside the time limits of the ranks


def run(program: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """Run on one device, alone; the checker must stay silent."""
    value, reports = run_ranks(1, on_device, program, *args, limit=90, **settings)[0]
    assert reports == [], "\n".join(reports)
    return value


def reports_of(program: Callable[..., Any], *args: Any, **settings: Any) -> list[str]:
    (_, reports) = run_ranks(1, on_device, program, *args, limit=90, **settings)[0]
    return list(reports)


def run_group(world_size: int, program: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
    """Run on several ranks; the checker must stay silent on all."""
    results = run_ranks(world_size, on_device, program, *args, limit=90, **settings)
    for rank, (_, reports) in enumerate(results):
        assert reports == [], f"rank {rank}:\n" + "\n".join(reports)
    return [value for value, _ in results]


# ---- building --------------------------------------------------------------------------------------------------------


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60, check=False
    )


def test_importing_neither_compiles_nor_registers(tmp_path: Path) -> None:
    done = run_python(
        "import zerolap_sim, torch; print(zerolap_sim.is_installed(), torch._C._get_privateuse1_backend_name())",
        ZEROLAP_SIM_CACHE=str(tmp_path / "cache"),
    )
    assert done.stdout.split() == ["False", "privateuseone"], done
    assert not (tmp_path / "cache").exists(), list(tmp_path.iterdir())


@pytest.mark.parametrize("environment", [{"PATH": "/nowhere", "CXX": ""}, {"CXX": "no-such-compiler"}])
def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path, environment: dict[str, str]) -> None:
    done = run_python("import zerolap_sim; zerolap_sim.install()", ZEROLAP_SIM_CACHE=str(tmp_path), **environment)
    assert done.returncode != 0, done
    assert "BuildError: the simulated device has to be compiled once, and no C++ compiler was found" in done.stderr
    assert "install one with C++20" in done.stderr, done.stderr


def test_a_failed_build_says_why_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = run_python("import zerolap_sim; zerolap_sim.install()", ZEROLAP_SIM_CACHE=str(tmp_path), CXX="false")
    assert "zerolap-sim: compiling the simulated device, about a minute, once" in done.stderr, done.stderr
    assert "BuildError: compiling the simulated device failed" in done.stderr, done.stderr
    left = [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")]
    assert left == [], left


def test_a_built_device_is_found_again_without_a_compiler() -> None:
    done = run_python("import zerolap_sim; zerolap_sim.install(); print('installed')", PATH="/nowhere", CXX="")
    assert (done.stdout, done.stderr) == ("installed\n", ""), done


def test_without_a_home_to_write_to_it_is_built_in_a_temporary_folder_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ZEROLAP_SIM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/dev/null")  # not even root can make a folder there
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = build.cache_folder()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o077 == 0, "what is in it is executed"
    assert build.cache_folder() == folder, "found again"
    folder.chmod(0o777)
    with pytest.raises(build.BuildError, match="is not a folder of ours alone"):
        build.cache_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(build.BuildError, match="is not a folder of ours alone"):
        build.cache_folder()


def test_other_sources_or_flags_give_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.cache_key()
    monkeypatch.setattr(build, "_link_flags", lambda: ["-lother"])
    assert build.cache_key() != before


# ---- installing ------------------------------------------------------------------------------------------------------


def _install_twice() -> dict[str, Any]:
    zerolap_sim.install("npu", "hccl")
    with pytest.raises(RuntimeError) as error:
        zerolap_sim.install("sim", "simccl")
    group = device_group("hccl")
    x = torch.ones(2, device="npu:0")
    dist.all_reduce(x, group=group)
    return {
        "error": str(error.value),
        "device": str(x.device),
        "accelerator": str(torch.accelerator.current_accelerator()),
        "name": torch.npu.get_device_name(),  # type: ignore[attr-defined]
        "backend": group._get_backend(torch.device("npu")).name(),
        "sum": x.tolist(),
    }


def _mixes_devices() -> str:
    here, there = torch.ones(3, device=DEVICE), torch.ones(3)
    assert (here + torch.tensor(2.0))[torch.tensor([0, 2])].tolist() == [3.0, 3.0], (
        "scalars and indices may be the host's"
    )
    try:
        torch.cat([there, here])
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_host_tensors_are_refused_as_a_card_would() -> None:
    assert "aten::cat expects all tensors to be on the same device, but one of shape [3] is on cpu" in run(
        _mixes_devices
    )


def test_it_can_pose_as_another_vendors_device_but_only_as_one() -> None:
    for value in run_group(2, _install_twice, name="npu", collectives="hccl"):
        assert "installed in this process as 'npu' with backend 'hccl'" in value.pop("error")
        assert value == {
            "device": "npu:0",
            "accelerator": "npu",
            "name": "zerolap simulated device",
            "backend": "hccl",
            "sum": [2.0, 2.0],
        }


def test_what_needs_the_device_says_when_it_is_not_installed() -> None:
    with pytest.raises(RuntimeError, match=r"call zerolap_sim.install\(\) first"):
        zerolap_sim.configure(stacks=True)


# ---- numbers: the same as on a CPU -----------------------------------------------------------------------------------


def _operators(device: torch.device) -> dict[str, Any]:
    torch.manual_seed(3)
    x, y = torch.randn(4, 5).to(device), torch.randn(5, 3).to(device)
    index = torch.tensor([0, 2]).to(device)
    image = torch.randn(2, 3, 8, 8).to(device)
    words = torch.tensor([[1, 2, 2], [0, 4, 1]]).to(device)
    z = torch.randn(3, dtype=torch.complex64).to(device)
    modules: list[tuple[nn.Module, torch.Tensor]] = [
        (nn.Conv2d(3, 4, 3), image),
        (nn.ConvTranspose2d(3, 4, 3), image),
        (nn.BatchNorm2d(3), image),
        (nn.LayerNorm(5), x),
        (nn.GroupNorm(1, 3), image),
        (nn.Embedding(5, 4), words),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), torch.randn(2, 5, 8).to(device)),
        (nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8).to(device)),
    ]
    results: dict[str, Any] = {
        "matmul": x @ y,
        "views": x.t()[1:3, ::2].contiguous(),
        "cat": torch.cat([x, x * 2], 1),
        "nonzero": (x > 0).nonzero(),
        "masked": x[x > 0],
        "indexed": x[index],
        "scalar promotion": (x[0, 0] * 2.5).bfloat16() + 1,
        "out": torch.add(x, x, out=torch.empty(0, device=device)),
        "sort": torch.cat([part.float() for part in x.sort(dim=1)]),
        "item": torch.tensor(x.sum().item()),
        "norm": torch.linalg.vector_norm(x),
        "conjugate": torch.view_as_real(z.conj() * z),
        "attention": F.scaled_dot_product_attention(image, image, image, is_causal=True),
        "cross entropy": F.cross_entropy(x, torch.tensor([0, 1, 2, 4]).to(device)),
        "foreach": torch.stack(torch._foreach_norm([x, x * 2])),
        "unique": torch.unique(index),
        "where": torch.where(x > 0, x, torch.zeros((), device=device)),
        "topk": x.topk(2).values,
        "deepcopy": copy.deepcopy(x),
    }
    into = [torch.zeros_like(x), torch.zeros_like(y)]
    torch._foreach_copy_(into, [x, y])
    torch._foreach_mul_(into, 3.0)
    results["foreach copy"] = into[1]
    for module, argument in modules:
        module = module.to(device)
        out = module(argument, argument, argument) if isinstance(module, nn.MultiheadAttention) else module(argument)
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        name = type(module).__name__
        results[name] = out.detach()
        for which, parameter in module.named_parameters():
            if parameter.grad is not None:
                results[f"{name} grad {which}"] = parameter.grad
        for which, buffer in module.named_buffers():
            results[f"{name} {which}"] = buffer
    return {name: value.detach().cpu() for name, value in results.items()}


def _compare_operators() -> list[str]:
    expected, got = _operators(torch.device("cpu")), _operators(DEVICE)
    return [
        f"{name}: {(expected[name] - value).abs().max()}"
        for name, value in got.items()
        if not torch.allclose(expected[name], value, rtol=1e-5, atol=1e-5) or expected[name].dtype != value.dtype
    ]


def test_operators_agree_with_the_cpu() -> None:
    wrong = run(_compare_operators)
    assert wrong == [], wrong


def _optimizers() -> dict[str, float]:
    def train(device: torch.device, make: Callable[..., Any]) -> list[torch.Tensor]:
        model = small_model().to(device)
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
        for step in range(3):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(device)
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().cpu() for p in model.parameters()]

    makers: dict[str, Callable[..., Any]] = {
        f"{cls.__name__} {how}": lambda p, cls=cls, how=how: cls(p, lr=0.01, **{how: True})
        for cls in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
        for how in ("foreach", "fused")
    }
    differences = {}
    for name, make in makers.items():
        pairs = zip(train(torch.device("cpu"), make), train(DEVICE, make), strict=True)
        differences[name] = max((a - b).abs().max().item() for a, b in pairs)
    return differences


def test_optimizers_and_the_gradient_scaler_agree_with_the_cpu() -> None:
    for name, difference in run(_optimizers).items():
        assert difference <= 1e-6, f"{name}: {difference}"


def _random_numbers(device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(5)
    side = torch.Stream(device=device) if device.type != "cpu" else None
    x = torch.ones(1000, device=device)
    results = [F.dropout(x, 0.1), torch.randn(100, device=device), torch.rand(7, device=device)]
    if side is not None:
        side.wait_stream(torch.accelerator.current_stream())
        with under(side):
            results.append(F.dropout(x, 0.3))
        torch.accelerator.current_stream().wait_stream(side)
    else:
        results.append(F.dropout(x, 0.3))
    results += [
        torch.randperm(50, device=device),
        torch.randint(0, 9, (20,), device=device),
        torch.multinomial(torch.ones(10, device=device), 5),
        torch.empty(30, device=device).exponential_(),
        torch.bernoulli(torch.full((40,), 0.3, device=device)),
        torch.randn(5, device=device),
    ]
    return [value.cpu() for value in results]


def _random_on_both() -> list[list[Any]]:
    return [[t.tolist() for t in _random_numbers(device)] for device in (torch.device("cpu"), DEVICE)]


@pytest.mark.parametrize("settings", [{"synchronous": True}, {"delay_us": 2000, "delay_probability": 0.5}], ids=str)
def test_random_numbers_follow_the_program_and_equal_the_cpus(settings: dict[str, Any]) -> None:
    expected, got = run(_random_on_both, **settings)
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert a == b, f"draw {i}: {a[:5]} and {b[:5]}"


def _housekeeping() -> dict[str, Any]:
    model = small_model().to(DEVICE)
    file = io.BytesIO()
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True, map_location=DEVICE)
    x = torch.randn(4, 32, device=DEVICE, requires_grad=True)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    before = _memory().memory_allocated()
    block = torch.empty(1000, dtype=torch.uint8, device=DEVICE)
    grown = _memory().memory_allocated() - before
    if hasattr(torch.accelerator, "memory_allocated"):
        assert torch.accelerator.memory_allocated() == _memory().memory_allocated()
        assert torch.accelerator.max_memory_allocated() == _memory().max_memory_allocated()
    block.untyped_storage().resize_(0)
    return {
        "loaded": all(torch.equal(loaded[k], v) for k, v in model.state_dict().items()),
        "checkpointed": x.grad is not None and bool(x.grad.isfinite().all()),
        "pinned": torch.ones(3).pin_memory().is_pinned(),
        "grown": grown,
        "resized": block.untyped_storage().nbytes(),
        "devices": torch.accelerator.device_count(),
    }


def test_saving_checkpointing_pinning_and_memory_work() -> None:
    expected = {"loaded": True, "checkpointed": True, "pinned": True, "grown": 1000, "resized": 0, "devices": 1}
    assert run(_housekeeping) == expected


# ---- streams and events ----------------------------------------------------------------------------------------------


def _streams() -> dict[str, Any]:
    side = torch.Stream(device=DEVICE)
    start, end = torch.Event(device=DEVICE, enable_timing=True), torch.Event(device=DEVICE, enable_timing=True)
    never = torch.Event(device=DEVICE)
    zerolap_sim.configure(delay_us=100_000, delay_probability=1.0)
    x = torch.zeros(3, device=DEVICE)
    begin = time.monotonic()
    start.record(side)
    with under(side):
        inside = torch.accelerator.current_stream() == side
        side.wait_stream(torch.sim.default_stream())  # type: ignore[attr-defined]
        for _ in range(5):
            x.add_(1)
    end.record(side)
    enqueued = time.monotonic() - begin
    pending = not end.query() and not side.query()
    torch.accelerator.current_stream().wait_event(end)
    torch.accelerator.current_stream().wait_event(never)
    value = x.sum().item()
    end.synchronize()
    future = torch.futures.Future(devices=[DEVICE])
    with under(side):
        y = x + 1
        future.set_result(y)
    return {
        "inside": inside,
        "outside": torch.accelerator.current_stream() != side,
        "enqueued quickly": enqueued < 0.05,
        "pending": pending,
        "value": value,
        "done": end.query(),
        "elapsed": start.elapsed_time(end) > 1,
        "future": future.done() and future.wait().tolist(),
        "default": torch.sim.default_stream() == torch.sim.current_stream(),  # type: ignore[attr-defined]
    }


def test_streams_run_behind_the_host_and_events_order_them() -> None:
    value = run(_streams)
    assert value.pop("future") == [6.0, 6.0, 6.0], value
    assert value.pop("value") == 15.0, value
    assert all(value.values()), value


def _unsynchronised() -> float:
    side = torch.Stream(device=DEVICE)
    x = torch.zeros(1000, device=DEVICE)
    torch.accelerator.synchronize()
    zerolap_sim.configure(delay_us=200_000, delay_probability=1.0, seed=1)
    with under(side):
        x.add_(1)
    zerolap_sim.configure(delay_probability=0.0)
    value: float = x.sum().item()
    return value


def test_a_missing_wait_gives_wrong_numbers_and_synchronous_mode_right_ones() -> None:
    (late, late_reports), (sync, sync_reports) = (
        run_ranks(1, on_device, _unsynchronised, synchronous=mode)[0] for mode in (False, True)
    )
    assert (late, sync) == (0.0, 1000.0), (late, sync)
    assert len(late_reports) == len(sync_reports) == 1, (late_reports, sync_reports)


def _no_execution() -> tuple[float, bool]:
    zerolap_sim.configure(execute=False)
    x = torch.full((2000, 2000), 2.0, device=DEVICE)
    begin = time.monotonic()
    for _ in range(5):
        x = x @ x
    torch.accelerator.synchronize()
    took = time.monotonic() - begin
    zerolap_sim.configure(execute=True)
    return took, bool(x.isnan().all())


def test_without_execution_everything_is_queued_and_nothing_computed() -> None:
    took, is_poison = run(_no_execution)
    assert is_poison, "a kernel has run"
    assert took < 1, took


def _two_devices() -> dict[str, Any]:
    zerolap_sim.configure(num_devices=2)
    one, two = torch.device("sim", 0), torch.device("sim", 1)
    x = torch.arange(4.0).to(one)
    y = x.to(two) * 2
    model = nn.Linear(4, 2).to(two)
    model(y).sum().backward()
    with torch.sim.device(1):  # type: ignore[attr-defined]
        z = torch.zeros(2, device="sim")
        current = torch.accelerator.current_stream().device
    assert model.weight.grad is not None
    with pytest.raises(RuntimeError, match="num_devices cannot change after the first use"):
        zerolap_sim.configure(num_devices=3)
    return {
        "count": torch.accelerator.device_count(),
        "y": (str(y.device), y.cpu().tolist()),
        "z": str(z.device),
        "current": str(current),
        "grad": str(model.weight.grad.device),
        "back": (y.to(one) + x).tolist(),
    }


def test_two_devices_in_one_process_keep_their_streams_apart() -> None:
    assert run(_two_devices) == {
        "count": 2,
        "y": ("sim:1", [0.0, 2.0, 4.0, 6.0]),
        "z": "sim:1",
        "current": "sim:1",
        "grad": "sim:1",
        "back": [0.0, 3.0, 6.0, 9.0],
    }


# ---- the checker: each kind of race, and its correct twin ------------------------------------------------------------


def _read_after_write(correct: bool) -> None:
    side = torch.Stream(device=DEVICE)
    x = torch.zeros(4, device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with under(side):
        x.mul_(2)
    if correct:
        torch.accelerator.current_stream().wait_stream(side)
    x.exp()


def _write_after_read(correct: bool) -> None:
    side = torch.Stream(device=DEVICE)
    x = torch.zeros(4, device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with under(side):
        y = x.exp()
    if correct:
        torch.accelerator.current_stream().wait_event(side.record_event())
    x.mul_(2)
    torch.accelerator.synchronize()
    del y


def _event_recorded_too_early(correct: bool) -> None:
    side = torch.Stream(device=DEVICE)
    x = torch.zeros(4, device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    event = side.record_event()
    with under(side):
        x.mul_(2)
    if correct:
        event.record(side)
    torch.accelerator.current_stream().wait_event(event)
    x.exp()


def _cut(whole: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """A part of a tensor of float32 by a storage of its own."""
    storage = whole.untyped_storage()[4 * start : 4 * stop]
    return whole.new_empty(0).set_(storage, 0, (stop - start,), (1,))


def _part_by_a_storage_of_its_own(correct: bool) -> None:
    side = torch.Stream(device=DEVICE)
    whole = torch.zeros(8, device=DEVICE)
    first, second = _cut(whole, 0, 4), _cut(whole, 4, 8)
    side.wait_stream(torch.accelerator.current_stream())
    with under(side):
        second.mul_(2)
    first.exp()  # the same allocation, another part
    if correct:
        torch.accelerator.current_stream().wait_stream(side)
    whole[6:].exp()


def _memory_reused(correct: bool) -> None:
    side = torch.Stream(device=DEVICE)
    x = torch.zeros(4, device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with under(side):
        y = x.exp()
    if correct:
        x.record_stream(side)
    del x
    torch.zeros(4, device=DEVICE)
    torch.accelerator.synchronize()
    del y


def _reused_after_a_wait(correct: bool) -> None:
    side = torch.Stream(device=DEVICE)
    x = torch.zeros(4, device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with under(side):
        y = x.exp()
    del x
    z = torch.empty(4, device=DEVICE)  # may get the memory of x
    if correct:
        torch.accelerator.current_stream().wait_stream(side)
    z.mul_(0)
    torch.accelerator.synchronize()
    del y


def _read_pinned(correct: bool) -> None:
    host = torch.zeros(4).pin_memory()
    host.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
    if correct:
        torch.accelerator.current_stream().synchronize()
    host.clone()


def _item_of_pinned(correct: bool) -> None:
    host = torch.zeros(4).pin_memory()
    host[1:3].copy_(torch.ones(2, device=DEVICE), non_blocking=True)
    host[0].item()  # not part of the copy
    event = torch.accelerator.current_stream().record_event()
    if correct:
        event.synchronize()
    host[2].item()


def _list_of_pinned(correct: bool) -> None:
    host = torch.zeros(4).pin_memory()
    host.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
    if correct:
        torch.accelerator.synchronize()
    host.tolist()


def _overwrite_pinned(correct: bool) -> None:
    host = torch.ones(4).pin_memory()
    x = host.to(DEVICE, non_blocking=True)
    if correct:
        torch.accelerator.synchronize()
    host.mul_(2)
    del x


RACES: list[tuple[Callable[[bool], None], list[str]]] = [
    (
        _read_after_write,
        ["unordered access", "'exp' on default stream, which reads", "'mul' on stream 1, which writes"],
    ),
    (
        _write_after_read,
        ["unordered access", "'mul' on default stream, which writes", "'exp' on stream 1, which reads"],
    ),
    (_event_recorded_too_early, ["unordered access", "'exp' on default stream", "'mul' on stream 1, which writes"]),
    (
        _part_by_a_storage_of_its_own,
        ["unordered access", "'exp' on default stream, which reads", "'mul' on stream 1, which writes"],
    ),
    (
        _memory_reused,
        ["memory reused while in use", "on default stream, which writes", "'exp' on stream 1, which reads"],
    ),
    (_reused_after_a_wait, ["memory reused while in use", "'mul' on default stream", "'exp' on stream 1, which reads"]),
    (
        _read_pinned,
        ["host read before the device wrote", "'clone' on the host, which reads", "'copy device to host' on default"],
    ),
    (_item_of_pinned, ["host read before the device wrote", "on the host, which reads", "of shape []"]),
    (_list_of_pinned, ["host read before the device wrote", "on the host, which reads"]),
    (
        _overwrite_pinned,
        ["host write before the device read", "'mul_' on the host, which writes", "'copy host to device'"],
    ),
]


@pytest.mark.parametrize(("program", "words"), RACES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_race_is_reported_with_names_and_its_correct_twin_is_not(
    program: Callable[[bool], None], words: list[str]
) -> None:
    assert run(program, True) is None
    for settings in ({}, {"synchronous": True}):  # timing hides nothing
        reports = reports_of(program, False, **settings)
        assert len(reports) == 1, "\n".join(reports)
        assert reports[0].startswith("simulated device: "), reports[0]
        missing = [word for word in words if word not in reports[0]]
        assert missing == [], f"{missing} missing in: {reports[0]}"


def _interleaved_columns() -> None:
    x = torch.zeros(8, 8, device=DEVICE)
    sides = [torch.Stream(device=DEVICE) for _ in range(2)]
    for i, side in enumerate(sides):
        side.wait_stream(torch.accelerator.current_stream())
        with under(side):
            x[:, i::2].add_(i)
    for side in sides:
        torch.accelerator.current_stream().wait_stream(side)
    x.sum().item()


def test_interleaved_views_on_two_streams_are_no_race() -> None:
    run(_interleaved_columns)


def _values_of_parts() -> tuple[list[float], list[float], int]:
    whole = torch.arange(8.0, device=DEVICE)
    part = _cut(whole, 2, 6)
    part.mul_(10)
    part[1:].view(3, 1).t().add_(1)
    values, kept = whole.tolist(), _memory().memory_allocated()
    del whole
    assert _memory().memory_allocated() == kept, "a part keeps the whole"
    return values, part.tolist(), part.untyped_storage().nbytes()


def test_a_storage_that_is_cut_from_another_is_the_same_memory() -> None:
    assert run(_values_of_parts) == ([0, 1, 20, 31, 41, 51, 6, 7], [20, 31, 41, 51], 16)


def _same_race_often() -> list[zerolap_sim.Report]:
    zerolap_sim.configure(stacks=True)
    for _ in range(3):
        _once()
    return zerolap_sim.take_reports()


_SIDE: list[torch.Stream] = []


def _once() -> None:
    if not _SIDE:
        _SIDE.append(torch.Stream(device=DEVICE))
    x = torch.zeros(2, 3, device=DEVICE)
    _SIDE[0].wait_stream(torch.accelerator.current_stream())
    with under(_SIDE[0]):
        x.mul_(2)
    x.exp()
    torch.accelerator.synchronize()


def test_the_like_is_counted_and_stacks_lead_to_both_lines() -> None:
    (report,) = run(_same_race_often)
    assert report.count == 3, report
    assert (report.second.shape, report.second.dtype) == ((2, 3), "float"), report
    assert (report.second.first_byte, report.second.end_byte) == (0, 24), report
    for access in (report.first, report.second):
        assert any("test_sim_device.py" in line and "_once" in line for line in access.stack), access.stack


def _two_threads(talk: str) -> None:
    """A thread waits for the device and hands on, in one way or another, to one that uses the result on its own stream."""
    side, other = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    x = torch.zeros(4, device=DEVICE)
    torch.accelerator.synchronize()
    queue: Queue[str] = Queue()
    started = threading.Event()
    bare = threading.Lock()
    bare.acquire()

    def use() -> None:
        with under(other):
            torch.ones(1, device=DEVICE)  # the thread's first use of the device, before the other has learned anything
        started.set()
        if talk == "queue":
            queue.get()
        else:
            bare.acquire()
        with under(other):
            x.exp()

    thread = threading.Thread(target=use)
    thread.start()
    started.wait()
    with under(side):
        x.mul_(2)
    side.synchronize()
    if talk == "queue":
        queue.put("go")
    else:
        bare.release()
    thread.join()


def test_what_one_thread_learned_reaches_another_only_by_a_visible_hand_over() -> None:
    assert reports_of(_two_threads, "queue") == []
    reports = reports_of(_two_threads, "bare lock")
    assert len(reports) == 1, reports
    assert "'exp' on stream 2" in reports[0], reports


class _Waiter(threading.Thread):
    """A thread, with a run() of its own, that waits for a stream between two bare locks, which the checker does not see."""

    def __init__(self, stream: torch.Stream) -> None:
        super().__init__()
        self.stream, self.gate, self.done = stream, threading.Lock(), threading.Lock()
        self.gate.acquire()
        self.done.acquire()

    def run(self) -> None:
        self.gate.acquire()  # nothing is learned before start() has returned
        self.stream.synchronize()
        self.done.release()


def _join_a_waiter(joins: bool) -> None:
    side = torch.Stream(device=DEVICE)
    x = torch.zeros(4, device=DEVICE)
    torch.accelerator.synchronize()
    with under(side):
        x.mul_(2)
    waiter = _Waiter(side)
    waiter.start()
    waiter.gate.release()
    waiter.done.acquire()
    if joins:
        waiter.join()
    x.exp()
    torch.accelerator.synchronize()


def test_joining_a_thread_teaches_what_it_learned() -> None:
    run(_join_a_waiter, True)
    reports = reports_of(_join_a_waiter, False)
    assert len(reports) == 1, reports


def _sync_in_backward() -> None:
    side = torch.Stream(device=DEVICE)
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    buffer = torch.zeros(4, device=DEVICE)

    def on_grad(grad: torch.Tensor) -> None:
        side.wait_stream(torch.accelerator.current_stream())
        with under(side):
            buffer.add_(grad)
        side.synchronize()  # on a thread of the autograd engine

    y = x * 2
    y.register_hook(on_grad)
    y.sum().backward()
    other = torch.Stream(device=DEVICE)
    with under(other):
        buffer.exp()  # on the thread that called backward: it came back after the hook had waited
    other.synchronize()


def test_the_autograd_engines_threads_act_for_their_caller() -> None:
    run(_sync_in_backward)


def _long_training() -> tuple[int, float, float]:
    side = torch.Stream(device=DEVICE)
    model = small_model().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(8, 32, device=DEVICE)
    times = []
    for _ in range(2):
        begin = time.monotonic()
        for _ in range(60):
            model(batch).square().mean().backward()
            side.wait_stream(torch.accelerator.current_stream())
            with under(side):
                optimizer.step()
            torch.accelerator.current_stream().wait_stream(side)
            optimizer.zero_grad(set_to_none=False)
        torch.accelerator.synchronize()
        times.append(time.monotonic() - begin)
    return _memory().memory_allocated(), times[0], times[1]


def _streams_in_turn(num_streams: int) -> tuple[int, int]:
    """Threads after the first stream and after the last: each is used while the one before may still be, and never again."""
    total = torch.zeros((), device=DEVICE)
    before = 0
    for number in range(num_streams):
        stream = torch.Stream(device=DEVICE)
        stream.wait_stream(torch.accelerator.current_stream())
        with under(stream):
            total += 1
        torch.accelerator.current_stream().wait_stream(stream)
        before = before or len(os.listdir("/proc/self/task"))
        if number % 10 == 0:
            torch.accelerator.synchronize()  # asks every stream there has ever been
    assert total.item() == num_streams
    return before, len(os.listdir("/proc/self/task"))


def test_a_stream_that_has_nothing_to_do_needs_no_thread() -> None:
    before, after = run(_streams_in_turn, 200)
    assert after <= before + 10, "as many as were busy at once, of those that were not waited for"


def test_many_steps_cost_no_more_per_step_than_the_first() -> None:
    _, first, second = run(_long_training)
    assert second < 3 * first + 0.5, (first, second)


# ---- collectives -----------------------------------------------------------------------------------------------------


def _collectives(timeout: float) -> dict[str, Any]:
    group = device_group(timeout=timeout)
    rank, size = group.rank(), group.size()
    sizes = [0, 3, 1, 2][:size]

    def tensor(*values: float) -> torch.Tensor:
        return torch.tensor(values, device=DEVICE)

    results: dict[str, Any] = {}
    reductions = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
    for name in reductions:
        x = tensor(rank + 1, 2.0)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, name), group=group)
        results[f"all_reduce {name}"] = x.tolist()
        x = tensor(0.0)
        parts = [tensor(float(rank + 1 + r)) for r in range(size)]
        dist.reduce_scatter(x, parts, op=getattr(dist.ReduceOp, name), group=group)
        results[f"reduce_scatter {name}"] = x.tolist()
    x = tensor(rank + 1.0)
    dist.reduce(x, size - 1, group=group)
    results["reduce"] = x.tolist() if rank == size - 1 else None
    x = tensor(float(rank))
    dist.broadcast(x, size - 1, group=group)
    results["broadcast"] = x.tolist()

    outs = [torch.zeros(n, device=DEVICE) for n in sizes]
    dist.all_gather(outs, torch.full((sizes[rank],), rank + 1.0, device=DEVICE), group=group)
    results["all_gather uneven"] = [out.tolist() for out in outs]
    x = torch.zeros(2 * size, device=DEVICE)
    dist.all_gather_into_tensor(x, tensor(rank, rank + 0.5), group=group)
    results["all_gather_into_tensor"] = x.tolist()
    x = torch.zeros(sizes[rank], device=DEVICE)
    dist.reduce_scatter(x, [torch.full((n,), rank + 1.0, device=DEVICE) for n in sizes], group=group)
    results["reduce_scatter uneven"] = x.tolist()
    x = torch.zeros(2, device=DEVICE)
    dist.reduce_scatter_tensor(x, torch.arange(2.0 * size, device=DEVICE) * (rank + 1), group=group)
    results["reduce_scatter_tensor"] = x.tolist()

    x = torch.zeros((rank + 1) * size, device=DEVICE)
    whole = torch.full((size * (size + 1) // 2,), float(rank), device=DEVICE)
    dist.all_to_all_single(x, whole, [rank + 1] * size, [r + 1 for r in range(size)], group=group)
    results["all_to_all_single uneven"] = x.tolist()
    outs = [torch.zeros(1, device=DEVICE) for _ in range(size)]
    dist.all_to_all(outs, [tensor(10.0 * rank + r) for r in range(size)], group=group)
    results["all_to_all"] = [out.item() for out in outs]
    gathered = [torch.zeros(1, device=DEVICE) for _ in range(size)] if rank == 0 else None
    dist.gather(tensor(float(rank)), gathered, 0, group=group)
    results["gather"] = [out.item() for out in gathered] if gathered else None
    x = torch.zeros(1, device=DEVICE)
    dist.scatter(x, [tensor(r + 0.5) for r in range(size)] if rank == 0 else None, 0, group=group)
    results["scatter"] = x.item()

    a, b = tensor(rank + 1.0), tensor(rank + 2.0, 1.0)
    with dist._coalescing_manager(group, DEVICE, async_ops=True) as batch:
        dist.all_reduce(a, group=group)
        dist.all_reduce(b, group=group)
    batch.wait()
    results["coalesced"] = [a.tolist(), b.tolist()]
    outs = [torch.zeros(size, device=DEVICE) for _ in range(2)]
    with dist._coalescing_manager(group):
        for i, out in enumerate(outs):
            dist.all_gather_into_tensor(out, tensor(rank + 10.0 * i), group=group)
    results["all_gather coalesced"] = [out.tolist() for out in outs]

    if size > 1:
        x, y, z = tensor(float(rank)), torch.zeros(1, device=DEVICE), torch.zeros(1, device=DEVICE)
        right, left = (rank + 1) % size, (rank - 1) % size
        if _coalesces_messages():
            ring = [dist.P2POp(dist.isend, x, right, group, 3), dist.P2POp(dist.irecv, y, left, group, 3)]
            for work in dist.batch_isend_irecv(ring):
                work.wait()
        else:  # in the order of a stream a rank that sends first waits for one that does so, too
            for move in (dist.send, dist.recv) if rank % 2 else (dist.recv, dist.send):
                move(x, right, group, tag=3) if move is dist.send else move(y, left, group, tag=3)
        results["ring"] = y.item()
        if rank == 0:
            dist.send(tensor(5.0), 1, group, tag=5)
            dist.send(tensor(6.0), 1, group, tag=6)
        elif rank == 1:
            dist.recv(y, 0, group, tag=5)
            dist.recv(z, 0, group, tag=6)
            results["tagged"] = [y.item(), z.item()]
    dist.barrier(group=group)
    results["timeout"] = group._get_backend(DEVICE).options._timeout
    return results


@pytest.mark.parametrize("size", [1, 2, 4])
def test_collectives_agree_with_arithmetic(size: int) -> None:
    sizes = [0, 3, 1, 2][:size]
    total = size * (size + 1) / 2
    for rank, got in enumerate(run_group(size, _collectives, 41.0)):
        assert got.pop("timeout") == timedelta(seconds=41), got
        product = 1.0
        scattered = 1.0
        for r in range(size):
            product *= r + 1
            scattered *= r + 1 + rank
        expected = {
            "all_reduce SUM": [total, 2.0 * size],
            "all_reduce AVG": [total / size, 2.0],
            "all_reduce MIN": [1.0, 2.0],
            "all_reduce MAX": [float(size), 2.0],
            "all_reduce PRODUCT": [product, 2.0**size],
            "reduce_scatter SUM": [total + rank * size],
            "reduce_scatter AVG": [total / size + rank],
            "reduce_scatter MIN": [rank + 1.0],
            "reduce_scatter MAX": [float(rank + size)],
            "reduce_scatter PRODUCT": [scattered],
            "reduce": [total] if rank == size - 1 else None,
            "broadcast": [size - 1.0],
            "all_gather uneven": [[r + 1.0] * n for r, n in enumerate(sizes)],
            "all_gather_into_tensor": [value for r in range(size) for value in (r, r + 0.5)],
            "reduce_scatter uneven": [total] * sizes[rank],
            "reduce_scatter_tensor": [2 * rank * total, (2 * rank + 1) * total],
            "all_to_all_single uneven": [float(r) for r in range(size) for _ in range(rank + 1)],
            "all_to_all": [10.0 * r + rank for r in range(size)],
            "gather": [float(r) for r in range(size)] if rank == 0 else None,
            "scatter": rank + 0.5,
            "coalesced": [[total], [total + size, float(size)]],
            "all_gather coalesced": [[r + 10.0 * i for r in range(size)] for i in range(2)],
        }
        if size > 1:
            expected["ring"] = (rank - 1) % size
        if size > 1 and rank == 1:
            expected["tagged"] = [5.0, 6.0]
        assert got == expected, f"rank {rank}"


def _reduced_both_ways(dtype: torch.dtype) -> tuple[list[float], list[float]]:
    group = device_group()
    x = torch.randn(1000, generator=torch.Generator().manual_seed(group.rank())).to(DEVICE, dtype)
    part = torch.empty(500, dtype=dtype, device=DEVICE)
    dist.reduce_scatter_tensor(part, x, group=group)
    dist.all_reduce(x, group=group)
    return part.tolist(), x.chunk(2)[group.rank()].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reduce_scatter_of_two_ranks_is_bitwise_the_all_reduce(dtype: torch.dtype) -> None:
    for rank, (scattered, reduced) in enumerate(run_group(2, _reduced_both_ways, dtype)):
        differing = [(a, b) for a, b in zip(scattered, reduced, strict=True) if a != b]
        assert differing == [], (rank, differing[:5])


def _group_by_hand() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    assert world is not None
    store = dist.PrefixStore("by hand", store_of(world))
    backend = zerolap_sim.make_backend(store, rank, size, timedelta(seconds=9))
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._register_backend(torch.device("sim"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_group_name("mine")  # type: ignore[arg-type]
    outs = [torch.zeros(1, device=DEVICE) for _ in range(size)]
    work = group.allgather([outs], [torch.full((1,), rank + 1.0, device=DEVICE)])
    zerolap_sim.configure(delay_us=50_000, delay_probability=1.0)
    slow = group.allreduce([torch.ones(1, device=DEVICE)])
    future = slow.get_future()
    done, complete = future.done(), slow.is_completed()
    doubled = future.then(lambda f: f.value()[0] * 2).wait()
    work.wait()
    slow.wait()
    return {
        "gathered": [out.item() for out in outs],
        "future done at once": done and not complete,
        "doubled": doubled.item(),
        "timeout": group._get_backend(torch.device("sim")).options._timeout,
    }


def test_a_group_by_hand_has_futures_complete_at_enqueue_and_a_readable_timeout() -> None:
    for value in run_group(2, _group_by_hand):
        assert value == {
            "gathered": [1.0, 2.0],
            "future done at once": True,
            "doubled": 4.0,
            "timeout": timedelta(seconds=9),
        }


def _collective_race(mistake: str) -> None:
    group = device_group()
    x, y = torch.ones(4, device=DEVICE), torch.zeros(4 * group.size(), device=DEVICE)
    work = dist.all_gather_into_tensor(y, x, group=group, async_op=True)
    assert work is not None
    if mistake == "read before the wait":
        y.sum()
    elif mistake == "input changed before the wait":
        x.mul_(2)
    elif mistake == "dropped before the wait":
        del work, x
        torch.zeros(4, device=DEVICE)
        torch.accelerator.synchronize()
        return
    work.wait()
    y.sum()


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("none", []),
        ("read before the wait", ["unordered access", "'sum' on default stream, which reads"]),
        ("input changed before the wait", ["unordered access", "'mul' on default stream, which writes"]),
        ("dropped before the wait", ["memory reused while in use", "on default stream, which writes"]),
    ],
)
def test_misuse_of_a_collective_is_reported_by_its_name(mistake: str, words: list[str]) -> None:
    for _, reports in run_ranks(2, on_device, _collective_race, mistake):
        assert len(reports) == (1 if words else 0), "\n".join(reports)
        for word in [*words, "'all_gather' on communication stream of group"] if words else []:
            assert word in reports[0], f"{word} missing in: {reports[0]}"


# ---- failures --------------------------------------------------------------------------------------------------------


def _go_on_until_it_raises(kind: str, timeout: float) -> dict[str, Any]:
    zerolap_sim.install()
    group = device_group(timeout=timeout)
    if dist.get_rank() == 0 and kind != "absent peer":
        zerolap_sim.inject("all_gather", kind, after=1)  # type: ignore[arg-type]
    x = torch.ones(2, device=DEVICE)
    out = torch.zeros(2 * group.size(), device=DEVICE)
    begin = time.monotonic()
    errors = []
    for step in range(3):
        try:
            if kind == "absent peer" and dist.get_rank() == 1 and step == 1:
                break
            dist.all_gather_into_tensor(out, x, group=group)
            out.sum().item()
        except RuntimeError as error:
            errors.append(f"{type(error).__name__}: {error}")
    took = time.monotonic() - begin
    try:
        torch.accelerator.synchronize()
    except RuntimeError as error:
        errors.append(str(error))
    return {"errors": errors, "took": took}


@pytest.mark.parametrize("kind", ["failure", "timeout", "absent peer"])
def test_a_collective_that_fails_ends_everything_in_bounded_time_and_says_which(kind: str) -> None:
    outcomes = try_ranks(2, _go_on_until_it_raises, kind, 2.0, limit=60)
    value = outcomes[0].value
    assert value is not None, outcomes[0].error
    first, *rest = value["errors"]
    error = "AcceleratorError" if hasattr(torch, "AcceleratorError") else "RuntimeError"
    assert first.startswith(f"{error}: simulated device: all_gather with sequence number 2"), first
    assert "on rank 0 of 2, group " in first, first
    assert (" failed, within its timeout of 2 s: " if kind == "failure" else " timed out after 2 s: ") in first, first
    assert ("injected" in first) == (kind != "absent peer"), first
    assert rest, "the failure did not stick"
    assert all("all_gather with sequence number 2" in error for error in rest), rest
    assert value["took"] < 15, value
    if kind != "absent peer":  # the other rank is left alone by the failed one, and must not hang either
        peer = outcomes[1].value
        assert peer is not None, outcomes[1].error
        assert "all_gather with sequence number 2 on rank 1 of 2" in peer["errors"][0], peer
        assert peer["took"] < 15, peer


def _bad_kernel() -> list[str]:
    zerolap_sim.install()
    table, index = torch.zeros(3, 2, device=DEVICE), torch.tensor([7], device=DEVICE)
    errors = []
    for _ in range(2):
        try:
            F.embedding(index, table)
            torch.accelerator.synchronize()
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_a_kernel_that_fails_is_told_at_the_next_synchronisation_and_for_ever() -> None:
    (errors,) = run_ranks(1, _bad_kernel)
    assert len(errors) == 2, errors
    assert all(error.startswith("simulated device: ") and "out of range" in error for error in errors), errors


def _use_in_forked_child() -> str:
    torch.ones(2, device=DEVICE).sum().item()
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            torch.ones(2, device=DEVICE)
            said = "nothing"
        except RuntimeError as error:
            said = str(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.wait()
    return os.read(reading, 10_000).decode()


def test_a_forked_child_is_told_to_be_spawned() -> None:
    said = run(_use_in_forked_child)
    assert "forked from one that uses the simulated device" in said, said
    assert "spawn or forkserver" in said, said


def test_the_process_can_leave_while_a_collective_hangs(tmp_path: Path) -> None:
    code = f"""
import torch, torch.distributed as dist, zerolap_sim
zerolap_sim.install()
dist.init_process_group("cpu:gloo,sim:simccl", init_method="file://{tmp_path}/store", rank=0, world_size=1)
zerolap_sim.inject("all_reduce", "timeout")
work = dist.all_reduce(torch.ones(3, device="sim"), async_op=True)
print("leaving", work.is_completed())
"""
    done = run_python(code)  # its own limit is far below the group's half hour
    assert (done.stdout, done.returncode) == ("leaving False\n", 0), done


# ---- training --------------------------------------------------------------------------------------------------------

DDP_OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"device_ids": [0]},
    {"hook": default_hooks.allreduce_hook},
]


def _ddp_both_ways() -> dict[str, float]:
    group = device_group()
    expected = train_ddp(torch.device("cpu"), group)
    differences = {}
    for options in DDP_OPTIONS:
        for delay in (0.0, 0.2):
            zerolap_sim.configure(delay_us=1000, delay_probability=delay)
            got = train_ddp(DEVICE, group, **options)
            worst = max((a - b).abs().max().item() for a, b in zip(expected, got, strict=True))
            differences[f"{list(options)} delays {delay}"] = worst
    train_ddp(DEVICE, group, hook=default_hooks.fp16_compress_hook)
    return differences


def test_plain_ddp_is_bitwise_that_of_the_cpu_and_silent() -> None:
    for rank, differences in enumerate(run_group(2, _ddp_both_ways)):
        assert set(differences.values()) == {0.0}, (rank, differences)


def _transformer_ddp(synchronous: bool) -> list[Any]:
    zerolap_sim.configure(synchronous=synchronous, delay_us=0 if synchronous else 500, delay_probability=0.1)
    group = device_group()
    torch.manual_seed(1)
    ddp = nn.parallel.DistributedDataParallel(Transformer().to(DEVICE), process_group=group, bucket_cap_mb=0.02)
    train_text(ddp, DEVICE)
    return [p.tolist() for p in ddp.parameters()]


def test_a_transformer_trains_the_same_with_and_without_asynchrony() -> None:
    synchronous, asynchronous = run_group(2, _transformer_ddp, True)[0], run_group(2, _transformer_ddp, False)[0]
    for i, (a, b) in enumerate(zip(synchronous, asynchronous, strict=True)):
        assert a == b, f"parameter {i}"


def _fsdp2() -> float:
    group = device_group()
    mesh = DeviceMesh.from_group(group, "sim")
    torch.manual_seed(1)
    reference = Transformer().to(DEVICE)
    train_text(nn.parallel.DistributedDataParallel(reference, process_group=group), DEVICE)
    worst = 0.0
    for delay in (0.0, 0.1):
        zerolap_sim.configure(delay_us=1000, delay_probability=delay)
        torch.manual_seed(1)
        model = Transformer().to(DEVICE)
        for layer in model.encoder.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train_text(model, DEVICE)
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        worst = max(worst, *((p.full_tensor() - q).abs().max().item() for p, q in pairs))  # type: ignore[attr-defined]
    return worst


def test_fsdp2_runs_silently_and_learns_what_ddp_learns() -> None:
    for worst in run_group(2, _fsdp2):
        assert worst < 1e-3, worst  # Adam blows rounding of tiny gradients up to a fraction of the learning rate


MISTAKES = {
    "none": "",
    "no wait after reduce-scatter": "'reduce_scatter' on communication stream",
    "no wait after all-gather": "'all_gather' on communication stream",
    "no wait before forward": "on default stream, which reads",
    "event too early": "on default stream, which reads",
    "gather from the wrong stream": "'all_gather' on communication stream",
    "no record_stream": "memory reused while in use",
}


def _all_mistakes() -> dict[str, list[str]]:
    group = device_group()
    found = {}
    for delay in (0.0, 0.2):
        zerolap_sim.configure(delay_us=2000, delay_probability=delay)
        for mistake in MISTAKES:
            step_in_hook(DEVICE, group, mistake)
            found[f"{mistake}, delays {delay}"] = [str(report) for report in zerolap_sim.take_reports()]
    return found


def test_every_missing_wait_of_an_optimizer_step_in_a_hook_is_reported_whatever_the_timing() -> None:
    for found in run_group(2, _all_mistakes):
        for case, reports in found.items():
            words = MISTAKES[case.split(", delays")[0]]
            assert bool(reports) == bool(words), f"{case}: {reports}"
            assert not words or any(words in report for report in reports), f"{case}: {reports}"
