"""Run the conformance suite against every adapter that can run here, on several numbers of ranks, and print a table.

    python ci/conformance_matrix.py [--tier 3] [--ranks 1 2 4]

Adapters for devices that are not here run on the simulated one (tests/support/stand_ins.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ADAPTERS = [
    "cpu_gloo",
    "zerolap_sim.installed:SimAdapter",
    *(f"support.stand_ins:{n}" for n in ("cuda_nccl", "xpu", "ascend_hccl")),
]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tier", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    given = parser.parse_args()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    print(f"{'adapter':36} {'ranks':>5} {'passed':>6} {'failed':>6} {'skipped':>7} {'seconds':>8}", flush=True)
    is_good = True
    for adapter in ADAPTERS:
        for ranks in given.ranks:
            command = [sys.executable, "-m", "zerolap", "conformance", "--adapter", adapter, "--json"]
            command += ["--nproc", str(ranks), "--tier", str(given.tier)]
            run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
            if not run.stdout:
                print(run.stderr)
                return 1
            verdict = json.loads(run.stdout)
            outcomes = [each["outcome"] for each in verdict["requirements"]]
            counts = " ".join(f"{outcomes.count(o):>{w}}" for o, w in (("passed", 6), ("failed", 6), ("skipped", 7)))
            print(f"{adapter:36} {ranks:>5} {counts} {verdict['seconds']:>8.0f}", flush=True)
            for each in verdict["requirements"]:
                if each["outcome"] == "failed":
                    print(f"    {each['id']}: {each['reason'][-600:]}", flush=True)
            is_good = is_good and verdict["is_conformant"]
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
