"""What tests of frameworks share: ranks as torchrun starts them, what comes of a run, and how two runs are compared."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import zerolap
from zerolap_conformance.ranks import run_ranks

LIMIT = 450


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Of a run, on one rank. Plain data, as it is sent to the test."""

    params: dict[str, list[float]]
    state_bytes: int
    num_updates: int | None  # None: nothing is sharded
    said: dict[str, Any] = field(default_factory=dict)


def run(num_ranks: int, programs: str, folder: Path, cases: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    """What came of each case, by rank. The programs import their framework, which is not there in every environment."""
    all_of = importlib.import_module(programs).all_of
    by_rank = run_ranks(num_ranks, all_of, str(folder), cases, limit=LIMIT)
    return {name: [each.get(name, "not reached") for each in by_rank] for name in cases}


def as_torchrun() -> None:
    """The environment in which frameworks find their rank; the process group is there already."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size},
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29400", TORCHELASTIC_RUN_ID="test", HF_HUB_OFFLINE="1",
        ACCELERATE_USE_CPU="true", WANDB_DISABLED="true",
    )  # fmt: skip


def text_of(error: Exception) -> str:
    return "".join(traceback.format_exception(error))[-3000:]


def numbers_of(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    return {name: tensor.detach().double().flatten().tolist() for name, tensor in tensors.items()}


def held_by(optimizer: Any) -> int:
    """Bytes of state in this rank's memory, of a plain optimizer or a sharded one."""
    optimizer = vars(optimizer).get("_optimizer", optimizer)  # in Lightning's wrapper
    if isinstance(optimizer, zerolap.ZeroRedundancyOptimizer):  # attached or not
        states = [state for local in optimizer._book.locals for state in local.states().values()]
    else:
        states = list(optimizer.state.values())
    return sum(t.nbytes for state in states for t in state.values() if isinstance(t, Tensor))


def result_of(model: nn.Module, optimizers: Any, *, num_updates: int | None = None, **said: Any) -> Result:
    return Result(
        params=numbers_of(dict(model.named_parameters())),
        state_bytes=sum(map(held_by, optimizers)),
        num_updates=num_updates,
        said=said,
    )


def difference(ours: Result, plain: Result) -> float:
    assert ours.params.keys() == plain.params.keys()
    pairs = ((a, b) for name, mine in ours.params.items() for a, b in zip(mine, plain.params[name], strict=True))
    return max(abs(a - b) for a, b in pairs)


def check(
    ours: list[Any], plain: list[Any], *, num_updates: int | None = None, tolerance: float = 0.0, what: str = ""
) -> None:
    """That every rank has the plain run's numbers, by updates of zerolap's, and 1/n of its state."""
    for rank, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        assert isinstance(mine, Result), f"rank {rank}: {mine}"
        assert isinstance(theirs, Result), f"rank {rank}, without zerolap: {theirs}"
        found = difference(mine, theirs)
        assert found <= tolerance, f"{what}, rank {rank}: parameters differ by {found}"
        if num_updates is not None:
            assert mine.num_updates == num_updates, (
                f"{what}, rank {rank}: {mine.num_updates} updates, not {num_updates}"
            )
        share = mine.state_bytes / theirs.state_bytes * len(ours)
        assert 0.8 < share < 1.2, f"{what}, rank {rank} has {share:.2f} / {len(ours)} of the state"
