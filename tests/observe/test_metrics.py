"""Live metrics of real runs, their writer, and what is logged."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.ranks import on_ranks
from support.training import Mlp, batches, iterate
from zerolap._logging import FORMAT, logger_of
from zerolap_conformance.ranks import run_ranks


def _trained(num: int, **options: Any) -> tuple[DDP, Any, zerolap.Handle]:
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.01)
    handle = zerolap.attach(ddp, zero, **options)
    for x in batches(num):
        iterate(ddp, zero, x)
    return ddp, zero, handle


@pytest.mark.parametrize("gather", ["eager", "lazy"])
@pytest.mark.parametrize("schedule", ["interleaved", "after_backward", "on_step"])
@on_ranks(2)
def test_stats_count_what_was_done_and_what_is_held(schedule: str, gather: str) -> None:
    ddp, zero, handle = _trained(3, schedule=schedule, gather=gather)
    before = handle.stats()
    for x in batches(4):
        iterate(ddp, zero, x)
    handle.finish()
    stats = handle.stats()
    assert stats.num_updates == stats.num_steps == 7
    assert stats.num_skipped == 0
    assert stats.sent_bytes > before.sent_bytes > 0
    num_bytes, size = sum(param.nbytes for param in ddp.parameters()), dist.get_world_size()
    assert num_bytes <= stats.flat_bytes < 1.5 * num_bytes, "padding is small"
    assert 0.8 * num_bytes / size < stats.gradient_bytes < 1.2 * num_bytes / size
    parts = stats.state_bytes + stats.whole_gradient_bytes + stats.gradient_bytes + stats.receive_bytes
    assert (stats.held_bytes, stats.peak_bytes) == (parts, parts), "nothing is freed here"
    assert stats.whole_gradient_bytes >= num_bytes
    assert 1.6 * num_bytes / size < stats.state_bytes < 2.5 * num_bytes / size, "two states of Adam"
    assert 0 < stats.receive_bytes <= 2 * num_bytes, "for gradients and for parameters"
    assert stats.exposed_ms is not None
    assert before.exposed_ms is not None
    assert stats.communication_ms is not None
    assert stats.exposed_ms > before.exposed_ms > 0
    assert stats.exposed_ms_per_update == pytest.approx(stats.exposed_ms / 7)
    assert stats.hidden_percent is not None
    assert 0 <= stats.hidden_percent <= 100
    assert stats.communication_ms > 0


@on_ranks(2)
def test_stats_say_what_the_system_counts_for_the_process() -> None:
    _, _, handle = _trained(2)
    before = handle.stats()
    taken = torch.ones(30_000_000)
    after = handle.stats()
    del taken
    assert before.process_bytes is not None
    assert after.process_bytes is not None
    assert after.process_peak_bytes is not None
    assert 115e6 < after.process_bytes - before.process_bytes < 130e6
    assert after.process_peak_bytes >= after.process_bytes


class Written(list[tuple[str, float, int | None]]):
    """Takes scalars as a SummaryWriter does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        self.append((tag, scalar_value, global_step))


@on_ranks(2)
def test_each_point_is_of_the_time_since_the_one_before() -> None:
    ddp, zero, handle = _trained(3)
    written = Written()
    writer = zerolap.StatsWriter(handle, written, prefix="mine")
    writer.write(step=3)
    assert "mine/exposed_ms_per_update" not in [tag for tag, _, _ in written], "nothing was updated since"
    written.clear()
    before = handle.stats()
    for x in batches(2):
        iterate(ddp, zero, x)
    stats = writer.write(step=5)
    found = {tag: value for tag, value, step in written if step == 5}
    assert len(found) == len(written) == 16, written
    assert found["mine/updates"] == 5
    assert found["mine/skipped"] == 0
    assert 1 <= found["mine/balance/state"] < 1.5
    assert 1 <= found["mine/balance/work"] < 1.5
    assert found["mine/sent_mb_per_update"] == pytest.approx((stats.sent_bytes - before.sent_bytes) / 2 / 2**20)
    assert stats.exposed_ms is not None
    assert found["mine/exposed_ms_per_update"] == pytest.approx((stats.exposed_ms - (before.exposed_ms or 0)) / 2)
    assert 0 <= found["mine/hidden_percent"] <= 100


def _in_tensorboard(folder: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    _, _, handle = _trained(0)
    with SummaryWriter(f"{folder}/{dist.get_rank()}") as writer:
        zerolap.StatsWriter(handle, writer).write(step=7)


def test_tensorboard_takes_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the tensorboard package")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(2, _in_tensorboard, str(tmp_path))
    for rank in range(2):
        events = EventAccumulator(str(tmp_path / str(rank)))
        events.Reload()
        (point,) = events.Scalars("zerolap/updates")
        assert (point.step, point.value) == (7, 0)


# --- logging ----------------------------------------------------------------------------------------------------------


class Collecting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(logging.Formatter("%(levelname)s %(rank)s %(message)s").format(record))


@on_ranks(2)
def test_every_record_has_the_rank(tmp_path: Path) -> None:
    collecting = Collecting()
    logging.getLogger().addHandler(collecting)  # as an application's, which knows nothing of ranks
    logging.getLogger("zerolap").setLevel("INFO")
    ddp, zero, handle = _trained(2, schedule="on_step", nonfinite="skip")
    with handle.trace(tmp_path):
        iterate(ddp, zero, next(batches(1)))
    zero.zero_grad()
    (ddp(next(batches(1))).sum() * float("nan")).backward()
    zero.step()
    assert handle.stats().num_skipped == 1
    lines, rank = collecting.lines, dist.get_rank()
    said = f"INFO {rank} attached: <zerolap.Handle: attached; schedule='on_step', gather='eager' (chosen), adapter='cpu_gloo', 2 ranks"
    assert any(line.startswith(said) for line in lines), lines
    assert any(line.startswith(f"INFO {rank} ") and "% of communication hidden" in line for line in lines), lines
    assert any(line.startswith(f"WARNING {rank} ") and line.endswith("it was skipped") for line in lines), lines


def test_nothing_is_printed_unless_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    logger = logger_of("zerolap.test")
    logger.propagate = True
    assert any(isinstance(each, logging.NullHandler) for each in logging.getLogger("zerolap").handlers)
    before = logging.getLogger("zerolap").level
    handler = zerolap.log_to_stderr("WARNING")
    try:
        logger.info("not this")
        logger.warning("but this")
    finally:
        logging.getLogger("zerolap").removeHandler(handler)
        logging.getLogger("zerolap").setLevel(before)
    said = capsys.readouterr().err
    assert said.endswith("WARNING rank 3 zerolap.test: but this\n"), said
    assert said.count("\n") == 1
    assert "%(rank)s" in FORMAT
    logger.warning("nor this")
    assert capsys.readouterr().err == ""
