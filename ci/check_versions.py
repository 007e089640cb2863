"""Fail unless every package has one and the same version, asks for that version of the others, and CHANGELOG has it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).parent.parent


def main() -> int:
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "core/src/zerolap/__init__.py").read_text(), re.MULTILINE)
    assert version, "core has no __version__"
    problems = []
    for path in sorted(ROOT.glob("*/pyproject.toml")) + sorted(ROOT.glob("adapters/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        if "version" not in project.get("dynamic", []) and project["version"] != version[1]:
            problems.append(f"{path.relative_to(ROOT)}: version {project['version']}, core has {version[1]}")
        for requirement in project["dependencies"]:
            if requirement.startswith("zerolap") and not requirement.endswith(f"=={version[1]}"):
                problems.append(f"{path.relative_to(ROOT)}: {requirement}, core has {version[1]}")
    if f"## {version[1]}" not in (ROOT / "CHANGELOG.md").read_text():
        problems.append(f"CHANGELOG.md has no entry for {version[1]}")
    print("\n".join(problems) or f"every package is at {version[1]}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
