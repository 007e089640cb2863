"""Write docs/machine.md from the overlap machine's table; with --check, fail if the file is stale."""

from __future__ import annotations

import sys
from pathlib import Path

from zerolap.machine import IN_BACKWARD, ON_STEP, Event, Table, to_mermaid

PAGE = Path(__file__).parent.parent / "docs" / "machine.md"

HEAD = """\
# The overlap machine

Generated from the tables in `core/src/zerolap/machine.py` by `python ci/draw_machine.py`; do not edit.

An arrow reads *event / what is asked for*. `FAILURE` leads to `FAILED` from everywhere and is not drawn. Events that are
not in a phase's row are illegal: they raise `IllegalEventError` and change nothing.
"""


def section(title: str, table: Table) -> str:
    lines = ["", f"## {title}", "", "```mermaid", to_mermaid(table) + "```", ""]
    lines.append("| phase | " + " | ".join(f"`{event.name}`" for event in Event) + " |")
    lines.append("|---" * (len(Event) + 1) + "|")
    for phase, row in table.items():
        cells = [f"`{row[event].to.name}`" if event in row else "illegal" for event in Event]
        lines.append(f"| `{phase.name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    return (
        HEAD
        + section("Updates inside backward: schedules `interleaved` and `after_backward`", IN_BACKWARD)
        + section("Updates by step(): schedule `on_step`", ON_STEP)
    )


def main() -> int:
    if "--check" not in sys.argv:
        PAGE.write_text(page())
        return 0
    if PAGE.exists() and PAGE.read_text() == page():
        return 0
    print("docs/machine.md is stale; run python ci/draw_machine.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
