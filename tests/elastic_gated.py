"""examples/elastic.py, which waits for the test at gates: after the checkpoint of step k, until the file ``gate-k`` is there."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import elastic

GATES = [int(step) for step in os.environ["ELASTIC_GATES"].split(",")]
save = elastic.checkpoint.save


def save_and_wait(folder: Path, *args: Any, step: int, **kwargs: Any) -> Path:
    path = save(folder, *args, step=step, **kwargs)
    deadline = time.monotonic() + 120
    while step in GATES and not (folder / f"gate-{step}").exists():
        assert time.monotonic() < deadline, f"nobody has opened gate {step}"
        time.sleep(0.02)
    return path


if __name__ == "__main__":
    elastic.checkpoint.save = save_and_wait
    elastic.main()
