"""Nothing hangs and nothing is silent: whatever breaks on one rank ends all of them, by name, within the timeout."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support import ROOT
from support.ranks import on_ranks
from support.training import HOOK_MAKERS, Mlp, backward, batches, overlapped
from zerolap_conformance.ranks import try_ranks
from zerolap_cpu_gloo import CpuGlooAdapter

GROUP_TIMEOUT = 6.0

NATIVE: list[dict[str, Any]] = [
    {"schedule": schedule, "gather": gather}
    for schedule in ("interleaved", "after_backward", "on_step")
    for gather in ("eager", "lazy")
]
ALL_WAYS = range(len(HOOK_MAKERS) + len(NATIVE))


class _FailingSGD(torch.optim.SGD):
    """Fails on rank 1, in the third step of any of its shards, once it trains: it is tried before."""

    is_training = False

    def step(self, closure: Any = None) -> Any:
        if self.is_training and dist.get_rank() == 1 and self.param_groups[0]["params"]:
            self.count = getattr(self, "count", 0) + 1
            if self.count == 3:
                raise ArithmeticError("the optimizer is out of luck")
        return super().step(closure)


def _failing_hook(state: Any, bucket):  # type: ignore[no-untyped-def]
    if dist.get_rank() == 1 and bucket.index() == 1:
        state["count"] += 1
        if state["count"] == 4:
            raise ArithmeticError("the hook is out of luck")
    return allreduce_hook(None, bucket)


def _hook_with_failing_future(state: Any, bucket):  # type: ignore[no-untyped-def]
    def check(future: Future[Tensor]) -> Tensor:
        if dist.get_rank() == 1 and bucket.index() == 1:
            state["count"] += 1
            if state["count"] == 4:
                raise ArithmeticError("the callback is out of luck")
        return future.value()

    return allreduce_hook(None, bucket).then(check)


def _hook_that_never_ends(state: Any, bucket):  # type: ignore[no-untyped-def]
    if bucket.index() == 1:
        state["count"] += 1
        if state["count"] == 4:
            return Future()
    return allreduce_hook(None, bucket)


class _FailingLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("the model is out of luck")


class _FailingModel(Mlp):
    num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        if dist.get_rank() == 1 and self.num_forwards == 4:
            hidden = torch.tanh(self.layers[0](x))
            for i, layer in enumerate(self.layers[1:]):
                hidden = layer(_FailingLayer.apply(hidden) if i == 1 else hidden)
            return hidden
        return super().forward(x)


def _train(
    which: int,
    *,
    cls: Any = torch.optim.SGD,
    hook: Callable[..., Any] = allreduce_hook,
    make_model: Callable[[], nn.Module] = Mlp,
    leave: bool = False,
) -> None:
    torch.manual_seed(0)
    ddp = DDP(make_model(), bucket_cap_mb=0.004)
    state = None if hook is allreduce_hook else {"count": 0}
    if which < len(HOOK_MAKERS):
        zero = overlapped(ddp, ddp.parameters(), cls, hook_maker=HOOK_MAKERS[which], hook=hook, state=state, lr=0.1)
    else:
        zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), cls, overlap_with_ddp=True, lr=0.1)
        zerolap.attach(ddp, zero, **NATIVE[which - len(HOOK_MAKERS)])
    _FailingSGD.is_training = True
    for i, x in enumerate(batches(10)):
        if leave and i == 4 and dist.get_rank() == 1:
            os._exit(7)
        try:
            backward(ddp, x)
            zero.step()
        except Exception as error:
            # The failure stays: going on is refused, with the first error named again.
            with pytest.raises(zerolap.ZerolapError, match=r"failed earlier|did not finish") as again:
                zero.step()
            zero.zero_grad()
            if not isinstance(error, zerolap.ZerolapError | ArithmeticError):  # ours, or the model's own
                raise TypeError(f"the loop got {error!r}") from error
            raise RuntimeError(f"SURFACED[{error}] AGAIN[{again.value}]") from error
    raise AssertionError("training went on to the end")


FAILURES: dict[str, tuple[dict[str, Any], str, str]] = {
    # what fails: options, what the guilty rank says, what the others say
    "optimizer": (
        {"cls": _FailingSGD},
        r"rank 1, bucket \d, step: ArithmeticError: the optimizer is out of luck",
        r"rank 0, bucket \d: ",
    ),
    "wrapped hook": (
        {"hook": _failing_hook},
        r"rank 1, bucket 1\D.*ArithmeticError: the hook is out of luck",
        r"rank 0, bucket \d: the reduction failed",
    ),
    "wrapped hook's future": (
        {"hook": _hook_with_failing_future},
        r"rank 1, bucket 1\D.*ArithmeticError: the callback is out of luck",
        r"rank 0, bucket \d: ",
    ),
}


@pytest.mark.parametrize("which", range(len(HOOK_MAKERS)))
@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_on_one_rank_ends_all_ranks_by_name(name: str, which: int) -> None:
    options, guilty, others = FAILURES[name]
    outcomes = try_ranks(2, _train, which, limit=60, group_timeout=GROUP_TIMEOUT, **options)
    for outcome, expected in zip(outcomes, (others, guilty), strict=True):
        assert outcome.error is not None
        surfaced = re.search(r"SURFACED\[(.*)\] AGAIN\[(.*)\]", outcome.error, re.DOTALL)
        assert surfaced, outcome.error
        for said in surfaced.groups():
            assert re.search(expected, said, re.DOTALL), said
        assert outcome.seconds < GROUP_TIMEOUT + 12


@pytest.mark.parametrize("which", ALL_WAYS[len(HOOK_MAKERS) :])
def test_a_failing_optimizer_on_one_rank_ends_all_ranks_by_name_natively(which: int) -> None:
    outcomes = try_ranks(2, _train, which, limit=60, group_timeout=GROUP_TIMEOUT, cls=_FailingSGD)
    assert re.search(r"rank 1, bucket \d, step: ArithmeticError: the optimizer is out of luck", outcomes[1].error or "")
    assert re.search(r"rank 0, bucket \d: ", outcomes[0].error or ""), outcomes[0].error
    assert outcomes[0].seconds < GROUP_TIMEOUT + 12


@pytest.mark.parametrize("which", range(len(HOOK_MAKERS)))
def test_a_hook_whose_future_never_completes_is_ended_by_a_timeout_that_names_the_bucket(which: int) -> None:
    for rank, outcome in enumerate(try_ranks(2, _train, which, limit=60, group_timeout=3, hook=_hook_that_never_ends)):
        assert outcome.error is not None
        assert re.search(rf"rank {rank}, bucket 1: .*not done after \d+ s", outcome.error), outcome.error


@pytest.mark.parametrize("which", ALL_WAYS)
def test_an_error_in_the_model_on_one_rank_ends_the_others_by_name(which: int) -> None:
    outcomes = try_ranks(2, _train, which, limit=60, group_timeout=GROUP_TIMEOUT, make_model=_FailingModel)
    assert "the model is out of luck" in (outcomes[1].error or "")
    assert re.search(r"SURFACED\[.*rank 0, bucket \d: ", outcomes[0].error or "", re.DOTALL), outcomes[0].error


@pytest.mark.parametrize("which", ALL_WAYS)
def test_a_rank_that_dies_ends_the_others_by_name(which: int) -> None:
    outcomes = try_ranks(2, _train, which, limit=60, group_timeout=GROUP_TIMEOUT, leave=True)
    assert "exit code 7" in (outcomes[1].error or "")
    assert re.search(r"SURFACED\[.*rank 0, bucket \d: ", outcomes[0].error or "", re.DOTALL), outcomes[0].error


def _lanes() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("zerolap-")]


@on_ranks(2)
def test_threads_and_connections_end_with_the_optimizer() -> None:
    for i in range(20):
        ddp = DDP(Mlp(), bucket_cap_mb=0.004)
        if i % 2:
            zero = overlapped(ddp, ddp.parameters(), torch.optim.SGD, lr=0.1)
        else:
            zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
            zerolap.attach(ddp, zero, gather="lazy")
        for x in batches(2):
            backward(ddp, x)
        assert [name.split("-")[1] for name in _lanes()] in (["update"], ["update", "progress"])
        num_files = len(os.listdir("/proc/self/fd"))
        del ddp, zero
        gc.collect()
        deadline = time.monotonic() + 10
        while _lanes() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert _lanes() == []
    assert num_files < 100, "connections of closed groups are left open"


def _moved_away() -> None:
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    overlapped(ddp, ddp.parameters(), torch.optim.SGD, lr=0.1)
    for i, x in enumerate(batches(6)):
        if i == 3:
            for p in ddp.parameters():
                p.data = p.data.clone()
        backward(ddp, x)


def test_parameters_that_left_their_buffer_are_noticed() -> None:
    for outcome in try_ranks(2, _moved_away):
        assert "parameters have left their flat buffer" in (outcome.error or "")


def _thawed() -> None:
    model = Mlp()
    model.layers[0].requires_grad_(False)
    ddp = DDP(model, bucket_cap_mb=0.004)
    overlapped(ddp, ddp.parameters(), torch.optim.SGD, lr=0.1)
    for i, x in enumerate(batches(6)):
        if i == 3:
            model.layers[0].requires_grad_(True)
        backward(ddp, x)


def test_a_parameter_thawed_behind_ddps_back_is_noticed() -> None:
    for outcome in try_ranks(2, _thawed):
        assert "in none of DDP's buckets" in (outcome.error or "")


def _scaled() -> None:
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    zero = overlapped(ddp, ddp.parameters(), torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(ddp(next(batches(1))).sum()).backward()
    scaler.step(zero)


def test_loss_scaling_is_refused_under_overlap() -> None:
    for outcome in try_ranks(2, _scaled):
        assert "scaling losses cannot work with updates inside backward" in (outcome.error or "")


COMPUTES_AT_THE_END = """
import threading, time
import torch
import zerolap

torch.set_num_threads(1)
lane, has_begun = zerolap.ThreadLane("busy"), threading.Event()
matrix = torch.ones(500, 500)
start = time.thread_time()
matrix @ matrix
size = int(500 * max(1, 2 / (time.thread_time() - start)) ** (1 / 3))  # takes about 2 s of a core

def compute():
    matrix = torch.ones(size, size)
    has_begun.set()
    matrix @ matrix  # in C++, where the interpreter is not held
    print("computed", flush=True)

lane.submit(compute)
has_begun.wait(60)
"""


def test_a_process_that_ends_while_its_lane_computes_ends_in_order() -> None:
    """A thread that comes back from C++ when the interpreter has gone would abort it."""
    command = [sys.executable, "-c", COMPUTES_AT_THE_END]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert (done.returncode, done.stdout) == (0, "computed\n"), done


class StopsWhileOpening(CpuGlooAdapter):
    """Rank 0, which keeps the store, is stopped while rank 1 opens a group."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self._first = first

    def open_group(self, like: dist.ProcessGroup, *, name: str) -> dist.ProcessGroup:
        if like.rank() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        while Path(f"/proc/{self._first}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        return super().open_group(like, name=name)


def open_with_a_stopped_store(rank: int, port: int, how: str) -> None:
    """Says how long it took rank 1 to raise, and what."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=GROUP_TIMEOUT)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=limit)
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    assert pids[0] is not None
    assert dist.group.WORLD is not None
    ddp = DDP(Mlp())
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    adapter, start = StopsWhileOpening(pids[0]), time.monotonic()
    try:
        if how == "attach":
            zerolap.attach(ddp, zero, adapter=adapter)
        else:
            adapter.open_group(dist.group.WORLD, name="late")
    except Exception as error:
        print(json.dumps([time.monotonic() - start, type(error).__name__, str(error)]), flush=True)
    os._exit(0)


@pytest.mark.parametrize(("how", "num_waits"), [("open_group", 1), ("attach", 2)])  # attach meets the other rank, too
def test_a_store_that_is_stopped_while_a_group_is_opened_ends_it_in_time(how: str, num_waits: int) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    paths = [str(Path(__file__).parent), str(ROOT / "tests")]
    code = f"import sys; sys.path[:0] = {paths!r}; import test_failures as t; "
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", f"{code}t.open_with_a_stopped_store({rank}, {port}, {how!r})"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, err = ranks[1].communicate(timeout=100)
    finally:
        for rank in ranks:
            rank.kill()  # a stopped one, too
            rank.communicate()
    assert said, err
    seconds, kind, error = json.loads(said)
    assert kind == "CollectiveError", error
    assert error.startswith("rank 1: opening group "), error
    assert "the rank that keeps the store (rank 0) is stopped" in error
    assert GROUP_TIMEOUT <= seconds < num_waits * (GROUP_TIMEOUT + 5) + 15, "the rest is a busy machine"
