"""What is run after a change: in which folder, and what becomes of a test that fails once."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support import ROOT

FLAKY = """
    from pathlib import Path
    def test_flaky_{0}():
        mark = Path(__file__).with_name("seen-{0}")
        is_second = mark.exists()
        mark.touch()
        assert is_second
"""


@pytest.fixture(params=["alone", "in tox"])
def everything(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # ours is one, and imports torch
    # pytest keeps its cache there. These tests may run in tox themselves, whose cache is not theirs.
    monkeypatch.delenv("TOX_ENV_DIR", raising=False)
    if request.param == "in tox":
        monkeypatch.setenv("TOX_ENV_DIR", str(tmp_path / ".tox/toy"))
    spec = importlib.util.spec_from_file_location("everything", ROOT / "ci/everything.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["everything"] = module  # where dataclasses look for what annotations mean
    spec.loader.exec_module(module)
    del sys.modules["everything"]
    return module


def _try(everything: ModuleType, folder: Path, *suites: str) -> int:
    """Run suites of a toy project as separate checks; in each there is also a test that holds."""
    pytest_here = (sys.executable, "-m", "pytest")
    checks = []
    for number, suite in enumerate(suites):
        file = folder / f"tests/test_{number}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text("def test_good():\n    pass\n" + re.sub("^    ", "", suite, flags=re.MULTILINE))
        again = lambda failed: [(*pytest_here, *failed)]  # noqa: E731
        checks.append(everything.Check(first=(*pytest_here, str(file)), again=again))
    (folder / "pytest.ini").write_text("[pytest]\n")
    return everything.run(checks, folder)


def test_a_test_that_passes_the_second_time_is_said_and_counted(
    everything: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _try(everything, tmp_path, FLAKY.format("a"), "", FLAKY.format("b")) == 0
    said = capfd.readouterr().out
    assert "second try: 1 failed: tests/test_0.py::test_flaky_a\n" in said
    assert "second try: 1 failed: tests/test_2.py::test_flaky_b\n" in said
    *summaries, counted, end = said.splitlines()[-7:]
    assert [re.sub(r" in [\d.]+s", "", line.strip("= ")) for line in summaries] == [
        "1 failed, 1 passed",
        "1 passed",
        "1 passed",
        "1 failed, 1 passed",
        "1 passed",
    ]
    assert (counted, end) == ("second tries: 2, at most 2 may be", "everything holds")


@pytest.mark.parametrize("is_one_suite", [True, False], ids=["one-suite", "three-suites"])
def test_more_than_two_second_tries_fail(
    everything: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], is_one_suite: bool
) -> None:
    suites = [FLAKY.format(name) for name in "abc"]
    assert _try(everything, tmp_path, *(["".join(suites)] if is_one_suite else suites)) == 1
    assert capfd.readouterr().out.endswith("second tries: 3, at most 2 may be\nfailed\n")


BAD = "    def test_bad():\n        assert False\n"


@pytest.mark.parametrize(
    "suite",
    [
        BAD,
        FLAKY.format("a") + BAD,
        "    import nothing_of_this_name\n",
        "    import os\n    def test_end():\n        os._exit(3)\n",
    ],
    ids=["fails", "fails-beside-a-flaky-one", "cannot-be-imported", "ends-pytest"],
)
def test_what_fails_twice_fails(everything: ModuleType, tmp_path: Path, suite: str) -> None:
    assert _try(everything, tmp_path, suite) == 1


def test_tests_that_were_not_run_for_another_failure_are_run_by_the_second_try(
    everything: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """pytest stops in the middle, once: the tests that it names as failed are not all that is open."""
    stops = FLAKY.format("a") + (
        "    import pytest\n"
        "    def test_stops():\n"
        "        if not Path(__file__).with_name('stopped').exists():\n"
        "            Path(__file__).with_name('stopped').touch()\n"
        "            pytest.exit('enough', returncode=2)\n"
    )
    assert _try(everything, tmp_path, stops + BAD) == 1
    assert "1 failed, 3 passed" in capfd.readouterr().out


def test_failed_tests_are_tried_again_wherever_they_lie(everything: ModuleType) -> None:
    ours = ["adapters/sim/tests/test_a.py::test_b", "tests/api/test_c.py::test_d"]
    _, tests, suite = everything._again_in_test(
        [*ours, "conformance/src/zerolap_conformance/test_conformance.py::DEV-1"]
    )
    assert list(tests[-2:]) == ours
    assert "zerolap_conformance" in suite


def test_checks_run_in_a_folder_with_the_name_that_clones_have(tmp_path: Path) -> None:
    """And only what is committed; the exit code comes through, and nothing stays behind."""
    project, temp = tmp_path / "another name", tmp_path / "temp"
    for folder in (project / ".ci", project / "ci", temp):
        folder.mkdir(parents=True)
    shutil.copy2(ROOT / ".ci/run", project / ".ci/run")
    (project / "ci/everything.py").write_text(
        "import os, sys\nprint(os.getcwd(), os.listdir(), repr(sys.stdin.read()))\nsys.exit(7)\n"
    )
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], cwd=project, check=True)
    (project / "not-committed").touch()
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", "TMPDIR": str(temp)}
    done = subprocess.run([project / ".ci/run"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done
    assert re.match(rf"{re.escape(str(temp))}/[^/]+/zerolap \['", done.stdout), done
    assert "not-committed" not in done.stdout
    assert done.stdout.endswith("''\n"), done
    assert list(temp.iterdir()) == []
