"""Train for real in every schedule, forecast each of them from a short measurement, and compare.

    python benchmarks/forecast.py --model lm27 --network 1000 --out results

The measurement is ``zerolap.calibration.measure``, which runs none of the schedules. Step time and exposed time (what is beyond
forward, backward and the update alone) are forecast for each, and for DDP; errors are relative to what was timed. Each round visits
every way to train, and forward and backward without communication as well: that time takes the place of the measured one, so that a
machine that is slow for a while is slow for all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, str(Path(__file__).parent))

from entries import ADAMW, MODELS, Entry, Plain, Zerolap
from network import open_network

from zerolap.calibrate.calibrate import Measured, calibrate, measure
from zerolap.calibrate.from_model import workload_of
from zerolap.calibrate.measure import reduce_nothing
from zerolap.calibrate.model_params import describe
from zerolap.forecast.forecast import Forecast, forecast_all
from zerolap.schedule.machine import Gather, Schedule
from zerolap_cpu_gloo import CpuGlooAdapter

ALONE = "forward and backward"


class Computing(Entry):
    """Forward and backward under a DDP that reduces nothing."""

    def __init__(self, model: nn.Module, cap: float) -> None:
        ddp = DDP(model, bucket_cap_mb=cap, gradient_as_bucket_view=True)
        reduce_nothing(ddp, lambda bucket: None)
        super().__init__(ddp, torch.optim.SGD(ddp.parameters()))

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.model(batch).backward()


def run_rank(given: argparse.Namespace) -> None:
    """On one rank: measure, train every way in turns, and let the first rank write what was found."""
    began = time.perf_counter()
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})  # as two hosts of one core each
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    source = MODELS[given.model]()

    def batch(number: int) -> Any:
        return source.batch(given.batch, torch.Generator().manual_seed(10 * number + rank))

    measured = measure(
        MODELS[given.model](),
        lambda ddp: ddp(batch(0)),
        optimizer_class=torch.optim.AdamW,
        optimizer_options=ADAMW,
        bucket_cap_mb=given.cap,
    )
    measuring_seconds = time.perf_counter() - began
    made: dict[str, Entry] = {
        ALONE: Computing(MODELS[given.model](), given.cap),
        "DDP": Plain(MODELS[given.model](), cap=given.cap, fused=True, as_view=True),
    }
    for schedule in Schedule:
        for gather in Gather:
            made[f"{schedule.value}, {gather.value}"] = Zerolap(
                MODELS[given.model](), cap=given.cap, schedule=schedule.value, gather=gather.value
            )
    seconds: dict[str, list[float]] = {name: [] for name in made}
    sent: dict[str, int] = {}
    round_, round_seconds, has_time = 0, 0.0, torch.ones(1)
    while has_time:
        round_began = time.perf_counter()
        for name, entry in made.items():
            entry.step(batch(0))
            if not round_:  # to warm up: DDP finds its buckets
                entry.step(batch(1))
                continue
            dist.barrier()
            before = entry.handle.stats().sent_bytes if isinstance(entry, Zerolap) else 0
            moments = [time.perf_counter()]
            for number in range(given.steps):
                entry.step(batch(number))
                moments.append(time.perf_counter())
            entry.finish()
            dist.barrier()
            seconds[name] += [end - start for start, end in pairwise(moments)]
            if isinstance(entry, Zerolap):
                sent[name] = (entry.handle.stats().sent_bytes - before) // given.steps
            if rank == 0:
                print(f"\rround {round_}: {name:30}", end="", file=sys.stderr, flush=True)
        now = time.perf_counter()
        round_seconds = now - round_began
        has_time.fill_(now - began + round_seconds < given.seconds or round_ == 0)
        dist.broadcast(has_time, src=0)
        round_ += 1
    mine = {
        "measured": asdict(measured),
        "measuring_seconds": measuring_seconds,
        "seconds": seconds,
        "sent": sent,
        "state_bytes": {name: e.handle.stats().state_bytes for name, e in made.items() if isinstance(e, Zerolap)},
    }
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, mine)
    if rank == 0:
        Path(os.environ["RESULT"]).write_text(json.dumps(everything))
    dist.destroy_process_group()


def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the ranks and bring home what they found."""
    with open_network(given.network, given.ranks) as network:
        given.out.mkdir(parents=True, exist_ok=True)
        result = given.out / f"forecast-{given.model}-{given.ranks}-{given.network}.json"
        names = ("model", "network", "ranks", "batch", "cap", "seconds", "steps")
        arguments = [part for name in names for part in (f"--{name}", str(getattr(given, name)))]
        network.run(__file__, arguments, seconds=1200, RESULT=str(result))
        found: list[dict[str, Any]] = json.loads(result.read_text())
        return found


def predict(model: str, measured: Measured, num_ranks: int) -> tuple[list[Forecast], str]:
    link, compute = calibrate(measured)
    calibrated = (
        f"Calibrated: {8e-6 * link.bytes_per_second:.0f} Mbit/s, latency {1e3 * link.latency:.2f} ms, forward "
        f"{1e3 * compute.forward:.0f} ms, backward {1e3 * compute.backward:.0f} ms, update "
        f"{1e9 * compute.step_seconds_per_element:.2f} ns an element, {1e6 * compute.host_seconds_per_bucket:.0f} us a bucket, "
        f"{1e9 * compute.cpu_seconds_per_byte:.2f} ns of CPU a byte."
    )
    workload = workload_of(
        describe(MODELS[model]()),
        optimizer_class=torch.optim.AdamW,
        optimizer_options=ADAMW,
        exact_cut=CpuGlooAdapter.capabilities.exact_cut,
        measured=measured,
    )
    return forecast_all(workload, world_size=num_ranks, link=link, compute=compute), calibrated


def report(model: str, ranks: list[dict[str, Any]]) -> str:
    measured = Measured(**{key: _as_tuple(value) for key, value in ranks[0]["measured"].items()})
    scale = _quartiles(ranks, ALONE)[1] / (measured.forward + measured.backward)
    measured = replace(measured, forward=scale * measured.forward, backward=scale * measured.backward)
    forecasts, calibrated = predict(model, measured, len(ranks))
    lines = [
        calibrated,
        "",
        "| way | s/step (quartiles) | forecast | error | exposed s | forecast | bytes as forecast | state as forecast |",
        "|---|---|---|---|---|---|---|---|",
    ]
    errors = []
    for each in forecasts:
        low, seconds, high = _quartiles(ranks, each.name)
        exposed = max(0.0, seconds - each.compute_seconds)
        error = each.step_seconds / seconds - 1
        errors.append(abs(error))
        same = ["", ""]
        if each.schedule is not None:
            same = [
                "yes" if ranks[0]["sent"][each.name] == each.sent_bytes else "no",
                "yes" if ranks[0]["state_bytes"][each.name] == each.memory.state + each.memory.masters else "no",
            ]
        lines.append(
            f"| {each.name} | {seconds:.3f} ({low:.3f}-{high:.3f}) | {each.step_seconds:.3f} | {100 * error:+.1f} % | {exposed:.3f} "
            f"| {each.exposed_seconds:.3f} | {same[0]} | {same[1]} |"
        )
    lines += [
        "",
        f"Largest error of a step {100 * max(errors):.1f} %, mean {100 * statistics.mean(errors):.1f} %. The measurement took "
        f"{ranks[0]['measuring_seconds']:.0f} s, {len(ranks[0]['seconds'][ALONE])} steps of each way were timed; forward and backward "
        f"took {scale:.2f} of what was measured at first.",
    ]
    return "\n".join(lines) + "\n"


def _quartiles(ranks: list[dict[str, Any]], name: str) -> list[float]:
    """Of the slowest rank's steps: the others wait for it."""
    steps = [max(taken) for taken in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]
    return statistics.quantiles(steps, n=4, method="inclusive") if len(steps) > 1 else steps * 3


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(each) for each in value) if isinstance(value, list) else value


def measure_and_report(given: argparse.Namespace) -> str:
    """Everything, as Markdown."""
    ranks = json.loads(given.again.read_text()) if given.again else run(given)
    setting = (
        f"{given.model}, batch {given.batch}, {len(ranks)} ranks, network {given.network}, {given.cap:g} MB a bucket."
    )
    return f"{setting} {report(given.model, ranks)}"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="lm5")
    parser.add_argument("--network", default="loopback", help="loopback, or Mbit/s, as in 1000 or 200+5ms (needs root)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--cap", type=float, default=5, help="MB a bucket")
    parser.add_argument("--seconds", type=float, default=120, help="for all of it, but one round at least")
    parser.add_argument("--steps", type=int, default=3, help="timed, per visit")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    parser.add_argument("--again", type=Path, help="only report on what an earlier run has written")
    return parser


def main() -> None:
    given = make_parser().parse_args()
    if "RESULT" in os.environ:
        run_rank(given)
        return
    text = measure_and_report(given)
    print(file=sys.stderr)
    print(text)


if __name__ == "__main__":
    main()
