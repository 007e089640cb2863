"""Write the module map of CONTRIBUTING.md from the modules' first sentences; with --check, fail if it is stale."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
CORE = ROOT / "core/src/zerolap"
BEGIN, END = "<!-- --8<-- [start:rooms] -->\n", "<!-- --8<-- [end:rooms] -->"

# What stands later may import what stands earlier; see tests/test_structure.py.
PACKAGES = (
    "untrusted",
    "schedule",
    "backend",
    "runtime",
    "observe",
    "forecast",
    "api",
    "checkpoint",
    "calibrate",
    "cli",
)


def sentence(path: Path) -> str:
    """The first sentence of a module, as Markdown."""
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    found = re.match(r"(.+?[.!])(?:\s|$)", " ".join(said.split()))
    if found is None:
        raise SystemExit(f"{path.relative_to(ROOT)} does not begin with a sentence that says what is in it")
    return found[1].removesuffix(".").replace("``", "`").replace("|", "\\|")


def rows() -> Iterator[tuple[str, str]]:
    """Every package and module of core, then the other packages: its path, and what it is."""
    yield from ((f"zerolap/{path.name}", sentence(path)) for path in sorted(CORE.glob("*.py")))
    known = [CORE / name for name in PACKAGES]
    others = [path.parent for path in sorted(CORE.glob("*/__init__.py")) if path.parent not in known]
    for package in (*others, *known):
        yield f"**zerolap/{package.name}/**", f"**{sentence(package / '__init__.py')}**"
        yield from _inside(package)
    others = (
        path
        for folder in ("adapters/*", "conformance", "integrations")
        for path in ROOT.glob(f"{folder}/src/*/__init__.py")
    )
    for init in sorted(others):
        yield f"**{init.parent.relative_to(ROOT)}/**", f"**{sentence(init)}**"


def _inside(package: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(package.iterdir()):
        if path.suffix == ".py" and path.name != "__init__.py":
            yield f"zerolap/{path.relative_to(CORE)}", sentence(path)
        elif (path / "__init__.py").exists():
            yield f"zerolap/{path.relative_to(CORE)}/", sentence(path / "__init__.py")
            yield from _inside(path)


def table() -> str:
    lines = ["| where | what |", "|---|---|"]
    for where, what in rows():
        name = where.strip("*")
        lines.append(f"| {where.replace(name, f'`{name}`')} | {what} |")
    return "\n".join(lines) + "\n"


def page(written: str) -> str:
    """The page with a current map in it."""
    head, _, rest = written.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    assert mark, f"{PAGE.name} has no {BEGIN.strip()} with an end behind it"
    return f"{head}{BEGIN}{table()}{mark}{tail}"


def main() -> int:
    written = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        is_stale = page(written) != written
        print(f"{PAGE.name} is stale; run python ci/draw_modules.py" if is_stale else f"{PAGE.name} is current")
        return is_stale
    PAGE.write_text(page(written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
