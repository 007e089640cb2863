"""What the options of `zerolap plan` mean: a model from wherever it is described, and numbers with their units."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zerolap.calibrate.model_params import ModelParam, describe, shared_out
from zerolap.cli.import_path import attribute
from zerolap.cli.numbers import in_units
from zerolap.cli.plan_options import PlanOptions
from zerolap.runtime.precision import Precision
from zerolap.schedule.wire_format import Wire
from zerolap.untrusted.files import parse_json, printable, read_json

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_RATES = {
    f"{prefix}{unit}{per}": factor / (8 if unit in ("bit", "b") else 1)
    for prefix, factor in _PREFIXES.items()
    for unit in ("", "bit", "b", "B")
    for per in ("", "/s", "ps")
}
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
LARGEST_MODEL = 1e15  # parameters
_LARGEST_SHAPES = 2**26  # bytes of a file
_MOST_TENSORS = 100_000
_HEAD_WIDTH = 128  # of attention
_SMALLEST = 10_000  # parameters of a pattern


def to_bytes_per_second(text: str) -> float:
    """Of "100Gbit", "12.5GB" or "1e9": bits or bytes a second."""
    what = "a bandwidth is like 100Gbit, 1000Mbit or 12.5GB a second: bytes"
    return in_units(text, _RATES, low=1.0, high=1e18, what=what)


def to_operations_per_second(text: str) -> float:
    """Of "150T" or "1.5e14"."""
    what = "--flops is a number of operations a second, for example 150T or 1.5e14"
    return in_units(text, _PREFIXES, low=1.0, high=1e24, what=what)


def to_seconds(text: str) -> float:
    """Of "10us", "5ms", or "0.12" in seconds."""
    return in_units(text, _TIMES, low=0.0, high=1e9, what="a time is like 0.12, 120ms or 10us: seconds")


def params_of(options: PlanOptions) -> list[ModelParam]:
    sources = [options.model, options.shapes, options.params]
    if sum(each is not None for each in sources) != 1:
        raise ValueError("say what is trained by one of --model MODULE:CALLABLE, --shapes FILE or --params NUMBER")
    dtype = dtype_of(options.param_dtype)
    if options.model is not None:
        params = describe(make_model(options.model, device="meta"))
    elif options.shapes is not None:
        params = _from_shapes(options.shapes)
    else:
        assert options.params is not None
        params = typical(options.params)
    if not params:
        raise ValueError("the model has no parameter to train")
    params = shared_out(params, len(optimizer_classes_of(options.optimizer)))
    return [param._replace(dtype=dtype) for param in params] if dtype is not None else params


def make_model(path: str, *, device: str) -> nn.Module:
    made_by = attribute(path, "--model")
    try:
        with torch.device(device):
            made = made_by()
    except (Exception, SystemExit) as error:  # it is the user's code: what it raises is for the user to know
        raise ValueError(f"--model {path} fails: {type(error).__name__}: {printable(error)}") from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"--model {path} makes a {type(made).__name__}, not a torch.nn.Module")
    return made


def _from_shapes(path: Path) -> list[ModelParam]:
    expected = "a JSON list of shapes such as [[512, 512], [512]], or an object of them by name, in the order of use"
    try:
        held = read_json(path, largest=_LARGEST_SHAPES, follows_links=True)
        shapes = [_shape(each) for each in (held.values() if isinstance(held, dict) else held)]
    except OSError as error:
        raise ValueError(f"--shapes {printable(path, 300)}: {error.strerror or error}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"--shapes {printable(path, 300)} must hold {expected}: {printable(error, 300)}") from error
    if len(shapes) > _MOST_TENSORS:
        raise ValueError(f"--shapes {path} has {len(shapes)} tensors; a forecast is for at most {_MOST_TENSORS}")
    if not sum(map(math.prod, shapes)) <= LARGEST_MODEL:
        raise ValueError(f"--shapes {path} has more than {LARGEST_MODEL:g} parameters")
    return [ModelParam(tuple(shape), torch.float32, float(math.prod(shape))) for shape in shapes]


def _shape(sizes: Any) -> list[int]:
    if type(sizes) is not list or len(sizes) > 64 or not all(type(each) is int and 0 <= each <= 1e15 for each in sizes):
        raise TypeError("a shape is a list of whole numbers that are not negative")
    return sizes


def typical(num_params: float) -> list[ModelParam]:
    """A decoder-only transformer of ``num_params`` parameters: a layer for every 128 of its width, and two tables for words."""
    if not _SMALLEST <= num_params <= LARGEST_MODEL:
        raise ValueError(
            f"--params is a number from {_SMALLEST} on, to {LARGEST_MODEL:g}, for example 7e9, got {num_params:g}"
        )
    width = max(16, int((num_params * _HEAD_WIDTH / 12) ** (1 / 3)) // 16 * 16)
    num_layers = max(1, width // _HEAD_WIDTH)
    layer = [(width,), (3 * width, width), (width, width), (width,), (4 * width, width), (width, 4 * width)]
    num_words = max(1, round((num_params - num_layers * sum(map(math.prod, layer)) - width) / (2 * width)))
    table, shapes = (num_words, width), [*(layer * num_layers), (width,)]
    return [
        ModelParam(table, torch.float32, 0.0),
        *(ModelParam(shape, torch.float32, float(math.prod(shape))) for shape in shapes),
        ModelParam(table, torch.float32, float(math.prod(table))),
    ]


def optimizer_classes_of(names: str) -> list[type[Optimizer]]:
    """Of "AdamW", or of two such as "muon+adamw"."""
    found = [_optimizer_class_of(name) for name in names.split("+")]
    if len(found) > 2:
        raise ValueError(
            "--optimizer is one class, or two as in muon+adamw: the first has the matrices of hidden layers, the other all else"
        )
    return found


def _optimizer_class_of(name: str) -> type[Optimizer]:
    known = {each.lower(): value for each, value in vars(torch.optim).items() if isinstance(value, type)}
    found = attribute(name, "--optimizer") if ":" in name else known.get(name.lower())
    if not (isinstance(found, type) and issubclass(found, Optimizer)) or found is Optimizer:
        raise ValueError(f"--optimizer is a class of torch.optim or MODULE:CLASS, got {name[:200]!r}")
    return found


def optimizer_options_of(options: PlanOptions) -> list[dict[str, Any]]:
    """Those of each optimizer."""
    num, expected = len(optimizer_classes_of(options.optimizer)), "a JSON object, for example '{\"lr\": 0.1}'"
    if num > 1:
        expected += f", or a list of {num} of them"
    try:
        held = parse_json(options.optimizer_options)
    except ValueError as error:
        raise ValueError(f"--optimizer-options is {expected}: {error}") from error
    each = [held] * num if isinstance(held, dict) else held
    if not isinstance(each, list) or len(each) != num or not all(isinstance(one, dict) for one in each):
        raise ValueError(f"--optimizer-options is {expected}, got {options.optimizer_options[:200]!r}")
    return each


def dtype_of(name: str | None) -> torch.dtype | None:
    found = getattr(torch, name, None) if name is not None else None
    if name is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(
            f"a dtype is float32, bfloat16, float16 or another of torch's floating-point ones, got {name[:200]!r}"
        )
    return found


def wire_of(given: str | None) -> Wire:
    names = (given or "none").split(",")
    if len(names) > 2 or any(name not in ("int8", "fp8", "bf16", "none") for name in names):
        said = f"{given!r}"[:200]
        raise ValueError(
            f"--wire is int8, fp8 or bf16, or two for gradients and parameters, as in int8,none; got {said}"
        )
    gradients, parameters = (None if name == "none" else name for name in (names[0], names[-1]))
    return Wire(gradients=gradients, parameters=parameters)  # type: ignore[arg-type]  # names of formats


def precision_of(options: PlanOptions, params: list[ModelParam]) -> Precision:
    precision = Precision(
        master_weights=options.master_weights,
        reduce_dtype=dtype_of(options.reduce_dtype),
        gather_dtype=dtype_of(options.gather_dtype),
        wire=wire_of(options.wire),
    )
    if options.wire is not None and (options.reduce_dtype is not None or options.gather_dtype is not None):
        raise ValueError("--wire says how all is sent: leave out --reduce-dtype and --gather-dtype")
    sent, widest = precision.gather_dtype, max(param.dtype.itemsize for param in params)
    if sent is not None and sent.itemsize > widest:
        raise ValueError(
            f"--gather-dtype {options.gather_dtype} is wider than the parameters: it would send more for nothing"
        )
    if sent is not None and sent.itemsize < widest and not options.master_weights:
        raise ValueError(f"--gather-dtype {options.gather_dtype} rounds parameters at every step; add --master-weights")
    return precision
