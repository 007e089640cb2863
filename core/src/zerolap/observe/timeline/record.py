"""What one rank's trace holds, and its file: one JSON object, written atomically. Nothing is computed here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zerolap._public import public
from zerolap.untrusted.files import printable, read_json, written_whole

SCHEMA = 1

# Every kind of span. On the training thread, or its stream:
PHASES = ("forward", "backward", "optimizer")
READY = "ready"  # a bucket's gradients were computed; no length
BLOCKED = "blocked"  # it waited for all that was left of an update; ``name`` says where
USE = "use"  # it waited for one bucket's parameters, which were first used there; ``name`` says by what
# Beside it:
COMMUNICATION = ("reduce", "gather", "agree", "migrate", "check")  # from its start until it was seen to be done
STEP = "step"  # a shard was updated
WAIT = "wait"  # the lane waited for a bucket's collective; ``name`` says which
KINDS = (*PHASES, READY, BLOCKED, USE, *COMMUNICATION, STEP, WAIT)


class TraceError(ValueError):
    """A file that is no trace, or traces that do not belong together."""


@public
class Span(NamedTuple):
    """Something that took time. ``bucket`` is None where it concerns all of them; ``update`` counts from 1."""

    kind: str
    bucket: int | None
    start: float  # seconds since the trace began
    end: float
    update: int = 0
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What a bucket holds."""

    num_bytes: int
    params: tuple[str, ...]
    is_shared: bool  # every rank owns a part of it


@dataclass(frozen=True, slots=True, kw_only=True)
class HostClock:
    """The clock that a trace's moments were taken by. Ranks with the same ``host`` share it."""

    host: str
    begin: float  # seconds on this clock when the trace began
    unix: float  # the same moment by the system's clock, which other hosts have, too


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """All that one rank has noted."""

    rank: int  # of the whole job, as all ranks here
    ranks: tuple[int, ...]  # of all that took part
    run: str  # the same on all ranks, and on no others
    clock: HostClock
    seconds: float  # what happened later, or has not ended by then, is not in the trace
    spans: tuple[Span, ...]
    buckets: tuple[Bucket, ...] = ()
    about: dict[str, str] = field(default_factory=dict)  # schedule, adapter and the like, to be shown
    is_simulated: bool = False


def write(trace: RankTrace, folder: str | os.PathLike[str]) -> Path:
    """Write ``rankN.json`` into the folder; returns where it is."""
    path = Path(folder, f"rank{trace.rank}.json")
    content = asdict(trace) | {
        "zerolap_trace": SCHEMA,
        # In microseconds, as whole numbers: that is what clocks are good for, and a fifth of the size.
        "spans": [
            [span.kind, span.bucket, round(span.start * 1e6), round(span.end * 1e6), span.update, span.name]
            for span in trace.spans
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as stream:
        stream.write(json.dumps(content, separators=(",", ":")).encode())
    return path


def read(paths: Iterable[str | os.PathLike[str]]) -> list[RankTrace]:
    """The traces in these files, and in these folders' ``rank*.json``; TraceError if one is none."""
    files: list[Path] = []
    for each in map(Path, paths):
        found = sorted(each.glob("rank*.json")) if each.is_dir() else [each]
        if not found:
            raise TraceError(f"{each}: there is no rank*.json in this folder; write traces by handle.trace(path=...)")
        files += found
    if not files:
        raise TraceError("no trace was given")
    if len(files) > _MOST_RANKS:
        raise TraceError(f"{len(files)} files were given, and a run has at most {_MOST_RANKS} ranks")
    return [_read_file(path) for path in files]


def _read_file(path: Path) -> RankTrace:
    called = printable(path, 300)
    try:
        content = read_json(path, largest=_LARGEST_FILE, follows_links=True)
    except OSError as error:
        raise TraceError(f"{called}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise TraceError(f"{called}: cannot be parsed as JSON: {printable(error, 300)}") from error
    if not isinstance(content, dict) or "zerolap_trace" not in content:
        raise TraceError(f"{called}: is not a trace of zerolap; handle.trace(path=...) writes one")
    if content["zerolap_trace"] != SCHEMA:
        raise TraceError(
            f"{called}: has schema {printable(repr(content['zerolap_trace']), 100)}, and this version of zerolap reads {SCHEMA}: "
            "use the version that wrote it"
        )
    try:
        return _from_json(content)
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{called}: is damaged: {type(error).__name__}: {printable(error, 300)}") from error


# --- what a file may say: every number has a type and a range, every text is printable ----------------------------------

_LARGEST_FILE = 2**28
_MOST_RANKS = 100_000
_MOST_BUCKETS = 1_000_000
_LONGEST_TEXT = 1000


def _whole(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} is not a whole number from 0 to {most}")
    return value


def _seconds(value: Any, least: float = 0.0) -> float:
    if type(value) not in (int, float) or not least <= value <= 1e12:
        raise ValueError(f"{value!r} is not a moment of a run")
    return float(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is not text")
    return printable(value, _LONGEST_TEXT)


def _list(value: Any, most: int) -> list[Any]:
    if type(value) is not list or len(value) > most:
        raise TypeError(f"there is no list of at most {most} where one should be")
    return value


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _from_json(content: dict[str, Any]) -> RankTrace:
    clock, about, rank = content["clock"], content["about"], _whole(content["rank"], 2**31)
    ranks = tuple(_whole(each, 2**31) for each in _list(content["ranks"], _MOST_RANKS))
    if type(clock) is not dict or type(about) is not dict or len(about) > 100:
        raise TypeError("its clock, or what is said about it, is not an object")
    if rank not in ranks or len(set(ranks)) != len(ranks):
        raise ValueError(f"rank {rank} is none of {ranks[:20]}, or one is there twice")
    return RankTrace(
        rank=rank,
        ranks=ranks,
        run=_text(content["run"]),
        clock=HostClock(
            host=_text(clock["host"]), begin=_seconds(clock["begin"], -1e12), unix=_seconds(clock["unix"], -1e12)
        ),
        seconds=_seconds(content["seconds"]),
        spans=tuple(_span(row) for row in _list(content["spans"], _LARGEST_FILE)),
        buckets=tuple(
            Bucket(
                num_bytes=_whole(each["num_bytes"], 2**63),
                params=tuple(map(_text, _list(each["params"], _MOST_BUCKETS))),
                is_shared=_bool(each["is_shared"]),
            )
            for each in _list(content["buckets"], _MOST_BUCKETS)
        ),
        about={_text(key): _text(value) for key, value in about.items()},
        is_simulated=_bool(content["is_simulated"]),
    )


def _span(row: Any) -> Span:
    match row:
        case [str(kind), bucket, start, end, update, name] if kind in KINDS:
            begin, stop = _seconds(start), _seconds(end)
            number = None if bucket is None else _whole(bucket, _MOST_BUCKETS)
            said = None if name is None else _text(name)
            # What the lane waited for is shown by name, and so must be one.
            if begin <= stop and (kind != WAIT or said in COMMUNICATION):
                return Span(kind, number, begin / 1e6, stop / 1e6, _whole(update, 2**53), said)
    raise ValueError(f"no such span: {printable(repr(row), 200)}")
