"""Between sharded checkpoints and single files with the plain optimizer's state dict. One process, nothing to train."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerolap.checkpoint import STATES, described_then, pack
from zerolap.checkpoint_folder import path_of
from zerolap.plan import Piece
from zerolap.reading import CheckpointError, CheckpointReader, unpacked
from zerolap.saving import Target, write_state
from zerolap.sharded import Described, from_sharded, room_for, to_sharded
from zerolap.states import State, flat_state, shaped_state


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What is in a checkpoint, as plain data; CheckpointError if it is damaged."""
    reader = CheckpointReader(Path(path))
    small = reader.read({"optimizer": {"params": None, "param_groups": None}})["optimizer"]
    entries = sorted({key for name in reader.metadata.planner_data.values() if name[:2] == STATES for key in name[3:]})
    return {
        "step": reader.step,
        "ranks": reader.ranks,
        "bytes": sum(size for size, _ in reader.files.values()),
        "files": len(reader.files),
        "parameters": [{"name": name, "shape": list(shape)} for name, shape, _ in small["params"]],
        "param_groups": [
            {
                key: value if isinstance(value, bool | int | float | str | None) else repr(value)
                for key, value in group.items()
            }
            | {"params": len(group["params"])}
            for group in small["param_groups"]
        ],
        "state_entries": entries,
        "buffers": sorted(reader.names(("model",)).keys() - {name for name, *_ in small["params"]}),
    }


def to_file(path: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Write a sharded checkpoint as one file: ``model``, ``optimizer`` as the plain class has it, ``step`` and ``extra``."""
    reader = CheckpointReader(Path(path))
    small = reader.read({"optimizer": {"params": None, "param_groups": None}, "extra": reader.room(("extra",))})
    then = described_then(small["optimizer"]["params"])
    params = list(then.values())
    pieces = [Piece(index, 0, param.numel) for index, param in enumerate(params)]
    model = {
        name: reader.room(("model", name)) if hasattr(kept, "size") else None
        for name, kept in reader.names(("model",)).items()
    }
    room = {"model": model, "optimizer": {"state": room_for(reader.metadata, STATES, pieces, params, then)}}
    whole = reader.read(room)
    index_of = {param.name: index for index, param in enumerate(params)}
    states = from_sharded(whole["optimizer"]["state"], params, then)
    consolidated = {
        "model": whole["model"],
        "optimizer": {
            "state": {
                piece.param: shaped_state(state, _like(params[piece.param])) for piece, state in sorted(states.items())
            },
            "param_groups": [
                {**group, "params": [index_of[name] for name in group["params"]], "param_names": list(group["params"])}
                for group in small["optimizer"]["param_groups"]
            ],
        },
        "step": reader.step,
        "extra": unpacked(small["extra"]),
    }
    temporary = Path(f"{file}.partial")
    torch.save(consolidated, temporary)
    temporary.replace(file)


def _like(param: Described) -> Tensor:
    return torch.empty_strided(param.shape, param.strides, device="meta")


def from_file(file: str | os.PathLike[str], folder: str | os.PathLike[str], *, step: int | None = None) -> Path:
    """Make a sharded checkpoint of a file that has a ``model`` and an ``optimizer`` state dict: ours, or anybody's."""
    try:
        whole = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{file} cannot be loaded safely: {type(error).__name__}: {error}") from error
    if not isinstance(whole, dict) or not {"model", "optimizer"} <= whole.keys():
        raise CheckpointError(f"{file} has no 'model' and 'optimizer' state dicts")
    model, optimizer = whole["model"], whole["optimizer"]
    names = _names(model, optimizer)
    params = [Described.of(name, model[name]) for name in names]
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
    step = step if step is not None else int(whole.get("step", 0))
    if path_of(folder, step).exists():
        raise CheckpointError(f"{path_of(folder, step)} is there already")
    state = {"model": model, "optimizer": sharded, "extra": pack(whole.get("extra"))}
    with warnings.catch_warnings():  # that this is one process, which is what we want
        warnings.simplefilter("ignore")
        return write_state(Target(folder=Path(folder), step=step), state, None)


def _names(model: dict[str, Tensor], optimizer: dict[str, Any]) -> list[str]:
    """The name of each of the optimizer's parameters: as the file says, or, if it does not, by their order."""
    groups = optimizer["param_groups"]
    count = sum(len(group["params"]) for group in groups)
    if all("param_names" in group for group in groups):
        of_index = {i: n for group in groups for i, n in zip(group["params"], group["param_names"], strict=True)}
        names = [of_index[index] for index in range(count)]
    else:
        names = [name for name, value in model.items() if value.is_floating_point()]
        if len(names) != count:
            raise CheckpointError(
                f"the optimizer has {count} parameters and the model {len(names)} tensors that may be parameters, and the file does "
                "not say which is which: save it with an optimizer made from named_parameters()"
            )
    missing = [name for name in names if name not in model]
    if missing:
        raise CheckpointError(f"the optimizer's parameters {missing} are not in the model")
    return names
