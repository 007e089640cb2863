"""What one rank's trace holds, and its file: one JSON object, written whole or not at all. Nothing is computed here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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
class Clock:
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
    clock: Clock
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
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
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
    return [_read_file(path) for path in files]


def _read_file(path: Path) -> RankTrace:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise TraceError(f"{path}: cannot be parsed as JSON: {error}") from error
    if not isinstance(content, dict) or "zerolap_trace" not in content:
        raise TraceError(f"{path}: is no trace of zerolap; handle.trace(path=...) writes one")
    if content["zerolap_trace"] != SCHEMA:
        raise TraceError(
            f"{path}: has schema {content['zerolap_trace']!r}, and this version of zerolap reads {SCHEMA}: "
            "use the version that wrote it"
        )
    try:
        return _from_json(content)
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: is damaged: {type(error).__name__}: {error}") from error


def _from_json(content: dict[str, Any]) -> RankTrace:
    clock, rank, ranks = content["clock"], int(content["rank"]), tuple(map(int, content["ranks"]))
    if rank not in ranks:
        raise ValueError(f"rank {rank} is none of {ranks}")
    return RankTrace(
        rank=rank,
        ranks=ranks,
        run=str(content["run"]),
        clock=Clock(host=str(clock["host"]), begin=float(clock["begin"]), unix=float(clock["unix"])),
        seconds=float(content["seconds"]),
        spans=tuple(_span(*row) for row in content["spans"]),
        buckets=tuple(
            Bucket(
                num_bytes=int(each["num_bytes"]),
                params=tuple(map(str, each["params"])),
                is_shared=bool(each["is_shared"]),
            )
            for each in content["buckets"]
        ),
        about={str(key): str(value) for key, value in content["about"].items()},
        is_simulated=bool(content["is_simulated"]),
    )


def _span(kind: str, bucket: int | None, start: int, end: int, update: int, name: str | None) -> Span:
    if kind not in KINDS or not 0 <= start <= end or not (bucket is None or bucket >= 0):
        raise ValueError(f"no such span: {[kind, bucket, start, end, update, name]}")
    return Span(kind, bucket, start / 1e6, end / 1e6, int(update), None if name is None else str(name))
