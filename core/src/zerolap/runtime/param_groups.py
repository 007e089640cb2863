"""Param groups, and the exposed kind: a dict whose parameters are waited for before it hands them out.

Learning rates and other options are read and set at every step, by schedulers and by us: only ``params`` waits.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import Any

from torch import Tensor

ParamGroup = dict[str, Any]
Options = dict[str, Any]  # a param group without its parameters


NOT_OPTIONS = ("params", "param_names")  # torch keeps both beside the options


def options_of(group: ParamGroup) -> Options:
    """What is told of a group's parameters, without them and without their names."""
    return {key: value for key, value in dict.items(group) if key not in NOT_OPTIONS}


def params_of(group: ParamGroup) -> list[Tensor]:
    """Its parameters, whose values may still be on their way."""
    params: list[Tensor] = dict.__getitem__(group, "params")
    return params


class ExposedGroup(ParamGroup):
    """A param group as the user has it. A copy of it, or one from a file, is an ordinary dict."""

    def __init__(self, group: Mapping[str, Any], wait: Callable[[], None]) -> None:
        super().__init__(group)
        self._wait = wait

    def __getitem__(self, key: str) -> Any:
        if key == "params":
            self._wait()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        if key == "params":
            self._wait()
        return super().get(key, default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        super().setdefault(key, default)
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        if key == "params":
            self._wait()
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        self._wait()
        return super().popitem()

    # A dict's own views have a private type; the abstract ones are as much as a caller may rely on.
    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._wait()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._wait()
        return super().values()

    def __iter__(self) -> Iterator[str]:
        # Not for its own sake: with the inherited one dict(group), {**group} and update(group) would not ask __getitem__.
        return super().__iter__()

    def copy(self) -> ParamGroup:
        return dict(self)

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def __reduce__(self) -> Any:
        return dict, (list(self.items()),)

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.__reduce__()

    def __repr__(self) -> str:
        self._wait()
        return super().__repr__()


def exposed(groups: Sequence[ParamGroup], wait: Callable[[], None]) -> list[ParamGroup]:
    """Groups as users have them, which call ``wait`` before they hand out parameters."""
    return [group if isinstance(group, ExposedGroup) else ExposedGroup(group, wait) for group in groups]
