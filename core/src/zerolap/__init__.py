"""Sharded optimizers for data-parallel training, overlapped with backward, on any backend of torch.distributed."""

import importlib
import importlib.util
import sys
from typing import Any

if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == "zerolap" and importlib.util.find_spec("torch") is None:
    # `python -m zerolap` comes here before it comes to __main__: the command can say what is missing, the imports below cannot.
    from zerolap_cli import main

    main()

from zerolap.adapter import Adapter, Capabilities, GroupSpec
from zerolap.attach import GradScaler, Handle, attach, trace
from zerolap.errors import AdapterNotFoundError, CollectiveError, IllegalEventError, ZerolapError
from zerolap.hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from zerolap.lane import Lane, Side, ThreadLane
from zerolap.logs import log_to_stderr
from zerolap.metrics import Stats, StatsWriter
from zerolap.optimizer import ZeroRedundancyOptimizer
from zerolap.parts import Parts
from zerolap.pending import Pending, Waitable
from zerolap.registry import AdapterInfo, adapters, find_adapter, installed_adapters, load_adapter
from zerolap.stream import StreamAdapter
from zerolap.tracing import Trace
from zerolap_timeline.record import Span
from zerolap_timeline.verdict import Exposure, Verdict

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "AdapterInfo",
    "AdapterNotFoundError",
    "Capabilities",
    "CollectiveError",
    "Exposure",
    "GradScaler",
    "GroupSpec",
    "Handle",
    "IllegalEventError",
    "Lane",
    "Parts",
    "Pending",
    "Side",
    "Span",
    "Stats",
    "StatsWriter",
    "StreamAdapter",
    "ThreadLane",
    "Trace",
    "Verdict",
    "Waitable",
    "ZeroRedundancyOptimizer",
    "ZerolapError",
    "adapters",
    "attach",
    "find_adapter",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "installed_adapters",
    "load_adapter",
    "log_to_stderr",
    "trace",
]


def __getattr__(name: str) -> Any:
    """``zerolap.checkpoint`` when it is first used: torch.distributed.checkpoint takes a second to import."""
    if name == "checkpoint":
        return importlib.import_module("zerolap.checkpoint")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
