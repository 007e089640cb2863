"""Tests on ranks: the body runs on all of them, with what the test is given, and fails with the rank and the line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from support.ranks import on_ranks


@pytest.mark.parametrize("number", [3, 5])
@on_ranks(2)
def test_the_body_runs_on_every_rank_with_what_the_test_is_given(number: int, tmp_path: Path) -> None:
    (tmp_path / str(dist.get_rank())).write_text(str(number))
    dist.barrier()
    assert [(tmp_path / str(rank)).read_text() for rank in range(dist.get_world_size())] == [str(number)] * 2


@on_ranks(2)
def _fails_on_one() -> None:
    assert dist.get_rank() != 1, "this is the second rank"


def test_a_failure_names_its_rank_and_line() -> None:
    with pytest.raises(AssertionError) as failure:
        _fails_on_one()
    (said,) = re.findall(r"--- rank 1 ---\n(.*?)(?=--- rank|\Z)", str(failure.value), re.DOTALL)
    assert re.search(r"in _fails_on_one\s+assert dist.get_rank\(\) != 1", said), said
    assert "AssertionError: this is the second rank" in said
