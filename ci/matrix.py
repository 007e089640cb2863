"""Run the tests with every version of torch that zerolap is for, and write docs/compatibility.md.

    python ci/matrix.py                             # all: hours, and 3 GB of downloads for each environment
    python ci/matrix.py torch26 py313-torch215      # some
    python ci/matrix.py torch26 --take              # add what ci/try_torch.py has noted in .tox/torch26.json, if it was run by itself
    python ci/matrix.py --page                      # draw the page from what is known
    python ci/matrix.py --check                     # fail if it is stale

One of tox's environments at a time is installed, used by ci/try_torch.py and removed, as builds for CUDA take 6 GB each. What came of it
is kept in ci/compatibility.json. Needs nothing but Python 3.11; an environment whose Python is not on this machine is left out, and named.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "ci/compatibility.json"
PAGE = ROOT / "docs/compatibility.md"
OLDEST, DEFAULT, NEWEST = "torch26", "torch213", "torch215"
BETWEEN = ("torch27", "torch28", "torch29", "torch210", "torch211", "torch212", DEFAULT, "torch214")
OTHER_PYTHONS = (
    *("py310-torch26", "py310-torch214"),  # the last that has wheels for it
    *("py312-torch26", "py312-torch215", "py313-torch26", "py313-torch215"),
)
ENVS = (OLDEST, *BETWEEN, NEWEST, *OTHER_PYTHONS)
WHOLE = (OLDEST, DEFAULT, NEWEST)
GIGABYTES = 12  # that installing one environment takes, for a moment
ADAPTERS = ("cpu_gloo", "sim", "cuda_nccl", "ascend_hccl", "xpu")

Record = dict[str, Any]  # what ci/try_torch.py writes, of one environment

# --- running ----------------------------------------------------------------------------------------------------------


def run(env: str, what: list[str], records: dict[str, Record]) -> bool:
    """In a fresh environment, which is removed whatever happens; whether nothing failed."""
    free = shutil.disk_usage(ROOT).free / 1e9
    print(f"{env}: {free:.0f} GB of disk are free, {GIGABYTES} are needed", flush=True)
    if free < GIGABYTES:
        raise SystemExit(f"too little disk for {env}; what ran before is in {RECORD.name}")
    folder, into = ROOT / ".tox" / env, ROOT / ".tox" / f"{env}.json"
    into.unlink(missing_ok=True)
    tox = [ROOT / "ci/run_tox", "-e", env, "--skip-missing-interpreters", "true", *interpreters()]
    command = [*tox, "--", *what, "--into", into]
    try:
        is_good = subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not into.exists():
        print(f"{env}: nothing ran", flush=True)
        return False
    add(records, env, json.loads(into.read_text()))
    return is_good


def interpreters() -> list[str]:
    """Where tox is to look besides the search path."""
    root = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    found = sorted(str(each) for each in root.glob("versions/3.*/bin/python"))
    return ["--discover", *found] if found else []


def add(records: dict[str, Record], env: str, found: Record) -> None:
    """A run takes the place of an earlier one with the same torch and Python; its parts that were not run again stay."""
    earlier = records.get(env, {})
    if all(earlier.get(key) == found[key] for key in ("torch", "python")):
        found["runs"] = earlier["runs"] | found["runs"]
    records[env] = found
    RECORD.write_text(json.dumps(dict(sorted(records.items())), indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(records))


# --- the page ---------------------------------------------------------------------------------------------------------

INTRO = """\
# Versions of torch and Python

zerolap asks for torch 2.6 or newer and Python 3.10 or newer, and sets no upper bound: with a torch newer than those below it warns once, and
`zerolap doctor` says so. Each of these environments was installed from the package index, as `python ci/matrix.py` does, which has
written this page. All builds but that of torch 2.13.0 are CUDA builds, on a machine without a GPU.

A cell has the tests that passed, and is empty where none were run. "whole" is the whole test command, and names are parts of it that were run
alone. "quick" is every schedule, gather and hook against DDP + the plain optimizer, optimizer state, checkpoints, private names of torch, and
tests of all adapters. Both are followed by the conformance suite, tiers 0 to 3, on CPU-Gloo and the
simulated device. Adapters for CUDA, Ascend and Intel devices have tests of their API contract only.

"""
CHECKPOINTS = """
## Checkpoints

Each was written on 2 ranks by one version of torch, under three kinds of overlap, and loaded on 1, 2 and 3 ranks by another: model, optimizer
state and options are the same, bit by bit.

"""
HEAD = ("| written with torch | loaded with torch | |", "|---|---|---|")
SKIPPED = """
## Skipped tests, by reason

"""
FAILED = """
## Failed tests

"""
END = """
With torch 2.5 and older nothing was tried.
"""


def counts_of(record: Record, prefix: str, *, exactly: bool = True) -> list[dict[str, Any]]:
    """What is known of the parts with this name, or that begin with it."""
    return [
        counts
        for run in record["runs"].values()
        for part, counts in run["parts"].items()
        if (part == prefix if exactly else part.startswith(prefix))
    ]


def cell(found: list[dict[str, Any]]) -> str:
    if not found:
        return ""
    passed = sum(each["passed"] for each in found)
    failed = sum(len(each["failed"]) for each in found)
    skipped = sum(sum(each["skipped"].values()) for each in found)
    return f"{passed}" + (f", **{failed} failed**" if failed else "") + (f", {skipped} skipped" if skipped else "")


def _order(record: Record) -> tuple[list[int], list[int]]:
    number = lambda text: [int(part) for part in text.partition("+")[0].split(".")[:3]]  # noqa: E731
    return number(record["torch"]), number(record["python"])


def _in_table(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _kind(record: Record) -> str:
    """Which tests ran besides the conformance suite."""
    if "quick" in record["runs"]:
        return "quick"
    parts = sorted(target for target in record["runs"] if target.startswith(("tests", "adapters")))
    folders = {str(file.parent.relative_to(ROOT)) for file in ROOT.glob("tests/*/test_*.py")}
    return "whole" if folders <= {*parts} else ", ".join(part.rpartition("/")[2] for part in parts)


def _not_run(records: dict[str, Record]) -> str:
    missing = [env for env in ENVS if env not in records]
    return f"\nNot run yet: {', '.join(f'`{env}`' for env in missing)}.\n" if missing else ""


def _tests(records: list[Record]) -> Iterator[str]:
    columns = ("torch", "Python", "date", "tests", "core", *ADAPTERS, "conformance, CPU-Gloo", "conformance, simulated")
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for record in records:
        kind = _kind(record)
        parts = [*("core", *ADAPTERS), "conformance cpu_gloo", "conformance sim"]
        cells = [record["torch"], record["python"], record["date"], kind, *(cell(counts_of(record, p)) for p in parts)]
        yield f"| {' | '.join(cells)} |"


def _checkpoints(records: list[Record]) -> Iterator[str]:
    for record in records:
        for part, counts in record["runs"].get("checkpoints", {"parts": {}})["parts"].items():
            said = "**differs**" if counts["failed"] else "bitwise the same"
            reader = record["torch"].partition("+")[0]
            yield f"| {part.removeprefix('checkpoint of ')} | {reader}, Python {record['python']} | {said} |"


def _reasons(records: list[Record]) -> Iterator[str]:
    where: dict[str, dict[str, int]] = {}
    for record in records:
        for counts in counts_of(record, "", exactly=False):
            for reason, number in counts["skipped"].items():
                of = where.setdefault(_in_table(reason), {})
                name = f"{record['torch'].partition('+')[0]}, Python {record['python'].rpartition('.')[0]}"
                of[name] = of.get(name, 0) + number
    yield "| reason | with torch: tests |"
    yield "|---|---|"
    for reason, of in sorted(where.items()):
        is_everywhere = len(of) == len(records) and len({*of.values()}) == 1
        said = (
            f"all: {next(iter(of.values()))}" if is_everywhere else "; ".join(f"{name}: {n}" for name, n in of.items())
        )
        yield f"| {reason} | {said} |"


def _failures(records: list[Record]) -> Iterator[str]:
    for record in records:
        for counts in counts_of(record, "", exactly=False):
            for name in counts["failed"]:
                yield f"* torch {record['torch']}, Python {record['python']}: `{' '.join(name.split())}`"


def page(records: dict[str, Record]) -> str:
    ordered = sorted(records.values(), key=_order)
    text = INTRO + "\n".join(_tests(ordered)) + "\n" + _not_run(records)
    failures = [*_failures(ordered)]
    text += FAILED + "\n".join(failures) + "\n" if failures else ""
    text += SKIPPED + "\n".join(_reasons(ordered)) + "\n"
    loaded = [*_checkpoints(ordered)]
    text += CHECKPOINTS + "\n".join([*HEAD, *loaded]) + "\n" if loaded else ""
    return text + END


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("envs", nargs="*", metavar="ENV", help=f"of {', '.join(ENVS)}")
    parser.add_argument("--take", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    records: dict[str, Record] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if given.check:
        is_stale = not PAGE.exists() or PAGE.read_text() != page(records)
        print(f"{PAGE.name} is stale; run python ci/matrix.py --page" if is_stale else f"{PAGE.name} is current")
        return is_stale
    if given.page:
        PAGE.write_text(page(records))
        return 0
    if unknown := {*given.envs} - {*ENVS}:
        parser.error(f"no such environment: {', '.join(sorted(unknown))}")
    if given.take:
        for env in given.envs:
            add(records, env, json.loads((ROOT / f".tox/{env}.json").read_text()))
        return 0
    envs = given.envs or ENVS
    results = [run(env, ["whole" if env in WHOLE else "quick", "checkpoints"], records) for env in envs]
    if {OLDEST, NEWEST} <= {*envs}:  # the oldest was there before any other had written a checkpoint
        results.append(run(OLDEST, ["checkpoints"], records))
    return not all(results)


if __name__ == "__main__":
    sys.exit(main())
