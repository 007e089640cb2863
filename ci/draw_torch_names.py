"""Write docs/torch-internals.md from the table of torch's private names; with --check, fail if it is stale."""

from __future__ import annotations

import sys
from pathlib import Path

from zerolap._torch.names import SECTIONS, Kind, PrivateName

PAGE = Path(__file__).parent.parent / "docs/torch-internals.md"

HEAD = """\
# Private names of torch

Generated from the table in `core/src/zerolap/_torch/names.py` by `python ci/draw_torch_names.py`; do not edit.

No version of torch promises to keep these names. All of them are used in one place, the package `zerolap._torch`, and nowhere else,
which `ci/check_private_names.py` checks. `tests/test_torch_seam.py` looks for each of them in the torch that is installed: run it with a
new version of torch to see what that version has removed. A name that is missing breaks nothing before it is used; then a
`zerolap.ZerolapError` names it.

A name is *used* (called or read), *defined by zerolap* (torch calls or reads it), *not in all versions* (there is a replacement for
versions without it, or they need none), or *known by its spelling* (torch writes it to files, and reading them does not import it).
"""


def page() -> str:
    parts = [HEAD]
    for title, names in SECTIONS.items():
        parts.append(f"\n## {title}\n\n| name | needed because it | without it | |\n|---|---|---|---|\n")
        parts += [_row(name) for name in names]
    return "".join(parts)


def _row(name: PrivateName) -> str:
    kind = "" if name.kind is Kind.USED else name.kind.value
    return f"| `{name.path}` | {name.why} | {name.without} | {kind} |\n".replace("  |", " |")


def main() -> int:
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        print("docs/torch-internals.md is stale; run python ci/draw_torch_names.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
