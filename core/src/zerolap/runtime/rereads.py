"""Parameters that a backward reads again after it has updated them: found in the first updates, and refused. Updates nothing.

[Note: what may be read again] A bucket is updated inside backward once the gradients of all its parameters are complete, that is, when
every node of the graph through which they have gradients has run. What backward computes again (torch.utils.checkpoint) it computes
before the gradients of that part, so parameters that are used there *with* a gradient are always read in time, however often they are
used and however regions are nested. One that is used there as a constant (``.detach()``, ``.data``, under ``no_grad``, in a comparison)
has no node there to wait for: its gradient may be complete, and its value new, when the region is computed again.

So for some backwards of every layout, from the first bucket to the end, modules look at who reads their parameters. No forward ever
runs with them, and later backwards have no trace of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.autograd.function
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from zerolap.errors import ZerolapError
from zerolap.runtime.engine import Engine
from zerolap.schedule.machine import Phase, Schedule

_NUM_WATCHED = 3  # backwards, of each layout
# Who computes something again: torch's own checkpointing, or the backward of a function written in Python.
_RECOMPUTING = frozenset({torch.utils.checkpoint.__file__, torch.autograd.function.__file__})


class _WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's parameters, each looked at before it is handed out. A copy is an ordinary dict."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], look: Callable[[Tensor], None]) -> None:
        super().__init__(parameters)
        self.look = look

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None:
            self.look(param)
        return param

    def __reduce__(self) -> Any:
        return dict, (list(self.items()),)


def _before_forward(module: nn.Module, args: Any) -> None:
    """For modules that keep references of their own, as recurrent layers do."""
    if isinstance(module._parameters, _WatchedParameters):
        for param in module._parameters.values():
            if param is not None:
                module._parameters.look(param)


class _LookingWaiter:
    """Where modules wait for their parameters already: looks, and lets the other one wait."""

    def __init__(self, waiter: Any, look: Callable[[Tensor], None]) -> None:
        self._waiter = waiter
        self._look = look

    def wait_for_param(self, param: Tensor) -> None:
        self._look(param)
        self._waiter.wait_for_param(param)

    def wait_for_params(self) -> None:
        self._waiter.wait_for_params()


class Rereads:
    """Watches one DDP's module while its engine updates inside backward. On backward's thread only."""

    def __init__(self, module: nn.Module, engine: Engine) -> None:
        self._module = module
        self._engine = engine
        self._plan: object = None  # of the layout that is watched
        self._num_left = 0
        self.is_watching = False
        self._bucket_of: dict[Tensor, int] = {}  # of parameters whose buckets are ready
        self._used: set[Tensor] = set()  # those of them that have a gradient: the others are left alone by the update
        self._newest = -1
        self._is_updating = False
        self._siblings: dict[Tensor, tuple[Tensor, ...]] = {}
        self._undo: list[Callable[[], object]] = []

    def bucket_ready(self, bucket: GradBucket) -> None:
        """To be told of buckets that the engine has taken: the first of every backward with updates inside, and all while watching."""
        index, is_last = bucket.index(), bucket.is_last()
        if index == 0:
            self._begin()
        if not self.is_watching:
            return
        for param in bucket.parameters():
            self._bucket_of[param] = index
            if param.grad is not None:
                self._used.add(param)
        self._newest = index
        self._is_updating = is_last or self._engine.schedule is Schedule.INTERLEAVED
        if is_last:
            torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def end(self) -> None:
        """Leave the modules as they were."""
        for undo in self._undo:
            undo()
        self._undo, self.is_watching = [], False
        self._bucket_of, self._used, self._siblings = {}, set(), {}
        self._is_updating = False

    def _begin(self) -> None:
        engine = self._engine
        if self.is_watching:
            self.end()  # of a backward that was not finished
        if engine.schedule is Schedule.ON_STEP or engine.phase is Phase.DDP_HAS_REBUILT_BUCKETS:
            return  # nothing is updated inside this backward, or nothing before its end
        if engine._plan is not self._plan:
            self._plan, self._num_left = engine._plan, _NUM_WATCHED
        if self._num_left == 0 or torch._C._current_graph_task_id() == -1:  # -1 for a rank that has joined
            return
        self._num_left -= 1
        modules = list(self._module.modules())
        if not any(map(is_compiled, modules)):
            self.is_watching = True
            for module in modules:
                if module._parameters:
                    self._watch(module)

    def _watch(self, module: nn.Module) -> None:
        before = module._parameters
        params = tuple(param for param in dict.values(before) if param is not None and param.requires_grad)
        for param in params:
            self._siblings[param] = (*self._siblings.get(param, ()), *params)
        waiter = getattr(before, "_waiter", None)
        if waiter is not None:
            before._waiter = _LookingWaiter(waiter, self._look)  # type: ignore[attr-defined]
            self._undo.append(partial(setattr, before, "_waiter", waiter))
            return
        hook = module.register_forward_pre_hook(_before_forward)
        module._parameters = _WatchedParameters(before, self._look)
        self._undo += [hook.remove, partial(setattr, module, "_parameters", before)]

    def _look(self, param: Tensor) -> None:
        if not (self._is_updating and param in self._used and torch._C._current_graph_task_id() != -1):
            return
        # A bias that is added last has its gradient before its layer's weight has, and is read with it: nothing depends on its value.
        if self._bucket_of[param] == self._newest and not self._bucket_of.keys() >= {*self._siblings[param]}:
            return
        if not _is_recomputing():
            return  # a hook that looks at a gradient, for instance
        self.end()
        name = next(name for name, each in self._module.named_parameters() if each is param)
        error = ZerolapError(
            f"{name} is read again inside backward after its gradient was complete, and may have its new value there: what is computed "
            "again (activation checkpointing), or a function's backward, uses it as a constant, by detach(), .data or under no_grad(). "
            'Use zerolap.attach(ddp, optimizer, schedule="on_step")'
        )
        self._engine._fail(error, "backward")
        self._engine._raise_failure()  # now, and not when backward ends: what comes of this value is wrong


def _is_recomputing() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":  # a backward inside of one has its own
        if frame.f_code.co_filename in _RECOMPUTING:
            return True
        frame = frame.f_back
    return False


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled, by torch.compile or TorchScript: its code looks at parameters when it is made, not when it runs."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
    )
