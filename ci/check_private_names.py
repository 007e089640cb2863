"""Fail if anything but the seam, ``zerolap._torch``, touches a private name of torch.

    python ci/check_private_names.py

Private is what begins with one underscore. Found are imports, chains of attributes that begin at a name imported from torch, attributes
of any object, and strings that are such a name (``getattr``, ``attrgetter``). An attribute or a string is torch's if it is in the
seam's table, or if nothing in our packages defines it: so a new one is found without being listed anywhere. What is public, but not in all versions, has a row in the table and counts as well.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from zerolap._torch.names import NAMES, Kind

ROOT = Path(__file__).parent.parent
SOURCES = ("core/src", "conformance/src", "adapters/*/src")
SEAM = "core/src/zerolap/_torch"

# Python's, not torch's: what is documented, by name; the rest for the one file that needs it.
PYTHONS = {"_replace", "_asdict", "_fields", "_make", "_getframe", "_exit", "_codecs"}
PYTHONS_IN = {"adapters/sim/src/zerolap_sim/hand_over.py": {"_bootstrap_inner", "_cond", "_lock", "_started"}}

TORCHS = {part for name in NAMES for part in name.path.split(".") if part.startswith("_")}
RECENT = {name.attribute for name in NAMES if name.kind is Kind.RECENT}
IN_FILES = {name.attribute for name in NAMES if name.kind is Kind.IN_FILES or name.attribute == "_StorageInfo"}
IN_FILES_OF = {name.path.rpartition(".")[0] for name in NAMES if name.kind is Kind.IN_FILES}


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def main() -> int:
    files = sorted(file for pattern in SOURCES for source in ROOT.glob(pattern) for file in source.rglob("*.py*"))
    sources = {str(file.relative_to(ROOT)): file.read_text() for file in files if file.suffix in (".py", ".pyi")}
    problems = problems_in(sources)
    print("\n".join(problems) or f"{len(sources)} files use torch's private names by the seam only")
    return bool(problems)


def problems_in(sources: dict[str, str]) -> list[str]:
    """One line for each private name of torch, by file and line; the seam and exceptions are left out."""
    ours = _ours(sources)
    return [
        f"{file}:{line}: {what} is private to torch, or not in all versions: use {SEAM}, or give it a row in names.py and a name there"
        for file, source in sources.items()
        if not file.startswith(f"{SEAM}/") and file.endswith(".py")
        for line, what in sorted(_found(file, source, ours))
    ]


# --- what is ours -----------------------------------------------------------------------------------------------------


def _ours(sources: dict[str, str]) -> set[str]:
    """Every private name that our sources define: modules, functions, classes, variables, and attributes of self."""
    found = {Path(file).stem for file in sources} | {part for file in sources for part in Path(file).parts}
    for file, source in sources.items():
        if not file.startswith(f"{SEAM}/"):
            for node in ast.walk(ast.parse(source)):
                found.update(_defined_by(node))
    return {name for name in found if is_private(name)}


def _defined_by(node: ast.AST) -> Iterable[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
            return [name]
        case ast.Name(id=name, ctx=ast.Store()):
            return [name]
        case ast.Attribute(value=value, attr=name, ctx=ast.Store()) if _is_own(value):
            return [name]
        case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
            return [each.value for each in ast.walk(value) if isinstance(each, ast.Constant)]
    return []


def _is_own(node: ast.expr) -> bool:
    """Whether this is the object whose class is being written."""
    match node:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super" | "type")):
            return True
    return False


# --- what is torch's --------------------------------------------------------------------------------------------------


def _found(file: str, source: str, ours: set[str]) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source)
    from_torch = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and _is_of_torch(node)
        for alias in node.names
    }
    pieces = {id(each) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for each in node.values[1:]}
    pythons = PYTHONS | PYTHONS_IN.get(file, set())
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom() if _is_of_torch(node):
                paths = [f"{getattr(node, 'module', '')}.{alias.name}".strip(".") for alias in node.names]
                yield from ((node.lineno, path) for path in paths if any(map(_is_kept_back, path.split("."))))
            case ast.Attribute(attr=name) if name in RECENT:
                yield node.lineno, ast.unparse(node)
            case ast.Attribute(value=value, attr=name) if is_private(name) and name not in pythons:
                if _root_of(value) in from_torch or not _may_be_ours(value, name, ours):
                    yield node.lineno, ast.unparse(node)
            case ast.Constant(value=str(text)) if id(node) not in pieces and text not in pythons:
                is_name = is_private(text) and (text in TORCHS or text not in ours) and text not in IN_FILES
                is_path = re.fullmatch(r"torch(\.\w+)*\._[a-z]\w*(\.\w+)*", text) and text not in IN_FILES_OF
                if (is_name and not text.startswith("_zerolap")) or is_path:
                    yield node.lineno, repr(text)


def _may_be_ours(value: ast.expr, name: str, ours: set[str]) -> bool:
    return name.startswith("_zerolap") or (name in ours and (name not in TORCHS or _is_own(value)))


def _is_kept_back(part: str) -> bool:
    return is_private(part) or part in RECENT


def _is_of_torch(node: ast.Import | ast.ImportFrom) -> bool:
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return any(module.partition(".")[0] == "torch" for module in modules)


def _root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    sys.exit(main())
