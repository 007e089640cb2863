"""The page on errors has every message that a user can see, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT

PAGE = ROOT / "docs/troubleshooting.md"
SOURCES = (ROOT / "core/src", *sorted(ROOT.glob("adapters/*/src")))
ANY = "…"

# Errors without words of their own, by file and what stands there: what the page has of them, or None if it is an error handed on.
WORDLESS = {
    "core/src/zerolap/runtime/safety.py: found": "gradients are not finite, update … was not made",
    "core/src/zerolap/runtime/failures.py: …, …: …: …": "…, …: …: …",
    "core/src/zerolap/runtime/failures.py: …: …: …": "…, …: …: …",
    "core/src/zerolap/runtime/engine.py: …: …: …": "…, …: …: …",
    "core/src/zerolap/runtime/failures.py: …": None,
    "core/src/zerolap/runtime/failures.py: str(failure)": None,  # what has failed, raised where it is heard
    "core/src/zerolap/backend/lanes.py: …: …": None,  # the first error of a lane, for those behind it
    "core/src/zerolap/cli/console.py: …": None,  # what the system said of a file
    "core/src/zerolap/cli/plan.py: str(error).strip().splitlines()[-1]": None,  # what a rank has said
}


def template(node: ast.expr) -> str | None:
    """A message as the page has it: what is filled in is one mark. None if there are no words in it at all."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(v.value if isinstance(v, ast.Constant) else ANY for v in values)  # type: ignore[misc]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (template(left) or ANY) + (template(right) or ANY)
        case _:
            return None


def messages(path: Path) -> Iterator[str]:
    """The template of each error that is made, and of the reasons that adapters give for not being usable."""
    name = str(path.relative_to(ROOT))
    for node in ast.walk(ast.parse(path.read_text())):
        made = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(made, ast.Call) and made.args and ast.unparse(made.func) != "typer.Exit":
            called, given = ast.unparse(made.func), made.args[0]
            is_error = isinstance(node, ast.Raise) or called.endswith("Error") or called == "fail"
            if is_error or (called == "kind" and isinstance(given, ast.JoinedStr)):
                yield from worded(name, given)
        if isinstance(node, ast.FunctionDef) and node.name == "why_unavailable":
            for each in ast.walk(node):
                value = each.value if isinstance(each, ast.Return) else None
                text = template(value.orelse if isinstance(value, ast.IfExp) else value) if value is not None else None
                if text is not None:
                    yield text


def worded(name: str, given: ast.expr) -> Iterator[str]:
    text = template(given)
    if text is not None and re.search("[a-z]{3}", text):
        yield re.sub(f"{ANY}+", ANY, text)
    elif ast.unparse(given) not in (
        "error",
        "str(error)",
    ):  # handed on: its words are collected where they were written
        what = f"{name}: {ast.unparse(given) if text is None else re.sub(f'{ANY}+', ANY, text)}"
        assert what in WORDLESS, f"{what}: say in WORDLESS what the page has of it"
        if WORDLESS[what] is not None:
            yield WORDLESS[what]  # type: ignore[misc]  # not None


def all_messages() -> dict[str, str]:
    """Every template, and the file it is in."""
    files = (path for source in SOURCES for path in sorted(source.rglob("*.py")))
    return {message: str(path.relative_to(ROOT)) for path in files for message in messages(path)}


def entries() -> list[str]:
    """What the page has: the code at the start of each item of a list."""
    found = []
    for item in re.findall(r"^\* (`[^`\n]+`(?:,\s+`[^`\n]+`)*)", PAGE.read_text(), re.MULTILINE):
        found += re.findall("`([^`]+)`", item)
    return found


def covers(entry: str, message: str) -> bool:
    return re.sub(r"\s+", " ", entry) in re.sub(r"\s+", " ", message)


def test_every_message_is_on_the_page() -> None:
    known = all_messages()
    assert len(known) > 100
    listed = entries()
    missing = {m: where for m, where in known.items() if not any(covers(entry, m) for entry in listed)}
    assert not missing, "add to docs/troubleshooting.md, with what to do:\n" + "\n".join(
        f"* `{message}`   ({where})" for message, where in missing.items()
    )


def test_every_entry_of_the_page_is_a_message() -> None:
    known = all_messages()
    stale = [entry for entry in entries() if not any(covers(entry, message) for message in known)]
    assert not stale, f"no error says this any more: {stale}"


def test_entries_are_distinctive_and_stand_once() -> None:
    found = entries()
    assert len(set(found)) == len(found), sorted(e for e in found if found.count(e) > 1)
    vague = [e for e in found if len(re.sub(f"[^a-z]|{ANY}", "", e)) < 6 and e not in WORDLESS.values()]
    assert vague == [], vague


def test_a_message_that_is_not_on_the_page_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector sees f-strings, joined parts, errors that are made before they are raised, and reasons of adapters."""
    (tmp_path / "new.py").write_text(
        "def f(x):\n"
        "    if x: raise ValueError(f'no such {x} here; ' + ', '.join(x))\n"
        "    error = ZerolapError('made, and not raised')\n"
        "    raise error\n"
        "def why_unavailable(self):\n"
        "    return None if self.x else f'{self.x} is asleep'\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    found = set(messages(tmp_path / "new.py"))
    assert found == {"no such … here; …", "made, and not raised", "… is asleep"}
    assert not [m for m in found if any(covers(entry, m) for entry in entries())]
