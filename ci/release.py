"""Build sdists and wheels of all packages, install them into an environment of their own, and try them there.

    python ci/release.py DIST FOLDER

DIST is where they go, FOLDER an empty place for the trial: nothing in it leads back to the source tree. Uploads nothing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from check_wheels import PACKAGES, problems_of
from fresh import ROOT, TORCH, call, fresh_environment


def build(dist: Path) -> list[str]:
    """Build everything; returns what is wrong with it."""
    shutil.rmtree(dist, ignore_errors=True)
    problems = []
    for folder, (name, _) in PACKAGES.items():
        # The wheel is made from the sdist, so what is missing in one is missing in the other.
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT / folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}{done.stderr}\nbuilding {folder} failed")
        (wheel,), (sdist,) = dist.glob(f"{name}-*.whl"), dist.glob(f"{name}-*.tar.gz")
        problems += problems_of(folder, wheel)
        with tarfile.open(sdist) as archive:
            files = [file.partition("/")[2] for file in archive.getnames()]
        problems += [
            f"{sdist.name}: no {file}" for file in ("LICENSE", "README.md", "pyproject.toml") if file not in files
        ]
        problems += [f"{sdist.name}: {file} is no source" for file in files if file.endswith((".pyc", ".so"))]
        print(f"built {sdist.name} and {wheel.name}", flush=True)
    return problems


def try_out(dist: Path, folder: Path) -> None:
    """What a user does who has the wheels and nothing else, not even NumPy."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = fresh_environment(folder / "env")

    def run(command: str, codes: tuple[int, ...] = (0,)) -> str:
        return call(command, folder=folder, environment=environment, codes=codes)

    wheels = " ".join(f"'{wheel}'" for wheel in sorted(dist.glob("*.whl")) if not wheel.name.startswith("zerolap-"))
    (core,) = dist.glob("zerolap-*.whl")
    run(f"pip install --quiet {TORCH} '{core}[cli]' {wheels}")
    modules = ", ".join(name for name, _ in PACKAGES.values())
    where = run(f'python -c "import {modules}; print(zerolap.__file__)"').strip()
    assert Path(where).is_relative_to(folder), f"{where} is not what was installed"
    usable = {a["name"]: a["why_unusable"] for a in json.loads(run("zerolap doctor --json"))["adapters"]}
    assert usable["cpu_gloo"] is None, usable
    found = json.loads(run("zerolap demo --rounds 1 --json"))
    assert found["ranks"] == 2, found
    assert found["largest_difference"] == 0, found
    for example in ("quickstart.py", "elastic.py"):
        shutil.copy2(ROOT / "examples" / example, folder)
    print(run("torchrun --standalone --nproc-per-node 2 quickstart.py").strip())
    elastic = "torchrun --standalone --nproc-per-node {} elastic.py --folder run --steps {} --save-every 2"
    assert "pip install numpy" in run(elastic.format(2, 4) + " 2>&1", codes=(1,))
    run("pip install --quiet numpy")
    for steps, ranks in ((4, 2), (6, 1)):  # saved by two, continued by one
        run(elastic.format(ranks, steps))
    assert json.loads(run("zerolap checkpoint inspect run --json"))["step"] == 6
    assert "conforms" in run("zerolap conformance --adapter cpu_gloo --tier 0")
    run("zerolap bench", codes=(2,))  # says where to get it


def main(dist: Path, folder: Path) -> int:
    problems = build(dist)
    if problems:
        print("\n".join(problems))
        return 1
    try_out(dist, folder)
    print(f"{len(PACKAGES)} packages in {dist} can be installed and used")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute()))
