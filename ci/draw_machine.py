"""Write docs/machine.md from the overlap machine's table; with --check, fail if the file is stale."""

from __future__ import annotations

import sys
from pathlib import Path

from zerolap.machine import TRANSITIONS, Event, to_mermaid

PAGE = Path(__file__).parent.parent / "docs" / "machine.md"

HEAD = """\
# The overlap machine

Generated from the table in `core/src/zerolap/machine.py` by `python ci/draw_machine.py`; do not edit.

An arrow reads *event / what is asked for*. `FAILURE` leads to `FAILED` from everywhere and is not drawn. Events that are
not in a phase's row are illegal: they raise `IllegalEventError` and change nothing.

```mermaid
"""


def page() -> str:
    lines = ["", "| phase | " + " | ".join(f"`{event.name}`" for event in Event) + " |"]
    lines.append("|---" * (len(Event) + 1) + "|")
    for phase, row in TRANSITIONS.items():
        cells = [f"`{row[event].to.name}`" if event in row else "illegal" for event in Event]
        lines.append(f"| `{phase.name}` | " + " | ".join(cells) + " |")
    return HEAD + to_mermaid() + "```\n" + "\n".join(lines) + "\n"


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
