"""A browser for tests of pages; and the last line of a run against broken adapters: how many were caught."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # only where pages are looked at

    with sync_playwright() as driver:
        # No sandbox: containers run as root, where Chromium refuses to start with one; the pages are our own.
        browser = driver.chromium.launch(executable_path=os.environ.get("ZEROLAP_CHROMIUM"), args=["--no-sandbox"])
        yield browser
        browser.close()
