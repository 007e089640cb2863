"""The matrix of versions of torch: which there are, what is counted of a run, and the page that is written of it."""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support import ROOT
from zerolap._torch import versions

TESTS = """
import pytest

def test_good(): pass

@pytest.mark.parametrize("i", [1, 2])
def test_skipped(i): pytest.skip("no | device")

def test_bad(): assert 0

@pytest.fixture
def broken(): raise ValueError

def test_error(broken): pass
"""


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"ci/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    return _script("matrix")


@pytest.fixture(scope="module")
def try_torch() -> ModuleType:
    return _script("try_torch")


def test_every_version_that_was_tried_has_an_environment_and_no_other(matrix: ModuleType) -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    (section,) = (name for name in tox.sections() if "torch26" in name)
    assert re.findall(r"[\w-]+", section)[1:] == [
        *sorted(matrix.ENVS, key=lambda env: ("-" in env, matrix.ENVS.index(env)))
    ]
    pinned = dict(re.findall(r"^(torch\d+): torch==(\d+\.\d+)", tox[section]["deps"], re.MULTILINE))
    assert {*pinned} == {env.rpartition("-")[2] for env in matrix.ENVS}
    oldest, newest = versions.OLDEST, versions.NEWEST
    assert [*pinned.values()] == [f"2.{minor}" for minor in range(oldest[1], newest[1] + 1)]
    assert (oldest[0], newest[0]) == (2, 2)
    assert all(pinned[env] == env.replace("torch2", "2.") for env in pinned)


def test_the_quick_set_is_there_and_the_whole_one_leaves_out_nothing(try_torch: ModuleType) -> None:
    for each in try_torch.QUICK:
        file, _, test = each.partition("::")
        assert (ROOT / file).exists(), each
        assert not test or f"\ndef {test}(" in (ROOT / file).read_text(), each
    files = [
        str(file.relative_to(ROOT)) for file in (*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("adapters/*/tests/*.py"))
    ]
    assert len(files) > 60
    whole = try_torch.whole()
    for file in files:
        assert sum(file == part or file.startswith(f"{part}/") for part in whole) == 1, file
    tox = (ROOT / "tox.ini").read_text()
    assert f'pytest -m "{try_torch.APART}"' in tox


def test_outcomes_are_counted_by_whose_the_tests_are(try_torch: ModuleType, tmp_path: Path) -> None:
    for place in ("tests", "adapters/sim/tests"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / f"test_in_{place[0]}.py").write_text(TESTS)
    (tmp_path / "tests/test_apart.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", ".", "--junitxml=junit.xml", "tests", "adapters"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # ours is one, and imports torch
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=120, check=False)
    found = try_torch.counted(try_torch.outcomes(tmp_path / "junit.xml"))
    assert {*found} == {"core", "sim"}
    for part, module in (("core", "tests.test_in_t"), ("sim", "adapters.sim.tests.test_in_a")):
        assert found[part]["passed"] == 1
        assert found[part]["failed"] == [f"{module}::test_bad", f"{module}::test_error"]
        assert found[part]["skipped"].pop("no | device") == 2
    assert found["sim"]["skipped"] == {}
    assert [*found["core"]["skipped"].values()] == [1]


def _record(torch: str, python: str, **runs: dict[str, Any]) -> dict[str, Any]:
    return {"torch": torch, "python": python, "date": "2026-01-02", "runs": runs}


def test_the_page_says_what_passed_failed_and_was_skipped(matrix: ModuleType) -> None:
    old = {"core": {"passed": 7, "failed": ["test_bad"], "skipped": {"no | device": 2}}}
    new = {"core": {"passed": 9, "failed": [], "skipped": {}}, "sim": {"passed": 3, "failed": [], "skipped": {}}}
    records = {
        "torch210": _record("2.10.0+cu1", "3.13.0", whole={"seconds": 1, "parts": new}),
        "torch29": _record("2.9.1", "3.11.7", quick={"seconds": 1, "parts": old}),
    }
    folders = {str(file.parent.relative_to(ROOT)) for file in ROOT.glob("tests/*/test_*.py")}
    nothing: dict[str, Any] = {"seconds": 1, "parts": {}}
    found = records["torch210"]["runs"].pop("whole")
    records["torch210"]["runs"] = dict.fromkeys(folders, nothing) | {"tests/api": found}
    records["torch211"] = _record("2.11.0", "3.11.7", **{"tests/api/test_hooks.py": nothing, "adapters/sim": nothing})
    page = matrix.page(records)
    rows = [line for line in page.splitlines() if "2026-01-02" in line]
    assert rows == [
        "| 2.9.1 | 3.11.7 | 2026-01-02 | quick | 7, **1 failed**, 2 skipped |  |  |  |  |  |  |  |",
        "| 2.10.0+cu1 | 3.13.0 | 2026-01-02 | whole | 9 |  | 3 |  |  |  |  |  |",
        "| 2.11.0 | 3.11.7 | 2026-01-02 | sim, test_hooks.py |  |  |  |  |  |  |  |  |",
    ]
    assert "* torch 2.9.1, Python 3.11.7: `test_bad`" in page
    assert "Not run yet: `torch26`, `torch27`, `torch28`, `torch212`" in page
    assert "| no \\| device | 2.9.1, Python 3.11: 2 |" in page


def test_a_part_that_runs_again_takes_its_place_and_others_stay(
    matrix: ModuleType, try_torch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(matrix, "PAGE", tmp_path / "page.md")
    records: dict[str, Any] = {}
    bad, good = ({"core": {"passed": 1, "failed": failed, "skipped": {}}} for failed in (["test_bad"], []))
    into = tmp_path / "noted.json"
    for target, parts in (("tests/api", bad), ("tests/cli", good), ("tests/api", good)):
        into.unlink(missing_ok=True)
        try_torch.note(into, target, parts, 1.0)
        matrix.add(records, "torch213", json.loads(into.read_text()))
    assert {*records["torch213"]["runs"]} == {"tests/api", "tests/cli"}
    assert "failed" not in (tmp_path / "page.md").read_text().partition("## Skipped")[0].replace(
        "tests that failed", ""
    )
    assert json.loads((tmp_path / "record.json").read_text()) == records


def test_the_page_is_of_what_is_known(matrix: ModuleType) -> None:
    assert matrix.PAGE.read_text() == matrix.page(json.loads(matrix.RECORD.read_text()))
