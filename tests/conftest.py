"""The last line of a run against broken adapters: how many were caught."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = {
        outcome: sum(
            "test_a_broken_adapter_is_caught" in report.nodeid for report in terminalreporter.getreports(outcome)
        )
        for outcome in ("passed", "failed", "error")
    }
    total = sum(counts.values())
    if total:
        terminalreporter.write_line(f"{counts['passed']} of {total} broken adapters caught")
