"""Check that every name of a vendor's package that an adapter uses is there, without importing the package.

    python ci/check_vendor_api.py [FOLDER]

Downloads the vendors' wheels into FOLDER (a temporary one if not given) and reads their sources; names of torch are looked up
in the torch that is installed, and classes that its build leaves out in its type stubs and headers. Prints what was checked;
fails if anything is missing.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
TORCH_NPU = ("2.6.0", "2.8.0", "2.13.0", "2.14.0")  # the releases whose sources are read
RECENT_SETTINGS = {"2.6.0": {"TORCH_HCCL_HIGH_PRIORITY"}}  # what a release does not know yet, as the advice says
BASE = ROOT / "core/src/zerolap/backend/streams.py"
TORCH = Path(torch.__file__).parent
STUB = TORCH / "_C/_distributed_c10d.pyi"
SETTERS = {"set_timeout": "_timeout"}  # functions of zerolap._torch that set an attribute of what they are given


@dataclass(frozen=True, slots=True)
class Use:
    """A dotted name in an adapter's source, and the keywords it is called with."""

    name: str
    keywords: tuple[str, ...] = ()


@dataclass(slots=True)
class Findings:
    checked: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def note(self, what: str, is_there: bool) -> None:
        (self.checked if is_there else self.missing).append(what)


# --- what our sources use ---------------------------------------------------------------------------------------------


def uses_of(source: str, root: str) -> set[Use]:
    """Every use of a name that starts with ``root``, attributes set on what a call of it made included."""
    tree = ast.parse(source)
    found: set[Use] = set()
    made_by: dict[str, str] = {}  # a variable, and the class it was made of
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
            name = _dotted(node.value.func)
            if name.startswith(f"{root}."):
                made_by[node.targets[0].id] = name
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for call in called.values():
        match call:
            case ast.Call(func=ast.Name(id=setter), args=[ast.Name(id=target), *_]) if target in made_by:
                if setter in SETTERS:
                    found.add(Use(f"{made_by[target]}.{SETTERS[setter]}"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        name = _dotted(node)
        head, _, rest = name.partition(".")
        if head in made_by and rest:
            name = f"{made_by[head]}.{rest}"
        if name.startswith(f"{root}."):
            call = called.get(id(node))
            keywords = tuple(k.arg for k in call.keywords if k.arg) if call is not None else ()
            found.add(Use(name, keywords))
    is_part = {use.name for use in found if any(other.name.startswith(f"{use.name}.") for other in found)}
    return {use for use in found if use.keywords or use.name not in is_part}


def settings_of(source: str) -> set[str]:
    """The environment variables that a source reads or advises."""
    return {text for text in _strings(source) if text.isupper() and text.startswith("TORCH_")}


def _strings(source: str) -> set[str]:
    nodes = ast.walk(ast.parse(source))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


# --- what is there ----------------------------------------------------------------------------------------------------


def params_in_tree(folder: Path, module: str, name: str) -> list[str] | None:
    """The parameters of a function, or [] for another name, in a package's sources; None if there is no such name."""
    path = folder / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return None
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            arguments = node.args if isinstance(node, ast.FunctionDef) else None
            return [a.arg for a in (*arguments.args, *arguments.kwonlyargs)] if arguments else []
        if isinstance(node, ast.Assign) and name in {t.id for t in node.targets if isinstance(t, ast.Name)}:
            return []
        if isinstance(node, ast.ImportFrom):
            package = module if path.is_dir() else module.rpartition(".")[0]
            source = f"{package}.{node.module or ''}".rstrip(".") if node.level == 1 else node.module or ""
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return params_in_tree(folder, source, alias.name) or []
                if alias.name == "*" and (found := params_in_tree(folder, source, name)) is not None:
                    return found
    return None


def check_in_tree(uses: set[Use], folder: Path, package: str, prefix: str, findings: Findings) -> None:
    """``prefix`` is what our sources call the module ``package``."""
    for use in sorted(uses, key=lambda use: use.name):
        *middle, name = use.name.removeprefix(f"{prefix}.").split(".")
        params = params_in_tree(folder, ".".join([package, *middle]), name)
        findings.note(f"{use.name} in {package}", params is not None)
        for keyword in use.keywords if params is not None else ():
            findings.note(f"{use.name}({keyword}=) in {package}", keyword in params)  # type: ignore[operator]


def check_in_torch(uses: set[Use], findings: Findings) -> None:
    for use in sorted(uses, key=lambda use: use.name):
        found: object = torch
        for part in use.name.split(".")[1:]:
            found = getattr(found, part, None)
        findings.note(f"{use.name} in torch {torch.__version__}", found is not None)
        for keyword in use.keywords if callable(found) else ():
            findings.note(f"{use.name}({keyword}=)", keyword in inspect.signature(found).parameters)


def check_in_stub(uses: set[Use], findings: Findings) -> None:
    """Classes that this build of torch leaves out, by its stub: ``dist.Class[.Inner][.attribute]``."""
    classes = {node.name: node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef)}
    for use in sorted(uses, key=lambda use: use.name):
        _, outer, *rest = use.name.split(".")
        body = classes.get(outer)
        for part in rest:
            body = next(iter(_members(body, part, classes)), None) if isinstance(body, ast.ClassDef) else None
        findings.note(f"{use.name} in torch's stubs", body is not None)
        if use.keywords and isinstance(body, ast.ClassDef):
            init = next(node for node in body.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
            for keyword in use.keywords:
                findings.note(f"{use.name}({keyword}=)", keyword in [a.arg for a in init.args.args])


def _members(cls: ast.ClassDef, name: str, classes: dict[str, ast.ClassDef]) -> Iterator[ast.stmt]:
    for node in cls.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            yield node
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            yield node
    for base in cls.bases:
        outer, *rest = _dotted(base).split(".")
        found: ast.stmt | None = classes.get(outer)
        for part in rest:
            found = next(iter(_members(found, part, classes)), None) if isinstance(found, ast.ClassDef) else None
        if isinstance(found, ast.ClassDef):
            yield from _members(found, name, classes)


# --- the vendors ------------------------------------------------------------------------------------------------------


def source_of(adapter: str) -> str:
    return (ROOT / f"adapters/{adapter}/src/zerolap_{adapter}/__init__.py").read_text()


def base_uses(device_type: str) -> set[Use]:
    """What the stream base class uses of a device's module, under the name that module has in torch."""
    return {Use(f"torch.{device_type}{use.name.removeprefix('module')}") for use in uses_of(BASE.read_text(), "module")}


def check_cuda(source: str, findings: Findings) -> None:
    check_in_torch(base_uses("cuda") | uses_of(source, "torch.cuda"), findings)
    check_in_stub(uses_of(source, "dist.ProcessGroupNCCL") | _classes(source, "dist.ProcessGroupNCCL"), findings)
    header = (TORCH / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp").read_text()
    for name in settings_of(source):
        findings.note(f"{name} in torch's headers", f'"{name}"' in header)


def check_xpu(source: str, findings: Findings) -> None:
    check_in_torch(
        base_uses("xpu") | uses_of(source, "torch.xpu") | {Use("torch.distributed.is_xccl_available")}, findings
    )
    check_in_stub(uses_of(source, "dist.ProcessGroupXCCL") | _classes(source, "dist.ProcessGroupXCCL"), findings)


def check_npu(source: str, folder: Path, findings: Findings, *, release: str = "") -> None:
    uses = base_uses("npu") | uses_of(source, "torch.npu")
    check_in_tree(uses, folder, "torch_npu.npu", "torch.npu", findings)
    check_in_tree(
        {Use("torch_npu.__version__")} | uses_of(source, "torch_npu"), folder, "torch_npu", "torch_npu", findings
    )
    texts = [path.read_text(errors="replace") for path in (folder / "torch_npu").rglob("*.py")]
    findings.note(
        "torch.npu is torch_npu.npu",
        any(re.search(r"""_register_device_module\(["']npu["'], torch_npu\.npu\)""", t) for t in texts),
    )
    # torch_npu makes a group's backend from an options object that we fill in: it must ask for nothing else.
    makers = [t for t in texts if "def _new_process_group_hccl_helper(" in t]
    findings.note("torch_npu's maker of HCCL backends", len(makers) == 1)
    for maker in makers:
        (function,) = (
            node
            for node in ast.parse(maker).body
            if isinstance(node, ast.FunctionDef) and node.name == "_new_process_group_hccl_helper"
        )
        options = function.args.args[0].arg
        wanted = {u.name.partition(".")[2] for u in uses_of(ast.unparse(function), options)}
        given = {u.name.partition(".")[2] for u in uses_of((BASE.parent / "base.py").read_text(), "options")}
        for name in sorted(wanted):
            findings.note(f"torch_npu's maker of HCCL backends is given {name}", name in given)
    # The adapter looks at a setting's older name, too, if it has one: a library has to know one of them.
    library = (folder / "torch_npu/lib/libtorch_npu.so").read_bytes()
    for name in settings_of(source) - RECENT_SETTINGS.get(release, set()):
        names = {name, name.removeprefix("TORCH_")} & {*_strings(source)}
        findings.note(
            f"{' or '.join(sorted(names))} in libtorch_npu.so", any(each.encode() in library for each in names)
        )


def _classes(source: str, name: str) -> set[Use]:
    """The class itself, which uses_of() leaves out where something of it is used, too."""
    return {Use(name)} if name in source else set()


def unpacked(requirement: str, folder: Path) -> Path:
    name = requirement.partition("==")[0].replace("-", "_")
    target = folder / name
    if not target.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        print(f"downloading {requirement}", flush=True)
        subprocess.run([*pip, "--dest", str(folder), requirement], check=True)
        (wheel,) = folder.glob(f"{name}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            wanted = [n for n in archive.namelist() if n.endswith((".py", "libtorch_npu.so"))]
            archive.extractall(target, wanted)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    given = parser.parse_args().folder
    findings = Findings()
    importlib.import_module("torch.distributed")
    with tempfile.TemporaryDirectory() as temporary:
        folder = given or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        check_cuda(source_of("cuda_nccl"), findings)
        check_xpu(source_of("xpu"), findings)
        for version in TORCH_NPU:
            print(f"torch-npu {version}", flush=True)
            unpacked_to = unpacked(f"torch-npu=={version}", folder / version)
            check_npu(source_of("ascend_hccl"), unpacked_to, findings, release=version)
    print("\n".join(f"there: {what}" for what in findings.checked))
    print("\n".join(f"MISSING: {what}" for what in findings.missing) or f"all {len(findings.checked)} are there")
    return bool(findings.missing)


if __name__ == "__main__":
    sys.exit(main())
