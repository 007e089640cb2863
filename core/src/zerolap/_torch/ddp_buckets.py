"""Giving DDP other buckets. It has no public way, but one of its own, used after unpickling, which this follows."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from zerolap._torch.lookup import text, used

__all__ = [
    "are_buckets_current",
    "bucket_caps_of",
    "can_free_buckets",
    "can_rebucket",
    "hides_unused_buckets",
    "own_caps_of",
    "rebucket",
]

_remove_autograd_hooks: Callable[[Any], None] = used("torch.distributed.Reducer._remove_autograd_hooks")
_register_comm_hook: Callable[[Any, object, Callable[..., Any]], None] = used(
    "torch._C._distributed_c10d._register_comm_hook"
)
_set_static_graph: Callable[[DistributedDataParallel], None] = used(
    "torch.nn.parallel.DistributedDataParallel._set_static_graph"
)
# DDP then neither copies what lies in a bucket to gradients nor lets gradients point there.
_leave_gradients_alone: Callable[[Any], None] = used("torch.distributed.Reducer._set_optimizer_in_backward")
_assign_to_buckets: Callable[[list[Tensor], list[int], list[bool]], tuple[list[list[int]], list[int]]] = used(
    "torch.distributed._compute_bucket_assignment_by_size"
)
_ASSIGN = text("torch.distributed._compute_bucket_assignment_by_size")
_HAS_REBUILT = text("torch.nn.parallel.DistributedDataParallel._has_rebuilt_buckets")
_CONFIG = text("torch.nn.parallel.DistributedDataParallel._bucket_config")
_FIRST_CAP = text("torch.distributed._DEFAULT_FIRST_BUCKET_BYTES")
_REBUCKETING = (
    text("torch.nn.parallel.DistributedDataParallel._ddp_init_helper"),
    text("torch.nn.parallel.DistributedDataParallel._build_params_for_reducer"),
    text("torch.nn.parallel.DistributedDataParallel._build_debug_param_to_name_mapping"),
    text("torch.nn.parallel.DistributedDataParallel._comm_hooks"),
)


def can_rebucket(ddp: DistributedDataParallel) -> bool:
    """Whether this torch's DDP can be given other buckets."""
    is_known = hasattr(ddp, _CONFIG) or (hasattr(ddp, "bucket_bytes_cap_default") and hasattr(dist, _FIRST_CAP))
    return is_known and all(hasattr(ddp, name) for name in _REBUCKETING)


def bucket_caps_of(ddp: Any) -> tuple[int, int]:
    """The most bytes of DDP's buckets, and of the first."""
    if hasattr(ddp, _CONFIG):
        return ddp._bucket_config.bucket_bytes_cap, ddp._bucket_config.first_bucket_bytes_cap
    cap: int = ddp.bucket_bytes_cap
    return cap, getattr(dist, _FIRST_CAP) if ddp.bucket_bytes_cap_default else cap


def own_caps_of(ddp: object) -> list[int]:
    """The most bytes of each bucket, where they were given one by one, as newer versions allow."""
    return list(getattr(ddp, "bucket_bytes_cap_list", ()))


def hides_unused_buckets(ddp: object) -> bool:
    """Whether hooks do not see the buckets of unused parameters, as newer versions allow."""
    return bool(getattr(ddp, "skip_all_reduce_unused_params", False))


def can_free_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether this torch's DDP can do without the memory of its buckets once they were reduced."""
    return can_rebucket(ddp) and hasattr(ddp.reducer, text("torch.distributed.Reducer._set_optimizer_in_backward"))


def rebucket(ddp: Any, *, cap: int, first_cap: int, is_freed: bool = False) -> None:
    """Give DDP buckets of at most ``cap`` bytes, as if it had been made with them; between two iterations.

    DDP begins with one bucket of everything, as it does not know yet in which order gradients come. If buckets are freed, it begins with
    those that it will make later if they come from the model's end to its beginning, and leaves alone what lies in them.
    """
    params, are_sparse = ddp._build_params_for_reducer()
    _remove_autograd_hooks(ddp.reducer)
    # While it learns a static graph DDP hands over every bucket as number 0: there must be only one.
    names, is_static = ddp._build_debug_param_to_name_mapping(params), ddp.static_graph
    with _caps_set(ddp, cap, first_cap), _buckets_from_the_end(ddp) if is_freed and not is_static else nullcontext():
        ddp._ddp_init_helper(params, are_sparse, names, is_static)
    setattr(ddp, _HAS_REBUILT, False)
    if ddp.static_graph:
        ddp.static_graph = False  # or it would be left at that
        _set_static_graph(ddp)
    if is_freed:
        _leave_gradients_alone(ddp.reducer)
    for hook, state in ddp._comm_hooks:
        _register_comm_hook(ddp.reducer, state, hook)


@contextmanager
def _caps_set(ddp: Any, cap: int, first_cap: int) -> Iterator[None]:
    """Sets the most bytes of buckets. Older versions have the first bucket's in a variable, to be set while buckets are made."""
    ddp.bucket_bytes_cap = cap
    if hasattr(ddp, _CONFIG):
        ddp._bucket_config = dataclasses.replace(
            ddp._bucket_config, bucket_bytes_cap=cap, first_bucket_bytes_cap=first_cap
        )
        yield
        return
    ddp.bucket_bytes_cap_default = first_cap < cap
    default = getattr(dist, _FIRST_CAP)
    setattr(dist, _FIRST_CAP, first_cap)
    try:
        yield
    finally:
        setattr(dist, _FIRST_CAP, default)


@contextmanager
def _buckets_from_the_end(ddp: Any) -> Iterator[None]:
    """DDP begins with the buckets that it would make of gradients that come from its last parameter to its first."""
    cap, first_cap = bucket_caps_of(ddp)
    limits = own_caps_of(ddp) or [first_cap, cap]

    def assign(params: list[Tensor], _: list[int], are_sparse: list[bool]) -> tuple[list[list[int]], list[int]]:
        buckets, sizes = _assign_to_buckets(params[::-1], limits, are_sparse[::-1])
        return [[len(params) - 1 - place for place in bucket] for bucket in buckets[::-1]], sizes[::-1]

    setattr(dist, _ASSIGN, assign)
    try:
        yield
    finally:
        setattr(dist, _ASSIGN, _assign_to_buckets)


def are_buckets_current(ddp: DistributedDataParallel) -> Callable[[], bool]:
    """Tells, whenever it is asked, whether DDP still has the buckets it has now."""
    has_rebuilt, seen, reducer = getattr(ddp, _HAS_REBUILT), weakref.ref(ddp), weakref.ref(ddp.reducer)

    def are_current() -> bool:
        now = seen()
        return now is not None and now.reducer is reducer() and getattr(now, _HAS_REBUILT) == has_rebuilt

    return are_current
