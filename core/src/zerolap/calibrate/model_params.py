"""A model's parameters as sizes, and which of several optimizers has which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer


class ModelParam(NamedTuple):
    """A parameter before it is known how it is trained."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    work: float  # its share of the computing, in any unit
    optimizer: int = 0  # which of several has it


def describe(module: nn.Module) -> list[ModelParam]:
    """The parameters that are trained, in order. Tables that are only looked up in take no computing."""
    looked_up = {child.weight for child in module.modules() if isinstance(child, nn.Embedding | nn.EmbeddingBag)}
    return [
        ModelParam(tuple(param.shape), param.dtype, 0.0 if param in looked_up else float(param.numel()))
        for param in module.parameters()
        if param.requires_grad
    ]


def shared_out(params: Sequence[ModelParam], num_optimizers: int) -> list[ModelParam]:
    """As people share them out between two: the first has the matrices of hidden layers; the other has what is looked up in, the last
    matrix, which is the output's, and all that is no matrix."""
    if num_optimizers == 1:
        return list(params)
    last = max((index for index, param in enumerate(params) if len(param.shape) == 2), default=-1)
    return [
        param._replace(optimizer=0 if len(param.shape) == 2 and param.work and index != last else 1)
        for index, param in enumerate(params)
    ]


def with_options(
    optimizer_class: type[Optimizer] | Sequence[type[Optimizer]],
    options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
) -> list[tuple[type[Optimizer], Mapping[str, Any]]]:
    """Each class with its options; ValueError if there are not as many of those."""
    classes = [optimizer_class] if isinstance(optimizer_class, type) else list(optimizer_class)
    given = (
        [options] * len(classes) if options is None else [options] if isinstance(options, Mapping) else list(options)
    )
    if len(given) != len(classes):
        raise ValueError(f"{len(classes)} optimizers need options for each of them, got {len(given)}")
    return [(each, mine or {}) for each, mine in zip(classes, given, strict=True)]
