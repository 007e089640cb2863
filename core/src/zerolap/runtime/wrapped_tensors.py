"""Tensors that are made of others, such as the quantised states of low-bit optimizers: taken apart to travel, and put together again.

By torch's own protocol for such classes, ``__tensor_flatten__``. A class is never looked up by a name that came from elsewhere: what
arrives is put together as the optimizer's own state of that parameter is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor, nn

_PARTS: Final = "parts of a tensor"  # the one key of what a tensor was taken apart to


def is_wrapped(value: object) -> bool:
    """Whether a tensor is of a class of its own that can be taken apart."""
    return (
        isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter) and hasattr(value, "__tensor_flatten__")
    )


def is_taken_apart(value: object) -> bool:
    return isinstance(value, Mapping) and value.keys() == {_PARTS}


def take_apart(value: Any) -> dict[str, Any]:
    """The plain tensors it is made of; what else belongs to it, such as the size of its blocks, is the same on every rank."""
    names, _ = value.__tensor_flatten__()
    inner = {name: getattr(value, name) for name in names}
    return {_PARTS: {name: take_apart(each) if is_wrapped(each) else each.detach() for name, each in inner.items()}}


def put_together(parts: Mapping[str, Any], like: Any) -> Tensor:
    """A tensor of the class, and of the kind, of ``like``; ValueError if those are not its parts."""
    names, context = like.__tensor_flatten__() if is_wrapped(like) else ((), None)
    given: Mapping[str, Any] = parts[_PARTS]
    if given.keys() != set(names):
        raise ValueError(
            f"a state has the parts {sorted(given)}, and a {type(like).__name__} is made of {sorted(names)}"
        )
    inner = {}
    for name in names:
        part, own = given[name], getattr(like, name)
        if is_taken_apart(part):
            part = put_together(part, own)
        if part.shape != own.shape or part.dtype != own.dtype:
            raise ValueError(
                f"the part {name!r} of a {type(like).__name__} is {part.dtype} of {tuple(part.shape)}, not {own.dtype} of {tuple(own.shape)}"
            )
        inner[name] = part.to(own.device)
    made: Tensor = type(like).__tensor_unflatten__(inner, context, like.size(), like.stride())
    return made


def num_bytes_of(value: Tensor) -> int:
    """What it takes, whatever it says of itself."""
    if not is_wrapped(value):
        return value.nbytes
    names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]  # which is_wrapped() has seen
    return sum(num_bytes_of(getattr(value, name)) for name in names)
