"""Follow VENDORS.md as a vendor would, in an empty folder and a fresh environment, with the example package of tests/support/acme.

    python ci/try_vendor.py FOLDER

Acme's devices are simulated: what brings them to torch, zerolap-sim, is installed first, as a driver would be.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from fresh import ROOT, TORCH, fresh_environment


def main(folder: Path) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _copy_project(folder / "zerolap")
    shutil.copytree(ROOT / "tests/support/acme", folder / "zerolap-acme")
    environment = fresh_environment(folder / "env")
    (commands,) = re.findall(r"```sh\n(pip install.*?)```", (ROOT / "VENDORS.md").read_text(), re.DOTALL)
    driver = [
        f"pip install --quiet {TORCH} numpy ./zerolap/core ./zerolap/adapters/sim",
        'python -c "from zerolap_sim import build; build.build()"',  # compiles it
    ]
    for command in (*driver, *commands.splitlines()):
        print(f"$ {command}", flush=True)
        subprocess.run(command, shell=True, cwd=folder, env=environment, check=True)
    verdict = json.loads((folder / "out/verdict.json").read_text())
    missing = [name for name in ("verdict.html", "junit.xml") if not (folder / "out" / name).exists()]
    print(
        f"conformant: {verdict['is_conformant']}, simulated: {verdict['is_simulated']}, missing: {missing or 'nothing'}"
    )
    return 0 if verdict["is_conformant"] and not missing else 1


def _copy_project(to: Path) -> None:
    """What is under version control, as it is now."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.splitlines():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
