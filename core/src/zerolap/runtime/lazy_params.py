"""Waiting for a parameter where it is used: modules whose parameters may still be on their way. Nothing here knows how.

Every way to a parameter through its module waits: attribute access, which is how layers and functions that borrow a child's
weights reach it, iteration (``parameters()``, ``state_dict()``, ``to()``), copying and pickling. Modules that keep
references of their own (recurrent layers do) are covered by a hook before their forward.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, ItemsView, Mapping, ValuesView
from typing import Any

import torch
from torch import Tensor, nn

from zerolap._torch import PARAMETERS, is_compile_wrapper, parameters_of
from zerolap.runtime.bucket import Bucket


class _WaitingParameters(dict[str, nn.Parameter | None]):
    """A module's parameters, each waited for before it is handed out."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], bucket_of: Mapping[Tensor, Bucket]) -> None:
        super().__init__(parameters)
        self._bucket_of = bucket_of  # which changes with the layout
        self.look: Callable[[Tensor], None] | None = None  # told of each that is handed out

    def wait(self) -> None:
        bucket_of, look = self._bucket_of, self.look
        for param in super().values():
            if param is None:
                continue
            if look is not None:
                look(param)
            bucket = bucket_of.get(param)
            if bucket is not None and bucket.gathering is not None:
                bucket.wait(param)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None:
            if self.look is not None:
                self.look(param)
            bucket = self._bucket_of.get(param)
            if bucket is not None and bucket.gathering is not None:
                bucket.wait(param)
        return param

    def get(self, name: str, default: Any = None) -> Any:
        self.wait()
        return super().get(name, default)

    # A dict's own views have a private type; the abstract ones are as much as a caller may rely on.
    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        self.wait()
        return super().items()

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        self.wait()
        return super().values()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        self.wait()  # the copy is of an ordinary module: nobody updates it
        return {name: copy.deepcopy(param, memo) for name, param in super().items()}

    def __reduce__(self) -> Any:
        self.wait()
        return dict, (list(super().items()),)


def wait_on_access(module: nn.Module, bucket_of: Mapping[Tensor, Bucket]) -> Callable[[], None]:
    """From now on whoever reaches a parameter through ``module`` or one of its children waits for it.

    Returns what undoes it.
    """
    children = [child for child in module.modules() if parameters_of(child)]
    for child in children:
        vars(child)[PARAMETERS] = _WaitingParameters(parameters_of(child), bucket_of)
    hooks = [child.register_forward_pre_hook(_before_forward) for child in {module: None, **dict.fromkeys(children)}]

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for child in children:
            vars(child)[PARAMETERS] = dict(parameters_of(child))

    return undo


# Hooks are functions of this file, not closures, so that modules stay picklable. What waits is never traced: a trace would run
# it once and never again. What is traced refuses that, whenever and by whomever the module, or a function round it, was
# compiled: while it is traced it is known to be, and the call that raises becomes a part of what was compiled.
def _before_forward(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        _refuse_compiled()
    parameters = parameters_of(module)
    if isinstance(parameters, _WaitingParameters):  # a copy's are ordinary
        parameters.wait()


# (torch gives its decorator no types.)
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_compiled() -> None:
    raise RuntimeError('gather="lazy" cannot wait inside a compiled forward; use gather="eager" with torch.compile')


def is_called_by_compiled() -> bool:
    """Whether the caller runs inside what torch.compile has made; to be called by what is never traced itself."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if is_compile_wrapper(frame.f_code):
            return True
    return False
