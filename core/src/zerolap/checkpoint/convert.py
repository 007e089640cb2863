"""Between sharded checkpoints and single files with the plain optimizer's state dict. One process, nothing to train."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerolap.checkpoint.contents import STATES, pack
from zerolap.checkpoint.folder import find, path_of
from zerolap.checkpoint.reader import CheckpointError, CheckpointReader, unpacked
from zerolap.checkpoint.writer import Target, write_state
from zerolap.errors import ZerolapError
from zerolap.runtime.dcp_state import ParamShape, from_sharded, room_for, saved_shapes, to_sharded
from zerolap.runtime.state_pieces import State, flat_state, shaped_state
from zerolap.schedule.ownership import Piece
from zerolap.untrusted.files import open_regular, printable, written_whole
from zerolap.untrusted.tensors import load_plain


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """What a file is not as it should be ends as one error that names it, whatever the code stumbled over."""
    try:
        yield
    except CheckpointError:
        raise
    except (ZerolapError, ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _small(reader: CheckpointReader) -> tuple[dict[str, ParamShape], list[dict[str, Any]]]:
    """The parameters of a checkpoint, and its param groups."""
    small = reader.read({"optimizer": {"params": None, "param_groups": None}})["optimizer"]
    then, groups = saved_shapes(small["params"]), small["param_groups"]
    if type(groups) not in (list, tuple) or not all(isinstance(group, dict) for group in groups):
        raise ValueError("its param groups are not a list of dicts")
    for group in groups:
        names = group.get("params")
        if type(names) not in (list, tuple) or not all(type(name) is str and name in then for name in names):
            raise ValueError("a param group has other parameters than the checkpoint")
    return then, list(groups)


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What is in a checkpoint, as plain data; CheckpointError if it is damaged."""
    reader = CheckpointReader(Path(path))
    with _reading(path):
        return _described(reader)


def _described(reader: CheckpointReader) -> dict[str, Any]:
    then, groups = _small(reader)
    entries = sorted(
        {str(key) for name in reader.metadata.planner_data.values() if name[:2] == STATES for key in name[3:]}
    )
    return {
        "step": reader.step,
        "ranks": reader.ranks,
        "bytes": sum(size for size, _ in reader.files.values()),
        "files": len(reader.files),
        "parameters": [{"name": name, "shape": list(param.shape)} for name, param in then.items()],
        "param_groups": [
            {
                str(key): value if isinstance(value, bool | int | float | str | None) else printable(repr(value), 200)
                for key, value in group.items()
            }
            | {"params": len(group["params"])}
            for group in groups
        ],
        "state_entries": entries,
        "buffers": sorted(reader.names(("model",)).keys() - then.keys()),
    }


def to_file(path: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Write a sharded checkpoint as one file: ``model``, ``optimizer`` as the plain class has it, ``step`` and ``extra``."""
    reader = CheckpointReader(Path(path))
    with _reading(path):
        consolidated = _consolidated(reader)
    with written_whole(file) as stream, _reading(path):  # what is nested too deeply can be read, and not written
        torch.save(consolidated, stream)


def _consolidated(reader: CheckpointReader) -> dict[str, Any]:
    then, groups = _small(reader)
    params = list(then.values())
    pieces = [Piece(index, 0, param.numel) for index, param in enumerate(params)]
    model = {
        name: reader.room(("model", name)) if hasattr(kept, "size") else None
        for name, kept in reader.names(("model",)).items()
    }
    room = {
        "model": model,
        "optimizer": {"state": room_for(reader.metadata, STATES, pieces, params, then)},
        "extra": reader.room(("extra",)),
    }
    whole = reader.read(room)
    index_of = {param.name: index for index, param in enumerate(params)}
    states = from_sharded(whole["optimizer"]["state"], params, then)
    return {
        "model": whole["model"],
        "optimizer": {
            "state": {
                piece.param: shaped_state(state, _like(params[piece.param])) for piece, state in sorted(states.items())
            },
            "param_groups": [
                {**group, "params": [index_of[name] for name in group["params"]], "param_names": list(group["params"])}
                for group in groups
            ],
        },
        "step": reader.step,
        "extra": unpacked(whole["extra"]),
    }


def _like(param: ParamShape) -> Tensor:
    return torch.empty_strided(param.shape, param.strides, device="meta")


def from_file(file: str | os.PathLike[str], folder: str | os.PathLike[str], *, step: int | None = None) -> Path:
    """Make a sharded checkpoint of a file that has a ``model`` and an ``optimizer`` state dict, whoever wrote it."""
    try:
        with open_regular(file, follows_links=True) as stream:  # it is the user who names it, not what is read
            whole = load_plain(stream, os.fstat(stream.fileno()).st_size)
    except Exception as error:
        raise CheckpointError(f"{file} cannot be loaded safely: {type(error).__name__}: {error}") from error
    if not isinstance(whole, dict) or not {"model", "optimizer"} <= whole.keys():
        raise CheckpointError(f"{file} has no 'model' and 'optimizer' state dicts")
    with _reading(file):
        state = _split(whole)
        step = step if step is not None else whole.get("step", 0)
        if type(step) is not int or not 0 <= step < 10**18:
            raise ValueError("its step is not a number of steps")
    if find(folder, step) is not None or path_of(folder, step).exists():
        raise CheckpointError(f"{path_of(folder, step)} already exists")
    with warnings.catch_warnings():  # that this is one process, which is what we want
        warnings.simplefilter("ignore")
        return write_state(Target(folder=Path(folder), step=step), state, None)


def _split(whole: dict[str, Any]) -> dict[str, Any]:
    """What is in a single file, as a sharded checkpoint has it."""
    model, optimizer = whole["model"], whole["optimizer"]
    _check_model(model)
    _check_optimizer(optimizer)
    names = _names(model, optimizer)
    params = [ParamShape.of(name, model[name]) for name in names]
    states: dict[Piece, State] = {
        Piece(index, 0, params[index].numel): flat_state(state, model[names[index]])
        for index, state in optimizer["state"].items()
    }
    groups = tuple(
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        | {"params": [names[index] for index in group["params"]]}
        for group in optimizer["param_groups"]
    )
    sharded = {"state": to_sharded(states, params), "param_groups": groups, "params": tuple(map(tuple, params))}
    return {"model": model, "optimizer": sharded, "extra": pack(whole.get("extra"))}


def _check_model(model: Any) -> None:
    if not isinstance(model, dict) or not all(type(name) is str for name in model):
        raise ValueError("its model is not a dict of tensors by name")
    for name, value in model.items():
        # One that repeats its elements would become as large as it pretends to be.
        if isinstance(value, Tensor) and value.nbytes > value.untyped_storage().nbytes():
            raise ValueError(f"{printable(name, 200)} is larger than its memory; save it by .contiguous()")


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, dict) or not {"state", "param_groups"} <= optimizer.keys():
        raise ValueError("its optimizer has no 'state' and 'param_groups'")
    groups, state = optimizer["param_groups"], optimizer["state"]
    if type(groups) is not list or not all(
        isinstance(group, dict) and type(group.get("params")) is list for group in groups
    ):
        raise ValueError("its param groups are not a list of dicts")
    indices = [index for group in groups for index in group["params"]]
    if not all(type(index) is int for index in indices) or sorted(indices) != list(range(len(indices))):
        raise ValueError("its param groups do not number the parameters from 0 on, each once")
    if not isinstance(state, dict) or not all(type(i) is int and 0 <= i < len(indices) for i in state):
        raise ValueError("it has a state for a parameter that it does not have")
    for index, entries in state.items():
        if not isinstance(entries, dict) or not all(type(key) is str for key in entries):
            raise ValueError(f"the state of its parameter {index} is not a dict")
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.nbytes > value.untyped_storage().nbytes():
                raise ValueError(
                    f"{printable(key, 200)} of parameter {index} is larger than its memory; save it by .contiguous()"
                )


def _names(model: dict[str, Tensor], optimizer: dict[str, Any]) -> list[str]:
    """The name of each of the optimizer's parameters: as the file says, or, if it does not, by their order."""
    groups = optimizer["param_groups"]
    count = sum(len(group["params"]) for group in groups)
    if all("param_names" in group for group in groups):
        if not all(
            type(group["param_names"]) is list and all(type(n) is str for n in group["param_names"]) for group in groups
        ):
            raise ValueError("its param_names are not names")
        of_index = {i: n for group in groups for i, n in zip(group["params"], group["param_names"], strict=True)}
        names = [of_index[index] for index in range(count)]
    else:
        names = [name for name, value in model.items() if isinstance(value, Tensor) and value.is_floating_point()]
        if len(names) != count:
            raise CheckpointError(
                f"the optimizer has {count} parameters and the model {len(names)} tensors that may be parameters, and the file does "
                "not say which is which: save it with an optimizer made from named_parameters()"
            )
    missing = [name for name in names if not isinstance(model.get(name), Tensor)]
    if missing:
        raise CheckpointError(f"the optimizer's parameters {printable(missing, 500)} are not in the model")
    return names
