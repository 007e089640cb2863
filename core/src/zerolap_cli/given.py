"""What the user of `zerolap plan` said: a model from wherever it is described, and numbers with their units."""

from __future__ import annotations

import importlib
import json
import math
import operator
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zerolap.forecast import Pattern
from zerolap.native import Precision
from zerolap.sizing import Described, describe

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_HEAD_WIDTH = 128  # of attention
_SMALLEST = 10_000  # parameters of a pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user said, in text and numbers; None where nothing was said."""

    model: str | None
    shapes: Path | None
    num_params: float | None
    world_size: int
    bandwidth: str | None
    latency: str | None
    exchange: Pattern
    forward: str | None
    backward: str | None
    flops: str | None
    tokens: int | None
    optimizer: str
    optimizer_options: str
    param_dtype: str | None
    master_weights: bool
    reduce_dtype: str | None
    gather_dtype: str | None
    bucket_cap_mb: float | None
    step_ns: float | None
    host_us: float | None
    cpu_ns_per_byte: float | None
    cores: float | None
    changes_gradients: bool
    calibrates: bool
    batch: str | None


def to_bytes_per_second(text: str) -> float:
    """Of "100Gbit", "12.5GB" or "1e9": bits or bytes a second."""
    found = re.fullmatch(r"\s*([\d.eE+-]+)\s*([kMGTP]?)(bit|b|B)?(?:/s|ps)?\s*", text)
    try:
        if found is None:
            raise ValueError(text)
        number, prefix, unit = found.groups()
        rate = float(number) * _PREFIXES[prefix] / (8 if unit in ("bit", "b") else 1)
    except ValueError as error:
        raise ValueError(f"a bandwidth is like 100Gbit, 1000Mbit or 12.5GB a second, got {text!r}") from error
    if not 0 < rate < math.inf:
        raise ValueError(f"a bandwidth is more than nothing, and finite, got {text!r}")
    return rate


def to_operations_per_second(text: str) -> float:
    """Of "150T" or "1.5e14"."""
    found = re.fullmatch(r"\s*([\d.eE+-]+)\s*([kMGTP]?)\s*", text)
    try:
        if found is None:
            raise ValueError(text)
        rate = float(found[1]) * _PREFIXES[found[2]]
        if not 0 < rate < math.inf:
            raise ValueError(text)
    except ValueError as error:
        raise ValueError(
            f"--flops is a number of operations a second, for example 150T or 1.5e14, got {text!r}"
        ) from error
    return rate


def to_seconds(text: str) -> float:
    """Of "10us", "5ms", or "0.12" in seconds."""
    found = re.fullmatch(r"\s*([\d.eE+-]+?)\s*(s|ms|us|ns)?\s*", text)
    try:
        if found is None:
            raise ValueError(text)
        seconds = float(found[1]) * _TIMES[found[2] or ""]
    except ValueError as error:
        raise ValueError(f"a time is like 0.12, 120ms or 10us, got {text!r}") from error
    if not 0 <= seconds < math.inf:
        raise ValueError(f"a time is not negative, got {text!r}")
    return seconds


def params_of(wanted: Wanted) -> list[Described]:
    given = [wanted.model, wanted.shapes, wanted.num_params]
    if sum(each is not None for each in given) != 1:
        raise ValueError("say what is trained by one of --model MODULE:CALLABLE, --shapes FILE or --params NUMBER")
    dtype = dtype_of(wanted.param_dtype)
    if wanted.model is not None:
        params = describe(make_model(wanted.model, device="meta"))
    elif wanted.shapes is not None:
        params = _from_shapes(wanted.shapes)
    else:
        assert wanted.num_params is not None
        params = typical(wanted.num_params)
    if not params:
        raise ValueError("there is no parameter to train in it")
    return [param._replace(dtype=dtype) for param in params] if dtype is not None else params


def make_model(path: str, *, device: str) -> nn.Module:
    with torch.device(device):
        made = attribute(path, "--model")()
    if not isinstance(made, nn.Module):
        raise ValueError(f"--model {path} makes a {type(made).__name__}, not a torch.nn.Module")
    return made


def attribute(path: str, option: str) -> Any:
    module, _, name = path.partition(":")
    if not name:
        raise ValueError(f"{option} is MODULE:CALLABLE, for example train:make_model, got {path!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # what lies here, as with `python -m`
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{option} {path}: {error}; run this where it can be imported") from error
    if not callable(getattr(found, name, None)):
        raise ValueError(f"{option} {path}: {module} has no callable {name!r}")
    return getattr(found, name)


def _from_shapes(path: Path) -> list[Described]:
    expected = "a JSON list of shapes such as [[512, 512], [512]], or an object of them by name, in the order of use"
    try:
        held = json.loads(path.read_text())
        shapes = [
            [operator.index(size) for size in shape] for shape in (held.values() if isinstance(held, dict) else held)
        ]
    except OSError as error:
        raise ValueError(f"--shapes {path}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"--shapes {path} must hold {expected}: {error}") from error
    if any(size < 0 for shape in shapes for size in shape):
        raise ValueError(f"--shapes {path}: a size is negative")
    return [Described(tuple(shape), torch.float32, float(math.prod(shape))) for shape in shapes]


def typical(num_params: float) -> list[Described]:
    """A decoder-only transformer of so many parameters: a layer for every 128 of its width, and two tables for words."""
    if not _SMALLEST <= num_params < math.inf:
        raise ValueError(f"--params is a number from {_SMALLEST} on, for example 7e9, got {num_params:g}")
    width = max(16, int((num_params * _HEAD_WIDTH / 12) ** (1 / 3)) // 16 * 16)
    num_layers = max(1, width // _HEAD_WIDTH)
    layer = [(width,), (3 * width, width), (width, width), (width,), (4 * width, width), (width, 4 * width)]
    num_words = max(1, round((num_params - num_layers * sum(map(math.prod, layer)) - width) / (2 * width)))
    table, shapes = (num_words, width), [*(layer * num_layers), (width,)]
    return [
        Described(table, torch.float32, 0.0),
        *(Described(shape, torch.float32, float(math.prod(shape))) for shape in shapes),
        Described(table, torch.float32, float(math.prod(table))),
    ]


def optimizer_class_of(name: str) -> type[Optimizer]:
    found = attribute(name, "--optimizer") if ":" in name else getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, Optimizer)) or found is Optimizer:
        raise ValueError(f"--optimizer is a class of torch.optim or MODULE:CLASS, got {name!r}")
    return found


def json_object(text: str, option: str) -> dict[str, Any]:
    try:
        held = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option} is a JSON object, for example '{{\"lr\": 0.1}}': {error}") from error
    if not isinstance(held, dict):
        raise ValueError(f"{option} is a JSON object, for example '{{\"lr\": 0.1}}', got {text!r}")
    return held


def dtype_of(name: str | None) -> torch.dtype | None:
    found = getattr(torch, name, None) if name is not None else None
    if name is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(
            f"a dtype is float32, bfloat16, float16 or another of torch's floating-point ones, got {name!r}"
        )
    return found


def precision_of(wanted: Wanted, params: list[Described]) -> Precision:
    precision = Precision(
        master_weights=wanted.master_weights,
        reduce_dtype=dtype_of(wanted.reduce_dtype),
        gather_dtype=dtype_of(wanted.gather_dtype),
    )
    sent, widest = precision.gather_dtype, max(param.dtype.itemsize for param in params)
    if sent is not None and sent.itemsize > widest:
        raise ValueError(
            f"--gather-dtype {wanted.gather_dtype} is wider than the parameters: it would send more for nothing"
        )
    if sent is not None and sent.itemsize < widest and not wanted.master_weights:
        raise ValueError(f"--gather-dtype {wanted.gather_dtype} rounds parameters at every step; add --master-weights")
    return precision
