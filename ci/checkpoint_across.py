"""Write checkpoints with one version of torch, and compare what another one loads, bit by bit.

    python ci/checkpoint_across.py write FOLDER
    python ci/checkpoint_across.py read FOLDER

``ci/matrix.py`` runs it in environments with different versions. On two ranks; what they wrote is loaded by one, two and three.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch

import zerolap
from zerolap import checkpoint

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

KINDS: dict[str, dict[str, Any]] = {
    "interleaved": {},
    "on_step-lazy": {"schedule": "on_step", "gather": "lazy", "cap": 0.0005},
    "hook": {"overlap": "hook", "hook": zerolap.hook_with_zero_step, "shard_buckets": True},
}


def _write(folder: str, kind: dict[str, Any]) -> bytes | None:
    from support.checkpoints import make, snapshot, train

    ddp, zero = make(kind)
    train(ddp, zero, 0, 3)
    checkpoint.save(folder, ddp, zero, step=3, extra={"torch": str(torch.__version__), "seen": torch.arange(3)})
    return snapshot(ddp, zero)


def _read(folder: str, kind: dict[str, Any]) -> tuple[bytes | None, str]:
    from support.checkpoints import make, snapshot

    ddp, zero = make(kind)
    loaded = checkpoint.load(folder, ddp, zero)
    assert (loaded.step, loaded.extra["seen"].tolist()) == (3, [0, 1, 2])
    return snapshot(ddp, zero), loaded.extra["torch"]


def main() -> int:
    from support.checkpoints import assert_same
    from zerolap_conformance.ranks import run_ranks

    verb, folder = sys.argv[1], Path(sys.argv[2])
    for name, kind in KINDS.items():
        place, expected = folder / name, folder / f"{name}.expected"
        if verb == "write":
            expected.write_bytes(run_ranks(2, _write, str(place), kind)[0])
            print(f"{name}: written with torch {torch.__version__}", flush=True)
            continue
        for num_ranks in (1, 2, 3):
            found, by = run_ranks(num_ranks, _read, str(place), kind)[0]
            wanted, got = pickle.loads(expected.read_bytes()), pickle.loads(found)
            for groups in zip(wanted["groups"], got["groups"], strict=True):
                for key in groups[0].keys() ^ groups[1].keys():  # options that only one of the versions has
                    for group in groups:
                        group.pop(key, None)
            assert_same(wanted, got)
            print(
                f"{name}: written with torch {by}, the same with {torch.__version__} on {num_ranks} ranks", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
