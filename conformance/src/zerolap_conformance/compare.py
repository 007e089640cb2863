"""Two verdicts side by side, and a badge of one. Nothing is tried here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[list[str], bool]:
    """What differs between two verdicts, in lines, and whether anything is worse than it was."""
    old, new = ({each["id"]: each for each in verdict["requirements"]} for verdict in (before, after))
    lines, is_worse = [], False
    for what in ("adapter", "asked", "environment"):
        for key in sorted({*before[what], *after[what]}):
            a, b = before[what].get(key), after[what].get(key)
            if a != b and key != "advice":
                lines.append(f"{what}: {key} was {a!r}, is {b!r}")
    for id_ in [*old, *(each for each in new if each not in old)]:
        a, b = (each[id_]["outcome"] if id_ in each else "not tried" for each in (old, new))
        if a == b:
            continue
        worse = b == "failed" or (a == "passed" and b != "passed") or b == "not tried"
        is_worse = is_worse or worse
        lines.append(
            f"{'WORSE' if worse else 'better' if b == 'passed' and a in ('failed', 'waived') else 'other'} {id_}: {a}, now {b}"
        )
    if before["is_conformant"] and not after["is_conformant"]:
        is_worse = True
        lines.append("WORSE: it did conform, and does no longer")
    return lines, is_worse


def badge(verdict: Mapping[str, Any]) -> str:
    """A small picture for a README, as SVG."""
    tier, num_waived = verdict["asked"]["tier"], sum(each["outcome"] == "waived" for each in verdict["requirements"])
    word = f"tier {tier}" if verdict["is_conformant"] else "does not conform" if verdict["is_whole"] else "no verdict"
    word += f", {num_waived} waived" if num_waived and verdict["is_conformant"] else ""
    word += ", simulated" if verdict["is_simulated"] else ""
    color = (
        "#2e7d32"
        if verdict["is_conformant"] and not num_waived
        else "#b26a00"
        if verdict["is_conformant"]
        else "#b3261e"
    )
    left, right = 58, 14 + 7 * len(word)
    text = 'font-family="Verdana,sans-serif" font-size="11" fill="#fff"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="zerolap: {word}">'
        f'<rect width="{left}" height="20" fill="#444"/><rect x="{left}" width="{right}" height="20" fill="{color}"/>'
        f'<text x="7" y="14" {text}>zerolap</text><text x="{left + 7}" y="14" {text}>{word}</text></svg>\n'
    )
