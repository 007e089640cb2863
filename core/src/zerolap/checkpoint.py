"""Checkpoints of a model and its sharded optimizer: whole or absent, written by all ranks, loaded by any number of them.

    folder/step-000000100/      a checkpoint of torch.distributed.checkpoint, and manifest.json
    folder/latest               a link to the newest one
    folder/*.partial            what a save that did not finish has left; ignored, and removed by the next save

A checkpoint gets its name once everything in it is on disk. Loading trusts nothing it reads: digests are compared, the pickles
that torch.distributed.checkpoint writes are read with an allow-list or by weights_only, and the live model and optimizer are
touched only when every rank has all of its part.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.nn.parallel import DistributedDataParallel

from zerolap.errors import ZerolapError
from zerolap.exchange import all_gather_json, refuse_together
from zerolap.optimizer import ZeroRedundancyOptimizer
from zerolap.plan import greedy_owners
from zerolap.reading import FORMAT, MANIFEST, CheckpointError, CheckpointReader, digest_of, unpacked
from zerolap.sharded import Described, FlatShards, compare, from_sharded, room_for
from zerolap.states import copied

__all__ = ["CheckpointError", "Loaded", "Saving", "async_save", "load", "save", "steps"]

STATES = ("optimizer", "state")  # where they are in a checkpoint


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came with a checkpoint that was loaded."""

    step: int
    extra: Any
    path: Path


# --- which there are --------------------------------------------------------------------------------------------------


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps of all whole checkpoints, the oldest first."""
    names = (path.name for path in Path(folder).glob("step-*") if (path / MANIFEST).exists())
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d+)", name)))


def path_of(folder: str | os.PathLike[str], step: int) -> Path:
    return Path(folder, f"step-{step:09d}")


# --- saving -----------------------------------------------------------------------------------------------------------


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    *,
    step: int,
    extra: Any = None,
    keep: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Save model and optimizer, each rank its own part; called by all ranks of the optimizer's group.

    ``extra`` is the first rank's: numbers, strings, tensors, and containers of them. With ``keep`` only so many of the newest
    checkpoints are kept. The folder must be the same one for all ranks.
    """
    group = optimizer.process_group
    _wait_for_last(group)
    state = refuse_together(
        lambda: _state_of(Path(folder), model, optimizer, step, extra, keep, overwrite),
        group=group,
        what="saving a checkpoint",
    )
    return write_state(Path(folder), step, state, group, keep)


class Saving:
    """A checkpoint that is being written in the background."""

    def __init__(self, write: Callable[[], Path]) -> None:
        self._path: Path | None = None
        self._error: BaseException | None = None
        # A daemon: a process that fails must be able to end, and what it has not finished is ignored.
        self._thread = threading.Thread(target=self._run, args=(write,), name="zerolap-checkpoint", daemon=True)
        self._thread.start()

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            self._path = write()
        except BaseException as error:  # for whoever waits: a thread has no caller to raise to
            self._error = error

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Return once the checkpoint is there; raises if it could not be written."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path


_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}  # of background saves, by the optimizer's
_last: dict[dist.ProcessGroup, Saving] = {}


def async_save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    *,
    step: int,
    extra: Any = None,
    keep: int | None = None,
    overwrite: bool = False,
) -> Saving:
    """Copy what this rank saves, and write it while training goes on. Waits for an earlier one that is not done yet.

    Wait for the last one before the process ends.
    """
    group = optimizer.process_group
    _wait_for_last(group)
    state = refuse_together(
        lambda: _staged(_state_of(Path(folder), model, optimizer, step, extra, keep, overwrite)),
        group=group,
        what="saving a checkpoint",
    )
    if group not in _groups:  # one of its own: another thread uses the optimizer's
        if torch.device("cpu") not in group._device_types:
            raise CheckpointError(
                "saving in the background needs a process group that can communicate on the CPU, too; name a CPU backend "
                "beside the device's in init_process_group()"
            )
        made = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
        assert made is not None
        _groups[group] = made
    _last[group] = saving = Saving(lambda: write_state(Path(folder), step, state, _groups[group], keep))
    return saving


def _module_of(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _wait_for_last(group: dist.ProcessGroup) -> None:
    if group in _last:
        _last.pop(group).wait()


def _state_of(
    folder: Path,
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    step: int,
    extra: Any,
    keep: int | None,
    overwrite: bool,
) -> dict[str, Any]:
    """What this rank saves. Refuses what could not be loaded again."""
    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"step must not be negative and keep at least 1, got {step} and {keep}")
    if path_of(folder, step).exists() and not overwrite:
        raise FileExistsError(f"{path_of(folder, step)} is there already; give overwrite=True to replace it")
    rank, size = optimizer.rank, optimizer.world_size
    if size > 1:
        _refuse_without_numpy()
    module = _module_of(model)
    whole = module.state_dict()
    params = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    shared = [name for name in whole if name in params]
    ((*owners,),) = greedy_owners([[whole[name].numel() for name in shared]], world_size=size)
    owner_of = dict(zip(shared, owners, strict=True))
    state: dict[str, Any] = {
        # Parameters are the same everywhere, so each is written by one rank; buffers are the first rank's, as in DDP.
        "model": {name: value for name, value in whole.items() if owner_of.get(name, 0) == rank},
        "optimizer": optimizer.sharded_state_dict(model),
    }
    pack(state["optimizer"]["param_groups"])  # for its refusal
    if rank == 0:
        state["extra"] = pack(extra)
    return state


def _refuse_without_numpy() -> None:
    """torch does not bring NumPy, but sends objects by it: DCP would fail on one rank, and leave the others waiting."""
    try:
        torch.empty(0).numpy()
    except RuntimeError as error:
        raise CheckpointError(
            "torch.distributed.checkpoint needs NumPy to save on several ranks, and it cannot be used here; pip install numpy"
        ) from error


def pack(value: Any) -> Tensor:
    """As bytes; refused if it could not be loaded again."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    packed = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    unpacked(packed)
    return packed


def _staged(value: Any) -> Any:
    """A copy of what will be written, on the CPU."""
    if isinstance(value, FlatShards):
        return FlatShards(value.numel(), copied(value.ranges, device="cpu"))
    if isinstance(value, Mapping):
        return {key: _staged(item) for key, item in value.items()}
    return copied(value, device="cpu")


class _SavePlanner(DefaultSavePlanner):
    """Says how far it is."""

    def __init__(self, on_item: Callable[[int], None]) -> None:
        super().__init__()
        self._on_item = on_item

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        self._on_item(data.nbytes if isinstance(data, Tensor) else len(data.getbuffer()))
        return data


def write_state(
    folder: Path, step: int, state: dict[str, Any], group: dist.ProcessGroup | None, keep: int | None
) -> Path:
    """Write under another name, and give it its own when all of it is on disk. Without a group this process writes everything."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    path = path_of(folder, step)
    partial = path.with_suffix(".partial")

    def prepare() -> None:
        if rank == 0:
            for left in folder.glob("*.partial"):
                _remove(left)
            partial.mkdir(parents=True)

    def look() -> None:
        if not partial.exists():
            raise CheckpointError(f"{folder} is not the same folder on all ranks; checkpoints need one that they share")

    def write() -> dict[str, Any]:
        with _progress(f"saving {path.name}", _nbytes(state), is_shown=rank == 0) as tick:
            writer, planner = FileSystemWriter(partial), _SavePlanner(tick)
            state_dict_saver.save(
                state, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None
            )
        mine = [*partial.glob(f"__{rank}_*"), *([partial / ".metadata"] if rank == 0 else [])]
        return {file.name: digest_of(file) for file in mine}

    def finish() -> None:
        if rank != 0:
            return
        files = {name: digest for each in digests for name, digest in each.items()}
        manifest = {"format": FORMAT, "step": step, "ranks": size, "files": files}
        _write_durably(partial / MANIFEST, json.dumps(manifest, indent=1))
        if path.exists():
            _remove(path)
        partial.rename(path)
        link = folder / "latest.partial"
        link.symlink_to(path.name)
        link.replace(folder / "latest")
        _sync_folder(folder)
        for old in steps(folder)[:-keep] if keep is not None else []:
            _remove(path_of(folder, old))

    _together(prepare, group, f"making {partial}")
    _together(look, group, f"looking for {partial}")
    written = _together(write, group, f"writing {partial}")
    digests = [written] if group is None else all_gather_json(written, group=group, what="comparing what was written")
    _together(finish, group, f"finishing {path}")
    return path


def _together(do: Callable[[], Any], group: dist.ProcessGroup | None, what: str) -> Any:
    return do() if group is None else refuse_together(do, group=group, what=what)


@contextmanager
def _progress(what: str, total: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar for people who wait: on a terminal, for what takes more than a moment, if rich is installed."""
    is_shown = is_shown and total >= 2**26 and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    if not is_shown:
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


def _nbytes(value: Any) -> int:
    if isinstance(value, FlatShards):
        return sum(part.nbytes for part in value.ranges.values())
    if isinstance(value, Mapping):
        return sum(_nbytes(item) for item in value.values())
    return value.nbytes if isinstance(value, Tensor) else 0


def _remove(path: Path) -> None:
    """Under a name that says so: half removed, it must not pass for a checkpoint."""
    if path.suffix != ".partial":
        path = path.rename(path.with_name(f"{path.name}-old.partial"))
    path.unlink() if path.is_symlink() else shutil.rmtree(path)


def _write_durably(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    _sync_folder(file.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- loading ----------------------------------------------------------------------------------------------------------


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    *,
    step: int | None = None,
    strict: bool = True,
) -> Loaded:
    """Load the newest checkpoint, or that of ``step``; called by all ranks of the optimizer's group, however many there are.

    FileNotFoundError if there is none; CheckpointError, on all ranks and with nothing changed, if it is damaged or does not fit.
    With ``strict=False`` parameters that it does not have stay as they are, and those it has beyond the model's are left out.
    """
    group = optimizer.process_group
    said = all_gather_json(steps(folder), group=group, what="looking for checkpoints")[0]
    if not said or (step is not None and step not in said):
        raise FileNotFoundError(
            f"{folder} has no whole checkpoint{'' if step is None else f' of step {step}'}; it has {said}"
        )
    path = path_of(folder, step if step is not None else max(said))
    reader = refuse_together(
        lambda: CheckpointReader(path, share=(group.rank(), group.size())), group=group, what=f"checking {path}"
    )

    def read() -> tuple[dict[str, Any], Any]:
        """Everything, beside what is live."""
        small = reader.read({"optimizer": {"params": None, "param_groups": None}, "extra": reader.room(("extra",))})
        then = described_then(small["optimizer"]["params"])
        now = optimizer._described(model)
        module = _module_of(model)
        room = {
            name: torch.empty_like(value, device="cpu") if isinstance(value, Tensor) else None
            for name, value in module.state_dict().items()
        }
        differences = [*compare(now, then), *_differences(room, reader)]
        if not strict:
            differences = [difference for difference in differences if "has shape" in difference]
            room = {name: value for name, value in room.items() if reader.has(("model", name))}
        if differences:
            raise CheckpointError(f"{path} does not fit the model: " + "; ".join(dict.fromkeys(differences)))
        pieces = [piece for local in optimizer._book.locals for piece in local.pieces]
        states = room_for(reader.metadata, STATES, pieces, now, then)
        whole = reader.read({"model": room, "optimizer": {"state": states}})
        found = from_sharded(whole["optimizer"]["state"], now, then)
        options = optimizer._options_by_name(small["optimizer"]["param_groups"], now)
        return {"model": whole["model"], "states": found, "options": options}, unpacked(small["extra"])

    found, extra = refuse_together(_damaged_is_an_error(read, path), group=group, what=f"loading {path}")
    module = _module_of(model)
    module.load_state_dict(found["model"], strict=strict)
    optimizer._take(found["options"], found["states"])
    return Loaded(reader.step, extra, path)


def described_then(saved: Iterable[Sequence[Any]]) -> dict[str, Described]:
    return {name: Described(name, tuple(shape), tuple(strides)) for name, shape, strides in saved}


def _differences(room: Mapping[str, Any], reader: CheckpointReader) -> list[str]:
    """What the checkpoint's model has otherwise, buffers included."""
    saved = reader.names(("model",))
    found = [f"{name} is not in the checkpoint" for name in room if name not in saved]
    found += [f"{name} of the checkpoint is not in the model" for name in saved if name not in room]
    for name, value in room.items():
        kept = saved.get(name)
        if isinstance(kept, TensorStorageMetadata) and isinstance(value, Tensor) and kept.size != value.shape:
            found.append(f"{name} has shape {tuple(kept.size)} in the checkpoint and {tuple(value.shape)} in the model")
    return found


def _damaged_is_an_error(read: Callable[[], Any], path: Path) -> Callable[[], Any]:
    def wrapped() -> Any:
        try:
            return read()
        except ZerolapError:
            raise
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error

    return wrapped
