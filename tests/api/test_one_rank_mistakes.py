"""A mistake on one rank only: the others hear of it at once, and all can go on as if it had never happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.ranks import on_ranks
from support.training import Mlp, assert_same_params, backward, batches, iterate, pair
from zerolap_conformance.ranks import run_ranks
from zerolap_cpu_gloo import CpuGlooAdapter

Zero = zerolap.ZeroRedundancyOptimizer
ADAMW = {"lr": 0.01, "fused": False}


class CannotOpen(CpuGlooAdapter):
    """Meets everybody, and then has no lane."""

    def lane(self, name: str, *, device: torch.device) -> Any:
        raise OSError("can't start new thread")


class Wrapper:
    """As frameworks wrap optimizers."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def _attach(**options: Any) -> Callable[[DDP, Zero], object]:
    return lambda ddp, zero: zerolap.attach(ddp, zero, **options)


def _attach_hooked(ddp: DDP, zero: Zero) -> object:
    other = DDP(nn.Linear(2, 2))  # on both ranks, so that they make the same DDPs
    if dist.get_rank() == _guilty[0]:
        other.register_comm_hook(None, allreduce_hook)
    mine = Zero(other.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    return zerolap.attach(other, mine)


def _attach_twice(ddp: DDP, zero: Zero) -> object:
    other = DDP(nn.Linear(2, 2))
    mine = Zero(other.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    handle = zerolap.attach(other, mine)
    if dist.get_rank() != _guilty[0]:
        handle.detach()
    return zerolap.attach(other, mine)


def _plain_zero(ddp: DDP) -> Zero:
    return Zero(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=dist.get_rank() != _guilty[0])


_guilty = [0]

# What a mistake is called: what the guilty rank calls, what the others call, and the words that both are told.
Call = Callable[[DDP, Zero], object]
_right: Call = _attach()
_hook: Call = lambda ddp, zero: zerolap.hook_with_zero_step(allreduce_hook, ddp, zero)  # noqa: E731
_add: Call = lambda ddp, zero: zero.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})  # noqa: E731
_make: Call = lambda ddp, zero: Zero(ddp.parameters(), torch.optim.SGD, lr=0.1)  # noqa: E731
MISTAKES: dict[str, tuple[Call, Call, str]] = {
    "schedule": (_attach(schedule="interleavd"), _right, "schedule must be one of"),
    "schedule of no kind": (_attach(schedule=["interleaved"]), _right, "schedule must be one of"),
    "gather": (_attach(gather="lasy"), _right, "gather must be one of"),
    "nonfinite": (_attach(nonfinite="rise"), _right, "nonfinite must be one of"),
    "adapter": (_attach(adapter="gluu"), _right, "no adapter 'gluu'"),
    "adapter of no kind": (_attach(adapter=7), _right, "adapter must be a name or a zerolap.Adapter, got int"),
    "adapter that fails": (_attach(adapter=CannotOpen()), _right, "can't start new thread"),
    "option": (_attach(shedule="interleaved"), _right, "unexpected keyword argument 'shedule'"),
    "too few arguments": (lambda ddp, zero: zerolap.attach(ddp), _right, "missing a required argument"),  # type: ignore[call-arg]
    "audit_every": (_attach(audit_every="often"), _right, "audit_every must be a number"),
    "master_weights": (_attach(master_weights="yes"), _right, "master_weights must be True or False"),
    "float8": (_attach(reduce_dtype=torch.float8_e4m3fn), _right, "reduce_dtype must be one of"),
    "integers": (_attach(reduce_dtype=torch.int32), _right, "reduce_dtype must be one of"),
    "complex": (_attach(gather_dtype=torch.complex64), _right, "gather_dtype must be one of"),
    "dtype of no kind": (_attach(reduce_dtype="bfloat16"), _right, "reduce_dtype must be one of"),
    "class": (lambda ddp, zero: zerolap.attach(ddp, torch.optim.AdamW), _right, "got the class torch.optim"),  # type: ignore[arg-type]
    "plain optimizer": (
        lambda ddp, zero: zerolap.attach(ddp, torch.optim.AdamW(ddp.parameters())),  # type: ignore[arg-type]
        _right,
        "must be a zerolap.ZeroRedundancyOptimizer, got AdamW; zerolap.shard(ddp, optimizer) makes one of it",
    ),
    "swapped": (lambda ddp, zero: zerolap.attach(zero, ddp), _right, "the arguments are swapped"),  # type: ignore[arg-type]
    "bare module": (lambda ddp, zero: zerolap.attach(ddp.module, zero), _right, "wrap the model first"),
    "nothing": (lambda ddp, zero: zerolap.attach(None, zero), _right, "ddp must be a DistributedDataParallel"),  # type: ignore[arg-type]
    "scheduler": (
        lambda ddp, zero: zerolap.attach(ddp, torch.optim.lr_scheduler.StepLR(zero, 1)),  # type: ignore[arg-type]
        _right,
        "got its LR scheduler",
    ),
    "another hook": (_attach_hooked, _attach_hooked, "register_comm_hook or register_builtin_comm_hook"),
    "attached already": (_attach_twice, _attach_twice, "a hook was already made for this optimizer"),
    "no overlap": (
        lambda ddp, zero: zerolap.attach(ddp, _plain_zero(ddp)),
        lambda ddp, zero: zerolap.attach(ddp, _plain_zero(ddp)),
        "overlap_with_ddp=True",
    ),
    "hook of no kind": (
        lambda ddp, zero: zerolap.hook_with_zero_step("allreduce", ddp, zero),  # type: ignore[arg-type]
        _hook,
        "hook must be a DDP communication hook",
    ),
    "hook's option": (
        lambda ddp, zero: zerolap.hook_with_zero_step(allreduce_hook, ddp, zero, shard=True),  # type: ignore[call-arg]
        _hook,
        "unexpected keyword argument 'shard'",
    ),
    "optimizer's class": (lambda ddp, zero: Zero(ddp.parameters(), "AdamW"), _make, "optimizer_class must be"),  # type: ignore[arg-type]
    "optimizer's group": (
        lambda ddp, zero: Zero(ddp.parameters(), torch.optim.SGD, process_group="gloo", lr=0.1),  # type: ignore[arg-type]
        _make,
        "process_group must be a ProcessGroup",
    ),
    "no class": (lambda ddp, zero: Zero(ddp.parameters()), _make, "missing a required argument"),  # type: ignore[call-arg]
    "added group": (lambda ddp, zero: zero.add_param_group({"params": []}), _add, "without parameters"),
    "added module": (lambda ddp, zero: zero.add_param_group({"params": [ddp]}), _add, "must hold tensors only"),
    "destination": (
        lambda ddp, zero: zero.consolidate_state_dict(to=2),
        lambda ddp, zero: zero.consolidate_state_dict(to=0),
        "the group has ranks 0 to 1",
    ),
}


def _make_mistakes() -> list[tuple[str, str, str, float]]:
    """Every mistake on either rank, then training as if there had been none."""
    oracle, ours = pair()
    plain = torch.optim.AdamW(oracle.parameters(), **ADAMW)
    zero = Zero(ours.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **ADAMW)
    seen = []
    for name, (wrong, right, _) in MISTAKES.items():
        for guilty in range(2):
            _guilty[0] = guilty
            start = time.monotonic()
            try:
                (wrong if dist.get_rank() == guilty else right)(ours, zero)
                raise AssertionError(f"{name} was not refused")
            except (ValueError, TypeError, LookupError, RuntimeError, OSError) as error:
                kind = "ours" if isinstance(error, zerolap.ZerolapError) else "theirs"
                seen.append((f"{name} of rank {guilty}", kind, str(error), time.monotonic() - start))
            assert zero._engine is None, name
    handle = zerolap.attach(ours, zero)
    for i, x in enumerate(batches(3)):
        iterate(oracle, plain, x)
        iterate(ours, zero, x)
        assert_same_params(ours, oracle, i)
    handle.detach()
    return seen


def test_the_others_are_told_of_a_mistake_at_once_and_all_can_go_on() -> None:
    told = run_ranks(2, _make_mistakes, limit=100, group_timeout=20)
    for rank, seen in enumerate(told):
        for what, kind, said, seconds in seen:
            name, _, guilty = what.rpartition(" of rank ")
            assert MISTAKES[name][2] in said, f"{what}: rank {rank} was told: {said}"
            if rank != int(guilty):
                assert kind == "ours", f"{what}: rank {rank} got {said}"
                assert f"rank {guilty}: " in said, said
            else:
                assert kind == "theirs", f"{what}: rank {rank} got {said}"
            assert seconds < 10, f"{what}: rank {rank} was told after {seconds:.0f} s"


# --- what both are told -----------------------------------------------------------------------------------------------


def _told(fn: Callable[[], object]) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        fn()
    return str(caught.value)


@on_ranks(2, group_timeout=20)
def test_what_cannot_be_attached_is_refused_with_what_to_do() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    ddp = DDP(Mlp())
    torchs = TorchZero(ddp.parameters(), torch.optim.SGD, lr=0.1)
    zero = Zero(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    mesh = init_device_mesh("cpu", (2,))
    replicated = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    said = [
        _told(lambda: zerolap.attach(ddp, torchs)),  # type: ignore[arg-type]
        _told(lambda: zerolap.attach(fully_shard(nn.Linear(4, 4), mesh=mesh), zero)),  # type: ignore[arg-type]
        _told(lambda: zerolap.attach(torch.compile(ddp), zero)),  # type: ignore[arg-type]
        _told(lambda: Zero([replicated], torch.optim.SGD, lr=0.1)),
        _told(lambda: Zero(nn.LazyLinear(3).parameters(), torch.optim.SGD, lr=0.1)),
    ]
    handle = zerolap.attach(ddp, zero)
    second = Zero(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    said.append(_told(lambda: zerolap.attach(ddp, second)))
    handle.detach()
    expected = (
        "torch's own ZeroRedundancyOptimizer; import it from zerolap instead",
        "FSDP shards parameters and optimizer by itself",
        "give the DDP that was compiled, before it is compiled",
        "a parameter is a DTensor",
        "run a forward before the optimizer is made",
        "this DDP is attached to another optimizer already",
    )
    for sentence, words in zip(said, expected, strict=True):
        assert words in sentence, said


@on_ranks(2)
def test_the_optimizer_inside_of_a_frameworks_wrapper_is_taken() -> None:
    oracle, ours = pair()
    plain = torch.optim.AdamW(oracle.parameters(), **ADAMW)
    zero = Zero(ours.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **ADAMW)
    zerolap.attach(ours, Wrapper(Wrapper(zero)))  # type: ignore[arg-type]
    for i, x in enumerate(batches(3)):
        iterate(oracle, plain, x)
        iterate(ours, zero, x)
        assert_same_params(ours, oracle, i)


# --- parameters with names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_groups", [False, True])
@on_ranks(2)
def test_parameters_can_be_given_with_their_names_as_to_torchs_optimizers(in_groups: bool) -> None:
    oracle, ours = pair()

    def params(ddp: DDP) -> Any:
        named = list(ddp.named_parameters())
        return [{"params": named[:3], "lr": 0.02}, {"params": named[3:]}] if in_groups else iter(named)

    plain = torch.optim.AdamW(params(oracle), **ADAMW)  # type: ignore[arg-type]
    zero = Zero(params(ours), torch.optim.AdamW, overlap_with_ddp=True, **ADAMW)
    handle = zerolap.attach(ours, zero)
    for i, x in enumerate(batches(3)):
        iterate(oracle, plain, x)
        iterate(ours, zero, x)
        assert_same_params(ours, oracle, i)
    handle.detach()
    assert [g["param_names"] for g in zero.param_groups] == [g["param_names"] for g in plain.param_groups]
    for rank in range(2):
        zero.consolidate_state_dict(to=rank)
    if dist.get_rank() == 1:
        saved, expected = zero.state_dict(), plain.state_dict()
        assert [g["param_names"] for g in saved["param_groups"]] == [g["param_names"] for g in expected["param_groups"]]
        torch.optim.AdamW(params(oracle), **ADAMW).load_state_dict(saved)  # type: ignore[arg-type]
    plain_state = plain.state_dict()
    again = Zero(params(ours), torch.optim.AdamW, overlap_with_ddp=True, **ADAMW)
    again.load_state_dict(plain_state)
    zerolap.attach(ours, again)
    for i, x in enumerate(batches(3)):
        iterate(oracle, plain, x)
        iterate(ours, again, x)
        assert_same_params(ours, oracle, f"loaded, {i}")
    with pytest.raises((ValueError, zerolap.ZerolapError), match="with/without names"):
        again.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


# --- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [2.0, float("inf")])
@pytest.mark.parametrize(
    "wrong", [{"norm_type": 0.0}, {"norm_type": "two"}, {"max_norm": None}, {"max_norm": 7.0}, {"norm_type": 3.0}]
)
@on_ranks(2)
def test_arguments_of_clipping_that_one_rank_gets_wrong_are_refused_on_all(right: float, wrong: dict[str, Any]) -> None:
    oracle, ours = pair()
    plain = torch.optim.AdamW(oracle.parameters(), **ADAMW)
    zero = Zero(ours.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **ADAMW)
    zerolap.attach(ours, zero, schedule="on_step")
    good = {"max_norm": 0.5, "norm_type": right}
    for i, x in enumerate(batches(3)):
        backward(oracle, x)
        backward(ours, x)
        start = time.monotonic()
        with pytest.raises((TypeError, ValueError), match=r"max_norm|norm_type"):
            zero.clip_grad_norm_(**{**good, **(wrong if dist.get_rank() == 1 else {})})
        assert time.monotonic() - start < 10, "nobody waits for the time limit"
        nn.utils.clip_grad_norm_(oracle.parameters(), **good)
        zero.clip_grad_norm_(**good)
        plain.step()
        zero.step()
        plain.zero_grad()
        zero.zero_grad()
        for a, b in zip(ours.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=f"step {i}")
