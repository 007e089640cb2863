"""What can go wrong: verb x conditions x effect, and a seeded draw of it. How it is made to go wrong is elsewhere."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

COLLECTIVES = ("all_reduce", "broadcast", "reduce_scatter", "all_gather")
FLOATS = ("float32", "bfloat16", "float16", "float64")
INTEGERS = ("int32", "int64")
SEED = 23

Term = tuple[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One broken adapter. Its effect shows where all its conditions hold, and only there."""

    number: int
    device: str  # "host" or "stream"
    verb: str
    conditions: tuple[Term, ...]
    effect: Term

    def __str__(self) -> str:
        return (
            f"#{self.number} {self.device} {self.verb}, if {_said(self.conditions) or 'ever'}: {_said([self.effect])}"
        )


def _said(terms: Any) -> str:
    return " and ".join(
        f"{name}({value:.4g})" if isinstance(value, float) else f"{name}({value})" for name, value in terms
    )


Dice = random.Random
Draw = Callable[[Dice], Any]


def _log(low: float, high: float) -> Draw:
    return lambda dice: math.exp(dice.uniform(math.log(low), math.log(high)))


def _log_int(low: int, high: int) -> Draw:
    return lambda dice: round(_log(low, high)(dice))


def _of(*values: Any) -> Draw:
    return lambda dice: dice.choice(values)


def _nothing(dice: Dice) -> None:
    return None


# --- conditions ---------------------------------------------------------------------------------------------------------

USE: dict[str, Draw] = {
    "nth": _log_int(2, 300),
    "from_nth": _log_int(2, 300),
    "every": _log_int(2, 40),
    "after_seconds": _log(0.1, 1.0),
    "off_thread": _nothing,
}
OF_COLLECTIVE: dict[str, Draw] = {
    **USE,
    "bytes_over": _log_int(2**12, 2**22),
    "bytes_under": _log_int(8, 2**10),
    "multiple_of": _of(2, 16, 64, 256, 1024, 4096),
    "odd": _nothing,
    "dtype": _of(*FLOATS, *INTEGERS),
    "rank": _of(0, 1),
    "group_number": _of(2, 3, 4),
    "group_reversed": _nothing,
    "group_gapped": _nothing,
    "in_flight": _log_int(2, 64),
    "other_group": _nothing,
    "offset": _nothing,
    "out_of_order": _nothing,
    "waits_elsewhere": _nothing,
    "under_way": _log(0.002, 0.1),
}
WITH_TAGS: dict[str, Draw] = {
    "tag_over": _log_int(2, 200),
    "uneven": _nothing,
    "has_empty": _nothing,
    "scattered": _nothing,
}
CONDITIONS: dict[str, dict[str, Draw]] = {
    "all_reduce": {**OF_COLLECTIVE, "is_max": _nothing, "scalar": _nothing},
    "broadcast": {**OF_COLLECTIVE, "root": _of(0, 1)},
    "reduce_scatter": {**OF_COLLECTIVE, **WITH_TAGS},
    "all_gather": {**OF_COLLECTIVE, **WITH_TAGS},
    "lane": {**USE, "lane_number": _of(2, 3, 5, 8), "queued": _log_int(2, 50), "gives": _of("tensor", "tuple", "none")},
    "side": {**USE, "in_flight": _log_int(2, 20)},
    "clock": {**USE, "interval_over": _log(0.001, 0.1)},
    "synchronize": {name: USE[name] for name in ("nth", "from_nth", "every")},
    "group": {"group_number": _of(1, 2, 3, 4), "group_reversed": _nothing, "group_gapped": _nothing},
    "facts": {},
    "recycler": {**USE, "bytes_over": _log_int(2**16, 2**22)},
}

# --- effects ------------------------------------------------------------------------------------------------------------

ANYWHERE = lambda dice: dice.choice((0.0, 1.0, dice.random()))  # noqa: E731 - the place, as a share of the length
LEAKS: dict[str, Draw] = {
    "leaks_memory": _nothing,
    "leaks_objects": _nothing,
    "leaks_threads": _nothing,
    "leaks_descriptors": _nothing,
}
ON_ARRIVAL: dict[str, Draw] = {
    "flips_a_bit": ANYWHERE,
    "zeroes": ANYWHERE,
    "adds_one": ANYWHERE,
    "swaps_neighbours": ANYWHERE,
    "loses_the_tail": _log_int(1, 64),
    "through": _of("bfloat16", "float16", "float32"),
    "loses_negative_zero": _nothing,
    "loses_nan": _nothing,
    "loses_nan_payload": _nothing,
    "loses_infinity": _nothing,
    "flushes_denormals": _nothing,
    "integers_saturate": _nothing,
    "integers_as_doubles": _nothing,
    "another_order": _nothing,
    "stale": _nothing,
    "leaves_what_was_there": _nothing,
    "swaps_results": _nothing,
    "swaps_parts": _nothing,
    "writes_beyond": _nothing,
    "changes_its_input": ANYWHERE,
    "arrives_late": _nothing,
    "delays": _log(0.3, 1.0),
    "counts_bytes": _of(0, 0.5, 1.25, 2, 4),
    "fails": _nothing,
    "hangs": _nothing,
    "hides_errors": _nothing,
    "another_error": _of("RuntimeError", "KeyError", "OSError", "TimeoutError"),
    **LEAKS,
}
EFFECTS: dict[str, dict[str, Draw]] = {
    **dict.fromkeys(COLLECTIVES, ON_ARRIVAL),
    "lane": {
        "skips": _nothing,
        "runs_twice": _nothing,
        "loses_the_result": _nothing,
        "gives_the_last_result": _nothing,
        "swaps_order": _nothing,
        "done_early": _nothing,
        "ignores_its_caller": _nothing,
        "records_gradients": _nothing,
        "hides_errors": _nothing,
        "another_error": _of("RuntimeError", "KeyError", "OSError"),
        "goes_on_after_errors": _nothing,
        "close_drops": _nothing,
        "close_fails": _nothing,
        "runs_after_close": _nothing,
        "delays": _log(0.3, 1.0),
        "hangs": _nothing,
        **LEAKS,
    },
    "side": {
        "arrives_late": _nothing,
        "ignores_its_caller": _nothing,
        "counts_bytes": _of(0, 2),
        "delays": _log(0.3, 1.0),
        "hangs": _nothing,
        **LEAKS,
    },
    "clock": {
        "scales": _of(0.5, 0.8, 0.9, 1.1, 1.25, 2, 10, 1e3, 1e-3),
        "stands_still": _nothing,
        "runs_backwards": _nothing,
        "jumps": _log(0.01, 10),
        "wraps": _log(0.02, 0.1),
        "is_coarse": _log(0.005, 0.05),
        **LEAKS,
    },
    "synchronize": {"skips": _nothing, "one_stream_only": _nothing, **LEAKS},
    "group": {
        "swaps_ranks": _nothing,
        "forgets_timeouts": _of(0.5, 2, 90),
        "cuts_names": _of(4, 8, 12, 20),
        "close_breaks_others": _nothing,
        "close_fails_twice": _nothing,
        "hangs": _nothing,
        "delays": _log(0.5, 2),
        **LEAKS,
    },
    "facts": {
        "exact_cut": _of(1, 2, 4, 1024, 4096, 65536),
        "has_float64": _nothing,
        "one_issue_order": _nothing,
        "futures_complete_at_enqueue": _nothing,
        "device": _of("meta", "cpu:7"),
        "name": _of(None, 3, ""),
        "why_unavailable": _of("", "raises"),
        "diagnose": _of(None, "raises", ""),
        "stage_sizes": _of(1, 3),
        "kept_bytes": _of(-1, 0.5),
        "max_receive_bytes": _of(0, -1, 1.5),
        "release_memory": _of("raises", "zeroes"),
    },
    "recycler": {
        "loses_a_page": _nothing,
        "touches_neighbours": _nothing,
        "counts_bytes": _of(0.5, 2, -1),
        "keeps_after_release": _nothing,
        "delays": _log(0.3, 1.0),
        "fails": _nothing,
        **LEAKS,
    },
}
# How often a verb is drawn: the collectives are what there is most to do wrong in.
WEIGHTS = {
    **dict.fromkeys(COLLECTIVES, 18),
    "lane": 10,
    "side": 4,
    "clock": 4,
    "synchronize": 2,
    "group": 5,
    "facts": 4,
    "recycler": 3,
}
ON_HOST_ONLY = {
    "recycler",
    ("lane", "swaps_order"),
    ("lane", "close_drops"),
    ("lane", "runs_after_close"),
    ("lane", "queued"),
}
ON_STREAM_ONLY = {"synchronize", ("lane", "ignores_its_caller"), ("side", "ignores_its_caller")}


def draws(number: int, *, seed: int) -> Iterator[Fault]:
    """Faults, each another one; the same for the same seed."""
    dice, seen = random.Random(seed), set()
    while len(seen) < number:
        fault = _draw(dice, len(seen))
        if fault is None or (key := (fault.device, fault.verb, fault.conditions, fault.effect)) in seen:
            continue
        seen.add(key)
        yield fault


def _draw(dice: Dice, number: int) -> Fault | None:
    device = "host" if dice.random() < 0.6 else "stream"
    verb = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    known = CONDITIONS[verb]
    names = dice.sample(list(known), k=min(len(known), dice.choices((0, 1, 2), (1, 7, 2))[0]))
    effect = dice.choice(list(EFFECTS[verb]))
    drawn = Fault(
        number=number,
        device=device,
        verb=verb,
        conditions=tuple((name, known[name](dice)) for name in names),
        effect=(effect, EFFECTS[verb][effect](dice)),
    )
    return drawn if _is_one(drawn) else None


def _is_one(fault: Fault) -> bool:
    """Whether it can ever show, and breaks the contract if it does."""
    verb, effect, names = fault.verb, fault.effect[0], dict(fault.conditions)
    only = {"host": ON_STREAM_ONLY, "stream": ON_HOST_ONLY}[fault.device]
    if verb in only or any((verb, each) in only for each in (effect, *names)):
        return False
    if "nth" in names and (effect in LEAKS or effect == "delays"):
        return False  # once is no leak, and any host is slow once
    return verb not in COLLECTIVES or _is_one_of_collectives(fault, names)


_CONTRADICTIONS = (
    {"bytes_over", "bytes_under"},
    {"odd", "multiple_of"},
    {"nth", "from_nth"},
    {"nth", "every"},
    {"scalar", "bytes_over"},
    {"scalar", "multiple_of"},
    {"scalar", "odd"},
    {"group_reversed", "group_gapped"},
    {"scattered", "offset"},
    {"is_max", "scalar"},
    {"off_thread", "waits_elsewhere"},
)
_FLOATS_ONLY = {
    "through",
    "loses_negative_zero",
    "loses_nan",
    "loses_nan_payload",
    "loses_infinity",
    "flushes_denormals",
    "another_order",
}
_LARGE_INTEGERS = {"integers_saturate", "integers_as_doubles"}
_AT_START = {"arrives_late", "counts_bytes", "hides_errors", "another_error", "hangs", "fails", "delays"}
_AT_WAIT = {"out_of_order", "waits_elsewhere", "under_way"}


def _is_one_of_collectives(fault: Fault, names: dict[str, Any]) -> bool:
    verb, (effect, value) = fault.verb, fault.effect
    dtype = names.get("dtype")
    if any(pair <= names.keys() for pair in _CONTRADICTIONS):
        return False
    if "group_gapped" in names and names.get("rank") == 1:
        return False  # on 2 ranks the gapped group has one
    if effect in _AT_START and _AT_WAIT & names.keys():
        return False
    if effect in ("counts_bytes", "changes_its_input", "swaps_parts") and verb in ("all_reduce", "broadcast"):
        return False  # nothing is counted, and what is given is what is reduced
    if (effect, verb) in (("swaps_parts", "reduce_scatter"), ("changes_its_input", "all_gather")):
        return False
    if effect in ("swaps_parts", "swaps_neighbours") and ("scalar" in names or names.get("bytes_under", 64) < 16):
        return False
    if effect in _FLOATS_ONLY and dtype in INTEGERS:
        return False
    if effect in _LARGE_INTEGERS and dtype not in (None, "int64"):
        return False
    is_sum = verb in ("all_reduce", "reduce_scatter")
    if effect in ("loses_nan", "loses_nan_payload", "loses_negative_zero") and (is_sum and "is_max" in names):
        return False
    if effect == "loses_nan_payload" and is_sum:
        return False  # which NaN comes of two is left open
    if effect == "another_order":
        return (
            is_sum
            and "is_max" not in names
            and "rank" not in names
            and "off_thread" not in names
            and not _AT_WAIT & names.keys()
        )
    if effect == "through":
        return (
            dtype is None
            or FLOATS.index(dtype) in ({"bfloat16": (0, 2, 3), "float16": (0, 1, 3), "float32": (3,)}[value])
        )
    if effect in ("hides_errors", "another_error"):
        return not names.keys() - {"rank", "dtype", "odd", "tag_over", "off_thread"}
    return True
