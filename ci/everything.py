"""Run every check once, and what fails a second time. A second try is said and counted; more than two in all fail the run.

    python ci/everything.py

Needs nothing but Python: the checks make their own environments. The last lines are the summaries of all of pytest's sessions.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_SECOND_TRIES = 2
_SUMMARY = re.compile(r"=+ .*\b(passed|failed|errors?|skipped|deselected|no tests ran)\b.* in [\d.]+s.* =+")
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_NOT_ALL_RUN = re.compile(r"^(!{4,}|INTERNALERROR)", re.MULTILINE)  # pytest's, when it stops before the last test

Command = Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A command, and the commands that try again the tests that failed in it; without them the command itself is tried again."""

    first: Command
    again: Callable[[list[str]], list[Command]] | None = None


@dataclass(slots=True)
class Run:
    """What has come of the checks so far."""

    folder: Path
    num_second_tries: int = 0
    summaries: list[str] = field(default_factory=list)

    def holds(self, check: Check) -> bool:
        for earlier in self._last_failed():
            earlier.unlink()
        is_good, said = self._call(check.first)
        if is_good:
            return True
        failed = sorted(test for file in self._last_failed() for test in json.loads(file.read_text()))
        commands: list[Command] = [check.first]
        if check.again is not None and failed and not _NOT_ALL_RUN.search(said):
            commands = check.again(failed)
        else:
            failed = [" ".join(check.first)]
        self.num_second_tries += len(failed)
        print(f"\nsecond try: {len(failed)} failed: {', '.join(failed)}", flush=True)
        if self.num_second_tries > MOST_SECOND_TRIES:
            return False
        return all(self._call(command)[0] for command in commands)

    def _last_failed(self) -> list[Path]:
        """Where pytest notes what has failed: in the project, or in tox's environment that it runs in."""
        return [file for at in ("", ".tox/*/") for file in self.folder.glob(f"{at}.pytest_cache/v/cache/lastfailed")]

    def _call(self, command: Command) -> tuple[bool, str]:
        print(f"$ {' '.join(command)}", flush=True)
        lines = []
        with subprocess.Popen(
            command,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        said = _COLOR.sub("", "".join(lines))
        self.summaries += [line for line in said.splitlines() if _SUMMARY.match(line)]
        return process.returncode == 0, said


def run(checks: Sequence[Check], folder: Path) -> int:
    so_far = Run(folder)
    is_good = all(so_far.holds(check) for check in checks)
    print("", *so_far.summaries, sep="\n")
    print(f"second tries: {so_far.num_second_tries}, at most {MOST_SECOND_TRIES} may be")
    print("everything holds" if is_good else "failed", flush=True)
    return not is_good


def _inside(env: str, *command: str) -> Command:
    return (".venv/bin/tox", "exec", "-e", env, "--", *command)


def _again_in_test(failed: list[str]) -> list[Command]:
    """What ``ci/test`` does, but of the tests only those. The conformance suite has no part that could be tried alone."""
    tests = [test for test in failed if test.startswith(("tests/", "adapters/"))]
    suite = _inside("test", "pytest", "--pyargs", "zerolap_conformance", "--zerolap-adapter", "cpu_gloo")
    return [("ci/run_tox", "-e", "lint"), *([_inside("test", "pytest", *tests)] if tests else []), suite]


CHECKS = (
    Check(first=("ci/test",), again=_again_in_test),
    Check(first=("ci/run_tox", "-e", "breakers"), again=lambda failed: [_inside("breakers", "pytest", *failed)]),
    *(Check(first=("ci/run_tox", "-e", env)) for env in ("docs", "build", "vendor")),
)

if __name__ == "__main__":
    sys.exit(run(CHECKS, ROOT))
