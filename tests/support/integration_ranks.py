"""One rank of a test of an example: the example itself, what it is compared with, and the example without its attach call.

Started by torchrun, through ``run_example``. All runs of one job follow each other in the same processes.
"""

from __future__ import annotations

import ast
import faulthandler
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap

EXAMPLES = Path(__file__).parents[2] / "examples/integrations"
LIMIT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What came of a run on one rank. ``num_updates`` is None where zerolap is attached to nothing."""

    params: dict[str, Tensor] = field(default_factory=dict)
    state_bytes: int = 0
    num_updates: int | None = None
    error: str = ""


Run = tuple[str, dict[str, Any], list[tuple[str, str]]]  # kind; options of ``main``; edits of the example's text


def run_example(name: str, folder: Path, runs: list[Run]) -> tuple[list[list[Evidence]], str]:
    """For each run what came of it on 2 ranks, and what the job has printed."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = subprocess.run(
        [*command, name, str(folder), json.dumps(runs)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT + 60,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout[-8000:]
    ranks = [torch.load(folder / f"evidence-{rank}.pt", weights_only=True) for rank in range(2)]
    results = [[Evidence(**one) for one in both] for both in zip(*ranks, strict=False)]
    assert len(results) == len(runs), f"only {len(results)} runs: {[each.error for each in results[-1]]}"
    return results, job.stdout


def check(ours: list[Evidence], plain: list[Evidence], *, num_updates: int, tolerance: float = 0.0) -> None:
    """That all updates were zerolap's, gave the plain optimizer's numbers, and that every rank keeps half of the state."""
    for rank, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        assert not mine.error, f"rank {rank}: {mine.error}"
        assert mine.num_updates is not None, f"rank {rank}: zerolap's hook is not attached"
        assert mine.num_updates == num_updates, f"rank {rank}: {mine.num_updates} updates by zerolap, not {num_updates}"
        assert mine.params.keys() == theirs.params.keys()
        for name, param in mine.params.items():
            difference = (param - theirs.params[name]).abs().max().item()
            assert difference <= tolerance, f"rank {rank}: {name} differs from the plain optimizer's by {difference}"
        assert 0.4 < mine.state_bytes / theirs.state_bytes < 0.6, (
            f"rank {rank}: {mine.state_bytes} bytes of state, {theirs.state_bytes} with the plain optimizer"
        )


# --- on a rank ---------------------------------------------------------------------------------------------------------


def _load(name: str, edits: list[tuple[str, str]]) -> SimpleNamespace:
    """The example's names, after replacing some of its text."""
    path = EXAMPLES / f"{name}.py"
    source = path.read_text()
    for old, new in edits:
        assert source.count(old) == 1, f"{path.name} has {old!r} {source.count(old)} times"
        source = source.replace(old, new)
    names: dict[str, Any] = {"__name__": name, "__file__": str(path)}
    exec(compile(source, path, "exec"), names)
    return SimpleNamespace(**names)


def _without_attach(name: str) -> list[tuple[str, str]]:
    """The edit that leaves out the call."""
    source = (EXAMPLES / f"{name}.py").read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    (call,) = (node for node in calls if ast.unparse(node.func) == "zerolap.attach")
    return [(ast.get_source_segment(source, call) or "", "None")]


MakeOptimizer = partial[torch.optim.Optimizer]

# The plain optimizer, and a sharded one that has its plain step: the same numbers, and half of the state, without the hook.
OPTIMIZERS = {
    "plain": partial(torch.optim.AdamW, fused=True),
    "sharded": partial(zerolap.ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, fused=True),
}


def _loop(example: Any, make: MakeOptimizer, compiler: Callable[[DDP], Any], steps: int = 20) -> Any:
    dist.init_process_group("gloo")
    ddp = DDP(example.make_model())
    opt = make(ddp.parameters(), lr=1e-2)
    model = compiler(ddp)
    for step in range(steps):
        x = example.batch(step)
        loss = nn.functional.mse_loss(model(x), x[:, :8])
        opt.zero_grad()
        loss.backward()
        opt.step()
    return ddp.module, opt


ORACLES: dict[str, Callable[..., Any]] = {
    "with_torchrun": partial(_loop, compiler=lambda ddp: ddp),
    "with_compile": partial(_loop, compiler=torch.compile),
}


def _params_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _run(name: str, kind: str, options: dict[str, Any], edits: list[tuple[str, str]]) -> Evidence:
    if kind in OPTIMIZERS:
        model, optimizer = ORACLES[name](_load(name, []), OPTIMIZERS[kind], **options)
        held = optimizer.optim if isinstance(optimizer, zerolap.ZeroRedundancyOptimizer) else optimizer
        state_bytes = sum(t.nbytes for state in held.state.values() for t in state.values() if isinstance(t, Tensor))
        return Evidence(params=_params_of(model), state_bytes=state_bytes)
    try:
        model, optimizer = _load(name, _without_attach(name) if kind == "unattached" else edits).main(**options)
    except Exception:  # for the test to judge
        return Evidence(error=traceback.format_exc())
    stats = optimizer.handle.stats()
    num_updates = stats.num_updates if optimizer.handle.is_attached else None
    return Evidence(params=_params_of(model), state_bytes=stats.state_bytes, num_updates=num_updates)


def _main(name: str, folder: str, runs: str) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    torch.set_num_threads(1)
    start = dist.init_process_group
    # The first run of a job makes the group; the others, which would make one of their own in a job of their own, find it.
    dist.init_process_group = lambda *args, **kwargs: None if dist.is_initialized() else start(*args, **kwargs)
    evidence = []
    for kind, options, edits in json.loads(runs):
        evidence.append(_run(name, kind, options, edits))
        if evidence[-1].error:  # the last, and alone perhaps: who waits for this rank finds it gone
            break
    torch.save([asdict(each) for each in evidence], Path(folder, f"evidence-{os.environ['RANK']}.pt"))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    _main(*sys.argv[1:])
