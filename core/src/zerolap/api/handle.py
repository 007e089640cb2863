"""What ``attach`` returns."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from zerolap._public import public
from zerolap.api.tuner import Tuner
from zerolap.observe.process import process_memory
from zerolap.observe.recorder import Trace
from zerolap.observe.stats import Stats
from zerolap.observe.trace import take
from zerolap.runtime.bucket import Bucket
from zerolap.runtime.engine import Engine
from zerolap.runtime.grad_tensor import MeanGradient
from zerolap.runtime.safety import Audit, NonFiniteCheck
from zerolap.runtime.wrapped_tensors import num_bytes_of
from zerolap.schedule.balance import Balance, Load


@public
class Handle:
    """What ``attach`` returns."""

    def __init__(
        self,
        optimizers: Sequence[Any],
        engine: Engine,
        *,
        audit: Audit,
        nonfinite: NonFiniteCheck | None,
        tuner: Tuner | None,
        module: nn.Module,
        undo: Callable[[], None],
    ) -> None:
        # Each has the handle, and nothing shall be left to the garbage collector.
        self._optimizers: list[weakref.ref[Any]] = [weakref.ref(each) for each in optimizers]
        self._group = optimizers[0].process_group
        self._engine = engine
        self._audit = audit
        self._nonfinite = nonfinite
        self._tuner = tuner
        self._module = module
        self._undo = undo
        self._balance: tuple[object, Balance] = None, Balance(1.0, 1.0)  # of a layout

    def __repr__(self) -> str:
        engine = self._engine
        wire = "" if engine.common.wire.is_exact else f"wire: {engine.common.wire} (not the numbers of DDP), "
        how = "tuned by auto" if self._tuner is not None and self.is_tuned else "auto" if self._tuner else "chosen"
        return (
            f"<zerolap.Handle: {'attached' if self.is_attached else 'detached'}{', failed' if engine.common.failures.first else ''}; schedule="
            f"{self.schedule!r}, gather={self.gather!r} ({how}), {wire}adapter={engine.common.adapter.name!r}, "
            f"{engine.books.world_size} ranks, {len(engine.layout)} buckets>"
        )

    @property
    def is_attached(self) -> bool:
        """Whether updates are still overlapped by this ``attach``."""
        return getattr(self._optimizers[0](), "_engine", None) is self._engine

    @property
    def schedule(self) -> str:
        """The schedule in use, as ``attach`` takes it."""
        return self._engine.machine.schedule.value

    @property
    def gather(self) -> str:
        """The gather in use, as ``attach`` takes it."""
        return self._engine.machine.gather.value

    @property
    def is_tuned(self) -> bool:
        """Whether schedule, gather and buckets stay as they are; with ``schedule="auto"`` that takes some iterations."""
        return self._tuner is None or self._tuner.is_done

    def finish(self) -> None:
        """Wait for all parameters that are still on their way."""
        self._engine.raise_if_failed()
        self._engine.wait_for_params()

    def detach(self) -> None:
        """Undo ``attach``: DDP averages gradients as usual again, and threads and groups are given up.

        Parameters and optimizer states stay as they are, for ``consolidate_state_dict`` or another ``attach`` of the same
        optimizer. Called by all ranks, between two iterations. Harmless when called twice, or after a failure.
        """
        if not self.is_attached:
            return
        has_failed = self._engine.common.failures.first is not None
        try:
            if not has_failed:
                self.finish()
        finally:
            for optimizer in filter(None, (each() for each in self._optimizers)):
                optimizer._engine = optimizer._handle = None
            with suppress(Exception) if has_failed else nullcontext():  # what is broken cannot be closed in order
                self._undo()

    def trace(self, path: str | os.PathLike[str] | None = None) -> AbstractContextManager[Trace]:
        """Note when each bucket's gradients were ready, its reduction, update and gathering began and ended, and who waited.

        Args:
            path: A folder, to which each rank writes a file at the end; ``zerolap trace PATH`` shows them all. Default: none is written.
        """
        if not self.is_attached:
            raise RuntimeError("there is nothing to trace: this was detached")
        ranks = dist.get_process_group_ranks(self._group)
        return take(self._engine, ranks=ranks, module=self._module, path=path)

    def audit(self) -> None:
        """Compare all parameters with the other ranks', which call this, too; raises on all ranks if any differ."""
        if not self.is_attached:
            raise RuntimeError("there is nothing to audit by: this was detached; attach again, or audit before")
        self._audit.run()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the mean gradients of all optimizers together, and return their norm before. Called by all ranks, with
        ``schedule="on_step"``, between backward and ``step()``."""
        gradients = self._engine.gradients.usable_for("clipping")
        return gradients.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the mean gradients of all parameters, for a log. Called by all ranks.

        With ``schedule="on_step"`` of those that the next ``step()`` uses; else of the last update's, which needs
        ``attach(..., track_grad_norm=True)``.
        """
        return self._engine.gradients.norm(norm_type)

    def mean_gradient(self, param: Tensor) -> Tensor:
        """The mean gradient of one parameter, whole, as the next ``step()`` uses it. Called by all ranks, with ``schedule="on_step"``."""
        return self._engine.gradients.usable_for("collecting a gradient").mean_of(param)

    def refresh_masters(self) -> None:
        """Take over parameters that were set by hand; ``load_state_dict`` of the module does this by itself."""
        refresh_masters(self._engine)

    def stats(self) -> Stats:
        """Updates, bytes, memory, and how long training has waited; for a log or a chart. Waits for nothing."""
        engine, probe, layout = self._engine, self._engine.probe, self._engine.layout
        memory = engine.common.gradient_memory
        if self._balance[0] is not layout:
            self._balance = layout, _balance_of(engine)
        balance = self._balance[1]
        states = [state for local in engine.books.locals for state in local.states().values()]
        process = process_memory()
        return Stats(
            num_updates=probe.num_updates,
            num_steps=probe.num_steps,
            num_skipped=0 if self._nonfinite is None else self._nonfinite.num_skipped,
            num_buckets=len(layout),
            sent_bytes=probe.sent_bytes,
            state_bytes=sum(num_bytes_of(t) for state in states for t in state.values() if isinstance(t, Tensor)),
            state_balance=balance.state,
            work_balance=balance.work,
            flat_bytes=sum(bucket.flat.buffer.nbytes for bucket in engine.installed if bucket.flat is not None),
            whole_gradient_bytes=sum(map(_whole_gradient_bytes, layout)) + (0 if memory is None else memory.kept_bytes),
            gradient_bytes=sum(map(_shard_gradient_bytes, layout)),
            receive_bytes=engine.common.adapter.kept_bytes,
            transient_bytes=0 if memory is None else memory.most_transient_bytes,
            process_bytes=process.now,
            process_peak_bytes=process.peak,
            exposed_ms=1e3 * probe.exposed_seconds if probe.has_times else None,
            communication_ms=1e3 * probe.communication_seconds if probe.has_times else None,
        )


def _balance_of(engine: Engine) -> Balance:
    """Of what ranks own in the buckets at hand: a part of a parameter counts as that part of it."""
    books = engine.books
    held = [Load(0, 0)] * books.world_size
    for bucket in engine.layout:
        param_at = dict(zip(bucket.places, bucket.params, strict=True))
        for owner, pieces in bucket.owners.segments() if bucket.owners is not None else ():
            for place, start, stop in pieces:
                param = param_at[place]
                num_bytes, work = books.books[books.number_of(place)].load_of(param)
                part = (stop - start) / max(1, param.numel())
                held[owner] = Load(
                    held[owner].num_bytes + round(num_bytes * part), held[owner].work + round(work * part)
                )
    return Balance.of(held)


def _whole_gradient_bytes(bucket: Bucket) -> int:
    """Of a bucket's gradients that every rank has: DDP's own memory, and gradients that are not views of it."""
    is_there = bucket.freed is None or bucket.freed.whole.is_there
    ours = bucket.buffer.untyped_storage().data_ptr()
    grads = (param.grad for param in bucket.params)
    own = (grad for grad in grads if grad is not None and not isinstance(grad, MeanGradient))
    beside = sum(grad.nbytes for grad in own if grad.untyped_storage().data_ptr() != ours)
    return beside + (bucket.buffer.nbytes if is_there else 0)


def _shard_gradient_bytes(bucket: Bucket) -> int:
    """Of the mean gradients that this rank keeps of a bucket, and of what they are cast to."""
    if bucket.freed is not None:
        return bucket.freed.num_shard_bytes
    cast = None if bucket.shard is None else bucket.shard.cast
    return sum(each.nbytes for each in (bucket.shard_gradients, cast) if each is not None)


def refresh_masters(engine: Engine) -> None:
    """Take the parameters' values for the master weights: they were loaded, or set by hand."""
    engine.wait_for_params()
    for local in engine.books.locals:
        local.refresh_masters()
