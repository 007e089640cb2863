"""Sharded optimizers for data-parallel training, overlapped with backward, on any backend of torch.distributed.

Public is what is listed here, and ``zerolap.checkpoint``. Importing this imports nothing else: a name comes when it is first used, so
that forecasts, traces and the command line work where torch is not installed.
"""

from typing import TYPE_CHECKING

from zerolap._public import lazily

if TYPE_CHECKING:
    from zerolap import checkpoint as checkpoint
    from zerolap._logging import log_to_stderr as log_to_stderr
    from zerolap.api.attach import attach as attach
    from zerolap.api.grad_scaler import GradScaler as GradScaler
    from zerolap.api.handle import Handle as Handle
    from zerolap.api.hooks import hook_with_zero_step as hook_with_zero_step
    from zerolap.api.hooks import hook_with_zero_step_interleaved as hook_with_zero_step_interleaved
    from zerolap.api.optimizer import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
    from zerolap.api.shard import shard as shard
    from zerolap.api.tracing import trace as trace
    from zerolap.backend.base import Adapter as Adapter
    from zerolap.backend.base import Capabilities as Capabilities
    from zerolap.backend.base import GroupSpec as GroupSpec
    from zerolap.backend.base import Recycler as Recycler
    from zerolap.backend.lanes import Lane as Lane
    from zerolap.backend.lanes import Pending as Pending
    from zerolap.backend.lanes import Side as Side
    from zerolap.backend.lanes import ThreadLane as ThreadLane
    from zerolap.backend.lanes import Waitable as Waitable
    from zerolap.backend.parts import Parts as Parts
    from zerolap.backend.registry import AdapterInfo as AdapterInfo
    from zerolap.backend.registry import adapters as adapters
    from zerolap.backend.registry import find_adapter as find_adapter
    from zerolap.backend.registry import installed_adapters as installed_adapters
    from zerolap.backend.registry import load_adapter as load_adapter
    from zerolap.backend.streams import StreamAdapter as StreamAdapter
    from zerolap.errors import AdapterNotFoundError as AdapterNotFoundError
    from zerolap.errors import CollectiveError as CollectiveError
    from zerolap.errors import IllegalEventError as IllegalEventError
    from zerolap.errors import ZerolapError as ZerolapError
    from zerolap.observe.recorder import Trace as Trace
    from zerolap.observe.stats import Stats as Stats
    from zerolap.observe.stats import StatsWriter as StatsWriter
    from zerolap.observe.timeline.record import Span as Span
    from zerolap.observe.timeline.verdict import Exposure as Exposure
    from zerolap.observe.timeline.verdict import Verdict as Verdict
    from zerolap.schedule.wire_format import Wire as Wire

__version__ = "0.1.0"

_HOMES = {
    "Adapter": "zerolap.backend.base",
    "AdapterInfo": "zerolap.backend.registry",
    "AdapterNotFoundError": "zerolap.errors",
    "Capabilities": "zerolap.backend.base",
    "CollectiveError": "zerolap.errors",
    "Exposure": "zerolap.observe.timeline.verdict",
    "GradScaler": "zerolap.api.grad_scaler",
    "GroupSpec": "zerolap.backend.base",
    "Handle": "zerolap.api.handle",
    "IllegalEventError": "zerolap.errors",
    "Lane": "zerolap.backend.lanes",
    "Parts": "zerolap.backend.parts",
    "Pending": "zerolap.backend.lanes",
    "Recycler": "zerolap.backend.base",
    "Side": "zerolap.backend.lanes",
    "Span": "zerolap.observe.timeline.record",
    "Stats": "zerolap.observe.stats",
    "StatsWriter": "zerolap.observe.stats",
    "StreamAdapter": "zerolap.backend.streams",
    "ThreadLane": "zerolap.backend.lanes",
    "Trace": "zerolap.observe.recorder",
    "Verdict": "zerolap.observe.timeline.verdict",
    "Waitable": "zerolap.backend.lanes",
    "Wire": "zerolap.schedule.wire_format",
    "ZeroRedundancyOptimizer": "zerolap.api.optimizer",
    "ZerolapError": "zerolap.errors",
    "adapters": "zerolap.backend.registry",
    "attach": "zerolap.api.attach",
    "find_adapter": "zerolap.backend.registry",
    "hook_with_zero_step": "zerolap.api.hooks",
    "hook_with_zero_step_interleaved": "zerolap.api.hooks",
    "installed_adapters": "zerolap.backend.registry",
    "load_adapter": "zerolap.backend.registry",
    "log_to_stderr": "zerolap._logging",
    "shard": "zerolap.api.shard",
    "trace": "zerolap.api.tracing",
}

__all__ = [*_HOMES]

__getattr__ = lazily(__name__, {**_HOMES, "checkpoint": "zerolap.checkpoint"})
