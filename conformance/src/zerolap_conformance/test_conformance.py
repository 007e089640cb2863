"""The suite as pytest sees it: one test for each requirement."""

from __future__ import annotations

import pytest

from zerolap_conformance import waivers
from zerolap_conformance.plugin import Session
from zerolap_conformance.requirements import all_requirements
from zerolap_conformance.run import Result, try_requirement

REQUIREMENTS = all_requirements()


@pytest.mark.parametrize("id", REQUIREMENTS)
def test_requirement(zerolap_session: Session, id: str) -> None:  # noqa: A002 - it is what everybody calls it
    requirement = REQUIREMENTS[id]
    if (cause := zerolap_session.cause()) is None:
        result = try_requirement(requirement, adapter=zerolap_session.adapter, num_ranks=zerolap_session.num_ranks)
    else:  # said once, whole; what nothing can be asked of fails everything
        last = cause.strip().splitlines()[-1]
        result = Result(id=id, outcome="failed", reason=f"not tried: {last}" if zerolap_session.results else cause)
    result = waivers.apply(result, zerolap_session.waivers)
    zerolap_session.results[id] = result
    if result.outcome == "waived":
        pytest.skip(f"waived {result.reason}")
    if result.outcome == "skipped":
        pytest.skip(result.reason)
    if result.outcome == "failed":
        pytest.fail(f"{id}: {requirement.sentence}\n{result.reason}", pytrace=False)
