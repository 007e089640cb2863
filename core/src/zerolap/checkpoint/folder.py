"""A folder of checkpoints: which there are, which is the latest, how one gets its place and goes. Names only: no tensors, no torch.

    step-000000100/                    a checkpoint: it gets this name last, so it is complete
    latest                             a link to the one that was written last
    step-000000100.WRITER.partial/     being written or removed by that process, or left so when it ended; never read
    step-000000100.replaced/           the old one of two, where the file system cannot exchange names; read if the new one is not there

The latest is the one that ``latest`` names, and without a valid link the one that was written last, by the clock in its manifest: not
the one of the highest step, which after a rollback is of a branch that was given up. Several jobs may use one folder: all that they
write before it has its name is in folders of their own, and none removes what another may still be writing.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import math
import operator
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolap._logging import logger_of
from zerolap._public import public_in
from zerolap.untrusted.files import open_regular, parse_json, read_all

MANIFEST = "manifest.json"
LATEST = "latest"
_LARGEST_STEP = 10**18 - 1
_LARGEST_MANIFEST = 2**26
_UNKNOWN_HOST = "0" * 12
_QUIET_SECONDS = 600.0  # beyond what its timeout allows: attributes of network file systems may be a minute old

logger = logger_of(__name__)


# --- what callers give --------------------------------------------------------------------------------------------------


def step_number(step: Any) -> int:
    """The step as an int; TypeError or ValueError for what is none."""
    number = _whole_number(step, "step")
    if not 0 <= number <= _LARGEST_STEP:
        raise ValueError(f"step must be from 0 to {_LARGEST_STEP}, got {number}")
    return number


def keep_number(keep: Any) -> int | None:
    """The number of checkpoints to keep, None for all; TypeError or ValueError for what is neither."""
    if keep is None:
        return None
    number = _whole_number(keep, "keep")
    if number < 1:
        raise ValueError(f"keep must be at least 1, or None to keep all, got {number}")
    return number


def _whole_number(given: Any, name: str) -> int:
    is_truth = isinstance(given, bool) or "bool" in str(getattr(given, "dtype", ""))
    try:
        if not is_truth:
            return operator.index(given)
    except TypeError:
        pass  # said below, for both
    raise TypeError(f"{name} must be a whole number, got {given!r}")


# --- which there are ----------------------------------------------------------------------------------------------------


def path_of(folder: str | os.PathLike[str], step: int) -> Path:
    return Path(folder, f"step-{step:09d}")


@public_in("zerolap.checkpoint")
def steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps of all complete checkpoints, in ascending order; ``latest`` says which of them ``load`` takes."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = {step for name in names if (step := _step_of(name.removesuffix(".replaced"))) is not None}
    return sorted(step for step in found if find(folder, step) is not None)


@public_in("zerolap.checkpoint")
def latest(folder: str | os.PathLike[str]) -> int | None:
    """The step of the checkpoint that was written last, which ``load`` takes; None if there is none.

    A link ``latest`` that names a complete checkpoint of the folder decides, also if it was set by hand.
    """
    held = steps(folder)
    linked = _linked_step(Path(folder))
    if linked in held:
        return linked
    # One whose manifest cannot be read counts as the newest: loading says that it is damaged, and takes no older one in silence.
    return max(held, key=lambda step: (_written(Path(folder), step, unknown=math.inf), step), default=None)


def find(folder: str | os.PathLike[str], step: int) -> Path | None:
    """Where the checkpoint of a step is, if there is a complete one."""
    path = path_of(folder, step)
    return next((each for each in (path, _aside(path)) if _is_complete(each)), None)


def _step_of(name: str) -> int | None:
    """The step of a checkpoint's name. ``step-9`` and the like are not ours: they are neither read, counted nor removed."""
    found = re.fullmatch(r"step-([0-9]{9,18})", name)
    return int(found[1]) if found and path_of("", int(found[1])).name == name else None


def _linked_step(folder: Path) -> int | None:
    try:
        target = folder / os.readlink(folder / LATEST)
        return _step_of(target.name) if os.path.samefile(target.parent, folder) else None
    except OSError:  # there is no link, or it leads nowhere
        return None


def _is_complete(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.replaced")


def manifest_of(path: Path) -> bytes:
    """A manifest as it is on disk; OSError if it is not a regular file of a sane size."""
    with open_regular(path / MANIFEST, largest=_LARGEST_MANIFEST) as stream:
        return read_all(stream, _LARGEST_MANIFEST)


def _written(folder: Path, step: int, *, unknown: float) -> float:
    """When a checkpoint was written, in nanoseconds; 0 for those of versions that did not say it."""
    try:
        path = find(folder, step)
        manifest = parse_json(manifest_of(path)) if path is not None else None
        written = manifest.get("written_ns", 0) if isinstance(manifest, dict) else None
        return written if type(written) is int else unknown
    except (OSError, ValueError):
        return unknown


def next_written_ns(folder: Path) -> int:
    """The time for a new manifest: later than that of the newest, whatever the clocks of other hosts have been."""
    held, linked = steps(folder), _linked_step(folder)
    few = {held[-1], linked} if linked in held else held  # a long run has many manifests, and a link
    newest = max((_written(folder, step, unknown=0) for step in few if step is not None), default=0)
    return max(time.time_ns(), int(newest) + 1)


# --- who writes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """The process that a partial folder belongs to, as its name has it. ``limit`` is how long its ranks wait for each other."""

    host: str
    pid: int
    started: int
    limit: int

    @classmethod
    def here(cls, *, limit: float) -> Writer:
        process = _process(os.getpid())
        return cls(
            host=_host(), pid=os.getpid(), started=process[1] if process is not None else 0, limit=math.ceil(limit)
        )

    def name_for(self, name: str) -> str:
        """A name that nothing has had before."""
        return f"{name}.{self.host}-{self.pid}-{self.started}-{self.limit}-{secrets.token_hex(6)}.partial"

    @classmethod
    def of(cls, name: str) -> Writer | None:
        """None for everything that is not ours, whatever it ends in."""
        found = re.fullmatch(
            r"(?:step-.+|latest)\.([0-9a-f]{12})-(\d+)-(\d+)-(\d+)-[0-9a-f]{12}\.partial", name, re.ASCII
        )
        if found is None:
            return None
        return cls(host=found[1], pid=int(found[2]), started=int(found[3]), limit=int(found[4]))

    def is_gone(self, *, quiet: float) -> bool:
        """Whether it has ended, for sure. A process of another host, which cannot be asked, is gone when it has not written for
        much longer than its ranks wait for each other."""
        if self.host == _UNKNOWN_HOST or self.host != _host():
            return quiet > 2 * self.limit + _QUIET_SECONDS
        try:
            os.kill(self.pid, 0)  # sends nothing
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            pass  # it is another user's, or the number is none: what /proc says decides
        process = _process(self.pid)
        return process is not None and (process[0] in "ZX" or process[1] != self.started)


def _host() -> str:
    """This boot of this machine and this namespace of process numbers: where a pid means the same process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return hashlib.blake2b(f"{boot}{os.readlink('/proc/self/ns/pid')}".encode(), digest_size=6).hexdigest()
    except OSError:
        return _UNKNOWN_HOST


def _process(pid: int) -> tuple[str, int] | None:
    """State and start of a process; None where it cannot be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def sweep(folder: Path, *, now: float, writer: Writer) -> None:
    """Remove what writers that are gone have left. ``now`` is by the clock of the file system."""
    for name in os.listdir(folder):
        left = Writer.of(name)
        if left is not None and left.is_gone(quiet=now - _last_change(folder / name)):
            discard(folder / name)
        path = folder / name.removesuffix(".replaced")
        if path.name != name and _step_of(path.name) is not None and _is_complete(path):
            _discard_complete(folder / name, writer)


def _last_change(path: Path) -> float:
    def times() -> Iterator[float]:
        yield path.lstat().st_mtime
        if path.is_dir() and not path.is_symlink():
            yield from (entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path))

    try:
        return max(times())
    except OSError:  # somebody else removes it
        return math.inf


# --- coming and going ---------------------------------------------------------------------------------------------------


def place(partial: Path, path: Path, *, writer: Writer, overwrite: bool) -> Path | None:
    """Give what is complete its name, and make it the latest. Returns what it has replaced, which is to be discarded.

    A process that ends anywhere in here leaves a complete checkpoint of this step, the old one or the new one, if there was one.
    """
    folder, aside = path.parent, _aside(path)
    if not overwrite and (_is_there(path) or _is_complete(aside)):
        raise FileExistsError(f"{path} was written by another job meanwhile; give each job a folder of its own")
    _unlink_latest(folder)  # without a link the newest is the latest, before and after the next lines
    replaced: Path | None = None
    if not _is_there(path):
        partial.rename(path)  # if another job was faster by an instant, this fails: only an empty folder would give way
    elif _exchange_names(partial, path):
        replaced = partial
    else:
        _discard_complete(aside, writer)
        if _is_complete(path):
            path.rename(aside)  # until the new one has its name, the old one is found here
        else:
            replaced = path.rename(folder / writer.name_for(path.name))
        partial.rename(path)
    _link_latest(path, writer)
    sync_folder(folder)
    return aside.rename(folder / writer.name_for(path.name)) if _is_complete(aside) else replaced


def remove_all_but(folder: Path, *, keep: int, newest: int, writer: Writer) -> None:
    """Keep the ``keep`` that were written last. ``newest`` is among them, whatever the clocks say."""
    written = {step: _written(folder, step, unknown=-1) for step in steps(folder) if step != newest}
    known = sorted((when, step) for step, when in written.items() if when >= 0)  # what cannot be read stays
    for _, step in known[: max(0, len(known) - (keep - 1))]:
        path = path_of(folder, step)
        for each in (_aside(path), path):  # in this order: the aside would be read when the other is gone
            try:
                _discard_complete(each, writer)
            except OSError as error:
                logger.warning("%s could not be removed: %s", each, error)


def _discard_complete(path: Path, writer: Writer) -> None:
    """Remove a checkpoint, under a name that says so: half removed, it must not pass for one."""
    if _is_complete(path):
        try:
            doomed = path.rename(path.with_name(writer.name_for(path.name)))
        except FileNotFoundError:  # another job has removed it
            return
        discard(doomed)


def discard(path: Path) -> None:
    """Remove something partial. What cannot be removed is logged: it does no harm."""
    try:
        path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
    except FileNotFoundError:
        pass  # another job was faster
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)


def _is_there(path: Path) -> bool:
    return os.path.lexists(path)


def _unlink_latest(folder: Path) -> None:
    link = folder / LATEST
    if link.is_symlink():
        link.unlink(missing_ok=True)


def _link_latest(path: Path, writer: Writer) -> None:
    """A file system without links, or something of the user's in the place of ours, is no reason to fail: without a link, too, it
    is known which is the latest."""
    link = path.parent / LATEST
    if _is_there(link) and not link.is_symlink():
        logger.warning("%s is no link, and is left as it is; the latest is %s", link, path.name)
        return
    made = path.parent / writer.name_for(LATEST)
    try:
        made.symlink_to(path.name)
        made.replace(link)
    except OSError as error:
        logger.warning("%s could not be linked to %s: %s", link, path.name, error)


def _exchange_names(one: Path, other: Path) -> bool:
    """Let two names change places at once. False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if renameat2 is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(error, os.strerror(error), str(one), None, str(other))


def write_durably(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
