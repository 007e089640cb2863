"""What is looked at while training goes on, and refused: gradients that are changed too late, parameters that are read or thawed too late.

Observers: the engine tells them what happens, and they raise or say nothing. No collectives, no updates.

[Note: what may be read again] A bucket is updated inside backward once the gradients of all its parameters are complete, that is, when
every node of the graph through which they have gradients has run. What backward computes again (torch.utils.checkpoint) it computes
before the gradients of that part, so parameters that are used there *with* a gradient are always read in time, however often they are
used and however regions are nested. One that is used there as a constant (``.detach()``, ``.data``, under ``no_grad``, in a comparison)
has no node there to wait for: its gradient may be complete, and its value new, when the region is computed again.

So for some backwards of every layout, from the first bucket to the end, modules look at who reads their parameters. No forward ever
runs with them, and later backwards have no trace of it.

[Note: gradients that are changed too late] Updates inside backward use reduced gradients, which are elsewhere. What is written to ``.grad`` after
backward has no effect, so whoever clips, masks or removes gradients there would train otherwise than with the plain optimizer, and must
be told.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.autograd.function
import torch.utils.checkpoint
from torch import Tensor, nn

from zerolap._torch import (
    ORIGINAL,
    PARAMETERS,
    RUN_BACKWARD,
    GradBucket,
    children_of,
    compiled_call_of,
    current_graph_task_id,
    parameters_of,
    queue_callback,
    version_of,
)
from zerolap.backend.base import Capabilities
from zerolap.errors import ZerolapError
from zerolap.runtime.bucket import Bucket
from zerolap.runtime.common import Common
from zerolap.runtime.shown_gradients import ShownGradients
from zerolap.runtime.state_pieces import strides_in_bucket
from zerolap.schedule.machine import Machine, Phase, Schedule


class _Gradient(NamedTuple):
    """A parameter, its place in the optimizer, and where its gradient lies in DDP's bucket."""

    param: Tensor
    place: int
    bucket: Tensor
    offset: int

    def in_bucket(self) -> Tensor:
        return self.bucket.as_strided(
            self.param.shape, strides_in_bucket(self.param), self.bucket.storage_offset() + self.offset
        )


class GradientWatch:
    """Notes all gradients at the end of backward, and refuses a step() before which one was changed."""

    def __init__(self) -> None:
        self._gradients: Sequence[_Gradient] = ()
        self.noted: list[tuple[int, int] | None] = []  # empty, or None: there is nothing to compare with

    def watch(self, buckets: Sequence[Bucket]) -> None:
        """From now on those of these buckets, which DDP has just filled."""
        self._gradients = [
            _Gradient(param, place, bucket.buffer, offset)
            for bucket in buckets
            for param, place, offset in zip(bucket.params, bucket.places, bucket.offsets, strict=True)
        ]
        self.noted = []

    def note(self) -> None:
        """Addresses and versions only: a gradient that is freed shall be gone."""
        self.noted = [
            (0, 0) if (grad := each.param.grad) is None else (grad.data_ptr(), version_of(grad))
            for each in self._gradients
        ]

    def refuse_changes(self, number: int, num_optimizers: int) -> None:
        """RuntimeError if any of an optimizer's was changed since they were noted. Asked once; all may be cleared, for updates are done."""
        change = self._find_change(number, num_optimizers)
        if change is not None:
            raise RuntimeError(
                f"gradients were changed between backward and step(), which has no effect here: {change}. The update has used the reduced "
                'ones. Use zerolap.attach(ddp, optimizer, schedule="on_step"), with which step() uses what .grad holds'
            )

    def _find_change(self, number: int, num_optimizers: int) -> str | None:
        """What has changed since it was noted, in words; None if nothing has, or if all were cleared and may be."""
        changed, asked = [], []
        for at, (each, noted) in enumerate(zip(self._gradients, self.noted, strict=False)):
            if noted is None or each.place % num_optimizers != number:
                continue
            (memory, version), self.noted[at] = noted, None
            asked.append(each)
            grad = each.param.grad
            if (memory, version) != ((0, 0) if grad is None else (grad.data_ptr(), version_of(grad))):
                changed.append((each, memory))
        if not changed or _are_cleared(asked):
            return None
        found = ((each, _change_of(each, memory)) for each, memory in changed)
        return next(
            (
                f"that of parameter {each.place // num_optimizers}, of shape {tuple(each.param.shape)}, was {how}"
                for each, how in found
                if how
            ),
            None,
        )


def _are_cleared(gradients: Iterable[_Gradient]) -> bool:
    return all(each.param.grad is None or not each.param.grad.any() for each in gradients)


def _change_of(gradient: _Gradient, memory: int) -> str | None:
    grad, bucket = gradient.param.grad, gradient.bucket
    if grad is None:
        return "removed"
    if not memory and grad.numel():
        return "set"
    if bucket.data_ptr() <= memory < bucket.data_ptr() + bucket.nbytes:
        return "written to"  # it lies in the bucket, so there is nothing to compare it with
    # DDP has copied it from its bucket: what was multiplied by one is as it was.
    before = gradient.in_bucket()
    is_same = grad.dtype is before.dtype and torch.allclose(grad, before, rtol=0, atol=0, equal_nan=True)
    return None if is_same else "changed"


class BackwardEnd:
    """Sees a backward end, after DDP has written gradients: raises what has failed in it, or has the gradients shown or noted."""

    def __init__(self, common: Common, machine: Machine, shown: ShownGradients) -> None:
        self._common = common
        self._machine = machine
        self._shown = shown
        self._task = -1  # the backward whose last callback is ours
        self._layout: Sequence[Bucket] = ()
        self._watched: Sequence[Bucket] = ()  # the layout whose gradients are noted
        self.gradients = GradientWatch()

    def expect(self, layout: Sequence[Bucket]) -> None:
        """The end of the backward that runs now, whose buckets are those of ``layout``."""
        self._layout = layout
        self.gradients.noted = []
        task = current_graph_task_id()
        if task in (-1, self._task):
            return  # a rank that has joined runs hooks without a backward
        self._task = task
        # Twice, for DDP queues the callback that waits for our futures and writes gradients after this one.
        queue_callback(self._let_ddp_finish)

    def free_gradients(self) -> None:
        """The training thread has waited for the lane: what was used, and is not freed yet, can be."""
        if self._common.gradient_memory is not None:
            self._common.gradient_memory.end()
            if self._machine.phase is not Phase.REDUCED:
                self.free_shards()

    def free_shards(self) -> None:
        """The same, for mean gradients that an update has used."""
        if self._common.gradient_memory is not None and self._common.failures.first is None:
            for bucket in self._layout:
                if bucket.freed is not None:
                    bucket.freed.used()
            self._common.gradient_memory.settle()
            self._shown.used()

    def forget_gradients(self) -> None:
        """They would keep memory that DDP has given up."""
        self._layout = self._watched = ()
        self.gradients.watch(())

    def _let_ddp_finish(self) -> None:
        probe = self._common.probe
        probe.backward_ended_at = perf_counter()
        if probe.trace is not None:
            probe.backward_ends(probe.trace)
        queue_callback(self._note)

    def _note(self) -> None:
        self._task = -1
        probe = self._common.probe
        # DDP has waited, and has given gradients to parameters. That is its own work, so the lane's end counts.
        start, end = probe.backward_ended_at, min(perf_counter(), probe.lane_ended_at)
        if start < end:
            probe.now.blocked.append((start, end))
        if probe.trace is not None:
            probe.backward_ended(probe.trace)
        self.free_gradients()
        if self._common.failures.first is not None:
            self._common.raise_failure()
        is_on_step = self._machine.schedule is Schedule.ON_STEP
        seen = self._shown if is_on_step else self.gradients
        if self._watched is not self._layout:
            self._watched = self._layout
            seen.watch(self._layout)
        if is_on_step:
            self._shown.show()
        else:
            self.gradients.note()


class Thawed:
    """Refuses parameters that came to require gradients after DDP had made its buckets: nobody would reduce those."""

    def __init__(self) -> None:
        self._outside: Sequence[Tensor] = ()

    def watch(self, params: Sequence[Tensor]) -> None:
        """From now on these, which are in no bucket."""
        self._outside = params
        self.refuse()

    def refuse(self) -> None:
        thawed = sum(param.requires_grad for param in self._outside)
        if thawed:
            raise ValueError(
                f"{thawed} trainable parameters of the optimizer are in none of DDP's buckets, so their gradients are not "
                "reduced; wrap the model in DDP again after changing requires_grad, and attach a new optimizer to it"
            )


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
    parameters = parameters_of(module)
    if isinstance(parameters, _WatchedParameters):
        for param in parameters.values():
            if param is not None:
                parameters.look(param)


class Rereads:
    """Watches one DDP's module while its engine updates inside backward. On backward's thread only."""

    def __init__(self, module: nn.Module, *, common: Common, machine: Machine) -> None:
        self._module = weakref.ref(module)  # which may have hooks that keep the engine
        self._common = common
        self._machine = machine
        self._num_left = 0
        self.is_watching = False
        self._bucket_of: dict[Tensor, int] = {}  # of parameters whose buckets are ready
        self._used: set[Tensor] = set()  # those of them that have a gradient: the others are left alone by the update
        self._newest = -1
        self._is_updating = False
        self._siblings: dict[Tensor, tuple[Tensor, ...]] = {}
        self._undo: list[Callable[[], object]] = []

    def layout_changed(self) -> None:
        """Watch the next backwards."""
        self._num_left = _NUM_WATCHED

    def bucket_ready(self, bucket: GradBucket) -> None:
        """To be told of buckets that the engine has taken: the first of every backward, and all while watching."""
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
        self._is_updating = is_last or self._machine.schedule is Schedule.INTERLEAVED
        if is_last:
            queue_callback(self.end)

    def end(self) -> None:
        """Leave the modules as they were."""
        for undo in self._undo:
            undo()
        self._undo, self.is_watching = [], False
        self._bucket_of, self._used, self._siblings = {}, set(), {}
        self._is_updating = False

    def _begin(self) -> None:
        if self.is_watching:
            self.end()  # of a backward that was not finished
        if self._machine.schedule is Schedule.ON_STEP or self._machine.phase is Phase.RECORDING:
            return  # nothing is updated inside this backward, or nothing before its end
        if self._num_left == 0 or current_graph_task_id() == -1:  # -1 for a rank that has joined
            return
        self._num_left -= 1
        module = self._module()
        assert module is not None, "a backward is that of a model that is alive"
        modules = list(module.modules())
        if not any(map(is_compiled, modules)):
            self.is_watching = True
            for each in modules:
                if parameters_of(each):
                    self._watch(each)

    def _watch(self, module: nn.Module) -> None:
        before = parameters_of(module)
        params = tuple(param for param in dict.values(before) if param is not None and param.requires_grad)
        for param in params:
            self._siblings[param] = (*self._siblings.get(param, ()), *params)
        if hasattr(before, "look") and not isinstance(
            before, _WatchedParameters
        ):  # where modules wait for their parameters already
            before.look = self._look
            self._undo.append(partial(setattr, before, "look", None))
            return
        hook = module.register_forward_pre_hook(_before_forward)
        vars(module)[PARAMETERS] = _WatchedParameters(before, self._look)
        self._undo += [hook.remove, partial(vars(module).__setitem__, PARAMETERS, before)]

    def _look(self, param: Tensor) -> None:
        if not (self._is_updating and param in self._used and current_graph_task_id() != -1):
            return
        # A bias that is added last has its gradient before its layer's weight has, and is read with it: nothing depends on its value.
        if self._bucket_of[param] == self._newest and not self._bucket_of.keys() >= {*self._siblings[param]}:
            return
        if not _is_recomputing():
            return  # a hook that looks at a gradient, for instance
        self.end()
        module = self._module()
        assert module is not None
        name = next(name for name, each in module.named_parameters() if each is param)
        error = ZerolapError(
            f"{name} is read again inside backward after its gradient was complete, and may have its new value there: what is computed "
            "again (activation checkpointing), or a function's backward, uses it as a constant, by detach(), .data or under no_grad(). "
            'Use zerolap.attach(ddp, optimizer, schedule="on_step")'
        )
        self._common.failures.note_at(error, "backward")
        self._machine.failed()
        self._common.close()
        self._common.raise_failure()  # now, and not when backward ends: what comes of this value is wrong


def _is_recomputing() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != RUN_BACKWARD:  # a backward inside of one has its own
        if frame.f_code.co_filename in _RECOMPUTING:
            return True
        frame = frame.f_back
    return False


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled, by torch.compile or TorchScript: its code looks at parameters when it is made, not when it runs."""
    is_made_by_compile = compiled_call_of(module) is not None or ORIGINAL in children_of(module)
    return isinstance(module, torch.jit.ScriptModule) or is_made_by_compile


def refuse_join(schedule: Schedule, capabilities: Capabilities, *, is_tuning: bool) -> None:
    """ZerolapError for what cannot work while ranks make different numbers of iterations."""
    if is_tuning:
        raise ZerolapError(
            'schedule="auto" cannot be tried out under Join, where ranks make different numbers of iterations; train without '
            "Join until handle.is_tuned, or choose a schedule"
        )
    if capabilities.one_issue_order and schedule is Schedule.INTERLEAVED:
        # A rank that has joined updates its buckets at the end, behind all reductions; others gather between them.
        raise ZerolapError(
            "updates interleaved with backward cannot work under Join on this device: ranks that have joined start "
            'collectives in another order than the others; use schedule="after_backward" or hook_with_zero_step'
        )
