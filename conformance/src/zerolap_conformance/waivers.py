"""Waivers: requirements that an adapter is known not to meet, each with a reason and an end. Nothing else is read here."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from zerolap.untrusted.files import read_json
from zerolap_conformance.run import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiver:
    """Why a requirement may fail, up to a day."""

    reason: str
    until: datetime.date


def read(path: Path, *, known: Iterable[str]) -> dict[str, Waiver]:
    """The waivers of a file, by requirement: ``{"COL-4": {"reason": "...", "until": "2027-01-31"}}``; ValueError if it is not one."""
    try:
        entries = read_json(path, largest=2**20, follows_links=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as waivers: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError(f'{path} must hold an object of requirements, {{"COL-4": {{"reason": ..., "until": ...}}}}')
    unknown = sorted(set(entries) - set(known))
    if unknown:
        raise ValueError(
            f"{path} waives {', '.join(unknown)}, which is no requirement; docs/requirements.md lists them"
        )
    return {id_: _waiver(f"{path}: {id_}", entry) for id_, entry in entries.items()}


def _waiver(where: str, entry: object) -> Waiver:
    if (
        not isinstance(entry, dict)
        or set(entry) != {"reason", "until"}
        or not all(isinstance(v, str) for v in entry.values())
    ):
        raise ValueError(f'{where} must have a "reason" and a day "until", and nothing else, got {entry!r}')
    if not entry["reason"].strip():
        raise ValueError(f"{where} must say why, its reason is empty")
    try:
        return Waiver(reason=entry["reason"], until=datetime.date.fromisoformat(entry["until"]))
    except ValueError as error:
        raise ValueError(f'{where}: "until" must be a day such as 2027-01-31, got {entry["until"]!r}') from error


def apply(result: Result, waivers: Mapping[str, Waiver], *, today: datetime.date | None = None) -> Result:
    """What the result counts as. A waiver that no longer applies is a failure, so that none is left behind."""
    waiver = waivers.get(result.id)
    if waiver is None:
        return result
    if result.outcome != "failed":
        return replace(
            result, outcome="failed", reason=f"it is waived ({waiver.reason}), but {result.outcome}: remove the waiver"
        )
    if (today or datetime.date.today()) > waiver.until:
        return replace(result, reason=f"the waiver ended on {waiver.until} ({waiver.reason})\n{result.reason}")
    return replace(result, outcome="waived", reason=f"until {waiver.until}: {waiver.reason}")
