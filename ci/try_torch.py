"""Run tests with the torch that is installed here, and note in a file what came of them.

    python ci/try_torch.py quick                          # every schedule, gather, hook and kind of checkpoint; conformance
    python ci/try_torch.py whole                          # the whole test command
    python ci/try_torch.py whole --only tests/api         # a part of it; what other parts gave is kept in the file
    python ci/try_torch.py checkpoints --folder FOLDER    # write one, and load those that other versions of torch wrote there

``ci/matrix.py`` runs it with one version of torch after another.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
APART = "not soak and not browser and not breakers and not kills and not integrations and not ipex"
ADAPTERS = {"cpu_gloo": "cpu_gloo", "sim": "zerolap_sim.installed:SimAdapter"}  # that can run here, and where they are
QUICK = (
    "tests/test_torch_seam.py",
    "tests/api/test_oracle.py",
    "tests/api/test_attach.py::test_every_schedule_equals_ddp_and_the_plain_optimizer",
    "tests/api/test_attach.py::test_every_class_of_torch_and_its_consolidated_state",
    "tests/api/test_attach.py::test_a_lazy_gather_is_waited_for_wherever_a_parameter_is_used",
    "tests/api/test_attach.py::test_loss_scaling_skips_exactly_the_steps_that_ddp_skips",
    "tests/api/test_hooks.py",
    "tests/api/test_state_dict.py",
    "tests/runtime/test_sharded_gradients.py::test_every_way_gives_the_numbers_of_ddp_and_holds_no_gradients",
    "tests/checkpoint/test_checkpoint.py::test_saved_at_n_ranks_loads_at_m_in_any_layout",
    "tests/checkpoint/test_checkpoint.py::test_training_goes_on_bitwise",
    "adapters/cpu_gloo/tests/test_exchange.py::test_every_part_reaches_its_rank_from_everyone",
    "adapters/cpu_gloo/tests/test_exchange.py::test_parts_of_any_size_are_scattered_and_gathered",
    "adapters/sim/tests/test_sim_device.py::test_operators_agree_with_the_cpu",
    "adapters/sim/tests/test_sim_device.py::test_optimizers_and_the_gradient_scaler_agree_with_the_cpu",
    "adapters/sim/tests/test_sim_device.py::test_collectives_agree_with_arithmetic",
    "adapters/sim/tests/test_sim_device.py::test_plain_ddp_is_bitwise_that_of_the_cpu_and_silent",
    *("adapters/cuda_nccl", "adapters/ascend_hccl", "adapters/xpu"),
)
LONGEST = 3600  # seconds; what takes longer has failed

Counts = dict[str, Any]  # of one part of the tests, as JSON: passed, failed, and skipped by reason


def whole() -> list[str]:
    """The parts of the whole test command: folders of tests, and the tests that lie in none."""
    folders = {file.parent for file in ROOT.glob("tests/*/test_*.py")}
    return sorted(str(each.relative_to(ROOT)) for each in (*folders, *ROOT.glob("tests/test_*.py"), ROOT / "adapters"))


# --- pytest -----------------------------------------------------------------------------------------------------------


def part_of(name: str) -> str:
    """Whose test this is: an adapter's, or core's."""
    found = re.match(r"adapters\.(\w+)\.", name)
    return found[1] if found else "core"


def outcomes(report: Path) -> Iterator[tuple[str, str, str]]:
    """Of every test in a JUnit report: whose it is, what came of it, and why or which it was."""
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        part = part_of(case.get("classname") or case.get("name") or "")
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            yield part, "failed", name
        elif skipped is not None:
            yield part, "skipped", skipped.get("message") or "no reason"
        else:
            yield part, "passed", name


def counted(found: Iterator[tuple[str, str, str]]) -> dict[str, Counts]:
    parts: dict[str, Counts] = {}
    for part, outcome, what in found:
        counts = parts.setdefault(part, {"passed": 0, "failed": [], "skipped": {}})
        if outcome == "passed":
            counts["passed"] += 1
        elif outcome == "failed":
            counts["failed"].append(what)
        else:
            counts["skipped"][what] = counts["skipped"].get(what, 0) + 1
    return parts


def run_pytest(targets: list[str]) -> dict[str, Counts]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", APART, f"--junitxml={report}", *targets]
        subprocess.run(command, cwd=ROOT, timeout=LONGEST, check=False)
        if not report.exists():
            raise SystemExit(f"pytest wrote no report of {', '.join(targets)}")
        return counted(outcomes(report))


# --- the conformance suite --------------------------------------------------------------------------------------------


def run_conformance(adapter: str) -> dict[str, Counts]:
    command = [sys.executable, "-m", "zerolap", "conformance", "--adapter", ADAPTERS[adapter], "--tier", "3", "--json"]
    done = subprocess.run(command, cwd=ROOT, timeout=LONGEST, check=False, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        raise SystemExit(f"the conformance suite gave no verdict of {adapter}")
    verdict = json.loads(done.stdout)
    found = Counter(each["outcome"] for each in verdict["requirements"])
    failed = [
        f"{each['id']}: {each['reason'][-400:]}" for each in verdict["requirements"] if each["outcome"] == "failed"
    ]
    if not verdict["is_conformant"] and not failed:
        failed = ["some requirements were not tried"]
    skipped = Counter(each["reason"] for each in verdict["requirements"] if each["outcome"] == "skipped")
    print(f"conformance of {adapter}: {dict(found)}", *failed, sep="\n  ", flush=True)
    return {f"conformance {adapter}": {"passed": found["passed"], "failed": failed, "skipped": dict(skipped)}}


# --- checkpoints ------------------------------------------------------------------------------------------------------


def run_checkpoints(folder: Path) -> dict[str, Counts]:
    """One is written by this torch, and each that another one has written is loaded and compared bit by bit."""
    folder.mkdir(parents=True, exist_ok=True)
    across, own = ROOT / "ci/checkpoint_across.py", str(torch.__version__).partition("+")[0]
    if not (folder / own).exists():
        subprocess.run([sys.executable, across, "write", folder / own], cwd=ROOT, timeout=LONGEST, check=True)
    parts: dict[str, Counts] = {}
    for other in sorted(each.name for each in folder.iterdir() if each.name != own):
        done = subprocess.run([sys.executable, across, "read", folder / other], cwd=ROOT, timeout=LONGEST, check=False)
        failed = [f"of torch {other}"] if done.returncode else []
        parts[f"checkpoint of {other}"] = {"passed": int(not failed), "failed": failed, "skipped": {}}
    return parts


# --- the file ---------------------------------------------------------------------------------------------------------


def note(into: Path, target: str, parts: dict[str, Counts], seconds: float) -> None:
    """Add to what the file says of this torch and Python."""
    known = json.loads(into.read_text()) if into.exists() else {}
    known |= {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    known.setdefault("runs", {})[target] = {"seconds": round(seconds), "parts": parts}
    into.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["quick", "whole", "checkpoints"])
    parser.add_argument("--only", nargs="+", help="parts of the whole test command, or 'conformance'")
    parser.add_argument("--folder", type=Path, default=ROOT / ".tox/checkpoints", help="where checkpoints lie")
    parser.add_argument("--into", type=Path, help="the file; without one, what came of the tests is only printed")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"torch {torch.__version__}, Python {platform.python_version()}", flush=True)
    num_failed = 0
    for what in given.what:
        runs = {
            "quick": [("quick", lambda: run_pytest([*QUICK]))],
            "whole": [(part, lambda part=part: run_pytest([part])) for part in whole()],
            "checkpoints": [("checkpoints", lambda: run_checkpoints(given.folder))],
        }[what]
        if what != "checkpoints":
            runs += [(f"conformance {each}", lambda each=each: run_conformance(each)) for each in ADAPTERS]
        for target, run in runs:
            if given.only and not any(target.startswith(each) for each in given.only):
                continue
            began = time.monotonic()
            parts = run()
            num_failed += sum(len(counts["failed"]) for counts in parts.values())
            if given.into is not None:
                note(given.into, target, parts, time.monotonic() - began)
    return bool(num_failed)


if __name__ == "__main__":
    sys.exit(main())
