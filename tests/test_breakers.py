"""The conformance suite is itself tested: every broken adapter is caught by the requirement that must catch it."""

from __future__ import annotations

import pytest

from breakers import BREAKERS, EVERYTHING
from zerolap_conformance.requirements import all_requirements
from zerolap_conformance.run import Result, try_requirements

REQUIREMENTS = all_requirements()


def _try(ids: list[str], adapter: str) -> list[Result]:
    return try_requirements([REQUIREMENTS[each] for each in ids], adapter=adapter, num_ranks=2)


@pytest.mark.breakers
@pytest.mark.parametrize("breaker", BREAKERS)
def test_a_broken_adapter_is_caught(breaker: str) -> None:
    must_fail, may_fail = BREAKERS[breaker]
    (result,) = _try([must_fail], f"breakers:{breaker}")
    assert result.outcome == "failed", result
    if EVERYTHING in may_fail:
        return
    others = [id_ for id_, r in REQUIREMENTS.items() if r.tier <= 2 and id_ != must_fail and id_ not in may_fail]
    failed = [f"{r.id}: {r.reason}" for r in _try(others, f"breakers:{breaker}") if r.outcome == "failed"]
    assert failed == [], f"{must_fail} must fail, others must not"


def test_there_are_enough_breakers() -> None:
    assert len(BREAKERS) >= 30
    unbroken = {id_ for id_, r in REQUIREMENTS.items() if r.tier <= 2} - {
        must_fail for must_fail, _ in BREAKERS.values()
    }
    assert unbroken <= {"DEV-8", "DEV-4", "LANE-4", "LANE-8", "SIDE-2", "GRP-2", "GRP-3", "CAP-2"}, unbroken
