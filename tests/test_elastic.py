"""Elastic training loses no sample and no update: workers are killed at any moment, a node is lost and comes back."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from test_net import hosts  # noqa: F401 - a fixture
from zerolap import checkpoint, convert

EXAMPLE = Path(__file__).parent.parent / "examples" / "elastic.py"
GATED = Path(__file__).parent / "elastic_gated.py"
NUM_SAMPLES = 1633  # of the example's text
STEPS_PER_KILL = 60  # a kill comes at most 40 steps after the start it ends, or within the save that follows
# Other world sizes sum the same gradients in another order; what that does to the loss was below 4e-7 in 400 steps.
LOSS_TOLERANCE = 1e-5


class Agent:
    """One torchrun, and the workers it has started. Nothing else is ever sent a signal."""

    def __init__(self, log: Path, options: list[str], program: list[str], *, prefix: tuple[str, ...] = (), **env: str):
        # A file, not a pipe: nobody reads while the test is busy killing.
        self.log = log
        command = [*prefix, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        options = ["--max-restarts", "100", "--monitor-interval", "0.1", *options]
        # Else torchrun hands every restart the same store, and ranks find the addresses of those that were killed in it.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **env}
        with log.open("ab") as out:
            self.process = subprocess.Popen([*command, *options, *program], env=env, stdout=out, stderr=out)

    def workers(self) -> list[int]:
        """Their pids. Children of an agent that has not been waited for cannot be anybody else's."""
        found = []
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for listed in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
                found += [int(pid) for pid in listed.read_text().split()]
        return sorted(found)

    def wait_for(self, what: str, is_so: Callable[[], Any], *, limit: float = 120) -> Any:
        """What ``is_so`` returns, once that is true."""
        deadline = time.monotonic() + limit
        while not (answer := is_so()):
            assert self.process.poll() is None, f"torchrun has ended before {what}:\n{self.said()}"
            assert time.monotonic() < deadline, f"{what}: not within {limit} s:\n{self.said()}"
            time.sleep(0.001)
        return answer

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def end(self, *, limit: float) -> None:
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not done within {limit} s:\n{self.said()}")
        assert code == 0, self.said()

    def kill(self) -> None:
        """The agent first, or it would start others; then its workers, which nobody else would end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)  # from here on it starts none, and its children stay listed
            workers = self.workers()
            self.process.kill()
            for pid in workers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def agent(*args: Any, **kwargs: Any) -> Iterator[Agent]:
    made = Agent(*args, **kwargs)
    try:
        yield made
    finally:
        made.kill()


# --- what has happened, from the final checkpoint and the logs ---------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The steps that led to the final checkpoint, in order: each one's samples, its loss, and how many ranks there were."""

    samples: list[list[int]]
    losses: list[float]
    world_sizes: list[int]
    num_replayed: int


def final_state(folder: Path, step: int) -> dict[str, Any]:
    convert.to_file(checkpoint.path_of(folder, step), folder / "final")
    return torch.load(folder / "final", weights_only=True)


def history(folder: Path, num_steps: int) -> History:
    runs = final_state(folder, num_steps)["extra"]["runs"]
    samples, losses, world_sizes = [], [], []
    for place, run in enumerate(runs):
        last = runs[place + 1]["after_step"] if place + 1 < len(runs) else num_steps
        ranks = [lines_of(folder / f"{run['name']}-rank-{rank}.jsonl") for rank in range(run["world_size"])]
        for number in range(last - run["after_step"]):
            lines = [lines[number] for lines in ranks]
            assert {line["step"] for line in lines} == {run["after_step"] + number + 1}
            samples.append([sample for line in lines for sample in line["samples"]])
            losses.append(sum(line["loss"] for line in lines) / len(samples[-1]))
            world_sizes.append(run["world_size"])
    done = Counter[str]()
    for file in folder.glob("run-*.jsonl"):
        name = file.name.partition("-rank-")[0]
        done[name] = max(done[name], len(lines_of(file)))
    return History(samples=samples, losses=losses, world_sizes=world_sizes, num_replayed=done.total() - len(samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    world_size: int
    step: int


def newest_run(folder: Path) -> Run:
    """How many ranks it has, and how far the first one is."""
    logs = sorted(folder.glob("run-*-rank-*.jsonl"))
    mine = [log for log in logs if log.name.partition("-rank-")[0] == logs[-1].name.partition("-rank-")[0]]
    lines = lines_of(mine[0]) if mine else []
    return Run(world_size=len(mine), step=lines[-1]["step"] if lines else 0)


def lines_of(log: Path) -> list[dict[str, Any]]:
    """A line that a kill has cut short belongs to a step that no checkpoint has."""
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def assert_every_sample_once_an_epoch(samples: list[list[int]]) -> None:
    consumed = [sample for step in samples for sample in step]
    epochs = [consumed[first : first + NUM_SAMPLES] for first in range(0, len(consumed), NUM_SAMPLES)]
    for number, epoch in enumerate(epochs):
        assert len(set(epoch)) == len(epoch), f"epoch {number} has samples twice"
        assert len(epoch) == NUM_SAMPLES or number == len(epochs) - 1
        assert set(epoch) <= set(range(NUM_SAMPLES))
    assert len(epochs) > 1, "too few steps to say anything"
    assert epochs[0] != epochs[1], "another order every epoch"


def bits_of(state: dict[str, Any]) -> dict[str, bytes]:
    """Parameters, buffers, and all that the optimizer keeps, as they lie in memory."""
    found = {name: value.numpy().tobytes() for name, value in state["model"].items()}
    for index, entries in state["optimizer"]["state"].items():
        found |= {f"{index}.{key}": torch.as_tensor(value).numpy().tobytes() for key, value in entries.items()}
    return found


def train(folder: Path, num_steps: int, *more: str) -> None:
    """On two ranks, undisturbed."""
    program = [str(EXAMPLE), "--folder", str(folder), "--steps", str(num_steps), "--save-every", "200", *more]
    with agent(folder.with_suffix(".log"), ["--standalone"], program) as undisturbed:
        undisturbed.end(limit=300)


# --- kills ------------------------------------------------------------------------------------------------------------


def wait_for_moment(job: Agent, folder: Path, moment: str, dice: random.Random, *, seen: set[Path]) -> None:
    """Return at a random point: of the start of workers, between or within steps, or within a save."""

    def run() -> Path | None:
        return next(iter(set(folder.glob("run-*-rank-0.jsonl")) - seen), None)

    def has_steps(wanted: int) -> bool:
        found = run()
        return found is not None and found.read_bytes().count(b"\n") >= wanted

    if moment == "start":  # while they import, meet, load, or take their first steps
        until = time.monotonic() + dice.uniform(0, 5)
        job.wait_for("the start", lambda: time.monotonic() > until or has_steps(1))
        return
    wanted = dice.randint(1, 40)
    job.wait_for("some steps", lambda: has_steps(wanted))
    if moment == "save":
        job.wait_for("a save", lambda: any(folder.glob("step-*[0-9].partial")))
    time.sleep(dice.uniform(0, 0.01))  # not to make a test pass: anywhere in what is going on now


def kill_at_random(folder: Path, moments: list[str], dice: random.Random, *more: str, limit: float) -> str:
    """Train while ranks are killed, then undisturbed, and compare. Returns what is to be said about it."""
    start, num_steps = time.monotonic(), STEPS_PER_KILL * len(moments) + 40
    num_inside, num_restarts = 0, 0
    program = [str(EXAMPLE), "--folder", str(folder), "--steps", str(num_steps), "--save-every", "10", *more]
    with agent(folder.with_suffix(".log"), ["--standalone"], program) as job:
        old: set[int] = set()

        def are_new() -> list[int] | None:
            pids = job.workers()
            return pids if len(pids) == 2 and old.isdisjoint(pids) else None

        for moment in moments:
            workers = job.wait_for("new workers", are_new)
            num_restarts += bool(old)
            seen = set(folder.glob("run-*-rank-0.jsonl"))
            wait_for_moment(job, folder, moment, dice, seen=seen)
            for pid in dice.sample(workers, dice.choice([1, 1, 1, 2])):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            num_inside += any(folder.glob("step-*[0-9].partial"))  # still there: it has not become a checkpoint
            old = set(workers)
        job.wait_for("new workers", are_new)
        num_restarts += 1
        job.end(limit=limit - (time.monotonic() - start))
    seconds = time.monotonic() - start

    happened, killed = history(folder, num_steps), final_state(folder, num_steps)
    train(folder.with_name("undisturbed"), num_steps)
    undisturbed = final_state(folder.with_name("undisturbed"), num_steps)
    num_updates = {int(entries["step"]) for entries in killed["optimizer"]["state"].values()}
    lost = num_steps - min(*num_updates, len(happened.samples))
    line = (
        f"{len(moments)} kills, {num_inside} of them inside saves; {num_restarts} restarts; {num_steps} steps, "
        f"{happened.num_replayed} replayed; {lost} updates lost; {seconds:.0f} s"
    )
    assert num_updates == {num_steps}, line
    assert bits_of(killed) == bits_of(undisturbed), line
    assert killed["optimizer"]["param_groups"] == undisturbed["optimizer"]["param_groups"]
    assert killed["extra"]["position"] == undisturbed["extra"]["position"]
    assert happened.losses == history(folder.with_name("undisturbed"), num_steps).losses
    assert_every_sample_once_an_epoch(happened.samples)
    assert not list(folder.glob("*.partial")), "what killed saves have left is removed by later ones"
    return line


def test_kills_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = kill_at_random(tmp_path / "killed", ["save", "step", "start"], random.Random(0), limit=300)
    with capsys.disabled():
        print(f"\n{line}")


@pytest.mark.kills
@pytest.mark.parametrize("mode", ["save", "async-save"])
def test_many_kills_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str) -> None:
    dice = random.Random(mode)
    moments = dice.choices(["save", "step", "start"], weights=[3, 3, 2], k=30)
    more = ["--async-save"] if mode == "async-save" else []
    line = kill_at_random(tmp_path / "killed", moments, dice, *more, limit=720)
    with capsys.disabled():
        print(f"\n{mode}: {line}")


# --- nodes ------------------------------------------------------------------------------------------------------------


def test_a_node_is_lost_and_comes_back(
    tmp_path: Path,
    hosts: list[tuple[str, str, str]],  # noqa: F811 - the fixture
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two nodes of two ranks each, on two hosts: 4 ranks, then 2, then 4 again."""
    folder, num_steps = tmp_path / "nodes", 300
    endpoint = f"{hosts[0][2]}:29400"  # free: the namespace is new
    program = [str(GATED), "--folder", str(folder), "--steps", str(num_steps), "--save-every", "20"]

    def node(number: int) -> Any:
        namespace, interface, address = hosts[number]
        conf = f"is_host={1 - number},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "1", "--rdzv-conf", conf]
        return agent(
            tmp_path / f"node{number}.log",
            ["--nnodes", "1:2", "--local-addr", address, *rendezvous],
            program,
            prefix=("ip", "netns", "exec", namespace),
            GLOO_SOCKET_IFNAME=interface,
            ELASTIC_GATES="100,200",
        )

    def at(world_size: int, step: int) -> Callable[[], bool]:
        return lambda: (now := newest_run(folder)).world_size == world_size and now.step >= step

    with node(0) as first:
        with node(1) as second:
            second.wait_for("steps on 4 ranks", at(4, 30))
            second.kill()
        since = time.monotonic()
        (folder / "gate-100").touch()
        first.wait_for("steps on 2 ranks", at(2, 110))
        seconds_to_go_on = time.monotonic() - since
        since = time.monotonic()
        with node(1) as second:
            first.wait_for("steps on 4 ranks again", at(4, 120))
            seconds_to_join = time.monotonic() - since
            (folder / "gate-200").touch()
            first.end(limit=120)
            second.end(limit=60)

    happened = history(folder, num_steps)
    sizes = [size for size, _ in groupby(happened.world_sizes)]
    assert sizes == [4, 2, 4], happened.world_sizes
    assert_every_sample_once_an_epoch(happened.samples)
    train(tmp_path / "undisturbed", num_steps)
    undisturbed = history(tmp_path / "undisturbed", num_steps)
    assert happened.samples == undisturbed.samples, "the same batches, however many ranks share them"
    off = max(abs(a / b - 1) for a, b in zip(happened.losses, undisturbed.losses, strict=True))
    assert off < LOSS_TOLERANCE
    with capsys.disabled():
        print(
            f"\n4, 2 and 4 ranks on two nodes: {num_steps} steps, {happened.num_replayed} replayed; went on alone after "
            f"{seconds_to_go_on:.0f} s, joined after {seconds_to_join:.0f} s; loss {happened.losses[-1]:.6f}, of an undisturbed run "
            f"on 2 ranks {undisturbed.losses[-1]:.6f}; largest relative difference of all steps {off:.1e}"
        )
