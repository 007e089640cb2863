"""Exchanges in fewer bits: what rounding may lose, that nothing of it is lost for good, and that all ranks have the same."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.checkpoints import assert_same, make, snapshot, train
from support.ranks import on_ranks
from support.training import Branches, Mlp, backward, batches, iterate, pair
from support.versions import NEEDS_MUON
from zerolap import checkpoint
from zerolap.backend.lanes import Pending
from zerolap.backend.parts import Parts
from zerolap.runtime.codec import Blocks, Codec, Noise
from zerolap.runtime.quantised_exchange import Differences, Masters, Owed, QuantisedReduce
from zerolap.schedule.ownership import Piece
from zerolap.schedule.wire_format import BLOCK, Wire, WireFormat, in_blocks
from zerolap_conformance.ranks import run_ranks
from zerolap_cpu_gloo import CpuGlooAdapter

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1000, 7 * BLOCK + 5)
SCHEDULES = ("interleaved", "after_backward", "on_step")
# Of the largest magnitude of a block, or of the element itself: half a step.
LOSS = {WireFormat.INT8: 0.5 / 127, WireFormat.FP8: 2.0**-4, WireFormat.BF16: 2.0**-8}


def _blocks(values: Tensor, at_once: int | None = 2 * BLOCK, ends: tuple[int, ...] = ()) -> Blocks:
    """Values as pieces that are cut at ``ends``."""
    return Blocks(values, list(pairwise((0, *ends, values.numel()))), at_once=at_once)


def _round_trip(form: WireFormat, values: Tensor, at_once: int | None = 2 * BLOCK, **options: Any) -> Tensor:
    codec, blocks = Codec(form, kept_as=values.dtype, at_once=at_once), _blocks(values, at_once)
    message = torch.full((codec.num_bytes(blocks.numel),), 255, dtype=torch.uint8)
    codec.encode(blocks, message, **options)
    out = torch.full((blocks.numel,), math.nan, dtype=codec.computes_in)
    codec.mean([message], out)
    again = torch.zeros_like(out)
    codec.add(message, again)
    torch.testing.assert_close(again, out, rtol=0, atol=0, equal_nan=True)
    assert not out[values.numel() :].nan_to_num(0).any(), "what fills up the last block is not zero"
    return out[: values.numel()]


def _draw(numel: int, dtype: torch.dtype, draw: random.Random) -> Tensor:
    """Numbers of very different sizes, as gradients are, with zeros among them."""
    torch.manual_seed(draw.randrange(2**31))
    wide = torch.randn(numel, dtype=torch.float64) * torch.exp(
        draw.uniform(0, 3) * torch.randn(numel, dtype=torch.float64)
    )
    wide[torch.rand(numel) < 0.2] = 0
    return (wide * 10.0 ** draw.randint(-3, 1)).to(dtype)


@pytest.mark.parametrize("form", WireFormat)
def test_what_rounding_loses_is_bounded_by_the_largest_of_the_block(form: WireFormat) -> None:
    draw = random.Random(1)
    for dtype in DTYPES:
        for numel in SIZES:
            values = _draw(numel, dtype, draw)
            got = _round_trip(form, values)
            assert torch.equal(got, _round_trip(form, values, at_once=None)), "chunks show"
            bound = values.to(got.dtype).abs()
            if form is not WireFormat.BF16:
                largest = (
                    torch.stack([block.max().expand(BLOCK) for block in bound.split(BLOCK)]).view(-1)
                    if numel
                    else bound
                )
                bound = largest[:numel] if form is WireFormat.INT8 else torch.maximum(bound, largest[:numel] / 2**13)
            error = (got - values.to(got.dtype)).abs()
            assert (error <= bound * LOSS[form] * 1.001 + 1e-37).all(), (
                form,
                dtype,
                numel,
                float((error - bound).max()),
            )


@pytest.mark.parametrize("form", [WireFormat.INT8, WireFormat.FP8])
def test_zeros_denormals_and_the_largest_numbers(form: WireFormat) -> None:
    tiny, most = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    zeros = torch.zeros(300)
    assert torch.equal(_round_trip(form, zeros), zeros)
    denormal = torch.full((300,), 1e-44)
    assert (_round_trip(form, denormal) - denormal).abs().max() <= tiny
    extreme = torch.tensor([most / 2, -most / 2, 1.0, 0.0]).repeat(100)
    assert _round_trip(form, extreme).isfinite().all()
    torch.testing.assert_close(_round_trip(form, extreme)[:2], extreme[:2], rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", WireFormat)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found_where_it_arrives_and_only_there(form: WireFormat, bad: float) -> None:
    values = torch.ones(5 * BLOCK)
    values[2 * BLOCK + 3] = bad
    got = _round_trip(form, values)
    block = got[2 * BLOCK : 3 * BLOCK]
    assert not block[3].isfinite()
    assert form is WireFormat.BF16 or not block.isfinite().any()
    assert torch.equal(torch.cat([got[: 2 * BLOCK], got[3 * BLOCK :]]), torch.ones(4 * BLOCK))


def test_rounding_by_chance_is_right_on_average_and_the_same_every_time() -> None:
    values = torch.rand(4 * BLOCK) - 0.5
    numbers = torch.arange(4, dtype=torch.int32)
    rounded = [_round_trip(WireFormat.INT8, values, noise=Noise((7, i), numbers)) for i in range(400)]
    again = _round_trip(WireFormat.INT8, values, at_once=None, noise=Noise((7, 3), numbers))
    assert torch.equal(rounded[3], again), "the noise depends on how the work is cut"
    assert not torch.equal(rounded[3], rounded[4])
    step = 0.5 / 127
    mean_error = (torch.stack(rounded).mean(0) - values) / step
    assert mean_error.abs().max() < 5 * 0.5 / math.sqrt(400)
    assert mean_error.mean().abs() < 5 * 0.5 / math.sqrt(400 * values.numel())


def test_pieces_are_rounded_alike_wherever_they_lie() -> None:
    """Blocks begin where a piece begins, and pieces are cut at whole blocks: owners and buckets do not show."""
    torch.manual_seed(1)
    values, codec = torch.randn(2000), Codec(WireFormat.INT8, kept_as=torch.float32, at_once=3 * BLOCK)

    def rounded(first: int, last: int, ends: tuple[int, ...]) -> Tensor:
        blocks = Blocks(values, list(pairwise((first, *ends, last))), at_once=3 * BLOCK)
        message, out = torch.empty(codec.num_bytes(blocks.numel), dtype=torch.uint8), torch.empty(blocks.numel)
        codec.encode(blocks, message)
        codec.mean([message], out)
        return out

    whole = rounded(5, 1905, (12, 512 + 12))  # of 7 elements, of 4 blocks, of 10.8 blocks
    assert whole.numel() == BLOCK * (1 + 4 + 11)
    torch.testing.assert_close(whole[:7], values[5:12], rtol=0, atol=0.02)
    assert torch.equal(whole[BLOCK : 3 * BLOCK], rounded(12, 12 + 2 * BLOCK, ()))
    assert torch.equal(whole[3 * BLOCK : 5 * BLOCK], rounded(12 + 2 * BLOCK, 524, ()))
    assert torch.equal(whole[5 * BLOCK :], rounded(524, 1905, ()))


# --- the algebra: ranks that are objects of one process ---------------------------------------------------------------


class _Ranks:
    """Reductions of ranks that are driven one behind the other."""

    def __init__(self, sizes: list[int], form: WireFormat, dtype: torch.dtype, *, owes: bool = False) -> None:
        world_size, self.sent = len(sizes), dict[int, tuple[Parts, Parts]]()
        codec = Codec(form, kept_as=dtype, at_once=2 * BLOCK)
        self.memory = [torch.zeros(sum(sizes), dtype=dtype) for _ in sizes]
        ranges = list(pairwise(accumulate(sizes, initial=0)))
        parts = [[Blocks(mine, [each], at_once=2 * BLOCK) for each in ranges] for mine in self.memory]
        total = sum(each.numel for each in parts[0])
        self.owed = [torch.zeros(total) for _ in sizes] if owes else [None] * world_size
        self.means = [torch.empty(each.numel, dtype=codec.computes_in) for each in parts[0]]
        self.places = torch.cat(
            [
                torch.arange(size) + place
                for size, place in zip(sizes, accumulate(map(in_blocks, sizes), initial=0), strict=False)
            ]
        )
        self.reductions = [
            QuantisedReduce(
                codec, parts[rank], self.means[rank], rank=rank, start=partial(self._start, rank), owed=self.owed[rank]
            )
            for rank in range(world_size)
        ]

    def _start(self, rank: int, sent: Parts, received: Parts) -> Pending:
        self.sent[rank] = sent, received
        return Pending((), tensors=(), what="")

    def reduce(self, gradients: list[Tensor], noise: list[Any] | None = None) -> Tensor:
        """The mean, all parts together, of every rank's gradients."""
        for memory, gradient in zip(self.memory, gradients, strict=True):
            memory.copy_(gradient)
        pending = [each.scatter(noise or ()) for each in self.reductions]
        for source, (sent, _) in self.sent.items():
            for to, message in enumerate(sent.tensors):
                if to != source:
                    self.sent[to][1].tensors[source].copy_(message)
        for each in pending:
            each.wait()
        return torch.cat(self.means)[self.places]


@pytest.mark.parametrize("form", WireFormat)
def test_the_mean_of_gradients_is_bounded_whatever_the_number_of_ranks(form: WireFormat) -> None:
    draw = random.Random(2)
    for dtype in DTYPES:
        for world_size in (1, 2, 3, 4, 7):
            sizes = [draw.choice(SIZES) for _ in range(world_size)]
            ranks = _Ranks(sizes, form, dtype)
            gradients = [_draw(sum(sizes), dtype, draw) for _ in sizes]
            mean = ranks.reduce(gradients)
            exact = torch.stack([each.to(mean.dtype) for each in gradients]).mean(0)
            most = max((float(each.abs().max()) for each in gradients if each.numel()), default=0.0)
            assert float((mean - exact).abs().max() if exact.numel() else 0) <= LOSS[form] * most + 1e-6 * most


@pytest.mark.parametrize("seed", [None, 5])
def test_what_was_sent_of_gradients_is_what_was_meant_but_for_what_is_owed(seed: int | None) -> None:
    torch.manual_seed(3)
    for form in WireFormat:
        sizes = [3 * BLOCK, 0, 700]
        ranks = _Ranks(sizes, form, torch.float32, owes=True)
        meant, sent = torch.zeros(sum(sizes), dtype=torch.float64), torch.zeros(sum(sizes), dtype=torch.float64)
        numbers = [torch.arange(in_blocks(size) // BLOCK, dtype=torch.int32) for size in sizes]
        for step in range(50):
            gradients = [torch.randn(sum(sizes)) for _ in sizes]
            noise = None if seed is None else [Noise((seed, step), each) for each in numbers]
            sent += ranks.reduce(gradients, noise).double()
            meant += torch.stack(gradients).double().mean(0)
        still = torch.stack(ranks.owed).double().mean(0)[ranks.places]
        scale = float(meant.abs().max())
        assert float((meant - sent - still).abs().max()) <= 1e-6 * scale
        assert float(still.abs().max()) > 1e-4 * scale, "nothing was rounded, so nothing was tried"


def test_what_is_owed_follows_its_parameter_to_other_owners_and_is_forgotten_where_it_is_not_finite() -> None:
    owed, none = Owed(), torch.empty(0)
    first = owed.laid_out([Piece(0, 0, 6), Piece(1, 0, 4)], like=none, dtype=torch.float32)
    first[:6], first[BLOCK : BLOCK + 4] = torch.arange(6.0), torch.arange(6.0, 10)
    pieces = [Piece(1, 2, 4), Piece(0, 0, 3), Piece(1, 0, 2), Piece(0, 3, 6)]
    second = owed.laid_out(pieces, like=none, dtype=torch.float32).view(4, BLOCK)
    assert second[:, :3].flatten().tolist() == [8, 9, 0, 0, 1, 2, 6, 7, 0, 3, 4, 5]
    codec = Codec(WireFormat.INT8, kept_as=torch.float32, at_once=None)
    message, debt = torch.empty(codec.num_bytes(BLOCK), dtype=torch.uint8), torch.ones(BLOCK)
    codec.encode(_blocks(torch.tensor([1.0, math.nan, 2.0])), message, owed=debt)
    assert not debt.any()


@pytest.mark.parametrize(
    ("form", "world_size", "dtype", "num_updates"),
    [
        (WireFormat.INT8, 4, torch.float32, 1000),
        (WireFormat.INT8, 2, torch.bfloat16, 300),
        (WireFormat.FP8, 3, torch.float32, 100),
        (WireFormat.BF16, 3, torch.float32, 100),
        (WireFormat.INT8, 3, torch.float64, 100),
    ],
)
def test_replicas_are_equal_after_1000_random_updates_and_lag_by_the_last_residual_only(
    form: WireFormat, world_size: int, dtype: torch.dtype, num_updates: int
) -> None:
    draw = random.Random(world_size)
    codec = Codec(form, kept_as=dtype, at_once=2 * BLOCK)
    sections = [[0]]
    for ends in sections:
        for _ in range(world_size):
            ends.append(ends[-1] + in_blocks(draw.choice(SIZES)))
    sections.append([sections[0][-1]] * world_size + [sections[0][-1] + 2 * BLOCK])  # the last rank's alone
    replicas = [
        torch.randn(sections[-1][-1], generator=torch.Generator().manual_seed(1)).to(dtype) for _ in range(world_size)
    ]
    masters = [
        Masters(replica, [(ends[rank], ends[rank + 1]) for ends in sections], dtype=codec.computes_in)
        for rank, replica in enumerate(replicas)
    ]
    ranks = [
        Differences(codec, replica, sections, mine, rank=rank)
        for rank, (replica, mine) in enumerate(zip(replicas, masters, strict=True))
    ]
    for _ in range(num_updates):
        for mine in masters:
            for memory in mine.memory:
                memory.add_(torch.randn_like(memory), alpha=1e-3)
        messages = [each.message() for each in ranks]
        whole = messages[0].clone()
        for rank, message in enumerate(messages):
            for ends in ranks[rank].ends:
                whole[ends[rank] : ends[rank + 1]] = message[ends[rank] : ends[rank + 1]]
        for each in ranks:
            each.apply(whole)
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)
    for mine in masters:
        for (start, stop), memory in zip(mine.ranges, mine.memory, strict=True):
            if start < stop:
                # Of one update of 1e-3, and of what a parameter of this dtype can show.
                lag = (memory - replicas[0][start:stop].to(memory.dtype)).abs()
                shown = torch.finfo(dtype).eps * memory.abs() if dtype is torch.bfloat16 else 0.0
                assert (lag <= 5e-3 * LOSS[form] + shown + 1e-6).all(), (form, float(lag.max()))


# --- on ranks ---------------------------------------------------------------------------------------------------------


def _train(
    wire: Any,
    *,
    num_steps: int = 6,
    make_model: Callable[[], nn.Module] = Mlp,
    cls: Any = torch.optim.AdamW,
    ddp_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[Tensor], zerolap.Handle, Any, DDP]:
    torch.manual_seed(0)
    ddp = DDP(make_model(), **{"bucket_cap_mb": 0.004, **(ddp_options or {})})
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), cls, lr=0.01, overlap_with_ddp=True)
    handle = zerolap.attach(ddp, zero, wire=wire, audit_every=1, **options)
    dtype = next(ddp.parameters()).dtype
    for x in batches(num_steps, dtype=dtype):
        iterate(ddp, zero, x)
    handle.audit()
    return [param.detach().clone() for param in ddp.parameters()], handle, zero, ddp


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_schedule_and_gather_gives_the_same_and_all_ranks_have_it(num_ranks: int) -> None:
    run_ranks(num_ranks, _ways)


def _ways() -> None:
    exact, *_ = _train(None)
    wires: list[Any] = ["int8", Wire(gradients="int8", gradient_feedback=True)]
    if dist.get_world_size() == 2:
        wires += ["fp8", "bf16", Wire(parameters="int8", seed=1)]
    for wire in wires:
        expected, *_ = _train(wire)
        far = _distance(expected, exact)
        assert 0 < far < 0.05, (wire, far)
        every = product(SCHEDULES, ("eager", "lazy"))
        for schedule, gather in every if wire == "int8" else (("after_backward", "lazy"), ("on_step", "eager")):
            ours, handle, *_ = _train(wire, schedule=schedule, gather=gather)
            assert _distance(ours, expected) == 0, (wire, schedule, gather)
            handle.detach()
        ours, *_ = _train(wire, master_weights=True)
        assert _distance(ours, expected) == 0, wire
        # The first backward has other buckets here.
        ours, *_ = _train(wire, shard_gradients=True, schedule="on_step", gather="lazy")
        assert _distance(ours, expected) == 0, wire
        ours, *_ = _train(wire, ddp_options={"bucket_cap_mb": 100})
        assert _distance(ours, expected) == 0, wire


@on_ranks(2)
def test_other_dtypes_unused_parameters_and_what_stays_whole() -> None:
    for wire in ("int8", Wire(gradients="fp8", gradient_feedback=True, parameters="bf16")):
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            ours, *_ = _train(wire, make_model=lambda d=dtype: Mlp(d))
            exact, *_ = _train(None, make_model=lambda d=dtype: Mlp(d), master_weights=dtype.itemsize < 4)
            assert 0 < _distance(ours, exact) < 0.1, (wire, dtype)
        _train(wire, make_model=Branches, ddp_options={"find_unused_parameters": True})
        ours, *_ = _train(wire, cls=torch.optim.Adafactor)  # whole parameters
        assert 0 < _distance(ours, _train(None, cls=torch.optim.Adafactor)[0]) < 0.1


@on_ranks(2)
def test_less_than_0_27_of_the_bytes_is_sent() -> None:
    sent = {}
    for wire in (None, "int8", "bf16"):
        _, handle, _, _ = _train(wire, make_model=lambda: nn.Sequential(nn.Linear(13, 1024), nn.Linear(1024, 30)))
        sent[wire] = handle.stats().sent_bytes
    assert sent["int8"] < 0.27 * sent[None]
    assert sent["bf16"] < 0.51 * sent[None]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_saved_on_2_ranks_it_resumes_bitwise_and_loads_on_others(tmp_path: Path, num_ranks: int) -> None:
    saved = run_ranks(2, _resume, str(tmp_path))
    assert_same(pickle.loads(saved[0][0]), pickle.loads(saved[0][1]))
    loaded = run_ranks(num_ranks, _load, str(tmp_path))
    assert_same(pickle.loads(saved[0][2]), pickle.loads(loaded[0]))


def _kind() -> dict[str, Any]:
    return {"wire": Wire(gradients="int8", parameters="int8", seed=4), "schedule": "interleaved", "gather": "lazy"}


def _resume(folder: str) -> Any:
    """Train six steps with and without a stop in the middle."""
    ddp, zero = make(_kind())
    train(ddp, zero, 0, 3)
    checkpoint.save(folder, ddp, zero, step=3)
    saved = snapshot(ddp, zero)
    train(ddp, zero, 3, 6)
    there, loaded = make(_kind())
    checkpoint.load(folder, there, loaded)
    train(there, loaded, 3, 6)
    for a, b in zip(ddp.parameters(), there.parameters(), strict=True):
        assert torch.equal(a, b), "the resumed run differs"
    zero._handle.audit()
    return snapshot(ddp, zero), snapshot(there, loaded), saved


def _load(folder: str) -> bytes | None:
    ddp, zero = make(_kind())
    checkpoint.load(folder, ddp, zero)
    found = snapshot(ddp, zero)
    train(ddp, zero, 3, 5)
    zero._handle.audit()
    return found


@NEEDS_MUON
@on_ranks(2)
def test_muon_and_adamw_in_the_same_buckets() -> None:
    torch.manual_seed(0)
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    matrices = [p for p in ddp.parameters() if p.ndim == 2]
    rest = [p for p in ddp.parameters() if p.ndim != 2]
    zeros = [
        zerolap.ZeroRedundancyOptimizer(matrices, torch.optim.Muon, lr=0.01, overlap_with_ddp=True),
        zerolap.ZeroRedundancyOptimizer(rest, torch.optim.AdamW, lr=0.01, overlap_with_ddp=True),
    ]
    handle = zerolap.attach(ddp, zeros, wire=Wire(gradients="int8", parameters="int8", gradient_feedback=True))
    for x in batches(5):
        backward(ddp, x)
        for zero in zeros:
            zero.step()
            zero.zero_grad()
        handle.audit()


@on_ranks(2)
def test_gradients_that_are_not_finite_are_found_and_their_step_is_left_out() -> None:
    for wish in (Wire(gradients="int8", parameters="int8"), Wire(gradients="fp8", gradient_feedback=True)):
        ddp, _ = pair()
        zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
        handle = zerolap.attach(ddp, zero, schedule="on_step", wire=wish, nonfinite="skip")
        for step, x in enumerate(batches(6)):
            # On one rank, in what the other one owns as well as in what it owns itself.
            iterate(ddp, zero, x * float("inf") if step == 3 and dist.get_rank() == 1 else x)
        assert handle.stats().num_skipped == 1
        assert all(p.isfinite().all() for p in ddp.parameters())
        handle.audit()


@on_ranks(2)
def test_what_cannot_be_is_refused_on_all_ranks_with_what_to_do() -> None:
    def refused(
        match: str, error: type[Exception] = ValueError, model: nn.Module | None = None, **options: Any
    ) -> None:
        ddp = DDP(model or Mlp())
        zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
        with pytest.raises(error, match=match):
            zerolap.attach(ddp, zero, **options)

    refused("wire must be one of .*int8.*fp8.*bf16.*, a zerolap.Wire, or None .*got 'int4'", wire="int4")
    refused("the hooks of group ranks 0 and 1 differ", wire="int8" if dist.get_rank() else None)
    refused("reduce_dtype=torch.bfloat16: use one of them", wire="int8", reduce_dtype=torch.bfloat16)
    refused("gather_dtype=torch.bfloat16: use one", wire="int8", gather_dtype=torch.bfloat16, master_weights=True)
    model = Mlp()
    model.layers[0].bias.data[0] = -math.inf
    refused("parameter 1 of optimizer 0 has values that are not finite", wire="bf16", model=model)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gradients": "int4"}, "gradients must be one of"),
        ({"gradient_feedback": True}, "add gradients="),
        ({"gradients": "int8", "gradient_feedback": 1}, "must be True or False"),
        ({"gradients": "int8", "seed": -1}, "whole number"),
        ({"parameters": "bf16", "seed": 1}, "rounding to int8"),
    ],
)
def test_a_wire_that_makes_no_sense_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        Wire(**options)


@on_ranks(2)
def test_a_loss_scaler_is_refused_where_gradients_owe_what_was_scaled_otherwise() -> None:
    for scaler in (zerolap.GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        ddp, _ = pair()
        zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
        zerolap.attach(ddp, zero, schedule="on_step", wire=Wire(gradients="int8", gradient_feedback=True))
        scaler.scale(ddp(next(batches(1))).square().sum()).backward()
        with pytest.raises(RuntimeError, match=r"gradient_feedback=True .* another scale"):
            scaler.unscale_(zero)


@on_ranks(2)
def test_torchs_own_functions_see_the_mean_of_rounded_gradients() -> None:
    found = []
    for wire in (None, "int8"):
        torch.manual_seed(0)
        ddp = DDP(Mlp(), bucket_cap_mb=0.004)
        zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
        handle = zerolap.attach(ddp, zero, schedule="on_step", wire=wire)
        for x in batches(3):
            zero.zero_grad()
            for _ in range(2):  # added up between backwards that are reduced
                backward(ddp, x)
            norm = nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
            assert float(handle.grad_norm()) < 1.01e-3
            zero.step()
        found.append(float(norm))
        handle.audit()
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0)


@on_ranks(2)
def test_a_model_that_is_loaded_while_differences_are_under_way_is_what_training_goes_on_from() -> None:
    for gather in ("eager", "lazy"):
        _, handle, zero, ddp = _train("int8", gather=gather, num_steps=3)
        zero.zero_grad()
        backward(ddp, next(batches(1)))
        zero.step()
        ddp.module.load_state_dict(
            {name: torch.full_like(value, 0.25) for name, value in ddp.module.state_dict().items()}
        )
        assert all((param == 0.25).all() for param in ddp.parameters())
        for local in zero._book.locals:
            for state in local.states().values():
                assert (state["master_weight"] == 0.25).all(), "an owner would bring back old values"
        handle.audit()
        assert "wire: gradients int8, parameters int8 (not the numbers of DDP)" in repr(handle)
        iterate(ddp, zero, next(batches(1)))
        handle.audit()


@on_ranks(2)
def test_accumulated_gradients_are_rounded_once() -> None:
    for options in ({}, {"schedule": "on_step", "gather": "lazy"}):
        found = []
        for is_accumulated in (False, True):
            torch.manual_seed(0)
            ddp = DDP(Mlp(), bucket_cap_mb=0.004)
            zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
            zerolap.attach(ddp, zero, wire="int8", **options)
            for x in batches(3):
                zero.zero_grad()
                if is_accumulated:  # two halves, whose sum is exact
                    with ddp.no_sync():
                        (0.5 * ddp(x).square().sum()).backward()
                    (0.5 * ddp(x).square().sum()).backward()
                else:
                    backward(ddp, x)
                zero.step()
            found.append([param.detach().clone() for param in ddp.parameters()])
        assert _distance(*found) == 0, options


@on_ranks(3)
def test_messages_and_shared_memory_bring_the_same() -> None:
    shared, *_ = _train("int8")
    sent, *_ = _train("int8", adapter=CpuGlooAdapter(shares_memory=False))
    assert _distance(shared, sent) == 0


@on_ranks(2)
def test_what_auto_tries_does_not_show_in_the_numbers() -> None:
    """Schedules, gathers and buckets change while it trains; what gradients owe, and the noise, follow the parameters."""

    def train_by(schedule: str, num_steps: int | None) -> tuple[int, list[Tensor]]:
        torch.manual_seed(0)
        ddp = DDP(Mlp(), bucket_cap_mb=0.004)
        zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=True)
        wire = Wire(gradients="int8", parameters="int8", gradient_feedback=True, seed=1)
        handle, step = zerolap.attach(ddp, zero, schedule=schedule, wire=wire), 0
        while not handle.is_tuned if num_steps is None else step < num_steps:
            iterate(ddp, zero, torch.randn(5, 13, generator=torch.Generator().manual_seed(2 * step + dist.get_rank())))
            step += 1
        handle.finish()
        handle.audit()
        handle.detach()
        return step, [param.detach().clone() for param in ddp.parameters()]

    num_steps, tuned = train_by("auto", None)
    assert _distance(tuned, train_by("interleaved", num_steps)[1]) == 0
