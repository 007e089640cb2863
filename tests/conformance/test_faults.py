"""Faults are drawn, not listed: the draw itself, and some of it against the conformance suite."""

from __future__ import annotations

from collections import Counter

import pytest

from support.faults.product import COLLECTIVES, CONDITIONS, EFFECTS, SEED, Fault, draws
from support.faults.runs import Catch, report, run, sound
from zerolap_sim import build

NUM_DRAWN = 40


def test_a_seed_draws_the_same_faults_each_another_one() -> None:
    drawn = list(draws(500, seed=SEED))
    assert drawn == list(draws(500, seed=SEED))
    assert drawn[:100] == list(draws(100, seed=SEED))
    assert drawn != list(draws(500, seed=SEED + 1))
    assert len({(each.device, each.verb, each.conditions, each.effect) for each in drawn}) == 500


def test_many_draws_come_upon_every_verb_condition_and_effect() -> None:
    drawn = list(draws(6000, seed=SEED))
    assert {each.verb for each in drawn} == set(CONDITIONS)
    for verb in COLLECTIVES:
        of_verb = [each for each in drawn if each.verb == verb]
        seen = {name for each in of_verb for name, _ in each.conditions}
        assert seen == set(CONDITIONS[verb]), set(CONDITIONS[verb]) - seen
        effects = {each.effect[0] for each in of_verb}
        never = {"counts_bytes", "changes_its_input", "swaps_parts", "another_order", "loses_nan_payload"}
        assert set(EFFECTS[verb]) - effects <= never
    assert min(Counter(each.device for each in drawn).values()) > 1500


def test_a_report_gives_shares_by_tier_and_misses_by_reason() -> None:
    def fault(number: int) -> Fault:
        conditions = (("nth", 3),) if number == 2 else ()
        return Fault(number=number, device="host", verb="broadcast", conditions=conditions, effect=("hangs", None))

    said = report(
        [
            Catch(fault=sound(-1, "host")),
            Catch(fault=fault(0), by="DEV-1", ranks=2),
            Catch(fault=fault(1), by="USE-3", ranks=3),
            Catch(fault=fault(2)),
        ],
        seed=7,
    )
    assert "3 faults, seed 7; sound adapters refused: 0 of 1" in said
    assert "up to tier 0:  33.3% on 2 ranks,  33.3% on 2 or 3" in said
    assert "up to tier 2:  33.3% on 2 ranks,  66.7% on 2 or 3" in said
    assert "missed, 1: broadcast: hangs (nth)\n    #2 host broadcast, if nth(3): hangs(None)" in said


@pytest.mark.soak
def test_drawn_faults_are_caught() -> None:
    build.build()
    catches = list(run(draws(NUM_DRAWN, seed=SEED), tier=3, is_quick=True))
    assert sum(each.by is not None for each in catches) >= 0.9 * NUM_DRAWN, report(catches, seed=SEED)
