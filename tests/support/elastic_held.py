"""examples/elastic.py, held: a run makes three checkpoints and then waits for the file ``go``, so that nothing is over before the
test has lost a node and added it again, on a machine of any speed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import elastic

LIMIT = 240  # seconds

save, saved = elastic.checkpoint.save, []


def save_and_wait(folder: Path, *args: Any, **kwargs: Any) -> Path:
    saved.append(save(folder, *args, **kwargs))
    deadline = time.monotonic() + LIMIT
    while len(saved) >= 3 and not (folder / "go").exists():
        assert time.monotonic() < deadline, f"nobody has said go within {LIMIT} s"
        time.sleep(0.02)
    return saved[-1]


if __name__ == "__main__":
    elastic.checkpoint.save = save_and_wait
    elastic.main()
