"""The conformance suite is itself tested: every broken adapter is caught by the requirement that must catch it."""

from __future__ import annotations

import faulthandler
import os
import re
import sys

import pytest
import torch
import torch.distributed as dist

from support import (
    stream_breakers,  # noqa: F401 - they register
    training_breakers,  # noqa: F401
)
from support.breakers import BREAKERS, EVERYTHING
from support.faults import known  # noqa: F401
from zerolap import Adapter
from zerolap_conformance.ranks import try_ranks
from zerolap_conformance.requirements import NotDeclaredError, all_requirements
from zerolap_sim import build

REQUIREMENTS = all_requirements()
# These ask for everything at once, and any fault may fail them.
BROAD = {
    id_
    for id_, each in REQUIREMENTS.items()
    if each.check.__module__.rpartition(".")[2] in ("facts", "in_use", "lanes_in_use", "sides_in_use", "values")
}
CHECK_SECONDS = 25  # after which a check counts as hung
GROUP_SECONDS = 6  # what waits for a peer that never comes ends after so long


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    build.build()  # outside the time limits of the ranks


def _try_in_order(adapter: Adapter, ids: list[str]) -> None:
    """On a rank: try one after the other, and say which, up to the first that fails."""
    os.environ["ZEROLAP_SOAK_MINUTES"] = "0"
    for each in ids:
        faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True)
        print(f"trying {each}", file=sys.stderr, flush=True)
        try:
            REQUIREMENTS[each].check(adapter)
            if not REQUIREMENTS[each].fails_device:
                adapter.synchronize()
            dist.all_reduce(torch.zeros(1))  # what needs no peer takes one rank longer than another
        except NotDeclaredError:
            pass
        except Exception as error:
            raise RuntimeError(f"trying {each}: {error}") from error


def _first_failure(adapter: str, ids: list[str]) -> tuple[str | None, str]:
    """Which of the requirements fails first, and how."""
    outcomes = try_ranks(
        2, _try_in_order, ids, adapter=adapter, limit=CHECK_SECONDS * len(ids), group_timeout=GROUP_SECONDS
    )
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    # A rank that fails leaves others waiting: in the same requirement, in the next, or at the end, where nothing is tried.
    tried = [each for error in errors for each in re.findall(r"trying ([A-Z]+-\d+)", error)[-1:]]
    nothing = ids[0] if errors else None  # an adapter that cannot be used fails whatever comes first
    return min(tried, key=ids.index, default=nothing), "\n".join(errors)


@pytest.mark.breakers
@pytest.mark.parametrize("name", BREAKERS)
def test_a_broken_adapter_is_caught(name: str) -> None:
    breaker = BREAKERS[name]
    passing = [
        *(
            id_
            for id_, r in REQUIREMENTS.items()
            if r.tier <= 2 and id_ not in {*breaker.must_fail, *breaker.may_fail, *BROAD}
        ),
        *breaker.must_pass,
    ]
    if EVERYTHING in breaker.may_fail:
        passing = []
    # What must pass comes first, on the same ranks: starting them takes as long as trying it.
    first, *others = breaker.must_fail
    failed, reason = _first_failure(breaker.adapter, [*passing, first])
    assert failed == first, f"{failed} failed, {first} must:\n{reason}"
    for each in others:
        failed, reason = _first_failure(breaker.adapter, [each])
        assert failed == each, f"{each} must fail"


def test_every_requirement_has_a_breaker() -> None:
    caught = {id_ for breaker in BREAKERS.values() for id_ in breaker.must_fail}
    assert set(REQUIREMENTS) - caught == set(), "no broken adapter is caught by these"
    assert caught - set(REQUIREMENTS) == set(), "there are no such requirements"
