"""A mean gradient as torch's functions take it: a tensor of which this rank has some ranges. Nothing here knows buckets, groups or steps.

[Note: what is in .grad] Where updates wait for ``step()``, a backward leaves a ``MeanGradient`` in every parameter's ``.grad``. It has no
memory of its own: its elements are those of the shards. What torch does with it comes here, and is done in one of four ways:

* **In place, element by element** (``mul_``, ``clamp_``, ``add_`` of a tensor, and their ``_foreach_`` kinds): on this rank's ranges.
* **Norms**: of all parameters at once, by one small all-reduce, and kept until a gradient changes.
* **A loss scaler's search**: on this rank's ranges, and then all ranks agree on what was found.
* **Everything else** gets the whole gradient, which is collected from all ranks. It is gone afterwards, unless the result is a view of it:
  then it is kept, and takes the place of the ranges until ``step()``. What was written to it is written to the ranges.

So each of them gives what it gives with plain DDP, and is called by all ranks, as a collective is.

A backward that finds one in ``.grad`` adds to it, as to any gradient. What it adds is this rank's own until it is reduced, and is kept apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerolap._torch import (
    FOREACH_NORM,
    FOREACH_ZERO,
    UNSCALE,
    current_graph_task_id,
    make_wrapper_subclass,
    no_torch_function,
    schema_of,
    take_for_foreach,
    tree_map_only,
)
from zerolap.errors import ZerolapError
from zerolap.runtime.grad_part import Part, Range

aten = torch.ops.aten


class MeanGradient(Tensor):
    """The mean over ranks of one parameter's gradient, of which each rank has a part. See [Note: what is in .grad].

    Operations with it are collectives: all ranks must do the same. ``full_tensor()`` gives the whole as a plain tensor.
    """

    part: Part
    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, part: Part) -> MeanGradient:
        slot = part.slot
        self: MeanGradient = make_wrapper_subclass(
            cls, slot.shape, strides=slot.strides, dtype=slot.dtype, device=part.memory.device
        )
        self.part = part
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # as torch's own
        return _operate(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's own has no types
        # Not its elements: whoever prints on one rank would wait for the others.
        held = ", ".join(f"{each.start}:{each.stop}" for each in self.part.slot.ranges) or "nothing"
        return (
            f"MeanGradient({self.part.slot.name}, shape={tuple(self.shape)}, dtype={self.dtype}, this rank has {held}; "
            "full_tensor(), called by all ranks, gives the elements)"
        )

    def full_tensor(self) -> Tensor:
        """The whole mean gradient as a plain tensor of its own. Called by all ranks."""
        with torch.no_grad():
            return self.part.collected().clone()

    def numpy(self, *, force: bool = False) -> Any:
        return self.full_tensor().numpy(force=force)

    def tolist(self) -> Any:
        return self.full_tensor().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        return self.full_tensor().numpy().astype(dtype) if dtype is not None else self.full_tensor().numpy()

    def data_ptr(self) -> int:
        raise RuntimeError(
            f"the mean gradient of {self.part.slot.name} is not in one piece of memory; use full_tensor()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.full_tensor()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_it_is, (self.full_tensor(),)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


take_for_foreach(MeanGradient)

# --- what torch does with it ------------------------------------------------------------------------------------------


@torch.no_grad()
def _operate(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    handler = _HANDLERS.get(func)
    if handler is not None:
        return handler(func, *args, **kwargs)
    if current_graph_task_id() != -1 and func not in _SCALING:
        _refuse_in_backward(func)
    if _writes_first(func):
        if isinstance(args[0], list | tuple):
            return _each_in_place(func, args[0], args[1:], kwargs)
        if isinstance(args[0], MeanGradient) and (torch.Tag.pointwise in func.tags or func in _FILLING):
            return _in_place(func, *args, **kwargs)
    return _with_wholes(func, args, kwargs)


def _refuse_in_backward(func: Any) -> None:
    raise RuntimeError(
        f"{func} of a mean gradient inside backward: it is that of an earlier one. Use gradients after backward, or clear them before"
    )


def _writes_first(func: Any) -> bool:
    arguments = schema_of(func).arguments
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def _returns_views(func: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in schema_of(func).returns)


def _parts_in(*given: Any) -> list[Part]:
    found: dict[int, Part] = {}
    tree_map_only(MeanGradient, lambda each: found.setdefault(id(each.part), each.part), given)
    return list(found.values())


def _in_place(func: Any, gradient: MeanGradient, *others: Any, **kwargs: Any) -> MeanGradient:
    """Element by element, on what this rank has."""
    part = gradient.part
    if func not in _SCALING or part.local is None:
        part.usable()
    targets, cuts = _targets(part, others)
    for target, cut in zip(targets, cuts, strict=True):
        func(target, *cut, **kwargs)
    if part.local is not None:
        func(part.local, *others, **kwargs)
    part.is_zero = False
    part.find_source().note_change()
    return gradient


def _each_in_place(func: Any, tensors: Sequence[Tensor], others: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """The same for many gradients, by one call."""
    for part in _parts_in(tensors):
        part.usable()
    targets: list[Tensor] = []
    lists: list[list[Any]] = [[] for each in others if isinstance(each, list | tuple)]
    for place, tensor in enumerate(tensors):
        beside = [each[place] for each in others if isinstance(each, list | tuple)]
        if isinstance(tensor, MeanGradient):
            found, cuts = _targets(tensor.part, beside)
            tensor.part.is_zero = False
            tensor.part.find_source().note_change()
        else:
            found, cuts = [tensor], [[_plain(each) for each in beside]]
        targets += found
        for cut in cuts:
            for to, each in zip(lists, cut, strict=True):
                to.append(each)
    given = iter(lists)
    if targets:
        func(targets, *(next(given) if isinstance(each, list | tuple) else _plain(each) for each in others), **kwargs)


def _targets(part: Part, others: Sequence[Any]) -> tuple[list[Tensor], list[list[Any]]]:
    """What this rank has of a gradient, and what of the other operands belongs to each range of it."""
    # Collected where this rank has no range, too: it is a collective.
    others = [each if isinstance(each, MeanGradient) and each.part is part else _plain(each) for each in others]
    if part.whole is not None:
        return [part.whole], [[part.whole if isinstance(each, MeanGradient) else each for each in others]]
    flats = [part.slot.in_memory_order(each) if type(each) is Tensor and each.numel() != 1 else each for each in others]
    cuts = [[_cut(each, part, of) for each in flats] for of in part.slot.ranges]
    return list(part.ranges()), cuts


def _cut(operand: Any, part: Part, of: Range) -> Any:
    if isinstance(operand, MeanGradient):
        return of.view_of(part.memory)
    if not isinstance(operand, Tensor) or operand.ndim == 0:
        return operand
    return operand.reshape(1) if operand.numel() == 1 else operand[of.start : of.stop]


def _plain(value: Any) -> Any:
    if isinstance(value, MeanGradient):
        return value.part.collected()
    return value.detach() if isinstance(value, torch.nn.Parameter) else value


def _with_wholes(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """With all of it, in its place."""
    wholes: dict[int, Tensor] = {}
    gradients: dict[int, MeanGradient] = {}
    keeps = _returns_views(func)
    for part in _parts_in(args, kwargs):
        wholes[id(part)] = part.collected()
        if keeps:
            part.whole = wholes[id(part)]

    def replaced(gradient: MeanGradient) -> Tensor:
        whole = wholes[id(gradient.part)]
        gradients[id(whole)] = gradient
        return whole

    args, kwargs = tree_map_only(MeanGradient, replaced, (args, kwargs))
    result = func(*args, **kwargs)
    if any(each.alias_info is not None and each.alias_info.is_write for each in schema_of(func).arguments):
        for gradient in gradients.values():
            part = gradient.part
            part.is_zero = False
            part.write(wholes[id(part)])
            part.find_source().note_change()
    elif keeps:  # and whoever has the views may write to them
        for part in (gradient.part for gradient in gradients.values()):
            part.is_zero = False
            part.find_source().note_change()
    return tree_map_only(Tensor, lambda each: gradients.get(id(each), each), result)


def _norm(
    func: Any, gradient: Any, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """The norm of one gradient."""
    dims = [dim] if isinstance(dim, int) else dim
    is_over_all = not dims or len(dims) == gradient.ndim
    if not isinstance(gradient, MeanGradient) or keepdim or not is_over_all:
        return _with_wholes(func, (gradient, order, dim, keepdim), {"dtype": dtype})
    return _norms(func, [gradient], order, dtype)[0]


def _norms(func: Any, tensors: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Those of many."""
    if current_graph_task_id() != -1:
        _refuse_in_backward(func)
    found = []
    for each in tensors:
        if isinstance(each, MeanGradient) and (source := each.part.usable()) and each.part.whole is None:
            found.append(source.norms(float(order))[each.part.slot.number].to(dtype or each.dtype))
        else:
            found.append(torch.linalg.vector_norm(_plain(each), order, dtype=dtype))
    return found


def _unscale(func: Any, gradients: Sequence[Tensor], found: Tensor, inverse_scale: Tensor) -> None:
    """A loss scaler's pass over gradients of one dtype."""
    if current_graph_task_id() != -1:
        _refuse_in_backward(func)
    parts = _parts_in(gradients)
    sources = [part.usable() for part in parts]
    targets = [target for part in parts for target in _targets(part, ())[0]]
    others = [each for each in gradients if not isinstance(each, MeanGradient)]
    for some in (targets, others):
        if some:
            func(some, found, inverse_scale)
    for part, source in zip(parts, sources, strict=True):
        part.is_zero = False
        source.note_change()
    sources[0].agree(found, {part.slot.optimizer for part in parts})


def _add(func: Any, gradient: Any, other: Any, *, alpha: Any = 1) -> Any:
    if current_graph_task_id() == -1 or not isinstance(gradient, MeanGradient):
        if isinstance(gradient, MeanGradient):
            return _in_place(func, gradient, other, alpha=alpha)
        return _with_wholes(func, (gradient, other), {"alpha": alpha})
    gradient.part.add_local(other if alpha == 1 else other * alpha)
    return gradient


def _copy(func: Any, to: Any, source: Any, non_blocking: bool = False) -> Any:
    if current_graph_task_id() == -1:
        if isinstance(to, MeanGradient):
            return _in_place(func, to, source)
        return _with_wholes(func, (to, source, non_blocking), {})
    if isinstance(to, MeanGradient):
        return to  # DDP gives a gradient what is its own here, and gets the mean
    part = source.part  # DDP takes what is to be reduced
    if part.local is None:
        to.zero_()
    else:
        to.copy_(part.local)
    part.local, part.is_reduced_anew = None, True
    if (found := part.source()) is not None:
        found.note_added()
    return to


def _alias(func: Any, gradient: MeanGradient) -> MeanGradient:
    return MeanGradient(gradient.part)


def _same(func: Any, gradient: MeanGradient) -> MeanGradient:
    return gradient


def _zero(func: Any, gradient: MeanGradient) -> MeanGradient:
    part = gradient.part
    part.clear()
    for target in part.ranges() if _is_current(part) else ():
        target.zero_()
    return gradient


def _zero_each(func: Any, tensors: Sequence[Tensor]) -> None:
    for each in tensors:
        each.zero_()


def _is_current(part: Part) -> bool:
    try:
        part.find_source()
    except (RuntimeError, ZerolapError):
        return False
    return True


_SCALING = {aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar, aten.neg_.default}
_FILLING = {aten.fill_.Scalar, aten.fill_.Tensor}
_HANDLERS: Mapping[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _norm,
    FOREACH_NORM: _norms,
    UNSCALE: _unscale,
    aten.add_.Tensor: _add,
    aten.copy_.default: _copy,
    aten.zero_.default: _zero,
    FOREACH_ZERO: _zero_each,
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.detach_.default: _same,
}
