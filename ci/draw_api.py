"""Write docs/api.md from the sources; with --check, fail if it is stale.

The page is also the record of since when a name is there: what it lists keeps its version, what is new gets the current one. A
name that is gone is refused, by the page's own rules; ``--drop NAME`` says that they were followed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from itertools import pairwise
from pathlib import Path
from types import FunctionType, MemberDescriptorType
from typing import Any

import zerolap
from zerolap import checkpoint

PAGE = Path(__file__).parent.parent / "docs/api.md"

SECTIONS = {
    "Training": (
        *("shard", "ZeroRedundancyOptimizer", "attach", "Handle", "Wire", "GradScaler"),
        *("hook_with_zero_step", "hook_with_zero_step_interleaved"),
    ),
    "What it does": ("trace", "Trace", "Verdict", "Exposure", "Span", "Stats", "StatsWriter", "log_to_stderr"),
    "Checkpoints": tuple(f"checkpoint.{name}" for name in checkpoint.__all__),
    "Adapters": (
        *("Adapter", "StreamAdapter", "Capabilities", "GroupSpec", "Parts", "Pending", "Waitable"),
        *("Lane", "ThreadLane", "Side", "Recycler"),
    ),
    "Installed adapters": ("find_adapter", "load_adapter", "installed_adapters", "adapters", "AdapterInfo"),
    "Errors": ("ZerolapError", "CollectiveError", "IllegalEventError", "AdapterNotFoundError"),
}

# Whoever uses these gets them from a function: how they are made is nobody else's business.
GIVEN = ("Handle", "Trace", "checkpoint.Saving")

HEAD = """\
# The public API

Generated from the sources by `python ci/draw_api.py`, for version {version}; do not edit.

Public are the names on this page, `zerolap.__version__`, the entry point group `zerolap.adapters`, the environment variable
`ZEROLAP_DEBUG`, the [command line](command-line.md) with its exit codes and what `--json` prints, and the formats of checkpoints
and verdicts. All names are typed, and the packages say so (`py.typed`). Whatever is not here may change in any version, and so may
the words of a message; the types of exceptions stay. Sub-packages of `zerolap` other than `zerolap.checkpoint` are internal: import
public names from these two.

* **Versions** are `major.minor.patch`, one for all packages. A patch changes none of this, a minor version adds to it, a
  major version may take away. Before 1.0 a minor version may take away, too, but by the next rule only.
* **Deprecation.** What will go, or will mean something else, works as before for at least two minor versions, with a
  `DeprecationWarning` that says what to use instead and an entry in [CHANGELOG.md](changelog.md).
* **Checkpoints** are read by every later version of the same major version, and of the next.
"""


def main() -> int:
    written = PAGE.read_text() if PAGE.exists() else ""
    dropped = {name for flag, name in zip(sys.argv, sys.argv[1:], strict=False) if flag == "--drop"}
    fresh, gone = page(since_of(written))
    gone -= dropped
    if gone:
        print(f"public until now, and gone: {', '.join(sorted(gone))}; deprecate first, as docs/api.md says")
        return 1
    if "--check" not in sys.argv:
        PAGE.write_text(fresh)
    elif written != fresh:
        print("docs/api.md is stale; run python ci/draw_api.py")
        return 1
    return 0


def since_of(written: str) -> dict[str, str]:
    """The version of each name that a page lists."""
    names = re.findall(r"^### `([\w.]+)`, since ([\w.]+)$", written, re.MULTILINE)
    return dict(names + re.findall(r"^\| `([\w.]+)\b[^`]*` \|.*\| ([\w.]+) \|$", written, re.MULTILINE))


def page(since: dict[str, str]) -> tuple[str, set[str]]:
    """The page, and what ``since`` lists beyond it."""
    listed = {name for names in SECTIONS.values() for name in names}
    public = {*zerolap.__all__, *(f"checkpoint.{name}" for name in checkpoint.__all__)}
    if listed != public:
        raise SystemExit(f"ci/draw_api.py: SECTIONS and what is public differ by {sorted(listed ^ public)}")
    parts = [HEAD.format(version=zerolap.__version__)]
    seen: set[str] = set()

    def version_of(name: str) -> str:
        seen.add(name)
        return since.get(name, zerolap.__version__)

    for title, names in SECTIONS.items():
        parts.append(f"\n## {title}\n")
        for name in names:
            value: Any = zerolap
            for step in name.split("."):
                value = getattr(value, step)
            parts.append(f"\n### `{name}`, since {version_of(name)}\n\n")
            function = None if name in GIVEN else _signed(value)
            if function is not None:
                parts.append(f"```text\n{name}{_signature(function, is_wide=True)}\n```\n\n")
            parts.append(f"{_what(value)}\n")
            rows = [
                f"| `{name}.{member}{shown}` | {what} | {version_of(f'{name}.{member}')} |\n"
                for member, shown, what in _members(value)
            ]
            parts += ["\n| | | since |\n|---|---|---|\n", *rows] if rows else []
    return "".join(parts), since.keys() - seen


def _signed(value: Any) -> FunctionType | None:
    """What says how a function is called, or an object made, if that is in the source."""
    if isinstance(value, FunctionType):
        return value
    made_by = vars(value).get("__init__")
    return (
        made_by if isinstance(made_by, FunctionType) and not is_dataclass(value) and not _is_protocol(value) else None
    )


def _is_protocol(value: type) -> bool:
    return getattr(value, "_is_protocol", False)


def _members(value: Any) -> Iterator[tuple[str, str, str]]:
    """Name, how it goes on, and what it is, of everything public that a class defines and its bases here do not."""
    if not isinstance(value, type):
        return
    inherited = {name for base in value.__mro__[1:] if base.__module__.startswith("zerolap") for name in vars(base)}
    fields: dict[str, Any] = vars(value).get("__annotations__", {})
    for name, kind in fields.items():
        if not name.startswith("_"):
            shown = str(getattr(kind, "__forward_arg__", kind))
            yield name, f": {shown}".replace("|", "or"), _field_docs(value).get(name, "")
    for name, member in vars(value).items():
        if name.startswith("_") or name in fields or name in inherited:
            continue
        function = getattr(member, "__func__", member)  # of a class method
        if isinstance(function, FunctionType):
            yield name, _signature(function).replace("|", "or"), _what(getattr(value, name))
        elif isinstance(member, property):
            yield name, "", _what(member)
        elif isinstance(member, int | str | MemberDescriptorType):
            yield name, "", ""


def _field_docs(value: type) -> dict[str, str]:
    """The strings that stand behind fields."""
    homes = zerolap._HOMES if value.__module__ == "zerolap" else checkpoint._HOMES  # where the class was written
    tree = ast.parse(inspect.getsource(importlib.import_module(homes[value.__name__])))
    (node,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == value.__name__)
    return {
        ast.unparse(field.target): " ".join(said.value.value.split())
        for field, said in pairwise(node.body)
        if isinstance(field, ast.AnnAssign) and isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant)
    }


def _what(value: Any) -> str:
    """The first paragraph of its docstring, in one line of Markdown."""
    doc = value.__doc__ if isinstance(value, type) else inspect.getdoc(value)  # not that of a class's base
    text = inspect.cleandoc(doc or "").partition("\n\n")[0]
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def _signature(function: FunctionType, *, is_wide: bool = False) -> str:
    """As in the source, but for self."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    assert isinstance(node, ast.FunctionDef)
    shown = [each for each in _arguments(node.args) if each not in ("self", "cls")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    line = f"({', '.join(shown)}){returns}"
    return (
        line if not is_wide or len(line) < 90 else "(\n" + "".join(f"    {each},\n" for each in shown) + f"){returns}"
    )


def _arguments(given: ast.arguments) -> Iterator[str]:
    def written(argument: ast.arg, default: ast.expr | None) -> str:
        return ast.unparse(ast.arguments([], [argument], None, [], [], None, [] if default is None else [default]))

    num_plain = len(given.args) - len(given.defaults)
    yield from map(written, given.args, [*(None for _ in range(num_plain)), *given.defaults])
    if given.vararg is not None:
        yield f"*{ast.unparse(given.vararg)}"
    elif given.kwonlyargs:
        yield "*"
    yield from map(written, given.kwonlyargs, given.kw_defaults)
    if given.kwarg is not None:
        yield f"**{ast.unparse(given.kwarg)}"


if __name__ == "__main__":
    sys.exit(main())
