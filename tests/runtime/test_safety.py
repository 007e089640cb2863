"""Whatever one rank does, dies of or computes: all ranks hear of it in time, by name, and nothing drifts unseen."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
import zerolap_sim
from support import PYTHONPATH, safety_programs
from support.ranks import on_ranks
from support.safety_programs import GUILTY, WAYS, connect, fail
from support.sim_programs import on_device
from support.stream_programs import Attached, every_way
from support.training import assert_same_params, backward, batches, iterate, pair
from zerolap_conformance.ranks import Outcome, run_ranks, try_ranks
from zerolap_sim import build

Failures = dict[tuple[str, str, int], tuple[Path, Future[list[Outcome]]]]  # by case, way and number of ranks

SCHEDULES = ("interleaved", "after_backward", "on_step")
GATHERS = ("eager", "lazy")

# --- failures ---------------------------------------------------------------------------------------------------------

GROUP_TIMEOUT = 8.0
IN_TIME = GROUP_TIMEOUT + 6  # the others are listened to, and may have begun to wait a little later
NUM_AT_ONCE = 6  # of these programs: they wait more than they work

COLLECTIVE = r"rank 0, bucket \d+: (the reduction|all-gather of|broadcast of)"
SAYS_NOTHING = COLLECTIVE + r".*Nothing was heard of group rank 1"
NO_STEP = r"rank 1, bucket 0: IllegalEventError: step\(\) was not called after the last backward"

# case: ways, what the guilty rank says (None: it cannot), what rank 0 says
CASES: dict[str, tuple[list[str], dict[str, tuple[str | None, str]]]] = {
    "killed": ([*WAYS], {"": (None, SAYS_NOTHING)}),
    "stopped": ([*WAYS], {"": (r"rank 1, bucket \d+: ", SAYS_NOTHING)}),
    "extra backward": (
        [*WAYS],
        {
            "on_step": (
                r"rank 1, bucket 0: the reduction.*rank 1 began 6 backwards and called step\(\) 4 times",
                r"rank 0, bucket \d+: all-gather.*diverged: rank 0 began 5 backwards and called step\(\) 5 times, "
                r"rank 1 began 6 backwards and called step\(\) 4 times",
            ),
            "": (NO_STEP, COLLECTIVE + ".*" + NO_STEP),
        },
    ),
    "skipped step": (
        [*WAYS],
        {
            "on_step": (
                r"rank 1, bucket 0: the reduction.*rank 0 began 5 backwards and called step\(\) 5 times",
                r"rank 0, bucket \d+: all-gather.*rank 1 began 6 backwards and called step\(\) 4 times",
            ),
            "": (NO_STEP, COLLECTIVE + ".*" + NO_STEP),
        },
    ),
    "other order": (
        ["interleaved", "on_step"],
        {
            "on_step": (r"rank 1: norm of gradients failed", r"rank 0, bucket \d+: .*rank 1: norm of gradients failed"),
            "": (r"rank 1: audit of parameters failed", r"rank 0, bucket \d+: .*rank 1: audit of parameters failed"),
        },
    ),
    "other graph": (
        ["after_backward", "hook_with_zero_step"],
        {"": (r"a backward that did not finish|Expected to have finished reduction", COLLECTIVE)},
    ),
    "other buckets": (
        ["interleaved", "hook_with_zero_step"],
        {"": (r"ranks 0 and 1 differ: .*buckets of", r"ranks 0 and 1 differ: .*buckets of")},
    ),
}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def _continued(folder: Path) -> Iterator[None]:
    """Wakes the rank that has stopped itself once the others have ended, or the test has."""
    is_over = threading.Event()

    def wake() -> None:
        deadline = time.monotonic() + IN_TIME + 20
        while not (folder / "error0").exists() and time.monotonic() < deadline and not is_over.wait(0.05):
            pass
        if (pid := folder / f"pid{GUILTY}").exists() and _is_alive(int(pid.read_text())):
            os.kill(int(pid.read_text()), signal.SIGCONT)

    thread = threading.Thread(target=wake)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _fail(case: str, way: str, num_ranks: int, folder: Path) -> list[Outcome]:
    with _continued(folder):
        return try_ranks(num_ranks, fail, case, way, str(folder), limit=60, group_timeout=GROUP_TIMEOUT)


def _runs(case: str) -> list[tuple[str, int]]:
    ways, _ = CASES[case]
    return [(way, 2) for way in ways] + [("on_step", 3)] * (case in ("killed", "skipped step"))


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failures]:
    """All runs of all cases that were asked for, begun at once."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = {given["case"]: None for given in params if given.get("case") in CASES}
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        begun: Failures = {}
        for case in asked:
            for way, num_ranks in _runs(case):
                folder = tmp_path_factory.mktemp("failure")
                begun[case, way, num_ranks] = folder, pool.submit(_fail, case, way, num_ranks, folder)
        yield begun


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_dies_stalls_or_diverges_ends_all_ranks_in_time_and_by_name(case: str, failures: Failures) -> None:
    _, expected = CASES[case]
    lines, wrong = [], []
    for way, num_ranks in _runs(case):
        folder, running = failures[case, way, num_ranks]
        outcomes = running.result()
        guilty, others = expected.get(way, expected.get("", (None, "")))
        fault = float((folder / "fault").read_text())
        for rank, outcome in enumerate(outcomes):
            assert not _is_alive(int((folder / f"pid{rank}").read_text()))
            named = f"{case:14} {way:20} rank {rank} of {num_ranks}:"
            if rank == GUILTY and guilty is None:
                lines.append(f"{named} {(outcome.error or '').splitlines()[0]}")
                continue
            noted = folder / f"error{rank}"
            if not noted.exists():
                wrong.append(f"{named} no error of its own: {outcome}")
                continue
            when, _, said = noted.read_text().partition("\n")
            seconds = float(when) - fault
            lines.append(f"{named} {seconds:4.1f} s  {said.splitlines()[0]}")
            pattern = guilty if rank == GUILTY else others.replace("rank 0", f"rank {rank}") if num_ranks == 2 else ""
            if not re.search(pattern or "", said, re.DOTALL):
                wrong.append(f"{named} {said}\n    does not match {pattern}")
            if seconds > IN_TIME and not (case == "stopped" and rank == GUILTY):
                wrong.append(f"{named} {seconds:.1f} s is late")
    print("\n" + "\n".join(lines))
    assert not wrong, "\n".join(wrong)


# --- ZEROLAP_DEBUG=order ----------------------------------------------------------------------------------------------


def _num_keys() -> int:
    dist.barrier()  # each rank deletes what it has put there itself
    num = dist.distributed_c10d._get_default_store().num_keys()
    dist.barrier()
    return num


@on_ranks(2)
def test_with_checked_order_numbers_are_the_same_and_the_store_stays_small() -> None:
    os.environ["ZEROLAP_DEBUG"] = "order"
    for way in WAYS:
        oracle, ours = pair()
        plain = torch.optim.SGD(oracle.parameters(), lr=0.1, fused=way != "hook_with_zero_step")
        zero, _ = connect(ours, way)
        seen = []
        for i, x in enumerate(batches(12)):
            iterate(oracle, plain, x)
            iterate(ours, zero, x)
            assert_same_params(ours, oracle, (way, i))
            if i in (5, 11):
                seen.append(_num_keys())
        assert seen[0] == seen[1], f"{way}: keys in the store: {seen}"


def _other_collective() -> None:
    """One rank clips and the other does not: they start different collectives, which without the check is a timeout."""
    os.environ["ZEROLAP_DEBUG"] = "order"
    ddp = pair()[0]
    zero, _ = connect(ddp, "on_step")
    for i, x in enumerate(batches(4)):
        zero.zero_grad()
        backward(ddp, x)
        if i == 2 and dist.get_rank() == GUILTY:
            zero.clip_grad_norm_(1.0)
        zero.step()


def test_ranks_that_start_different_collectives_are_told_both_sides_at_once() -> None:
    expected = (
        r"rank 0 starts collective (\d+): all-gather of bucket 0, \d+ elements of torch.float32; "
        r"rank 1 starts collective \1: all-reduce \(norm of gradients\), 3 elements of torch.float64"
    )
    for outcome in try_ranks(2, _other_collective, limit=60, group_timeout=40):
        assert re.search(expected, outcome.error or ""), outcome.error
        assert outcome.seconds < 20, "found by a timeout, not by the check"


def _missing_collective() -> None:
    os.environ["ZEROLAP_DEBUG"] = "order"
    ddp = pair()[0]
    zero, _ = connect(ddp, "on_step")
    for i, x in enumerate(batches(4)):
        backward(ddp, x)
        if i != 2 or dist.get_rank() != GUILTY:
            zero.step()


def test_a_collective_that_a_rank_never_starts_is_named() -> None:
    first, second = try_ranks(2, _missing_collective, limit=60, group_timeout=2)
    for outcome, started, other in ((first, "all-gather", 1), (second, "reduce-scatter", 0)):
        expected = (
            rf"starts collective \d+: {started} of bucket 0.*group rank {other} has not started its own after 2 s"
        )
        assert re.search(expected, outcome.error or ""), outcome.error


def _unknown_mode() -> None:
    os.environ["ZEROLAP_DEBUG"] = "order,ordre"
    connect(pair()[0], "on_step")


def _one_sided_mode() -> None:
    os.environ["ZEROLAP_DEBUG"] = "order" * dist.get_rank()
    connect(pair()[0], "hook_with_zero_step")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (_unknown_mode, r"ZEROLAP_DEBUG=order,ordre: unknown ordre; known: order"),
        (_one_sided_mode, r"ranks 0 and 1 differ: .*'debug='.*'debug=order'"),
    ],
)
def test_a_debug_mode_that_is_unknown_or_not_on_all_ranks_is_refused(program: Any, expected: str) -> None:
    for outcome in try_ranks(2, program, limit=60):
        assert re.search(expected, outcome.error or ""), outcome.error


# --- audits -----------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Two dtypes, frozen layers, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.high = nn.Linear(13, 70)
        self.none = nn.Parameter(torch.empty(0, 4))
        self.low = nn.Sequential(nn.Linear(70, 33), nn.Linear(33, 7)).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.low(self.high(self.frozen(x)).to(torch.bfloat16) + self.none.sum())


def _attach(ddp: DDP, **options: Any) -> tuple[zerolap.ZeroRedundancyOptimizer, zerolap.Handle]:
    trained = [p for p in ddp.parameters() if p.requires_grad]
    zero = zerolap.ZeroRedundancyOptimizer(trained, torch.optim.AdamW, overlap_with_ddp=True, lr=0.01)
    return zero, zerolap.attach(ddp, zero, **options)


@on_ranks(2)
def test_audits_raise_no_false_alarm() -> None:
    for i, (schedule, gather) in enumerate(product(SCHEDULES, GATHERS)):
        masters = i in (0, 3, 5)  # with either gather
        ddp = pair(Mixed)[0]
        zero, handle = _attach(ddp, schedule=schedule, gather=gather, master_weights=masters, audit_every=1)
        for x in batches(50):
            zero.zero_grad()
            backward(ddp, x)
            zero.step()
        handle.audit()
        assert handle.stats().num_updates == 50
    for schedule in SCHEDULES:  # a rank that has joined audits, too
        ddp = pair()[0]
        zero, _ = _attach(ddp, schedule=schedule, audit_every=1)
        for _epoch in range(2):
            with Join([ddp, zero]):
                for x in batches(2 + dist.get_rank()):
                    iterate(ddp, zero, x)


def _flip_a_bit(param: Tensor) -> None:
    with torch.no_grad():
        param.view(-1)[-1:].view(torch.int16)[0] ^= 1


def _drift(schedule: Any, gather: Any, name: str, is_late: bool) -> None:
    ddp = pair(Mixed)[0]
    zero, _ = _attach(ddp, schedule=schedule, gather=gather, audit_every=3)
    for i, x in enumerate(batches(8)):
        if i == 6 and dist.get_rank() == GUILTY and not is_late:
            _flip_a_bit(ddp.module.get_parameter(name))
        zero.zero_grad()
        backward(ddp, x)
        if i == 6 and dist.get_rank() == GUILTY and is_late:
            _flip_a_bit(ddp.module.get_parameter(name))
        zero.step()


@pytest.mark.parametrize(
    ("schedule", "gather", "num_ranks", "name", "is_late"),
    [
        ("interleaved", "lazy", 3, "low.0.weight", False),
        ("after_backward", "eager", 2, "frozen.bias", False),
        ("on_step", "eager", 2, "high.weight", True),  # between backward and step()
    ],
)
def test_one_flipped_bit_on_one_rank_is_found_by_all(
    schedule: str, gather: str, num_ranks: int, name: str, is_late: bool
) -> None:
    where = "" if name.startswith("frozen") else r"bucket \d+, "
    who = rf"{name} of rank 1 differs from that of the 2 others"
    if num_ranks == 2:
        who = rf"{name} differs between rank 0 and rank 1: no side is the larger"
    for rank, outcome in enumerate(try_ranks(num_ranks, _drift, schedule, gather, name, is_late, limit=60)):
        expected = rf"rank {rank}: the audit after update 6 found that parameters differ between ranks: {where}{who}"
        assert re.search(expected, outcome.error or ""), outcome.error
        assert outcome.seconds < 30


# --- gradients that are not finite ------------------------------------------------------------------------------------


def _spoil(ddp: DDP, x: Tensor, value: float) -> None:
    """A backward in which rank 1 has one gradient of this value, so that everybody's mean has it, too."""
    handle = None
    if dist.get_rank() == GUILTY:

        def spoil(grad: Tensor) -> Tensor:
            grad = grad.clone()
            grad.view(-1)[3] = value
            return grad

        handle = ddp.module.layers[1].weight.register_hook(spoil)
    backward(ddp, x)
    if handle is not None:
        handle.remove()


def _skip(gather: Any) -> None:
    oracle, ours = pair()
    plain = torch.optim.AdamW(oracle.parameters(), lr=0.01, fused=True)
    zero, handle = _attach(ours, schedule="on_step", gather=gather, nonfinite="skip")
    bad = {0: float("inf"), 3: float("nan"), 4: float("-inf")}
    for i, x in enumerate(batches(8)):
        for model, optimizer in ((oracle, plain), (ours, zero)):
            optimizer.zero_grad()
            if i in bad:
                _spoil(model, x, bad[i])
            else:
                backward(model, x)
            if optimizer is zero or i not in bad:
                optimizer.step()
        zero.step()  # a second time, for nothing
        assert_same_params(ours, oracle, (gather, i))
    stats = handle.stats()
    assert (stats.num_updates, stats.num_skipped) == (5, 3), stats


@on_ranks(2)
def test_updates_that_are_not_finite_are_skipped_by_all_ranks() -> None:
    for gather in GATHERS:
        _skip(gather)


@pytest.mark.parametrize("schedule", ["after_backward", "on_step"])
@on_ranks(2)
def test_gradients_that_are_not_finite_raise_on_all_ranks_and_change_nothing(schedule: str) -> None:
    oracle, ours = pair()
    plain = torch.optim.AdamW(oracle.parameters(), lr=0.01, fused=True)
    zero, handle = _attach(ours, schedule=schedule, nonfinite="raise")
    for x in batches(3):
        iterate(oracle, plain, x)
        iterate(ours, zero, x)
    where = r"gradients are not finite, update 4 was not made: those of rank 1, bucket \d+, layers.1.weight"
    in_backward = pytest.raises(RuntimeError, match=where) if schedule == "after_backward" else nullcontext()
    with in_backward:
        _spoil(ours, x, float("nan"))
    if schedule == "on_step":
        with pytest.raises(zerolap.ZerolapError, match=where):
            zero.step()
    assert_same_params(ours, oracle, "what is not finite has changed nothing")
    if schedule == "on_step":  # the program may go on
        iterate(oracle, plain, x)
        iterate(ours, zero, x)
        assert_same_params(ours, oracle, "after the error")
        assert handle.stats().num_updates == 4
    else:
        with pytest.raises(zerolap.ZerolapError, match="failed earlier"):
            backward(ours, x)


def _nonsense(options: dict[str, Any]) -> None:
    _attach(pair()[0], **options)


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"audit_every": -1}, r"audit_every must be a number of updates, or None for never, got -1"),
    ({"audit_every": True}, r"audit_every must be .* got True"),
    ({"audit_every": 2.5}, r"audit_every must be .* got 2.5"),
    ({"nonfinite": "abort"}, r"nonfinite must be one of \['ignore', 'raise', 'skip'\], got 'abort'"),
    ({"nonfinite": "raise"}, r'nonfinite="raise" .* use schedule="after_backward" or "on_step"'),
    ({"nonfinite": "skip", "schedule": "after_backward"}, r'nonfinite="skip" .* schedule="on_step"'),
]


@on_ranks(2)
def test_nonsense_is_refused() -> None:
    for options, expected in NONSENSE:
        with pytest.raises(ValueError, match=expected):
            _nonsense(options)


# --- all of it on streams ---------------------------------------------------------------------------------------------


def _watched(ways: dict[str, Any]) -> dict[str, tuple[float, float, list[str]]]:
    os.environ["ZEROLAP_DEBUG"] = "order"
    return every_way(ways)


def test_what_is_watched_on_streams_is_right_and_ordered() -> None:
    build.build()  # outside the time limits of the ranks
    ways = {
        f"{s}, {g}": Attached(
            zerolap_sim.SimAdapter,
            schedule=s,
            gather=g,
            audit_every=1,
            nonfinite={"interleaved": "ignore", "after_backward": "raise", "on_step": "skip"}[s],
        )
        for s, g in product(SCHEDULES, GATHERS)
    }
    for found, late in run_ranks(2, on_device, _watched, ways):
        assert late == []
        for way, seen in found.items():
            assert seen == (0, 0, []), way


# --- parameters that are read after their update, in the same backward ------------------------------------------------


class _Slowly(torch.autograd.Function):
    """Gives the update of the buckets so far time to happen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(0.3)
        return grad


class ReadsLate(nn.Module):
    """The last layer's weight is used by the first layer, too, but as a constant: no gradient holds back its update."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(13, 40), nn.Linear(40, 40)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(self.first(x), self.last.weight.detach())
        return self.last(_Slowly.apply(x))


def _read_late(schedule: Any) -> None:
    ddp = pair(ReadsLate, bucket_cap_mb=0.001)[0]
    zero, _ = _attach(ddp, schedule=schedule)
    for x in batches(3):
        iterate(ddp, zero, x)


def test_a_parameter_that_is_read_after_its_update_is_noticed() -> None:
    for outcome in try_ranks(2, _read_late, "interleaved", limit=60, group_timeout=10):
        assert "modified by an inplace operation" in (outcome.error or ""), outcome.error
    run_ranks(2, _read_late, "after_backward")


@on_ranks(2)
def test_a_graph_from_before_an_update_is_refused() -> None:
    """As with a plain optimizer: a graph that was made before an update cannot be used after it."""
    ddp = pair()[0]
    zero, _ = _attach(ddp, schedule="on_step")
    loss = ddp(next(batches(1))).sum()
    loss.backward(retain_graph=True)
    zero.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- the end ----------------------------------------------------------------------------------------------------------


def _torchrun(case: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, "PYTHONWARNINGS": "default"}
    return subprocess.Popen(
        [*command, safety_programs.__file__, case],
        env=os.environ | options,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_program_that_just_ends_ends_cleanly_and_at_once() -> None:
    with _torchrun("ends") as launcher:
        assert launcher.stdout is not None
        ranks = [launcher.stdout.readline().split() for _ in range(2)]
        took = []
        for pid, said in ranks:
            while _is_alive(int(pid)) and launcher.poll() is None:
                time.sleep(0.01)
            took.append(time.monotonic() - float(said))
        _, errors = launcher.communicate(timeout=60)
    print(f"\ninterpreters took {took[0]:.2f} and {took[1]:.2f} s to end")
    assert (launcher.returncode, errors) == (0, "")
    assert max(took) < 10, took  # a fraction of a second on a quiet machine; who waits for a group waits 30 minutes


def test_a_program_that_raises_ends_on_all_ranks() -> None:
    with _torchrun("raises") as launcher:
        _, errors = launcher.communicate(timeout=90)
    assert launcher.returncode != 0
    assert "ArithmeticError: the program is out of luck" in errors


class OutOfLuck(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ArithmeticError("out of luck")


def _num_open() -> tuple[int, int]:
    gc.collect()
    threads = sum(thread.name.startswith("zerolap") for thread in threading.enumerate())
    return threads, len(os.listdir("/proc/self/fd"))


@on_ranks(2)
def test_nothing_is_left_open_by_what_has_failed() -> None:
    seen: list[tuple[int, int]] = []
    for i in range(6):
        ddp = pair()[0]
        zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), OutOfLuck, overlap_with_ddp=True, lr=0.1)
        handle = zerolap.attach(ddp, zero)
        with pytest.raises(RuntimeError, match="out of luck"):
            backward(ddp, next(batches(1)))
        if i % 2:
            handle.detach()
        del ddp, zero, handle
        deadline = time.monotonic() + 10
        while (now := _num_open()) > (seen[1] if i > 1 else (0, 1000)) and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(now)
    assert seen[-1] <= seen[1], f"threads and files open after each failure: {seen}"
