"""Writing one checkpoint, by all ranks together, at once or behind training. What is in it, and what it is called, is decided elsewhere."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem

from zerolap._logging import logger_of
from zerolap._public import public_in
from zerolap._torch import device_types_of, group_timeout
from zerolap._torch.checkpoint_format import save_state
from zerolap.checkpoint.folder import (
    MANIFEST,
    Writer,
    discard,
    next_written_ns,
    path_of,
    place,
    remove_all_but,
    sweep,
    write_durably,
)
from zerolap.checkpoint.reader import FORMAT, CheckpointError, digest_of
from zerolap.errors import CollectiveError, ZerolapError
from zerolap.runtime.dcp_state import FlatShards
from zerolap.runtime.peers import all_gather_json, refuse_together

logger = logger_of(__name__)

# Without progress a save may take as long as its ranks wait for each other, this much more, and its bytes at this rate: a rank may
# be at one large tensor for all of that.
_GRACE_SECONDS = 10.0
_SLOWEST_BYTES_PER_SECOND = 10e6
_SECONDS_ALONE = 1800  # how long one process without a group may write nothing before others take it for gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a checkpoint goes, the same on all ranks. ``partial`` is its name until it is complete: the first rank's choice."""

    folder: Path
    step: int
    keep: int | None = None
    overwrite: bool = False
    partial: str = ""

    @property
    def path(self) -> Path:
        return path_of(self.folder, self.step)


class Progress:
    """Where a save is, and when it last moved, for whoever waits for it."""

    def __init__(self) -> None:
        self.stage = "starting"
        self.moved = time.monotonic()

    def at(self, stage: str) -> None:
        self.stage = stage
        self.tick()

    def tick(self) -> None:
        self.moved = time.monotonic()


@public_in("zerolap.checkpoint")
class Saving:
    """A checkpoint that is being written in the background."""

    def __init__(self, write: Callable[[Progress], Path], *, path: Path, limit: float) -> None:
        self._path, self._limit = path, limit
        self._progress = Progress()
        self._error: BaseException | None = None
        self._was_raised = False
        # A daemon: a process that fails must be able to end, and what it has not finished is ignored.
        self._thread = threading.Thread(target=self._run, args=(write,), name="zerolap-checkpoint", daemon=True)
        self._thread.start()

    def _run(self, write: Callable[[Progress], Path]) -> None:
        try:
            write(self._progress)
        except BaseException as error:  # for whoever waits: a thread has no caller to raise to
            self._error = error
            logger.error("saving in the background failed: %s", error)

    def is_done(self) -> bool:
        """True once the checkpoint is there, or has failed."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path:
        """Return once the checkpoint is there; CheckpointError if it could not be written, or is not done within ``timeout`` seconds.

        Without ``timeout``, if it has not moved for longer than the process group's timeout and its size allow. A save that is not done
        goes on, and can be waited for again.
        """
        self._join(timeout)
        if self._error is not None:
            self._was_raised = True
            raise self._error
        return self._path

    def _take_unseen_error(self) -> BaseException | None:
        """The error of a save that has ended, if ``wait()`` has not raised it; once."""
        unseen = None if self._was_raised else self._error
        self._was_raised = True
        return unseen

    @property
    def _has_lost_step(self) -> bool:
        """Whether the ranks may have left its group at different places. An error that all of them were told of leaves none behind."""
        cause = self._error.__cause__ if isinstance(self._error, CheckpointError) else self._error
        was_told = isinstance(cause, OSError | CheckpointException | ZerolapError) and not isinstance(
            cause, CollectiveError
        )
        return self._error is not None and not was_told and cause is not None

    def _join(self, timeout: float | None = None) -> None:
        start = time.monotonic()
        while self._thread.is_alive():
            now = time.monotonic()
            end = self._progress.moved + self._limit if timeout is None else start + timeout
            if now >= end:
                raise CheckpointError(
                    f"{self._path} is not written yet: {self._progress.stage} has not moved for {now - self._progress.moved:.0f} s; "
                    "look at the other ranks and the file system, then wait() again or save anew"
                )
            self._thread.join(min(end - now, 60.0))


def limit_of(group: dist.ProcessGroup, state: Mapping[str, Any]) -> float:
    """How many seconds a save may go without progress."""
    return timeout_of(group) + _GRACE_SECONDS + nbytes_of(state) / _SLOWEST_BYTES_PER_SECOND


def timeout_of(group: dist.ProcessGroup) -> float:
    """How many seconds ranks of the group wait for each other."""
    devices = device_types_of(group)
    device = torch.device("cpu") if torch.device("cpu") in devices else devices[0]
    try:
        return group_timeout(group, device).total_seconds()
    except (AttributeError, RuntimeError):  # a backend from elsewhere that does not tell
        return dist.constants.default_pg_timeout.total_seconds()


def partial_name(step: int, group: dist.ProcessGroup | None) -> str:
    """A name of this process's own for what is not complete."""
    return _writer(group).name_for(path_of("", step).name)


def _writer(group: dist.ProcessGroup | None) -> Writer:
    return Writer.here(limit=_SECONDS_ALONE if group is None else timeout_of(group))


def write_state(
    target: Target, state: dict[str, Any], group: dist.ProcessGroup | None, progress: Progress | None = None
) -> Path:
    """Write under another name, and give it its own when all of it is on disk. Without a group this process writes everything.

    All errors are CheckpointErrors, but for what ends the process (KeyboardInterrupt, SystemExit); nothing of the attempt is left.
    """
    rank = 0 if group is None else group.rank()
    partial = target.folder / (target.partial or partial_name(target.step, group))
    progress = progress or Progress()
    try:
        return _written(target, partial, state, group, progress)
    except BaseException as error:
        if rank == 0:
            discard(partial)
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            raise
        raise CheckpointError(f"{target.path} could not be written: {progress.stage}: {_said(error)}") from error


def _written(
    target: Target, partial: Path, state: dict[str, Any], group: dist.ProcessGroup | None, progress: Progress
) -> Path:
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    path, folder, writer = target.path, target.folder, _writer(group)

    def prepare() -> None:
        if rank == 0:
            partial.mkdir(parents=True)
            sweep(folder, now=partial.stat().st_mtime, writer=writer)

    def look() -> None:
        if not partial.exists():
            raise CheckpointError(f"{folder} is not the same folder on all ranks; checkpoints need one that they share")

    def write() -> dict[str, Any]:
        with _progress_bar(f"saving {path.name}", nbytes_of(state), is_shown=rank == 0) as advance:

            def on_item(nbytes: int) -> None:
                progress.tick()
                advance(nbytes)

            _save_by_dcp(state, FileSystemWriter(partial), _SavePlanner(on_item), group, path)
        progress.at(f"computing digests for {path}")
        mine = [*partial.glob(f"__{rank}_*"), *([partial / ".metadata"] if rank == 0 else [])]
        return {file.name: digest_of(file) for file in mine}

    def finish() -> None:
        if rank != 0:
            return
        files = {name: digest for each in digests for name, digest in each.items()}
        about = {"format": FORMAT, "step": target.step, "ranks": size, "written_ns": next_written_ns(folder)}
        write_durably(partial / MANIFEST, json.dumps({**about, "files": files}, indent=1))
        replaced = place(partial, path, writer=writer, overwrite=target.overwrite)
        if replaced is not None:
            discard(replaced)
        if target.keep is not None:
            remove_all_but(folder, keep=target.keep, newest=target.step, writer=writer)

    def together(do: Callable[[], Any], what: str) -> Any:
        progress.at(what)
        return _together(do, group, what)

    together(prepare, f"making {partial}")
    together(look, f"looking for {partial}")
    written = together(write, f"writing {partial}")
    progress.at(f"comparing what was written for {path}")
    digests = [written] if group is None else all_gather_json(written, group=group, what=progress.stage)
    together(finish, f"finishing {path}")
    return path


def _save_by_dcp(
    state: dict[str, Any],
    writer: FileSystemWriter,
    planner: DefaultSavePlanner,
    group: dist.ProcessGroup | None,
    path: Path,
) -> None:
    try:
        save_state(state, writer=writer, planner=planner, group=group)
    except CheckpointException as error:  # a BaseException, raised on all ranks
        mine = error.failures.get(0 if group is None else group.rank())
        if mine is not None and not isinstance(mine[0], Exception):
            raise mine[0] from error  # KeyboardInterrupt, SystemExit: not ours to keep
        said = "; ".join(f"rank {rank}: {_said(cause)}" for rank, (cause, _) in error.failures.items())
        raise CheckpointError(f"{path} could not be written: {said}") from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _together(do: Callable[[], Any], group: dist.ProcessGroup | None, what: str) -> Any:
    """As ``refuse_together``; the other ranks are told, too, of what ends this process."""
    if group is None:
        return do()
    ending: list[BaseException] = []

    def told() -> Any:
        try:
            return do()
        except Exception:
            raise
        except BaseException as error:
            ending.append(error)
            raise CheckpointError(f"saving was interrupted by {type(error).__name__}") from error

    try:
        return refuse_together(told, group=group, what=what)
    except Exception:
        if ending:
            raise ending[0] from None
        raise


class _SavePlanner(DefaultSavePlanner):
    """Says how far it is."""

    def __init__(self, on_item: Callable[[int], None]) -> None:
        super().__init__()
        self._on_item = on_item

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        self._on_item(data.nbytes if isinstance(data, Tensor) else len(data.getbuffer()))
        return data


@contextmanager
def _progress_bar(what: str, total: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar for people who wait: on a terminal, for what takes more than a moment, if rich is installed."""
    is_shown = is_shown and total >= 2**26 and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    if not is_shown:
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


def nbytes_of(value: Any) -> int:
    if isinstance(value, FlatShards):
        return sum(part.nbytes for part in value.ranges.values())
    if isinstance(value, Mapping):
        return sum(nbytes_of(item) for item in value.values())
    return value.nbytes if isinstance(value, Tensor) else 0
