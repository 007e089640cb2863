"""Build every package's wheel and fail unless it has its code, its py.typed and its licence, and needs only what it may."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {  # folder: import name, what it may depend on
    "core": ("zerolap", {"torch"}),
    "adapters/cpu_gloo": ("zerolap_cpu_gloo", {"zerolap"}),
    "adapters/cuda_nccl": ("zerolap_cuda_nccl", {"zerolap"}),
    "adapters/ascend_hccl": ("zerolap_ascend_hccl", {"zerolap"}),
    "adapters/xpu": ("zerolap_xpu", {"zerolap"}),
    "adapters/sim": ("zerolap_sim", {"zerolap"}),
    "conformance": ("zerolap_conformance", {"zerolap", "pytest"}),
    "integrations": ("zerolap_integrations", {"zerolap"}),
}
DATA = {  # folder: files beside the code that it needs
    "core": (
        "zerolap/cli/app.py",
        "zerolap/cli/sonnets.txt",
        "zerolap/py.typed",
        "zerolap/observe/timeline/page.html",
        "zerolap/observe/timeline/page.css",
        "zerolap/observe/timeline/page_model.js",
        "zerolap/observe/timeline/page_draw.js",
        "zerolap/observe/timeline/page_input.js",
    ),
    "adapters/sim": ("zerolap_sim/csrc/runtime.cpp", "zerolap_sim/csrc/runtime.h"),
    "conformance": ("zerolap_conformance/page.html",),
}


def problems_of(folder: str, wheel: Path) -> list[str]:
    """What is missing in the wheel of the package in ``folder``, or is too much."""
    name, allowed = PACKAGES[folder]
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        (metadata,) = (file for file in files if file.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    needed = [f"{name}/__init__.py", f"{name}/py.typed", *DATA.get(folder, ())]
    problems = [f"{wheel.name}: no {file}" for file in needed if file not in files]
    if not any(file.endswith("licenses/LICENSE") for file in files):
        problems.append(f"{wheel.name}: no licence")
    for requirement in fields.get_all("Requires-Dist", []):
        if "extra ==" not in requirement and not any(requirement.startswith(each) for each in allowed):
            problems.append(f"{wheel.name}: depends on {requirement}")
    return problems


def main() -> int:
    problems = []
    build = ["-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    for folder in PACKAGES:
        with tempfile.TemporaryDirectory() as target:
            subprocess.run([sys.executable, *build, "--wheel-dir", target, str(ROOT / folder)], check=True)
            (wheel,) = Path(target).glob("*.whl")
            problems += problems_of(folder, wheel)
    print("\n".join(problems) or f"{len(PACKAGES)} wheels are complete")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
