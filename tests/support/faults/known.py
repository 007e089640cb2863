"""A fault for each requirement that asks for much at once: what it must catch, drawn by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.breakers import BREAKERS, EVERYTHING, Breaker
from support.faults.adapters import make
from support.faults.product import Fault, Term
from zerolap import Adapter


def _known(by: str, verb: str, effect: str, value: Any = None, *conditions: Term, device: str = "host") -> None:
    """Register it as a breaker, made by an attribute of this module."""
    fault = Fault(number=-1, device=device, verb=verb, conditions=conditions, effect=(effect, value))
    name = f"{by.replace('-', '_')}_{verb}_{effect}_{device}"
    maker: Callable[[], Adapter] = lambda: make(fault)  # noqa: E731
    globals()[name] = maker
    BREAKERS[name] = Breaker(
        adapter=f"{__name__}:{name}", must_fail=(by,), may_fail=frozenset({EVERYTHING}), must_pass=()
    )


_known("DEV-9", "facts", "stage_sizes", 3)
_known("DEV-9", "facts", "kept_bytes", -1, device="stream")
_known("DEV-10", "facts", "release_memory", "zeroes")
_known("DEV-11", "synchronize", "skips", None, ("from_nth", 250), device="stream")
_known("DEV-12", "facts", "device", "cpu:7")
_known("CAP-3", "facts", "exact_cut", 4096)
_known("CAP-4", "facts", "has_float64")
_known("CAP-4", "facts", "has_float64", device="stream")
_known("CAP-5", "facts", "one_issue_order")
_known("CAP-6", "facts", "futures_complete_at_enqueue", device="stream")
_known("GRP-5", "group", "cuts_names", 12)
_known("GRP-6", "group", "forgets_timeouts", 2, ("group_reversed", None))
_known("LANE-9", "lane", "runs_twice", None, ("from_nth", 280))
_known("LANE-10", "lane", "another_error", "KeyError")
_known("LANE-11", "lane", "close_drops")
_known("LANE-12", "lane", "leaks_threads", None, ("every", 30))
_known("LANE-13", "lane", "ignores_its_caller", None, ("off_thread", None), device="stream")
_known("SIDE-3", "side", "counts_bytes", 2, ("in_flight", 18))
_known("SIDE-3", "side", "leaks_descriptors", None, ("off_thread", None), device="stream")
_known("TIME-2", "clock", "scales", 1.1, ("interval_over", 0.08))
_known("TIME-2", "clock", "is_coarse", 0.01, device="stream")
_known("MEM-2", "recycler", "counts_bytes", 2)
_known("USE-1", "all_reduce", "flips_a_bit", 0.5, ("nth", 299))
_known("USE-2", "all_reduce", "flips_a_bit", 1.0, ("is_max", None), ("every", 40))
_known("USE-3", "broadcast", "zeroes", 1.0, ("from_nth", 250), device="stream")
_known("USE-4", "reduce_scatter", "flips_a_bit", 0.3, ("uneven", None), ("dtype", "float64"))
_known("USE-5", "all_gather", "writes_beyond", None, ("scattered", None))
_known("MIX-1", "reduce_scatter", "swaps_results", None, ("other_group", None))
_known("MIX-1", "all_gather", "arrives_late", None, ("off_thread", None))
_known("MIX-2", "all_reduce", "adds_one", 0.5, ("group_reversed", None), device="stream")
_known("MIX-3", "all_gather", "loses_the_tail", 1, ("after_seconds", 0.9))
_known("MIX-4", "all_gather", "swaps_results", None, ("in_flight", 60))
_known("LEAK-1", "reduce_scatter", "leaks_objects", None, ("every", 9))
_known("LEAK-2", "group", "leaks_descriptors")
_known("VAL-1", "all_gather", "loses_nan_payload")
_known("VAL-1", "broadcast", "loses_negative_zero", None, ("dtype", "float16"), device="stream")
_known("VAL-2", "reduce_scatter", "flushes_denormals")
_known("VAL-2", "all_reduce", "integers_as_doubles", device="stream")
_known("VAL-3", "reduce_scatter", "flips_a_bit", 0.7, ("bytes_over", 2_000_000), ("dtype", "float16"))
_known("VAL-4", "all_reduce", "zeroes", 0.9, ("bytes_over", 30_000_000))
_known("VAL-5", "reduce_scatter", "flips_a_bit", 0.1, ("every", 7), ("dtype", "float32"))
_known("LATE-1", "broadcast", "leaves_what_was_there", None, ("under_way", 0.1))
_known("LATE-2", "all_gather", "delays", 3.0, ("from_nth", 300))  # seen on a busy host, too
_known("ERR-1", "reduce_scatter", "another_error", "OSError")
_known("OVL-18", "all_gather", "flips_a_bit", 0.4, ("rank", 1))
_known("OVL-19", "all_gather", "arrives_late", None, ("off_thread", None))
_known("OVL-20", "all_gather", "flips_a_bit", 0.5, ("dtype", "float64"))
_known("OVL-21", "all_gather", "loses_the_tail", 2, ("bytes_over", 300_000))
