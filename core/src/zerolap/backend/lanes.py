"""Lanes and sides: ordered places to run things beside the training thread, and what is in flight there. Not what it is for."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch.futures import Future

from zerolap._public import public
from zerolap.errors import CollectiveError, ZerolapError

T = TypeVar("T")


@public
class Waitable(Protocol):
    def wait(self) -> object: ...


@public
class Pending:
    """A collective under way. Keeps its tensors alive, and knows how to call itself when it fails."""

    __slots__ = ("_finish", "_what", "_works", "sent_bytes", "tensors")

    def __init__(
        self,
        works: Sequence[Waitable],
        *,
        tensors: Sequence[object],
        what: str,
        sent_bytes: int = 0,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._works = works
        self._finish = finish  # what is left to do once everything has arrived
        self.sent_bytes = sent_bytes  # by this rank
        # Held until waited for: freed earlier, the allocator may hand the memory to the next bucket while it is sent.
        self.tensors = tensors
        self._what = what

    def wait(self) -> None:
        """Return when the tensors may be read and written by the caller; CollectiveError if it failed or timed out."""
        try:
            for work in self._works:
                work.wait()
            if self._finish is not None:
                self._finish()
        except CollectiveError:
            raise  # it knows more
        except Exception as error:
            raise CollectiveError(f"{self._what} failed: {error}") from error
        self._works, self._finish, self.tensors = (), None, ()


def start_all(starts: Sequence[Callable[[], Pending]]) -> Pending:
    """Start several collectives, which are waited for as one."""
    pending = [start() for start in starts]
    if len(pending) == 1:
        return pending[0]
    sent_bytes = sum(each.sent_bytes for each in pending)
    return Pending(pending, tensors=(), what="", sent_bytes=sent_bytes)  # those inside say what failed


@public
class Lane(Protocol):
    """Runs what it is given, one after the other, in the order given.

    After a failure a lane runs nothing more: whatever is queued, or comes later, fails with the first error. A future it
    returns can be handed to DDP: waiting for it lets the waiting stream (device) or thread (host) see the result.
    """

    def submit(self, fn: Callable[[], T]) -> Future[T]:
        """Run ``fn`` behind what was submitted before; may return before it has run."""

    def run(self, fn: Callable[[], T]) -> T:
        """Run ``fn`` behind what was submitted before; what the caller does next sees its result."""

    def as_caller(self) -> AbstractContextManager[None]:
        """Inside something that runs here: do the following as if the caller did it, with its memory."""

    def is_caller(self) -> bool:
        """True if a wait here is visible to every later user of the lane."""

    def close(self) -> None:
        """Run nothing more once what was submitted has run; what comes later fails at once."""


@public
class Side(Protocol):
    """Where collectives are started, in order, beside whatever the caller goes on to do."""

    def start(self, fn: Callable[[], Pending]) -> Pending:
        """Call ``fn``, which starts a collective. What it allocates is freed when nothing uses it any more."""


class HostSide:
    """A side for devices without streams, where nothing is used after it was waited for."""

    def start(self, fn: Callable[[], Pending]) -> Pending:
        return fn()


class _Job(NamedTuple):
    fn: Callable[[], object]
    outcome: Future[object]


class _Failure(NamedTuple):
    error: BaseException


def _unwrap(outcome: Future[object]) -> object:
    value = outcome.value()
    if isinstance(value, _Failure):
        raise value.error
    return value


def _raising(outcome: Future[object]) -> Future[Any]:
    """A future with the same outcome that raises if it is a failure.

    Only an error raised in a callback is one that C++ sees, and DDP waits in C++: set_exception() would hand it the exception
    object as if it were a gradient.
    """
    return outcome.then(_unwrap)


def failed(error: BaseException) -> Future[Any]:
    """A future that raises ``error`` wherever it is waited for."""
    outcome: Future[object] = Future()
    outcome.set_result(_Failure(error))
    return _raising(outcome)


# Of all lanes that are open. A thread that comes back from C++ while the interpreter ends takes the process down with it, so it
# is given a moment to end by itself: the last job's waiter may be told before the lane has quite finished with it. So are the
# backend's own threads, which cannot be joined: one that has just called a future's callback has yet to drop it, and on a busy
# machine it may be kept from that for long.
_open: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[_Job | None]] = weakref.WeakKeyDictionary()
_EXIT_SECONDS = 1.0  # one that waits for a peer is left behind
_BUSY_SECONDS = 30.0  # one that computes, or would if there were a core for it, comes back by itself
_STARVED_SECONDS = 5.0  # for threads that are not ours
_CALM_SECONDS = 0.03


@atexit.register
def _end_lanes() -> None:
    threads = dict(_open)
    for jobs in threads.values():
        jobs.put(None)
    start = time.monotonic()
    lane_ran = other_ran = start
    while threads:
        lanes = {thread.native_id for thread in threads if thread.is_alive()}
        now, running = time.monotonic(), _running_threads()
        lane_ran = now if lanes & running else lane_ran
        other_ran = now if running - lanes else other_ran
        if now < lane_ran + _CALM_SECONDS:
            allowed = _BUSY_SECONDS
        elif now < other_ran + _CALM_SECONDS:
            allowed = _STARVED_SECONDS
        else:
            allowed = _EXIT_SECONDS if lanes else 0.0
        if now >= start + allowed:
            return
        time.sleep(_CALM_SECONDS / 6)  # others may have the interpreter now


def _running_threads() -> set[int | None]:
    """Threads but this one that run, or would if there were a core for them; none where the system does not tell."""
    states = {}
    for task in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            states[int(task.parent.name)] = task.read_text().rpartition(")")[2].split()[0]
    return {thread for thread, state in states.items() if state == "R" and thread != threading.get_native_id()}


@public
class ThreadLane:
    """A lane for devices without streams: one progress thread.

    The thread is a daemon, so that a process whose training loop has raised can end while the lane still waits for a
    peer, and it holds no reference to the lane, so that a lane to which nothing can be submitted any more ends by itself.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # An elementwise kernel splits its work by thread count, and rounds differently at each split's end: a lane that
        # used another count than the training thread would not be bitwise equal to a plain step().
        self._num_done = [0]  # counted by the thread
        self._num_submitted = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=_run_lane,
            args=(self._jobs, self._num_done, torch.get_num_threads()),
            name=f"zerolap-{name}",
            daemon=True,
        )
        self._thread.start()
        _open[self._thread] = self._jobs
        self._close = weakref.finalize(self, self._jobs.put, None)

    def submit(self, fn: Callable[[], T]) -> Future[T]:
        job = _Job(fn, Future())
        promise: Future[T] = _raising(job.outcome)
        with self._lock:  # or a job could get behind the end of the queue, where it would wait for ever
            if self._is_closed:
                return failed(_closed())
            self._num_submitted += 1
            self._jobs.put(job)
        return promise

    def run(self, fn: Callable[[], T]) -> T:
        """What ``fn`` raises is raised here as it is: a future alone would turn it into a RuntimeError."""
        if self._is_closed:
            raise _closed()
        caught: list[BaseException] = []

        def noting() -> T:
            try:
                return fn()
            except BaseException as error:
                caught.append(error)
                raise

        try:
            return self.submit(noting).wait()  # each wait of what runs there has a limit of its own
        except RuntimeError:
            if not caught:
                raise
            raise caught.pop() from None

    def as_caller(self) -> AbstractContextManager[None]:
        return nullcontext()  # memory belongs to no lane

    def is_caller(self) -> bool:
        return True  # what one thread has waited for is there for all

    def close(self) -> None:
        """End the thread once what is queued has run: before this returns if all of it has. Harmless when called twice."""
        with self._lock:
            self._is_closed = True
            self._close()
        is_idle = self._num_done[0] == self._num_submitted
        if is_idle and threading.current_thread() is not self._thread:
            self._thread.join(_EXIT_SECONDS)


def _closed() -> ZerolapError:
    return ZerolapError("this lane is closed and runs nothing more: what it was for was detached, or has failed")


def forget_locals(error: BaseException | None) -> None:
    """Keep where an error came from, but not the variables there: an engine among them would keep its own lane open."""
    seen: set[BaseException] = set()  # a chain of causes may be a circle
    while error is not None and error not in seen:
        seen.add(error)
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def forget_frames(error: BaseException | None) -> None:
    """Keep where an error came from as text only: even a frame without variables holds its function, and all that it closes over."""
    seen: set[BaseException] = set()
    while error is not None and error not in seen:
        seen.add(error)
        if error.__traceback__ is not None:
            if hasattr(error, "add_note"):  # Python 3.10 has no notes
                error.add_note("It came from:\n" + "".join(traceback.format_tb(error.__traceback__)).rstrip())
            error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _run_lane(jobs: queue.SimpleQueue[_Job | None], num_done: list[int], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    failure: _Failure | None = None
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            outcome = job.outcome
            value: object = failure
            if failure is None:
                try:
                    value = job.fn()
                except BaseException as error:  # handed on to whoever waits: a thread has no caller to raise to
                    forget_locals(error)
                    value = _Failure(error)
                    # For those behind it, in words: the error itself will know whoever it is raised to, and keep them alive.
                    failure = _Failure(RuntimeError(f"{type(error).__name__}: {error}"))
            # Dropped before anyone is told: whoever is told may expect that nothing here holds on to the engine any more.
            del job
            num_done[0] += 1
            outcome.set_result(value)
            del outcome, value


class Waiter(Generic[T]):
    """Waits for a future with a time limit, which futures themselves do not have."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future
        self._done = threading.Event()
        future.add_done_callback(lambda _: self._done.set())

    def wait(self, timeout: float) -> T:
        """Return the future's value or raise its error; TimeoutError after ``timeout`` seconds."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"not done after {timeout:.0f} s")
        return self._future.wait()
