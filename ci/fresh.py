"""An environment as somebody has it who has nothing yet: for trying what vendors are told to do, and what is to be released."""

from __future__ import annotations

import os
import subprocess
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCH = "torch==2.13.0"


def fresh_environment(folder: Path) -> dict[str, str]:
    """Make a virtual environment, and return the variables with which commands run in it, and find nothing of this one."""
    venv.create(folder, with_pip=True)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TOX", "VIRTUAL_ENV"))},
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_CONSTRAINT": (ROOT / "ci/constraints.txt").absolute().as_uri(),  # pip splits what is here at spaces
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "OMP_NUM_THREADS": "1",
    }


def call(command: str, *, folder: Path, environment: dict[str, str], codes: tuple[int, ...] = (0,)) -> str:
    """Run a command as a user types it, show it, and return what it printed."""
    print(f"$ {command}", flush=True)
    start = time.monotonic()
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    print(f"    {time.monotonic() - start:.0f} s", flush=True)
    if done.returncode not in codes:
        print(done.stdout)
        raise SystemExit(f"{command!r} ended with {done.returncode}")
    return done.stdout
