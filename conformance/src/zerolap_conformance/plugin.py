"""The pytest plugin: which adapter is under test, and on how many ranks."""

from __future__ import annotations

import pytest

from zerolap import Adapter, load_adapter


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("zerolap")
    group.addoption("--zerolap-adapter", metavar="NAME", help="the adapter that the conformance suite is run against")
    group.addoption("--zerolap-nproc", type=int, default=2, metavar="N", help="ranks per test (default: 2)")


@pytest.fixture(scope="session")
def adapter(request: pytest.FixtureRequest) -> Adapter:
    """The adapter under test. That its device is there is a requirement, not a reason to skip."""
    name = request.config.getoption("--zerolap-adapter")
    if name is None:
        raise pytest.UsageError("say which adapter to test: --zerolap-adapter NAME")
    return load_adapter(name)


@pytest.fixture(scope="session")
def nproc(request: pytest.FixtureRequest) -> int:
    value: int = request.config.getoption("--zerolap-nproc")
    return value
