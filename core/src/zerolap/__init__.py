"""Sharded optimizers for data-parallel training, overlapped with backward, on any backend of torch.distributed."""

from zerolap.adapter import Adapter, Capabilities, Pending, Waitable, find_adapter, installed_adapters, load_adapter
from zerolap.attach import GradScaler, Handle, Stats, attach
from zerolap.errors import AdapterNotFoundError, CollectiveError, IllegalEventError, ZerolapError
from zerolap.hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from zerolap.lane import Lane, ThreadLane
from zerolap.optimizer import ZeroRedundancyOptimizer
from zerolap.trace import Span, Trace

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "AdapterNotFoundError",
    "Capabilities",
    "CollectiveError",
    "GradScaler",
    "Handle",
    "IllegalEventError",
    "Lane",
    "Pending",
    "Span",
    "Stats",
    "ThreadLane",
    "Trace",
    "Waitable",
    "ZeroRedundancyOptimizer",
    "ZerolapError",
    "attach",
    "find_adapter",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "installed_adapters",
    "load_adapter",
]
