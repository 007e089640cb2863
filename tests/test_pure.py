"""What decides, forecasts and reads files needs no torch: imported and used where there is none."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import zerolap.forecast
import zerolap.observe.timeline
import zerolap.schedule

PACKAGES = (zerolap.schedule, zerolap.forecast, zerolap.observe.timeline)
MODULES = [
    *(found.name for package in PACKAGES for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")),
    *("zerolap", "zerolap.errors", "zerolap.untrusted.files", "zerolap.untrusted.pickles", "zerolap.checkpoint.folder"),
    *(
        "zerolap.cli",
        "zerolap.cli.app",
        "zerolap.cli.doctor",
        "zerolap.cli.numbers",
        "zerolap.cli.skeleton",
        "zerolap.cli.trace",
    ),
]

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy") or name.startswith("zerolap_"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
sys.modules["torch"] = None
"""

FORECAST = """
from zerolap.forecast.forecast import Compute, Link, forecast_all, recommend
from zerolap.forecast.workload import Param, Workload, bucketize

params = tuple(Param(1000, used_at=i / 10, ready_at=1 - i / 10, state_bytes_per_element=8) for i in range(10))
workload = Workload(params=params, layout=bucketize(params, cap_bytes=8000))
link, compute = Link(bytes_per_second=1e6, latency=1e-4), Compute(forward=0.01, backward=0.02)
found = forecast_all(workload, world_size=4, link=link, compute=compute)
assert len(found) == 7
assert found[1].sent_bytes >= 2 * 4 * 10_000 * 3 // 4, found[1].sent_bytes
assert recommend(found).best.step_seconds >= 0.03
"""


def _run(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", BLOCKED + script]
    return subprocess.run(command, cwd=cwd, env=os.environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("module", MODULES)
def test_what_is_pure_is_imported_where_there_is_no_torch(module: str, tmp_path: Path) -> None:
    found = _run(f"import {module}", tmp_path)
    assert found.returncode == 0, found.stderr


def test_a_forecast_is_computed_where_there_is_no_torch(tmp_path: Path) -> None:
    found = _run(FORECAST, tmp_path)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("module", ["zerolap.backend.base", "zerolap.runtime.engine", "zerolap.cli.plan"])
def test_what_is_not_pure_is_stopped_here(module: str, tmp_path: Path) -> None:
    """Or else nothing is blocked, and the others pass for nothing."""
    found = _run(f"import {module}", tmp_path)
    assert found.returncode != 0
    assert "torch" in found.stderr, found.stderr
