"""Owners of whole parameters: evenly shared, the same everywhere, fast."""

from __future__ import annotations

import random
import time

import pytest

from zerolap.runtime.update_cost import update_cost
from zerolap.schedule.balance import Balance, Load, assign_whole, at_least, rank_loads


class Muon:
    """Known by its name."""


def _layers(kind: str, width: int) -> list[tuple[int, int]]:
    third = 8 * width // 3
    return {
        "fused qkv": [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)],
        "separate": [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)],
        "gated": [(width, width)] * 4 + [(third, width)] * 2 + [(width, third)],
        "grouped": [(width, width), (width // 4, width), (width // 4, width), (width, width)]
        + [(3 * width, width)] * 2,
    }[kind]


@pytest.mark.parametrize("kind", ["fused qkv", "separate", "gated", "grouped"])
def test_transformers_are_shared_as_evenly_as_whole_matrices_can_be(kind: str) -> None:
    uneven = []
    for width in (512, 1024, 8192):
        for depth in (12, 24, 40, 96):
            shapes = _layers(kind, width) * depth
            loads = [Load(4 * rows * columns, update_cost(Muon, (rows, columns))) for rows, columns in shapes]
            for world_size in (2, 3, 4, 6, 8, 16, 32, 64, 128, 1024, 4096):
                held = rank_loads(loads, assign_whole(loads, world_size=world_size), world_size=world_size)
                busiest = max(load.num_bytes for load in held)
                bound = at_least([load.num_bytes for load in loads], world_size=world_size)
                smallest = min(load.num_bytes for load in loads)  # sums of whole matrices do not take every value
                if busiest > max(1.05 * bound, bound + smallest - 1):
                    uneven.append((width, depth, world_size, busiest / bound))
    assert not uneven


def test_work_is_balanced_where_it_is_not_in_proportion_to_bytes() -> None:
    shapes = [(4096, 16)] * 24 + [(512, 512)] * 6
    loads = [Load(rows * columns, update_cost(Muon, (rows, columns))) for rows, columns in shapes]
    for world_size in (2, 3, 6):
        balance = Balance.of(rank_loads(loads, assign_whole(loads, world_size=world_size), world_size=world_size))
        assert max(balance) < 1.01


def test_equal_parameters_of_one_bucket_go_to_different_ranks() -> None:
    owners = assign_whole([Load(1, 1)] * 12, world_size=4)
    assert all(len({*owners[first : first + 4]}) == 4 for first in (0, 4, 8))


def test_every_rank_assigns_the_same_and_odd_sizes_are_taken() -> None:
    rng = random.Random(3)
    for _ in range(50):
        loads = [Load(rng.choice([0, 1, 7, 900]), rng.choice([0, 3, 10**9])) for _ in range(rng.randrange(40))]
        world_size = rng.randrange(1, 9)
        owners = assign_whole(loads, world_size=world_size)
        assert owners == assign_whole(list(loads), world_size=world_size)
        assert len(owners) == len(loads)
        assert all(0 <= owner < world_size for owner in owners)


def test_a_hundred_thousand_parameters_on_4096_ranks_take_less_than_a_second() -> None:
    rng = random.Random(0)
    loads = [Load(4 * size, 40 * size) for size in (rng.randrange(1, 10**6) for _ in range(100_000))]
    seconds = []
    for _ in range(3):
        start = time.process_time()
        owners = assign_whole(loads, world_size=4096)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1
    assert Balance.of(rank_loads(loads, owners, world_size=4096)).state < 1.05


def test_a_class_says_what_its_update_costs() -> None:
    class Own:
        @staticmethod
        def update_cost(shape: tuple[int, ...]) -> int:
            return sum(shape)

    class Wrong:
        @staticmethod
        def update_cost(shape: tuple[int, ...]) -> float:
            return float("nan")

    assert update_cost(Own, (3, 4)) == 7
    with pytest.raises(ValueError, match=r"Wrong.update_cost\(\(3,\)\) must be a number"):
        update_cost(Wrong, (3,))
    assert update_cost(Muon, (64, 128)) == update_cost(Muon, (128, 64)) > update_cost(dict, (64, 128))
