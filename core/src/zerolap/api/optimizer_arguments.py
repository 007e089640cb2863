"""What ZeroRedundancyOptimizer may be given: parameters, param groups and an optimizer class, checked before anything is made."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from zerolap._torch import is_traceable_wrapper_subclass
from zerolap.runtime.param_groups import ParamGroup


def as_groups(params: Any) -> list[ParamGroup]:
    """The caller's parameters as param groups of lists, with torch's exception types for what they cannot be.

    As in torch, parameters may be given as pairs of name and tensor; torch then keeps the names in its groups.
    """
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of tensors or dicts, not a tensor")
    try:
        given = list(params)
    except TypeError as error:
        raise TypeError(f"params must be an iterable of tensors or dicts, not {type(params).__name__}") from error
    if not given:
        raise ValueError("ZeroRedundancyOptimizer got an empty parameter list")
    if _are_params(given):
        return [{"params": given}]
    if not all(isinstance(item, dict) for item in given):
        kinds = ", ".join(sorted({type(item).__name__ for item in given}))
        raise TypeError(f"params must hold tensors only, pairs of name and tensor only, or dicts only, got {kinds}")
    groups = []
    for group in given:
        if "params" not in group:
            raise ValueError(f"a param group needs a 'params' entry, got {sorted(group)}")
        inside = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        if not _are_params(inside):
            raise TypeError("a param group's 'params' must hold tensors only, or pairs of name and tensor only")
        groups.append({**group, "params": inside})
    if not any(group["params"] for group in groups):
        raise ValueError("ZeroRedundancyOptimizer got param groups without parameters")
    return groups


def _are_params(given: list[Any]) -> bool:
    return all(isinstance(item, Tensor) for item in given) or all(
        isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor)
        for item in given
    )


def tensors_of(groups: list[ParamGroup]) -> list[Tensor]:
    """All parameters of the groups, without the names that may stand beside them."""
    return [item[1] if isinstance(item, tuple) else item for group in groups for item in group["params"]]


def check_optimizer_class(optimizer_class: Any) -> None:
    """ValueError if it is no optimizer class, or one whose update cannot be sharded."""
    if not callable(optimizer_class) or (
        isinstance(optimizer_class, type) and not issubclass(optimizer_class, Optimizer)
    ):
        raise ValueError(f"optimizer_class must be a torch.optim.Optimizer subclass, got {optimizer_class!r}")
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, LBFGS):
        raise ValueError("LBFGS cannot be sharded: its update of one parameter depends on all gradients")
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, SparseAdam):
        raise ValueError(
            "SparseAdam cannot be sharded here: sparse gradients are not supported; use Adam and sparse=False"
        )


def check_params(params: list[Tensor], *, overlap: bool) -> None:
    """ValueError if these parameters cannot be sharded together."""
    if len({id(param) for param in params}) != len(params):
        raise ValueError("a parameter is listed twice; give each parameter to the optimizer once")
    devices = {str(param.device) for param in params}
    if overlap and len(devices) > 1:
        raise ValueError(
            f"overlap needs all parameters on one device per rank, got {', '.join(sorted(devices))}; "
            "use overlap_with_ddp=False for a model on several devices"
        )
    for param in params:
        _check_param(param, overlap=overlap)
    if overlap:
        _refuse_shared_memory(params)
        return
    # torch's rule; under overlap DDP keeps every dtype in buckets of its own
    kinds = {torch.typename(param) for param in params}
    if len(kinds) > 1:
        raise ValueError(f"all parameters must be of one dense type without overlap, got {', '.join(sorted(kinds))}")


def _check_param(param: Tensor, *, overlap: bool) -> None:
    if is_traceable_wrapper_subclass(param):
        raise ValueError(
            f"a parameter is a {type(param).__name__}, which has no memory of its own to shard; give the optimizer plain "
            "parameters: what tensor parallelism or FSDP has sharded already needs an optimizer of torch's"
        )
    if nn.parameter.is_lazy(param):
        raise ValueError("a parameter of a lazy module has no shape yet; run a forward before the optimizer is made")
    if overlap and param.is_complex():
        raise ValueError(
            "complex parameters cannot be updated inside backward: DDP's buckets hold their real and imaginary parts as numbers of "
            "their own; use overlap_with_ddp=False, or keep the parameter real and use torch.view_as_complex() in forward"
        )
    if param.layout is not torch.strided:
        raise ValueError(f"only dense parameters can be sharded, got one of layout {param.layout}")
    if not param.is_leaf:
        raise ValueError("can't optimize a non-leaf tensor: give the optimizer the parameters themselves")
    if param.device.type == "meta":
        raise ValueError("a parameter is on the meta device and has no memory; materialize the model first")


def _refuse_shared_memory(params: list[Tensor]) -> None:
    memory = sorted(
        (param.untyped_storage().data_ptr(), param.storage_offset() * param.element_size(), param.nbytes)
        for param in params
        if param.numel()
    )
    for (storage, start, size), (other, next_start, _) in pairwise(memory):
        if storage == other and next_start < start + size:
            raise ValueError("two parameters share memory; tie weights by using one parameter twice instead")
