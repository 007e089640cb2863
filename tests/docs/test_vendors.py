"""VENDORS.md is true: its example, as a real package installed beside us, gets a verdict by the commands it gives."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import PYTHONPATH, ROOT
from zerolap.cli.skeleton import write
from zerolap_conformance.requirements import all_requirements
from zerolap_conformance.run import try_requirements
from zerolap_sim import build


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """As if the vendor's package were installed; from a copy, outside of this project."""
    build.build()
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--target", str(folder), str(ROOT / "tests/support/acme")], check=True
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), PYTHONPATH])}


def _run(environment: dict[str, str], folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--pyargs", "zerolap_conformance", "--zerolap-adapter", *options]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=500)


def test_the_example_gets_a_verdict(environment: dict[str, str], tmp_path: Path) -> None:
    run = _run(environment, tmp_path, "acme", "--zerolap-tier", "0", "--zerolap-report", str(tmp_path / "out"))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "acme conforms at tier 0 on 2 ranks, on a simulated device" in run.stdout
    verdict = json.loads((tmp_path / "out/verdict.json").read_text())
    assert (verdict["schema"], verdict["is_conformant"], verdict["is_simulated"]) == (1, True, True)
    assert verdict["adapter"]["name"] == "acme"
    assert "acme conforms" in re.sub("<[^>]*>", "", (tmp_path / "out/verdict.html").read_text())


@pytest.mark.parametrize("adapter", ["cuda_nccl", "support.breakers:HasNoDevice"])
def test_an_absent_device_is_a_failure_and_no_reason_to_skip(
    environment: dict[str, str], tmp_path: Path, adapter: str
) -> None:
    run = _run(environment, tmp_path, adapter, "--zerolap-tier", "0", "-k", "DEV-1")
    assert run.returncode == 1, run.stdout
    assert "FAILED DEV-1" in run.stdout


def test_nothing_tried_is_a_failure(environment: dict[str, str], tmp_path: Path) -> None:
    run = _run(environment, tmp_path, "acme", "--zerolap-nproc", "1", "--zerolap-tier", "2", "-k", "CAP-1")
    assert "needs 2 ranks" in run.stdout
    assert run.returncode == 1, run.stdout


def test_names_and_capabilities_are_enough_for_a_device_without_streams() -> None:
    slow = ("facts", "in_use", "lanes_in_use", "sides_in_use", "values")
    some = ("USE-4", "USE-5", "MIX-2", "GRP-5", "LATE-1", "OVL-1", "OVL-6", "HOOK-1")
    ids = [
        id_
        for id_, each in all_requirements().items()
        if id_ in some or (each.tier <= 2 and each.check.__module__.rpartition(".")[2] not in slow)
    ]
    results = try_requirements(
        [all_requirements()[id_] for id_ in ids], adapter="support.plain_adapter:PlainAdapter", num_ranks=2
    )
    assert [result.id for result in results] == ids, results[0].reason
    assert {result.outcome for result in results} == {"passed"}, results


def test_the_example_is_the_skeleton_on_a_simulated_device(tmp_path: Path) -> None:
    """tests/support/acme is what new-adapter writes, and what stands in for a vendor's driver and cards."""
    write(tmp_path, name="acme")
    for path in ("pyproject.toml", "src/zerolap_acme/__init__.py"):
        example = (ROOT / "tests/support/acme" / path).read_text()
        for line in (tmp_path / path).read_text().splitlines():
            assert line in example or "exact_cut" in line, line
