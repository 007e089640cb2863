"""Write docs/requirements.md from the requirements; with --check, fail if it is stale."""

from __future__ import annotations

import sys
from pathlib import Path

from zerolap_conformance.requirements import to_markdown

PAGE = Path(__file__).parent.parent / "docs/requirements.md"


def main() -> int:
    if "--check" in sys.argv[1:]:
        is_stale = not PAGE.exists() or PAGE.read_text() != to_markdown()
        print(f"{PAGE.name} is stale; run python ci/draw_requirements.py" if is_stale else f"{PAGE.name} is current")
        return is_stale
    PAGE.write_text(to_markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
