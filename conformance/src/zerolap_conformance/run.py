"""Trying requirements on real ranks. Nothing here knows which there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zerolap import Adapter
from zerolap_conformance.ranks import Outcome, try_ranks
from zerolap_conformance.requirements import NotDeclaredError, Requirement, all_requirements

Status = Literal["passed", "failed", "skipped", "waived"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one requirement came out. ``reason`` says why it was skipped, or what was expected and seen."""

    id: str
    outcome: Status
    reason: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


def try_requirement(requirement: Requirement, *, adapter: str, num_ranks: int) -> Result:
    """Try one requirement on ranks of its own."""
    return try_requirements([requirement], adapter=adapter, num_ranks=num_ranks)[0]


def try_requirements(requirements: Sequence[Requirement], *, adapter: str, num_ranks: int) -> list[Result]:
    """Try several, one after the other on the same ranks, up to the first that fails; what comes behind it is left out."""
    results = [
        Result(id=each.id, outcome="skipped", reason=f"needs {each.min_ranks} ranks")
        for each in requirements
        if each.min_ranks > num_ranks
    ]
    tried = [each for each in requirements if each.min_ranks <= num_ranks]
    if not tried:
        return results
    limit = max(each.seconds for each in tried) + 2 * len(tried)
    outcomes = try_ranks(
        num_ranks, _run_checks, [each.id for each in tried], adapter=adapter, limit=limit, group_timeout=20
    )
    return results + _merged([each.id for each in tried], outcomes)


def _run_checks(adapter: Adapter, ids: list[str]) -> list[Result]:
    """On a rank. Ends with the first failure: the ranks may be out of step behind it."""
    results, known = [], all_requirements()
    for each in ids:
        try:
            notes = known[each].check(adapter)
            results.append(Result(id=each, outcome="passed", notes=tuple(notes or ())))
        except NotDeclaredError as why:
            results.append(Result(id=each, outcome="skipped", reason=str(why)))
        except Exception as error:
            raise RuntimeError(f"{each}: {error}") from error
        if not known[each].fails_device:
            adapter.synchronize()
    return results


def _merged(ids: list[str], outcomes: list[Outcome]) -> list[Result]:
    """One result for each id from those of all ranks."""
    errors = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error is not None]
    seconds = max(outcome.seconds for outcome in outcomes) / len(ids)
    if errors:
        return [
            Result(id=ids[0] if len(ids) == 1 else _failed_id(ids, errors), outcome="failed", reason="\n".join(errors))
        ]
    merged = []
    for of_ranks in zip(*(outcome.value for outcome in outcomes), strict=True):
        notes = tuple(dict.fromkeys(note for result in of_ranks for note in result.notes))
        first = of_ranks[0]
        merged.append(Result(id=first.id, outcome=first.outcome, reason=first.reason, notes=notes, seconds=seconds))
    return merged


def _failed_id(ids: list[str], errors: list[str]) -> str:
    return next((each for each in ids if any(f"RuntimeError: {each}: " in error for error in errors)), ids[0])
