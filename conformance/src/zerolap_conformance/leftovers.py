"""What is left behind: memory, objects, threads and open files, counted before and after."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zerolap import Adapter
from zerolap_conformance.support import device_of

WAIT_SECONDS = 1.5  # threads end, and the interpreter frees, a little later
MOST_OBJECTS = 3  # of one kind
_ALLOWED = {
    "threads": 0,
    "files": 0,
    "tensor_bytes": 4096,
    "device_bytes": 4096,
    "process_bytes": 100_000_000,  # its allocator keeps some of what is freed, and the longer the more
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What there is now."""

    threads: int
    files: int
    kinds: Counter[str]  # of objects
    tensor_bytes: int
    device_bytes: int
    process_bytes: int

    @classmethod
    def now(cls, adapter: Adapter) -> Leftovers:
        device = device_of(adapter)
        adapter.synchronize()
        gc.collect()
        objects = gc.get_objects()
        tensors = {
            id(each.untyped_storage()): each.untyped_storage().nbytes() for each in objects if type(each) is Tensor
        }
        allocated = getattr(getattr(torch, device.type, None), "memory_allocated", None)
        return cls(
            threads=max(_count("/proc/self/task"), threading.active_count()),
            files=_count("/proc/self/fd"),
            kinds=Counter(type(each).__name__ for each in objects),
            tensor_bytes=sum(tensors.values()),
            device_bytes=int(allocated(device)) if device.type != "cpu" and allocated is not None else 0,
            process_bytes=_resident() if device.type == "cpu" else 0,
        )

    def more_than(self, before: Leftovers) -> dict[str, int]:
        """Of what there is more now than is allowed."""
        more = {name: getattr(self, name) - getattr(before, name) for name in _ALLOWED}
        grown = {f"{kind} objects": self.kinds[kind] - before.kinds[kind] for kind in self.kinds}
        found = {name: number for name, number in more.items() if number > _ALLOWED[name]}
        return found | {name: number for name, number in grown.items() if number > MOST_OBJECTS}


def expect_nothing_left(adapter: Adapter, work: Callable[[], object], what: str) -> None:
    """AssertionError if something is left behind each time. What is kept once is no leak."""
    before = Leftovers.now(adapter)
    more: list[dict[str, int]] = []
    for _ in range(3):
        work()
        dist.all_reduce(torch.zeros(1))  # what one rank has yet to do with another is over
        deadline = time.monotonic() + WAIT_SECONDS
        while (left := (now := Leftovers.now(adapter)).more_than(before)) and time.monotonic() < deadline:
            time.sleep(0.1)
        is_left = torch.tensor([float(bool(left))])
        dist.all_reduce(is_left)  # ranks go on together
        if not is_left.item():
            return
        more.append(left)
        before = now
    said = ", ".join(
        f"{number:+} {name.replace('_', ' ')}"
        for name, number in more[-1].items()
        if all(name in each for each in more)
    )
    assert not said, f"{what} leave more behind each time: {said}"


def _count(folder: str) -> int:
    path = Path(folder)
    return len(list(path.iterdir())) if path.is_dir() else 0


def _resident() -> int:
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * 4096 if path.exists() else 0
