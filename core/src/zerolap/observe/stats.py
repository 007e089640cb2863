"""Live metrics: what an attached optimizer has done so far, as numbers, and a writer that charts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from zerolap._public import public


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What an attached optimizer has done on this rank so far.

    Milliseconds are None where waiting happens on streams, which the host cannot see: there a trace tells.
    """

    num_updates: int
    num_steps: int
    """Calls of ``step()``."""
    num_skipped: int
    """Updates left out by ``nonfinite="skip"``."""
    num_buckets: int
    sent_bytes: int
    """By this rank to others, for gradients and parameters, over the network or by shared memory; no headers."""
    state_bytes: int
    """Of optimizer state in this rank's shards, master weights included."""
    state_balance: float
    """What the rank with the most parameters has, by the mean of all ranks: 1.0 is even."""
    work_balance: float
    """The same of the work of an update, as it is known of the optimizer's class."""
    flat_bytes: int
    """Of flat buffers, in which the parameters live; instead of their own memory, not beside it."""
    whole_gradient_bytes: int
    """Of gradients that are not sharded: DDP's buckets, and ``.grad`` beside them without ``gradient_as_bucket_view``."""
    gradient_bytes: int
    """Of the mean gradients of this rank's shards."""
    receive_bytes: int
    """That the adapter keeps for what is sent and received, shared memory included."""
    transient_bytes: int
    """The most that gradients took during a step beyond what was held after it, with ``shard_gradients``."""
    process_bytes: int | None
    """Of host memory that this process has now, interpreter, model and activations included; None where the system does not say."""
    process_peak_bytes: int | None
    """The same at most, since the process began."""
    exposed_ms: float | None
    """How long training has waited for communication."""
    communication_ms: float | None
    """How long communication was in flight; of lazy gathers only what was waited for is counted, as the end of the rest is not seen."""

    @property
    def held_bytes(self) -> int:
        """What training takes now beyond the model: state, gradients and what is kept to receive."""
        return self.state_bytes + self.whole_gradient_bytes + self.gradient_bytes + self.receive_bytes

    @property
    def peak_bytes(self) -> int:
        """The same at most, activations left aside."""
        return self.held_bytes + self.transient_bytes

    @property
    def exposed_ms_per_update(self) -> float | None:
        return None if self.exposed_ms is None else self.exposed_ms / max(1, self.num_updates)

    @property
    def hidden_percent(self) -> float | None:
        """Of communication, while training went on; with lazy gathers at least so much. None if that is not known."""
        return _hidden(self.exposed_ms, self.communication_ms)


def _hidden(exposed: float | None, communication: float | None) -> float | None:
    if exposed is None or not communication:
        return None
    return 100 * (1 - min(1.0, exposed / communication))


class ScalarWriter(Protocol):
    """TensorBoard's ``SummaryWriter``, or whatever else takes scalars that way."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> object: ...


class HasStats(Protocol):
    def stats(self) -> Stats: ...


@public
class StatsWriter:
    """Writes a handle's stats as scalars; each point is of the time since the one before.

    Args:
        handle: What ``attach`` returned.
        writer: Anything with ``add_scalar(name, value, step)``, such as TensorBoard's ``SummaryWriter``.
        prefix: Of the scalars' names.
    """

    def __init__(self, handle: HasStats, writer: ScalarWriter, *, prefix: str = "zerolap") -> None:
        self._handle = handle
        self._writer = writer
        self._prefix = prefix
        self._before = handle.stats()

    def write(self, step: int) -> Stats:
        """Write one point; returns the stats it was made from."""
        before, now = self._before, self._handle.stats()
        num_updates = now.num_updates - before.num_updates
        points: dict[str, float | None] = {
            "updates": now.num_updates,
            "skipped": now.num_skipped,
            "balance/state": now.state_balance,
            "balance/work": now.work_balance,
            "memory/state_mb": now.state_bytes / 2**20,
            "memory/flat_mb": now.flat_bytes / 2**20,
            "memory/whole_gradient_mb": now.whole_gradient_bytes / 2**20,
            "memory/gradient_mb": now.gradient_bytes / 2**20,
            "memory/receive_mb": now.receive_bytes / 2**20,
            "memory/held_mb": now.held_bytes / 2**20,
            "memory/peak_mb": now.peak_bytes / 2**20,
            "memory/process_mb": _in_mb(now.process_bytes),
            "memory/process_peak_mb": _in_mb(now.process_peak_bytes),
        }
        if num_updates:
            exposed, communication = (
                _since(before.exposed_ms, now.exposed_ms),
                _since(before.communication_ms, now.communication_ms),
            )
            points["sent_mb_per_update"] = (now.sent_bytes - before.sent_bytes) / 2**20 / num_updates
            points["exposed_ms_per_update"] = None if exposed is None else exposed / num_updates
            points["hidden_percent"] = _hidden(exposed, communication)
        for name, value in points.items():
            if value is not None:
                self._writer.add_scalar(f"{self._prefix}/{name}", value, step)
        self._before = now
        return now


def _in_mb(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / 2**20


def _since(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None else now - before
