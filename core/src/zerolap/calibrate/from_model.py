"""The workload of a real model: its shapes and dtypes, and optimizer states as the real optimizer makes them on tiny tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import lcm, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerolap.calibrate.calibrate import Measured
from zerolap.calibrate.model_params import ModelParam, with_options
from zerolap.forecast.workload import FIRST_BUCKET_BYTES, MB, Param, Workload, bucketize
from zerolap.runtime.optimizer_facts import is_elementwise
from zerolap.runtime.precision import Precision
from zerolap.runtime.update_cost import update_cost
from zerolap.schedule.ownership import Layout, Slot

_PRIMES = (
    11,
    13,
    17,
    19,
    23,
    29,
)  # a tiny tensor's shape: which of its sizes a state's size comes from is plain to see


def workload_of(
    params: Sequence[ModelParam],
    *,
    optimizer_class: type[Optimizer] | Sequence[type[Optimizer]],
    optimizer_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    precision: Precision | None = None,
    bucket_cap_mb: float | None = None,
    exact_cut: int = 1,
    max_receive_bytes: int | None = None,
    measured: Measured | None = None,
) -> Workload:
    """What ``attach`` will make of these parameters, in DDP's buckets, with an adapter's ``exact_cut`` and ``max_receive_bytes``.

    Of several optimizers, each class with its options, ``params`` say which has which. Unless it was measured, a layer's share of the time is its share of the work, and parameters are used in their order.
    """
    precision = precision or Precision()
    optimizers = [(*each, is_elementwise(each[0])) for each in with_options(optimizer_class, optimizer_options)]
    sizes: dict[tuple[int, int, torch.dtype], _StateSize] = {}
    done = list(accumulate((param.work for param in params), initial=0.0))
    total = done[-1] or 1.0
    described = []
    for index, (shape, dtype, _, number) in enumerate(params):
        numel = prod(shape)
        by, options, may_be_cut = optimizers[number]
        master = precision.stepped_as(dtype) if precision.has_masters(dtype) else None
        kind = (number, 1 if may_be_cut else len(shape), master or dtype)
        if kind not in sizes:
            sizes[kind] = _state_size(by, options, *kind[1:])
        sized = sizes[kind]
        described.append(
            Param(
                numel=numel,
                dtype=str(dtype).removeprefix("torch."),
                itemsize=dtype.itemsize,
                used_at=measured.used_at[index] if measured else done[index] / total,
                ready_at=measured.ready_at[index] if measured else 1 - done[index] / total,
                state_bytes_per_element=sized.bytes_of((1,)) - sized.bytes_of((0,)) if may_be_cut else 0.0,
                state_bytes_per_piece=sized.bytes_of((0,) if may_be_cut else shape),
                master_itemsize=master.itemsize if master else 0,
                optimizer=number,
                cut=lcm(exact_cut, precision.wire.block) if may_be_cut else None,
                update_cost=update_cost(by, shape),
            )
        )
    return Workload(
        params=tuple(described),
        layout=_layout(described, bucket_cap_mb, measured),
        reduce_itemsize=precision.reduce_dtype.itemsize if precision.reduce_dtype else None,
        gather_itemsize=precision.gather_dtype.itemsize if precision.gather_dtype else None,
        wire=precision.wire,
        max_receive_bytes=max_receive_bytes,
    )


def _layout(params: Sequence[Param], bucket_cap_mb: float | None, measured: Measured | None) -> Layout:
    if measured is not None:
        return tuple(tuple(Slot(i, params[i].numel) for i in bucket) for bucket in measured.buckets)
    return bucketize(
        params,
        cap_bytes=int((25 if bucket_cap_mb is None else bucket_cap_mb) * MB),
        first_bytes=FIRST_BUCKET_BYTES if bucket_cap_mb is None else None,
    )


class _StateSize(NamedTuple):
    """Of each of a state's tensors: its item size, and its sizes, as places in the parameter's shape or as numbers."""

    entries: tuple[tuple[int, tuple[tuple[int | None, int], ...]], ...]

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        return sum(
            itemsize * prod(size if place is None else shape[place] for place, size in sizes)
            for itemsize, sizes in self.entries
        )


def _state_size(
    optimizer_class: type[Optimizer], options: Mapping[str, Any], num_dims: int, dtype: torch.dtype
) -> _StateSize:
    """What the optimizer keeps for a parameter of ``num_dims`` dimensions, found by letting it step a tiny one."""
    shape = _PRIMES[:num_dims]
    param = nn.Parameter(torch.zeros(shape, dtype=dtype))
    param.grad = torch.zeros_like(param)
    try:
        optimizer = optimizer_class([param], **options)
        optimizer.step()
    except Exception as error:
        raise ValueError(
            f"{optimizer_class.__name__} cannot step a parameter of {num_dims} dimensions and {dtype}, so what it keeps is not "
            f"known: {type(error).__name__}: {error}; give the options it needs, or another optimizer"
        ) from error
    kept = [value for value in optimizer.state[param].values() if isinstance(value, Tensor)]
    return _StateSize(
        tuple(
            (value.itemsize, tuple((shape.index(size) if size in shape else None, size) for size in value.shape))
            for value in kept
        )
    )
