"""Small parts: the adapter registry, lanes, waiting with a limit, and the rule that core names no backend."""

from __future__ import annotations

import importlib.metadata
import re
import threading
from pathlib import Path

import pytest
import torch
from torch.futures import Future

import zerolap
import zerolap_cpu_gloo
from zerolap.backend import registry
from zerolap.backend.lanes import ThreadLane, Waiter


def test_core_names_no_backend_and_no_device() -> None:
    names = re.compile(r"\b(gloo|nccl|rccl|hccl|xccl|ccl|mpi|ucc|npu|xpu|cuda|rocm|hpu|ascend)\b", re.IGNORECASE)
    root = Path(zerolap.__file__).parent
    files = [file for file in root.rglob("*.py") if root / "cli" not in file.parents]  # which writes vendors' skeletons
    assert len(files) > 8
    found = [f"{file.name}: {line}" for file in files for line in file.read_text().splitlines() if names.search(line)]
    assert not found, found


def test_the_installed_adapter_is_found_by_device_type_and_by_name() -> None:
    assert isinstance(zerolap.find_adapter("cpu"), zerolap_cpu_gloo.CpuGlooAdapter)
    assert isinstance(zerolap.load_adapter("cpu_gloo"), zerolap_cpu_gloo.CpuGlooAdapter)
    assert zerolap.installed_adapters()["cpu_gloo"] is zerolap_cpu_gloo.CpuGlooAdapter


def test_an_unknown_adapter_is_an_error_that_lists_the_installed_ones() -> None:
    with pytest.raises(zerolap.AdapterNotFoundError, match=r"no adapter 'gluu'; installed: .*cpu_gloo"):
        zerolap.load_adapter("gluu")
    with pytest.raises(
        LookupError, match=r"device type 'acme'; installed: .*cpu_gloo \(cpu\).*pip install zerolap-acme-"
    ):
        zerolap.find_adapter("acme")


def _register(monkeypatch: pytest.MonkeyPatch, **plugins: str) -> None:
    points = [importlib.metadata.EntryPoint(name, value, "zerolap.adapters") for name, value in plugins.items()]
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: points)


class Absent(zerolap_cpu_gloo.CpuGlooAdapter):
    name, device_type = "absent", "acme"

    def why_unavailable(self) -> str:
        return "no acme is plugged in"


class Explosive(zerolap_cpu_gloo.CpuGlooAdapter):
    name, device_type = "explosive", "dynamite"

    def why_unavailable(self) -> str:
        raise OSError("libdynamite.so: cannot open shared object file")


def test_a_broken_plug_in_breaks_nothing_and_says_so_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _register(
        monkeypatch,
        broken="no_such_module:Adapter",
        wrong="math:pi",
        cpu_gloo="zerolap_cpu_gloo:CpuGlooAdapter",
        absent=f"{__name__}:Absent",
        explosive=f"{__name__}:Explosive",
    )
    assert zerolap.adapters() == [
        ("absent", "acme", "no acme is plugged in"),
        ("broken", None, "cannot be loaded: No module named 'no_such_module'"),
        ("cpu_gloo", "cpu", None),
        ("explosive", "dynamite", "its probe failed: OSError: libdynamite.so: cannot open shared object file"),
        ("wrong", None, "cannot be loaded: entry point 'math:pi' is not a subclass of zerolap.Adapter"),
    ]
    assert not Explosive().is_available()
    assert zerolap.find_adapter("cpu").name == "cpu_gloo"
    with pytest.raises(
        zerolap.AdapterNotFoundError, match="'broken' is installed, but cannot be loaded: No module named"
    ):
        zerolap.load_adapter("broken")
    with pytest.raises(zerolap.AdapterNotFoundError, match=r"not a subclass of zerolap.Adapter"):
        zerolap.load_adapter("wrong")
    with pytest.raises(zerolap.AdapterNotFoundError, match=r"broken \(broken: No module named"):
        zerolap.find_adapter("elsewhere")
    with pytest.raises(
        zerolap.AdapterNotFoundError,
        match="'absent' is installed for 'acme', but cannot be used: no acme is plugged in",
    ):
        zerolap.find_adapter("acme")


def test_a_lane_uses_as_many_threads_as_its_maker() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert ThreadLane("test").submit(torch.get_num_threads).wait() == before + 1
    finally:
        torch.set_num_threads(before)


def test_a_lane_nobody_holds_ends_its_thread() -> None:
    lane = ThreadLane("test")
    thread = lane.submit(threading.current_thread).wait()
    assert thread.daemon
    del lane
    thread.join(10)
    assert not thread.is_alive()


def test_a_lane_runs_without_gradients() -> None:
    assert ThreadLane("test").submit(torch.is_grad_enabled).wait() is False


def test_waiting_has_a_limit() -> None:
    with pytest.raises(TimeoutError, match="not done after 0 s"):
        Waiter(Future[int]()).wait(0.01)
    done: Future[int] = Future()
    done.set_result(3)
    assert Waiter(done).wait(1) == 3
