"""Taking a trace: what is noted of the model meanwhile, and of the run. What the engine does is noted by the engine itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolap._logging import logger_of
from zerolap._torch import queue_callback
from zerolap.observe.recorder import Noted, Recorder, Trace
from zerolap.observe.timeline.record import Bucket, HostClock, RankTrace
from zerolap.runtime.engine import Engine

logger = logger_of(__name__)


@contextmanager
def take(
    engine: Engine, *, ranks: Sequence[int], module: nn.Module | None, path: str | os.PathLike[str] | None
) -> Iterator[Trace]:
    """Trace an engine, and the phases of the module it trains. Begins when nothing is under way."""
    if engine.probe.trace is not None:
        raise RuntimeError("a trace is already being taken")
    if path is not None:
        if Path(path).exists() and not Path(path).is_dir():
            raise ValueError(f"path must be a folder, for every rank writes a file of its own; {path} is a file")
        Path(path).mkdir(parents=True, exist_ok=True)  # now: what cannot be written is said before hours of training
    engine.raise_if_failed()
    engine.wait_for_params()
    names: dict[Tensor, str] = {param: name for name, param in module.named_parameters()} if module is not None else {}
    on_host = not engine.common.adapter.capabilities.futures_complete_at_enqueue
    recorder = Recorder(engine.common.adapter, names=names, has_witness=on_host)
    recorder.update = engine.probe.num_backwards
    trace = Trace(recorder, lambda: _facts(engine, ranks, names))
    with ExitStack() as hooks:
        if module is not None:
            phases = _Phases(recorder)
            hooks.callback(module.register_forward_pre_hook(phases.forward_begins, prepend=True).remove)
            hooks.callback(module.register_forward_hook(phases.forward_ended, prepend=True).remove)
        engine.probe.trace = recorder
        try:
            yield trace
        finally:
            engine.probe.trace = None
            recorder.close()
            if (
                path is not None and engine.common.failures.first is None
            ):  # or a device may never get to what it was given
                written = trace.save(path)
                logger.info("%s; written to %s", trace.verdict(), written)


def _facts(engine: Engine, ranks: Sequence[int], names: dict[Tensor, str]) -> RankTrace:
    """All of a trace but its times."""
    adapter, world_size = engine.common.adapter, engine.books.world_size
    device_name = _name_of(engine.books.device)
    return RankTrace(
        rank=dist.get_rank(),
        ranks=tuple(ranks),
        run=engine.run_name,
        clock=HostClock(host="", begin=0.0, unix=0.0),
        seconds=0.0,
        spans=(),
        buckets=tuple(
            Bucket(
                num_bytes=sum(param.nbytes for param in bucket.params),
                params=tuple(names.get(param, "?") for param in bucket.params),
                is_shared=bucket.owners is not None
                and len({owner for owner, pieces in bucket.owners.segments() if pieces}) == world_size,
            )
            for bucket in engine.layout
        ),
        about={
            "schedule": engine.machine.schedule.value,
            "gather": engine.machine.gather.value,
            "adapter": adapter.name,
            "device": device_name,
            "torch": torch.__version__,
        },
        is_simulated="simulated" in device_name,
    )


def _name_of(device: torch.device) -> str:
    module = getattr(torch, device.type, None)
    name = getattr(module, "get_device_name", None)
    return str(name(device)) if callable(name) else device.type


class _Phases:
    """Notes when the model computes. Its methods are hooks of the model while the trace is taken; a copy's do nothing."""

    def __init__(self, trace: Recorder | None = None) -> None:
        self._trace = trace
        self._forward: Noted | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (_Phases, ())

    @property
    def _is_on(self) -> bool:
        # A compiled forward has no place for hooks: the compiler drops them where this is false.
        return not torch.compiler.is_compiling() and self._trace is not None and self._trace.is_on

    def forward_begins(self, module: nn.Module, args: Any) -> None:
        if self._is_on and self._trace is not None:
            self._forward = self._trace.begin("forward", ahead=1)

    def forward_ended(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_on or self._trace is None or self._forward is None:
            return
        self._trace.end(self._forward)
        self._forward = None
        differentiable = _first_differentiable(output)
        if differentiable is not None:
            differentiable.register_hook(self.backward_begins)  # type: ignore[no-untyped-call]  # torch's

    def backward_begins(self, grad: Tensor) -> None:
        trace = self._trace
        if trace is not None and trace.is_on:
            backward = trace.begin("backward", ahead=1)
            queue_callback(lambda: trace.end(backward))


def _first_differentiable(output: Any) -> Tensor | None:
    """The first tensor of a model's output that a backward can start from."""
    if isinstance(output, Tensor):
        return output if output.requires_grad else None
    if isinstance(output, dict):
        output = list(output.values())
    for each in output if isinstance(output, list | tuple) else ():
        found = _first_differentiable(each)
        if found is not None:
            return found
    return None
