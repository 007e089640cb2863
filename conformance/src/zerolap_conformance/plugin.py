"""The pytest plugin: which adapter is under test, on how many ranks, up to which tier, and the verdict at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from zerolap import Adapter
from zerolap_conformance import verdict, waivers
from zerolap_conformance.ranks import try_ranks
from zerolap_conformance.requirements import TIERS, all_requirements
from zerolap_conformance.run import Result
from zerolap_conformance.support import own_group
from zerolap_conformance.waivers import Waiver

_SESSION: pytest.StashKey[Session] = pytest.StashKey()


@dataclass(slots=True)
class Session:
    """What was asked for, and what came of it so far."""

    adapter: str
    num_ranks: int
    tier: int
    report: Path | None
    start: float = field(default_factory=time.monotonic)
    results: dict[str, Result] = field(default_factory=dict)
    waivers: dict[str, Waiver] = field(default_factory=dict)
    verdict: dict[str, Any] | None = None  # once everything was tried
    _cause: tuple[str | None] | None = None  # once it was looked for

    def cause(self) -> str | None:
        """Why nothing can be tried: the error of ranks that only make the adapter and a group of its own."""
        if self._cause is None:
            outcomes = try_ranks(self.num_ranks, _set_up, adapter=self.adapter, limit=60, group_timeout=20)
            errors = [outcome.error for outcome in outcomes if outcome.error is not None]
            # Of ranks that fail, those that only miss a peer say the least.
            errors.sort(key=lambda error: "peer" in error or "imed out" in error)
            self._cause = (f"the adapter cannot be set up\n{errors[0]}" if errors else None,)
        return self._cause[0]


def _set_up(adapter: Adapter) -> None:
    """What every requirement begins with."""
    adapter.close_group(own_group(adapter))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("zerolap")
    group.addoption(
        "--zerolap-adapter", metavar="NAME", help="the adapter under test: its name, or module:attribute that makes one"
    )
    group.addoption("--zerolap-nproc", type=int, default=2, metavar="N", help="ranks per requirement (default: 2)")
    group.addoption(
        "--zerolap-tier", type=int, default=3, choices=list(TIERS), help="try requirements up to this tier (default: 3)"
    )
    group.addoption(
        "--zerolap-waivers",
        type=Path,
        metavar="FILE",
        help='requirements that may fail: {"COL-4": {"reason": "...", "until": "2027-01-31"}}',
    )
    group.addoption(
        "--zerolap-report", type=Path, metavar="DIR", help="write verdict.json, verdict.html and junit.xml there"
    )


@pytest.hookimpl(tryfirst=True)  # before the plugin that writes JUnit's XML looks at its option
def pytest_configure(config: pytest.Config) -> None:
    adapter = config.getoption("--zerolap-adapter")
    if adapter is None:
        return
    session = Session(
        adapter=adapter,
        num_ranks=config.getoption("--zerolap-nproc"),
        tier=config.getoption("--zerolap-tier"),
        report=config.getoption("--zerolap-report"),
    )
    if session.num_ranks < 1:
        raise pytest.UsageError(f"--zerolap-nproc must be at least 1, got {session.num_ranks}")
    given = config.getoption("--zerolap-waivers")
    if given is not None:
        try:
            session.waivers = waivers.read(given, known=all_requirements())
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
    config.stash[_SESSION] = session
    if session.report is not None and config.option.xmlpath is None:
        config.option.xmlpath = str(session.report / "junit.xml")


@pytest.fixture(scope="session")
def zerolap_session(request: pytest.FixtureRequest) -> Session:
    if _SESSION not in request.config.stash:
        raise pytest.UsageError("say which adapter to test: --zerolap-adapter NAME")
    return request.config.stash[_SESSION]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what lies beyond the tier that was asked for."""
    if _SESSION not in config.stash:
        return
    tier, known = config.stash[_SESSION].tier, all_requirements()
    beyond = [item for item in items if (id_ := _id_of(item)) in known and known[id_].tier > tier]
    if beyond:
        config.hook.pytest_deselected(items=beyond)
        items[:] = [item for item in items if item not in beyond]


def _id_of(item: pytest.Item) -> str:
    return str(item.callspec.params.get("id", "")) if hasattr(item, "callspec") else ""


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Make the verdict. Whatever is not one, a run that skipped or left out something included, must not look green."""
    if _SESSION not in session.config.stash or session.config.option.collectonly:
        return
    ours = session.config.stash[_SESSION]
    if ours.results:
        ours.verdict = verdict.make(
            ours.results,
            adapter=ours.adapter,
            num_ranks=ours.num_ranks,
            tier=ours.tier,
            seconds=time.monotonic() - ours.start,
        )
    if exitstatus == 0 and not (ours.verdict and ours.verdict["is_conformant"]):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _SESSION not in config.stash or config.stash[_SESSION].verdict is None:
        return
    session = config.stash[_SESSION]
    assert session.verdict is not None
    terminalreporter.section("zerolap conformance")
    terminalreporter.write_line(verdict.to_text(session.verdict))
    if session.report is not None:
        for path in verdict.write(session.verdict, session.report):
            terminalreporter.write_line(f"written: {path}")
