"""Files and words that others may have made: what is opened, how much of it is read, what a terminal is shown. No torch."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

_HIDDEN = frozenset(
    {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
)  # control, format (which reorders text), surrogates, line ends


def printable(text: object, longest: int = 2000, *, keeps_lines: bool = False) -> str:
    """Text of unknown origin as a terminal may show it: what could move its cursor, reorder or hide text is escaped."""
    whole = str(text)
    kept = whole if len(whole) <= longest else f"{whole[:longest]}..."
    if kept.isascii() and kept.isprintable():
        return kept
    return "".join(_shown(each, keeps_lines) for each in kept)


def _shown(character: str, keeps_lines: bool) -> str:
    if character == "\n" and keeps_lines:
        return character
    if unicodedata.category(character) in _HIDDEN:
        return character.encode("unicode_escape").decode("ascii")
    return character


class UntrustedFileError(OSError):
    """A file is not one that may be read: no regular file, too large, or changed meanwhile."""


@contextlib.contextmanager
def open_regular(
    path: str | os.PathLike[str],
    *,
    inside: int | None = None,
    follows_links: bool = False,
    largest: int | None = None,
    size: int | None = None,
) -> Iterator[io.BufferedReader]:
    """Open a regular file for reading, and nothing else: neither a device, which never ends, nor a pipe, which waits.

    ``inside`` is the descriptor of the folder that a plain name is in. If the file changes while it is open, that is an error.
    """
    name = Path(path).name or str(path)
    try:
        # Looked at before it is opened: opening alone makes some devices act.
        found = os.stat(path, dir_fd=inside, follow_symlinks=follows_links)
    except ValueError as error:
        raise UntrustedFileError(f"{printable(name, 300)} is not a file name: {error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise UntrustedFileError(
            f"{printable(name, 300)} is not a regular file; links, pipes, devices and folders are not read"
        )
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follows_links else os.O_NOFOLLOW)
    with open(os.open(path, flags, dir_fd=inside), "rb") as stream:
        before = os.fstat(stream.fileno())
        if not stat.S_ISREG(before.st_mode) or identity(before) != identity(found):
            raise UntrustedFileError(f"{printable(name, 300)} changed while it was opened")
        if largest is not None and before.st_size > largest:
            raise UntrustedFileError(f"{printable(name, 300)} has {before.st_size} bytes, and may have {largest}")
        if size is not None and before.st_size != size:
            raise UntrustedFileError(f"{printable(name, 300)} has {before.st_size} bytes, and should have {size}")
        yield stream
        if identity(os.fstat(stream.fileno())) != identity(before):
            raise UntrustedFileError(f"{printable(name, 300)} changed while it was read")


Identity = tuple[int, int, int, int, int]


def identity(found: os.stat_result) -> Identity:
    """Which file this is, and which content it has, as far as the file system tells."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_all(stream: io.BufferedReader, largest: int) -> bytes:
    """All of a file, which is not read further than to ``largest`` even if it grows."""
    parts, left = [], largest + 1
    while left and (part := stream.read(min(left, 2**20))):
        parts.append(part)
        left -= len(part)
    if not left:
        raise UntrustedFileError(f"it has more than {largest} bytes")
    return b"".join(parts)


def read_json(
    path: str | os.PathLike[str], *, largest: int, inside: int | None = None, follows_links: bool = False
) -> Any:
    """A JSON file. ValueError if it is none: also for names that stand twice, NaN and Infinity, and deep nesting."""
    with open_regular(path, inside=inside, follows_links=follows_links, largest=largest) as stream:
        return parse_json(read_all(stream, largest))


def parse_json(data: bytes | str) -> Any:
    try:
        return json.loads(data, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice in one object")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[io.BufferedWriter]:
    """Write a file that gets its name when all of it is there. Until then, and if anything fails, what is there stays.

    A name takes the place of whatever has it, so a device, a pipe or a folder is refused: it would be gone.
    """
    target = Path(path)
    try:
        unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    except ValueError as error:
        raise UntrustedFileError(f"{printable(target)} is not a file name") from error
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(target).st_mode):
            raise UntrustedFileError(f"{printable(target)} is not a regular file, and is not replaced by one")
    try:
        with unfinished.open("wb") as stream:
            yield stream
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
