"""Write docs/machine.md and its pictures from the overlap machine's tables; with --check, fail if one is stale.

The pictures are plain SVG, made here: a browser and a repository's pages show them without any script.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from zerolap.schedule.machine import IN_BACKWARD, ON_STEP, Event, Phase, Table

DOCS = Path(__file__).parent.parent / "docs"
COLUMN, ROW, HEAD_HEIGHT, LEFT = 215, 32, 64, 112

HEAD = """\
# The overlap machine

Generated from the tables in `core/src/zerolap/schedule/machine.py` by `python ci/draw_machine.py`; do not edit.

Every column is a phase, every arrow a transition, in the order of the table: *event / what is asked for*. `FAILURE` leads to
`FAILED` from everywhere and is not drawn. Events that are not in a phase's row are illegal: they raise `IllegalEventError` and
change nothing.
"""

STYLE = """
    text { font: 12px system-ui, sans-serif; fill: #1a1a1a; }
    .phase { font-weight: 600; text-anchor: middle; }
    .label { paint-order: stroke; stroke: #fff; stroke-width: 4px; }
    .line { stroke: #c4c9d4; stroke-dasharray: 3 4; }
    .arrow { stroke: #3949ab; stroke-width: 1.6; fill: none; marker-end: url(#head); }
    .box { fill: #e8eaf6; stroke: #3949ab; }
"""


def to_svg(table: Table, title: str) -> str:
    """Phases side by side, transitions below each other: nothing can overlap, however many there are."""
    arrows = [
        (phase, event, transition)
        for phase, row in table.items()
        for event, transition in row.items()
        if event is not Event.FAILURE
    ]
    phases = [phase for phase in Phase if any(phase in (a, t.to) for a, _, t in arrows)]
    x_of = {phase: LEFT + COLUMN * place for place, phase in enumerate(phases)}
    width, height = LEFT + COLUMN * len(phases) + 60, HEAD_HEIGHT + ROW * len(arrows) + 16
    drawn = [f'<line class="line" x1="{x}" x2="{x}" y1="50" y2="{height - 8}"/>' for x in x_of.values()]
    drawn.append(f'<path class="arrow" d="M{x_of[Phase.UNINITIALIZED]} 4 V20"/>')  # where it starts
    for phase, x in x_of.items():
        drawn.append(f'<rect class="box" x="{x - 102}" y="24" width="204" height="26" rx="6"/>')
        drawn.append(f'<text class="phase" x="{x}" y="41">{phase.name}</text>')
    for place, (phase, event, transition) in enumerate(arrows):
        y, start, end = HEAD_HEIGHT + ROW * place + 20, x_of[phase], x_of[transition.to]
        does = ", ".join(each.name.lower() for each in transition.do)
        if start == end:
            drawn.append(f'<path class="arrow" d="M{start} {y - 11} h16 q6 0 6 6 t-6 6 h-12"/>')
        else:
            drawn.append(f'<path class="arrow" d="M{start} {y} H{end + (4 if end < start else -4)}"/>')
        at = start + 30 if start == end else min(start, end) + 12
        label = event.name + (f" / {does}" if does else "")
        drawn.append(f'<text class="label" x="{at}" y="{y - (1 if start == end else 8)}">{escape(label)}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
            '<path d="M0 0 L8 4 L0 8 z" fill="#3949ab"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',  # its own ground: readable on a dark page, too
            *drawn,
            "</svg>\n",
        ]
    )


def section(title: str, picture: str, table: Table) -> str:
    lines = [
        "",
        f"## {title}",
        "",
        f"[![The phases and what leads from one to another](pictures/{picture})](pictures/{picture})",
        "",
    ]
    lines.append("| phase | " + " | ".join(f"`{event.name}`" for event in Event) + " |")
    lines.append("|---" * (len(Event) + 1) + "|")
    for phase, row in table.items():
        cells = [f"`{row[event].to.name}`" if event in row else "illegal" for event in Event]
        lines.append(f"| `{phase.name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def files() -> dict[Path, str]:
    """What there must be, and what must be in it."""
    page, found = HEAD, {}
    for title, picture, table in (
        (
            "Updates inside backward: schedules `interleaved` and `after_backward`",
            "machine-in-backward.svg",
            IN_BACKWARD,
        ),
        ("Updates by step(): schedule `on_step`", "machine-on-step.svg", ON_STEP),
    ):
        page += section(title, picture, table)
        found[DOCS / "pictures" / picture] = to_svg(table, title.replace("`", ""))
    return {DOCS / "machine.md": page, **found}


def main() -> int:
    if "--check" not in sys.argv:
        (DOCS / "pictures").mkdir(exist_ok=True)
        for path, text in files().items():
            path.write_text(text)
        return 0
    stale = [path.name for path, text in files().items() if not path.exists() or path.read_text() != text]
    if stale:
        print(f"stale: {', '.join(stale)}; run python ci/draw_machine.py")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
