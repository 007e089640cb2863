"""Draw faults, try the conformance suite on each, and say which share it catches, tier by tier, and what it misses.

    python -m support.faults.runs --draws 500 --seed 23 --tier 3

Ranks live through all requirements of a fault, in the order in which they have caught faults like it, up to the first that fails;
each requirement gets a new adapter. What 2 ranks do not catch is tried on 3. Sound adapters are drawn, too: none may be caught.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from support.faults.product import SEED, Fault, draws
from zerolap_conformance.requirements import Requirement, all_requirements

GROUP_SECONDS = 6  # what waits for a peer that never comes ends after so long
CHECK_SECONDS = {30: 40.0}  # after which a requirement of so many seconds counts as hung, and so the fault as caught
MOST_SECONDS = 80.0
SOUND = "sound"  # the verb of an adapter without a fault

# A fork server that has imported all of it: ranks are there in milliseconds.
_SERVER = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Catch:
    """What caught a fault, if anything has."""

    fault: Fault
    by: str | None = None
    ranks: int = 0
    said: str = ""
    seconds: float = 0.0

    @property
    def tier(self) -> int | None:
        return all_requirements()[self.by].tier if self.by else None


def _on_rank(rank: int, size: int, folder: str, fault: Fault, ids: list[str], connection: Connection) -> None:
    log = open(Path(folder, f"stderr{rank}"), "w")  # noqa: SIM115 - lives as long as the process
    os.dup2(log.fileno(), 2)
    faulthandler.enable()
    os.environ["ZEROLAP_SOAK_MINUTES"] = "0"
    import torch
    import torch.distributed as dist

    from support.faults.adapters import make
    from zerolap_conformance.requirements import NotDeclaredError

    torch.set_num_threads(1)
    tried = "the start"
    try:
        adapter, backend = make(fault), "gloo"
        if adapter.device_type != "cpu":
            backend = f"cpu:gloo,{adapter.device_type}:{adapter.backend}"
            torch.accelerator.set_device_index(0)
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=GROUP_SECONDS),
        )
        for tried in ids:
            connection.send(("trying", tried, 0.0))
            start, known = time.monotonic(), all_requirements()[tried]
            if known.min_ranks > size:
                continue
            adapter = make(fault)
            with contextlib.suppress(NotDeclaredError):
                known.check(adapter)
            if not known.fails_device:
                adapter.synchronize()
                dist.all_reduce(torch.zeros(1))
            connection.send(("passed", tried, time.monotonic() - start))
        connection.send(("over", "", 0.0))
    except BaseException as error:
        connection.send(
            ("failed", tried, f"{type(error).__name__}: {error}"[:600] + "\n" + traceback.format_exc()[-1500:])
        )
    time.sleep(1000)  # the parent ends it: a rank that leaves makes the others fail


_FOR_COLLECTIVES = {"collectives", "collectives_in_flight", "in_use", "values"}
_MADE_FOR = {
    "lane": {"lanes", "lanes_in_use"},
    "side": {"lanes", "sides_in_use"},
    "clock": {"lanes", "sides_in_use"},
    "recycler": {"lanes", "sides_in_use"},
    "synchronize": {"device", "facts"},
    "group": {"collectives", "facts", "in_use"},
    "facts": {"device", "facts", "collectives_in_flight"},
}
_LEAKS = dict.fromkeys(
    ("leaks_memory", "leaks_objects", "leaks_threads", "leaks_descriptors"), ("LEAK-1", "LANE-12", "SIDE-3", "TIME-2")
)
# What is tried first, before anything was learned.
_FIRST = {
    **_LEAKS,
    "delays": ("LATE-2", "LANE-9", "SIDE-3", "MEM-2"),
    "another_error": ("ERR-1", "LANE-10"),
    "hides_errors": ("ERR-1", "LANE-2"),
    "loses_nan": ("VAL-1", "VAL-2"),
    "loses_nan_payload": ("VAL-1",),
    "loses_negative_zero": ("VAL-1", "VAL-2"),
    "loses_infinity": ("VAL-1", "VAL-2"),
    "flushes_denormals": ("VAL-1", "VAL-2"),
    "another_order": ("VAL-5",),
}
_FIRST_OF_VERB = {
    "all_reduce": ("USE-1", "MIX-1"),
    "broadcast": ("USE-3", "MIX-1"),
    "reduce_scatter": ("USE-4", "MIX-1"),
    "all_gather": ("USE-5", "MIX-1"),
    "lane": ("LANE-9", "LANE-13"),
    "side": ("SIDE-3",),
    "clock": ("TIME-2",),
    "recycler": ("MEM-2",),
}


class Runs:
    """Tries faults, and learns what catches them."""

    def __init__(self, *, tier: int, is_quick: bool) -> None:
        self.known = {id_: each for id_, each in all_requirements().items() if each.tier <= tier}
        self._is_quick = is_quick
        self.seconds: dict[str, float] = defaultdict(lambda: 1.0)
        self._caught: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self._by_verb: dict[str, Counter[str]] = defaultdict(Counter)

    def _order(self, fault: Fault) -> list[str]:
        first = _FIRST.get(fault.effect[0], _FIRST_OF_VERB.get(fault.verb, ()))
        like, of_verb = self._caught[fault.verb, fault.effect[0]], self._by_verb[fault.verb]

        def key(id_: str) -> tuple[Any, ...]:
            each: Requirement = self.known[id_]
            return (
                each.fails_device,
                each.tier > 3,
                id_ not in first,
                -like[id_] / self.seconds[id_],
                -of_verb[id_] / self.seconds[id_],
                each.tier,
            )

        ids = self.known
        if self._is_quick and fault.verb != SOUND:
            wanted = _MADE_FOR.get(fault.verb, _FOR_COLLECTIVES)
            ids = {id_: each for id_, each in ids.items() if each.check.__module__.rpartition(".")[2] in wanted}
        return sorted(ids, key=key)

    def try_fault(self, fault: Fault, *, ranks: Sequence[int] = (2, 3)) -> Catch:
        start = time.monotonic()
        for size in ranks:
            by, said = self._try(fault, size)
            if by is not None:
                if fault.verb != SOUND:
                    self._caught[fault.verb, fault.effect[0]][by] += 1
                    self._by_verb[fault.verb][by] += 1
                return Catch(fault=fault, by=by, ranks=size, said=said, seconds=time.monotonic() - start)
        return Catch(fault=fault, seconds=time.monotonic() - start)

    def _try(self, fault: Fault, size: int) -> tuple[str | None, str]:
        ids = self._order(fault)
        with tempfile.TemporaryDirectory() as folder:
            connections, processes = [], []
            for rank in range(size):
                ours, theirs = _SERVER.Pipe(duplex=False)
                process = _SERVER.Process(target=_on_rank, args=(rank, size, folder, fault, ids, theirs), daemon=True)
                process.start()
                theirs.close()
                connections.append(ours)
                processes.append(process)
            try:
                return self._watch(connections, ids, Path(folder))
            finally:
                for process in processes:
                    process.kill()
                for process in processes:
                    process.join()

    def _limit(self, id_: str) -> float:
        return CHECK_SECONDS.get(int(self.known[id_].seconds), MOST_SECONDS)

    def _watch(self, connections: list[Any], ids: list[str], folder: Path) -> tuple[str | None, str]:
        """The first failure of any rank, or what hangs."""
        trying = dict.fromkeys(connections, ids[0])
        since = time.monotonic() + 20  # to start
        open_ones = list(connections)
        while open_ones:
            ready = wait(open_ones, timeout=1.0)
            if not ready and time.monotonic() > since + self._limit(trying[open_ones[0]]):
                return min(trying.values(), key=ids.index), "hangs"
            for each in ready:
                since = max(since, time.monotonic())
                try:
                    kind, id_, what = each.recv()
                except EOFError:
                    said = "".join(path.read_text(errors="replace")[-600:] for path in sorted(folder.glob("stderr*")))
                    return trying[each], f"a rank is gone: {said}"
                if kind == "trying":
                    trying[each] = id_
                elif kind == "passed":
                    self.seconds[id_] = 0.8 * self.seconds[id_] + 0.2 * what if id_ in self.seconds else what
                elif kind == "failed":
                    return (id_ if id_ in self.known else ids[0]), what
                else:
                    open_ones.remove(each)
        return None, ""


def _mapped(
    pool: ThreadPoolExecutor, fn: Callable[[Fault], Catch], faults: Iterable[Fault], *, at_once: int
) -> Iterator[Catch]:
    """As pool.map, but nothing is taken before it is begun with, soon."""
    waiting: deque[Future[Catch]] = deque()
    for fault in faults:
        waiting.append(pool.submit(fn, fault))
        if len(waiting) >= at_once:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def sound(number: int, device: str) -> Fault:
    return Fault(number=number, device=device, verb=SOUND, conditions=(), effect=("nothing", None))


def run(
    faults: Iterable[Fault], *, tier: int, workers: int = 2, tell: bool = False, is_quick: bool = False
) -> Iterator[Catch]:
    """What comes of each, in order. In a quick run only those requirements are tried that are about the verb."""
    _SERVER.set_forkserver_preload(["support.faults.preloaded"])
    runs = Runs(tier=tier, is_quick=is_quick)
    with ThreadPoolExecutor(workers) as pool:
        for catch in _mapped(pool, runs.try_fault, faults, at_once=2 * workers):
            if tell:
                said = (catch.said.splitlines() or [""])[0][:140]
                print(
                    f"{catch.by or 'MISSED':8} {catch.ranks} ranks {catch.seconds:5.1f} s  {catch.fault} | {said}",
                    flush=True,
                )
            yield catch
    if tell and runs.seconds:
        print("seconds:", {id_: round(s, 2) for id_, s in sorted(runs.seconds.items(), key=lambda item: -item[1])[:25]})


def report(catches: Sequence[Catch], *, seed: int) -> str:
    """The share caught, tier by tier, and the misses by what they have in common."""
    faulty = [each for each in catches if each.fault.verb != SOUND]
    wrongly = [each for each in catches if each.fault.verb == SOUND and each.by]
    lines = [
        f"{len(faulty)} faults, seed {seed}; sound adapters refused: {len(wrongly)} of {len(catches) - len(faulty)}"
    ]
    lines += [f"  WRONGLY: {each.fault} by {each.by}: {each.said[:1500]}" for each in wrongly]
    for tier in range(max((each.tier or 0 for each in faulty), default=0) + 1):
        two = sum(each.tier is not None and each.tier <= tier and each.ranks == 2 for each in faulty)
        three = sum(each.tier is not None and each.tier <= tier for each in faulty)
        lines.append(f"up to tier {tier}: {two / len(faulty):6.1%} on 2 ranks, {three / len(faulty):6.1%} on 2 or 3")
    by = Counter(each.by for each in faulty if each.by)
    lines.append("caught by: " + ", ".join(f"{id_} {number}" for id_, number in by.most_common()))
    missed = [each.fault for each in faulty if not each.by]
    for reason, number in Counter(why_missed(fault) for fault in missed).most_common():
        lines.append(f"missed, {number}: {reason}")
        lines += [f"    {fault}" for fault in missed if why_missed(fault) == reason]
    return "\n".join(lines)


def why_missed(fault: Fault) -> str:
    """What a fault that nothing catches has in common with others."""
    names = {name for name, _ in fault.conditions}
    if len(names) > 1:
        return f"two conditions at once: {', '.join(sorted(names))}"
    return f"{fault.verb}: {fault.effect[0]}" + (f" ({', '.join(names)})" if names else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--tier", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of them, of an earlier run")
    parser.add_argument("--least", type=float, default=0.95, help="the share that must be caught")
    parser.add_argument("--sound", type=int, default=1, help="sound adapters of each device to try first")
    parser.add_argument(
        "--quick", action="store_true", help="try only requirements that are about the verb that is broken"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin with none after so long")
    parser.add_argument("--only", type=int, nargs="*", help="these numbers alone, with what each requirement said")
    parser.add_argument("--json", type=Path, help="write what came of each there")
    given = parser.parse_args()
    from zerolap_sim import build

    build.build()
    faults = list(draws(given.draws, seed=given.seed))[given.skip :]
    if given.only:
        faults = [each for each in faults if each.number in given.only]
    catches = []
    controls = [sound(-1 - i, device) for device in ("host", "stream") for i in range(given.sound)]
    end = time.monotonic() + given.seconds
    drawn = (fault for fault in [*controls, *faults] if time.monotonic() < end)
    for catch in run(drawn, tier=given.tier, workers=given.workers, tell=True, is_quick=given.quick):
        catches.append(catch)
        if given.only:
            print(catch.by, catch.said, flush=True)
    if given.json:
        given.json.write_text(json.dumps([[str(c.fault), c.by, c.ranks, c.said[:300]] for c in catches], indent=0))
    print(report(catches, seed=given.seed))
    faulty = [each for each in catches if each.fault.verb != SOUND]
    return not (sum(each.by is not None for each in faulty) >= given.least * len(faulty))


if __name__ == "__main__":
    sys.exit(main())
