"""The structure of the sources: how long a file, a class and a function may be, which package may import which, and the module map."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORE = ROOT / "core/src"
SOURCES = (CORE, *sorted(ROOT.glob("adapters/*/src")), ROOT / "conformance/src", ROOT / "integrations/src")

MOST_LINES = {"file": 400, "class": 250, "function": 60}

# What each package of core may import besides itself; what stands later may import what stands earlier. A package that is pure, such as
# forecast, names all it may import. Modules that lie in no package are for all of them.
BASE = ("errors", "_public", "_logging", "_torch", "untrusted")
MAY_IMPORT = {
    **dict.fromkeys(BASE, BASE),
    "schedule": BASE,
    "backend": (*BASE, "schedule"),
    "runtime": (*BASE, "schedule", "backend"),
    "observe.timeline": BASE,
    "observe": (*BASE, "schedule", "backend", "runtime", "observe.timeline"),
    "forecast": (*BASE, "schedule", "observe.timeline"),
    "api": (*BASE, "schedule", "backend", "runtime", "observe", "observe.timeline", "forecast"),
}
MAY_IMPORT["checkpoint"] = MAY_IMPORT["calibrate"] = (*MAY_IMPORT["api"], "api")
MAY_IMPORT["cli"] = (*MAY_IMPORT["api"], "api", "checkpoint", "calibrate", "")  # "": the public names of zerolap itself
MAY_IMPORT["__main__"] = ("cli",)

# --- sizes ------------------------------------------------------------------------------------------------------------


def sizes(path: Path) -> Iterator[tuple[str, str, int]]:
    """The kind, the name and the lines of a file and of all that is defined in it."""
    text, name = path.read_text(), str(path.relative_to(ROOT))
    yield "file", name, len(text.splitlines())

    def visit(parent: ast.AST, within: str) -> Iterator[tuple[str, str, int]]:
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from visit(node, within)
                continue
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            assert node.end_lineno is not None
            yield kind, f"{name}: {within}{node.name}", node.end_lineno - node.lineno + 1
            yield from visit(node, f"{within}{node.name}.")

    yield from visit(ast.parse(text), "")


def test_files_classes_and_functions_are_short() -> None:
    found = [each for source in SOURCES for path in sorted(source.rglob("*.py")) for each in sizes(path)]
    assert len(found) > 500
    long = {name: (kind, lines) for kind, name, lines in found if lines > MOST_LINES[kind]}
    new = [f"{name}: {kind} of {lines} lines" for name, (kind, lines) in long.items()]
    assert not new, f"at most {MOST_LINES} lines; split by subject:\n" + "\n".join(new)


# --- imports ----------------------------------------------------------------------------------------------------------


def module_of(path: Path) -> str:
    parts = path.relative_to(CORE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports() -> dict[str, frozenset[str]]:
    """What each module of core imports of core: at its top, in functions, and for types only."""
    paths = {module_of(path): path for path in (CORE / "zerolap").rglob("*.py")}
    found = {}
    for module, path in paths.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names if alias.name.split(".")[0] == "zerolap"}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: imports are absolute"
                assert node.module is not None
                if node.module.split(".")[0] == "zerolap":
                    inner = [f"{node.module}.{alias.name}" for alias in node.names]
                    named |= {each if each in paths else node.module for each in inner}
        assert named <= paths.keys(), f"{module} imports {named - paths.keys()}"
        found[module] = frozenset(named - {module})
    return found


def package_of(module: str) -> str:
    _, _, inside = module.partition(".")
    return "observe.timeline" if inside.startswith("observe.timeline") else inside.partition(".")[0]


def against_direction(graph: dict[str, frozenset[str]]) -> set[tuple[str, str]]:
    return {
        (module, other)
        for module, others in graph.items()
        for other in others
        if module != "zerolap"  # which names the homes of what is public
        and package_of(other) not in (package_of(module), *MAY_IMPORT[package_of(module)])
    }


def test_packages_import_in_one_direction() -> None:
    wrong = against_direction(imports())
    new = sorted(f"{module} imports {other}" for module, other in wrong)
    assert not new, "against the direction of imports:\n" + "\n".join(new)


def test_packages_above_may_be_imported_by_none_below() -> None:
    """The table itself: no package may, in however many steps, import one that may import it."""
    for package, allowed in MAY_IMPORT.items():
        if package not in BASE:
            assert not [each for each in allowed if package in MAY_IMPORT.get(each, ())], package


def circle_in(graph: dict[str, frozenset[str]]) -> tuple[str, ...]:
    """Modules that import each other, the first of them once more at the end; empty if there are none."""
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> tuple[str, ...]:
        if module in way:
            return (*way[way.index(module) :], module)
        if module not in done:
            for other in sorted(graph[module]):
                if found := visit(other, (*way, module)):
                    return found
            done.add(module)
        return ()

    return next((found for module in sorted(graph) if (found := visit(module, ()))), ())


def test_modules_do_not_import_each_other_in_circles() -> None:
    assert len(imports()) > 50
    assert not circle_in(imports()), " imports ".join(circle_in(imports()))


def test_wrong_imports_are_noticed() -> None:
    graph = {
        "zerolap.runtime.a": frozenset({"zerolap.api.b", "zerolap.schedule.c"}),
        "zerolap.api.b": frozenset({"zerolap.forecast.d", "zerolap.runtime.a"}),
        "zerolap.schedule.c": frozenset({"zerolap.backend.e"}),
        "zerolap.forecast.d": frozenset({"zerolap.observe.trace", "zerolap.observe.timeline.record"}),
        "zerolap.backend.e": frozenset({"zerolap"}),
        "zerolap.observe.trace": frozenset(),
        "zerolap.observe.timeline.record": frozenset(),
        "zerolap": frozenset({"zerolap.api.b"}),
    }
    assert against_direction(graph) == {
        ("zerolap.runtime.a", "zerolap.api.b"),
        ("zerolap.schedule.c", "zerolap.backend.e"),
        ("zerolap.forecast.d", "zerolap.observe.trace"),
        ("zerolap.backend.e", "zerolap"),
    }
    assert circle_in(graph) == ("zerolap.api.b", "zerolap.runtime.a", "zerolap.api.b")


# --- the module map ---------------------------------------------------------------------------------------------------


def test_the_module_map_names_every_module_and_nothing_else() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text[text.index("[start:rooms]") : text.index("[end:rooms]")]
    named = re.findall(r"^\| \**`(zerolap/[^`]+)`\** \| \**\S", table, re.MULTILINE)
    files = {str(path.relative_to(CORE)) for path in CORE.rglob("*.py")}
    packages = {f"{Path(file).parent}/" for file in files if file.endswith("/__init__.py")} - {"zerolap/"}
    modules = {file for file in files if file == "zerolap/__init__.py" or not file.endswith("/__init__.py")}
    assert sorted(named) == sorted(packages | modules), "run python ci/draw_modules.py"


def test_the_module_map_is_current() -> None:
    spec = importlib.util.spec_from_file_location("draw_modules", ROOT / "ci/draw_modules.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    written = draw.PAGE.read_text()
    assert draw.page(written) == written, "run python ci/draw_modules.py"
    stale = written.replace("| `zerolap/schedule/machine.py` |", "| `zerolap/machine.py` |")
    assert stale != written
    assert draw.page(stale) == written
