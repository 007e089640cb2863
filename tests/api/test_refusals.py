"""What cannot be right is refused at construction or when the hook is made: on all ranks, with what to do instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
import zerolap_cpu_gloo
from support.training import Mlp, backward, batches, overlapped
from support.versions import needs_ddp_option
from zerolap.backend import registry
from zerolap_conformance.ranks import try_ranks

Zero = zerolap.ZeroRedundancyOptimizer
SGD = torch.optim.SGD


def _sharded(params: Any, **options: Any) -> Zero:
    return Zero(params, SGD, lr=0.1, **options)


def mismatched_shapes() -> None:
    _sharded([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4 + dist.get_rank()))])


def mismatched_numbers() -> None:
    _sharded([nn.Parameter(torch.zeros(3)) for _ in range(2 + dist.get_rank())])


def mismatched_groups() -> None:
    params = [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    _sharded([{"params": params}] if dist.get_rank() else [{"params": params[:2]}, {"params": params[2:]}])


def frozen_on_one_rank() -> None:
    _sharded([nn.Parameter(torch.zeros(3), requires_grad=dist.get_rank() == 0)])


def bad_on_one_rank() -> None:
    _sharded([nn.Parameter(torch.zeros(3))] if dist.get_rank() == 0 else [])


def empty() -> None:
    _sharded([])


def empty_groups() -> None:
    _sharded([{"params": []}])


def non_leaf() -> None:
    _sharded([nn.Parameter(torch.zeros(3)) * 2])


def duplicates() -> None:
    param = nn.Parameter(torch.zeros(3))
    _sharded([param, param])


def duplicates_over_groups() -> None:
    param = nn.Parameter(torch.zeros(3))
    _sharded([{"params": [param]}, {"params": [param]}])


def shared_memory() -> None:
    memory = torch.zeros(10)
    _sharded([nn.Parameter(memory[:6]), nn.Parameter(memory[4:])], overlap_with_ddp=True)


def meta_device() -> None:
    _sharded([nn.Parameter(torch.zeros(3, device="meta"))])


def two_devices() -> None:
    _sharded([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, device="meta"))], overlap_with_ddp=True)


def bad_option() -> None:
    Zero([nn.Parameter(torch.zeros(3))], SGD, lr=-1.0, overlap_with_ddp=True)


def not_an_optimizer() -> None:
    Zero([nn.Parameter(torch.zeros(3))], nn.Linear)  # type: ignore[arg-type]


def no_adapter() -> None:
    registry.installed_adapters = dict  # as if none were installed
    ddp = DDP(Mlp())
    zerolap.attach(ddp, Zero(ddp.parameters(), SGD, lr=0.1, overlap_with_ddp=True))


def broken_adapter() -> None:
    registry.installed_adapters = lambda: {"acme": ImportError("libacme.so is missing")}
    ddp = DDP(Mlp())
    zerolap.hook_with_zero_step(allreduce_hook, ddp, Zero(ddp.parameters(), SGD, lr=0.1, overlap_with_ddp=True))


class ForAnotherDevice(zerolap_cpu_gloo.CpuGlooAdapter):
    name = "acme"
    device_type = "acme"


def _attach_with(adapter: Any) -> None:
    ddp = DDP(Mlp())
    zerolap.attach(ddp, _sharded(ddp.parameters(), overlap_with_ddp=True), adapter=adapter)


def unknown_adapter() -> None:
    _attach_with("gluu")


def adapter_for_another_device() -> None:
    _attach_with(ForAnotherDevice())


def adapter_class() -> None:
    _attach_with(zerolap_cpu_gloo.CpuGlooAdapter)


def no_overlap() -> None:
    ddp = DDP(Mlp())
    zerolap.hook_with_zero_step(allreduce_hook, ddp, _sharded(ddp.parameters()))


def another_ddp() -> None:
    overlapped(DDP(Mlp()), Mlp().parameters(), SGD, lr=0.1)


def another_ddp_on_one_rank() -> None:
    ddp = DDP(Mlp())
    overlapped(ddp, Mlp().parameters() if dist.get_rank() else ddp.parameters(), SGD, lr=0.1)


def not_ddp() -> None:
    model = Mlp()
    zerolap.hook_with_zero_step(allreduce_hook, model, _sharded(model.parameters(), overlap_with_ddp=True))  # type: ignore[arg-type]


def another_group() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    ddp = DDP(Mlp(), process_group=alone)
    overlapped(ddp, ddp.parameters(), SGD, lr=0.1)


def two_hooks() -> None:
    ddp = DDP(Mlp())
    zero = overlapped(ddp, ddp.parameters(), SGD, lr=0.1)
    zerolap.hook_with_zero_step(allreduce_hook, ddp, zero)


def different_hooks() -> None:
    ddp = DDP(Mlp())
    maker = zerolap.hook_with_zero_step if dist.get_rank() else zerolap.hook_with_zero_step_interleaved
    overlapped(ddp, ddp.parameters(), SGD, hook_maker=maker, lr=0.1)


def mixed_precision() -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    ddp = DDP(Mlp(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    overlapped(ddp, ddp.parameters(), SGD, lr=0.1)


def skipped_buckets() -> None:
    ddp = DDP(Mlp(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    overlapped(ddp, ddp.parameters(), SGD, lr=0.1)


def optimizer_in_backward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = Mlp()
    _apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})
    ddp = DDP(model)
    overlapped(ddp, ddp.parameters(), SGD, lr=0.1)


def static_graph_set_too_late() -> None:
    ddp = DDP(Mlp())
    overlapped(ddp, ddp.parameters(), SGD, lr=0.1)
    ddp._set_static_graph()
    backward(ddp, next(batches(1)))


def step_without_hook() -> None:
    ddp = DDP(Mlp())
    zero = _sharded(ddp.parameters(), overlap_with_ddp=True)
    backward(ddp, next(batches(1)))
    zero.step()


def clipping_without_hook() -> None:
    ddp = DDP(Mlp())
    zero = _sharded(ddp.parameters(), overlap_with_ddp=True)
    backward(ddp, next(batches(1)))
    zero.clip_grad_norm_(1.0)


def hook_not_registered() -> None:
    ddp = DDP(Mlp())
    zero = _sharded(ddp.parameters(), overlap_with_ddp=True)
    zerolap.hook_with_zero_step(allreduce_hook, ddp, zero)
    backward(ddp, next(batches(1)))
    zero.step()


def step_with_options() -> None:
    ddp = DDP(Mlp())
    overlapped(ddp, ddp.parameters(), SGD, lr=0.1).step(scale=2)


def state_not_consolidated() -> None:
    zero = _sharded([nn.Parameter(torch.zeros(3))])
    zero.step()
    zero.state_dict()


def consolidate_to_nobody() -> None:
    _sharded([nn.Parameter(torch.zeros(3))]).consolidate_state_dict(to=2)


def state_of_another_model() -> None:
    zero = _sharded([nn.Parameter(torch.zeros(3))])
    zero.load_state_dict({"state": {7: {}}, "param_groups": [{"params": [0]}]})


def groups_of_another_model() -> None:
    zero = _sharded([nn.Parameter(torch.zeros(3))])
    zero.load_state_dict({"state": {}, "param_groups": [{"params": [0]}, {"params": []}]})


def added_group_of_strangers() -> None:
    ddp = DDP(Mlp(), bucket_cap_mb=0.004)
    zero = overlapped(ddp, ddp.parameters(), SGD, lr=0.1)
    zero.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    for x in batches(2):
        backward(ddp, x)


def weights_that_are_elsewhere_too() -> None:
    class _IPEXPrepackModule(nn.Linear):
        """By whose name packed modules are known."""

    model = nn.Sequential(nn.Linear(2, 2), _IPEXPrepackModule(2, 2))
    overlapped(DDP(model), model.parameters(), SGD, lr=0.1)


def master_weights_of_another_optimizer() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].master_weight_split = False
    overlapped(DDP(model), model.parameters(), SGD, lr=0.1)


def replaced_state_dict() -> None:
    ddp = DDP(Mlp())
    zero = _sharded(ddp.parameters(), overlap_with_ddp=True)
    zero.load_state_dict = print  # type: ignore[method-assign, assignment]
    zerolap.attach(ddp, zero)


# case: what both ranks say
REFUSALS: dict[Callable[[], None], str] = {
    mismatched_shapes: r"ValueError: .*parameter 1 of group 0 is \(4,\) torch.float32 and \(5,\) torch.float32",
    mismatched_numbers: r"ValueError: .*group 0 has 2 and 3 parameters",
    mismatched_groups: r"ValueError: .*2 and 1 param groups",
    frozen_on_one_rank: r"ValueError: .*\(3,\) torch.float32 and \(3,\) torch.float32 frozen",
    bad_on_one_rank: r"empty parameter list",
    empty: r"ValueError: .*empty parameter list",
    empty_groups: r"ValueError: .*without parameters",
    non_leaf: r"ValueError: can't optimize a non-leaf",
    duplicates: r"ValueError: a parameter is listed twice",
    duplicates_over_groups: r"ValueError: a parameter is listed twice",
    shared_memory: r"ValueError: two parameters share memory",
    meta_device: r"ValueError: .*materialize the model first",
    two_devices: r"ValueError: overlap needs all parameters on one device per rank, got cpu, meta",
    bad_option: r"ValueError: Invalid learning rate",
    not_an_optimizer: r"ValueError: optimizer_class must be a torch.optim.Optimizer subclass",
    no_adapter: r"AdapterNotFoundError: no zerolap adapter for device type 'cpu'; installed: none.*pip install zerolap-cpu",
    broken_adapter: r"installed: acme \(broken: libacme.so is missing\)",
    unknown_adapter: r"AdapterNotFoundError: no adapter 'gluu'; installed: .*cpu_gloo",
    adapter_for_another_device: r"ValueError: adapter 'acme' is for device type 'acme', the parameters are on 'cpu'",
    adapter_class: r"TypeError: adapter must be a name or a zerolap.Adapter, got type",
    no_overlap: r"ValueError: .*overlap_with_ddp=True",
    another_ddp: r"ValueError: .*not reduced by this DDP",
    another_ddp_on_one_rank: r"not reduced by this DDP",
    not_ddp: r"TypeError: ddp must be a DistributedDataParallel, got Mlp",
    another_group: r"ValueError: .*give both the same process_group",
    two_hooks: r"ValueError: a hook was already made for this optimizer",
    different_hooks: r"ValueError: the hooks of group ranks 0 and 1 differ",
    mixed_precision: r"ValueError: .*use torch.autocast instead",
    skipped_buckets: r"ValueError: skip_all_reduce_unused_params",
    optimizer_in_backward: r"ValueError: .*another optimizer applied in backward",
    static_graph_set_too_late: r"static_graph was changed after the hook was made",
    step_without_hook: r"RuntimeError: .*no hook was made for this optimizer",
    clipping_without_hook: r"RuntimeError: .*no hook was made for this optimizer",
    hook_not_registered: r"RuntimeError: .*register it by ddp.register_comm_hook",
    step_with_options: r"TypeError: step\(\) takes no options under overlap.*scale",
    state_not_consolidated: r"RuntimeError: .*call consolidate_state_dict\(to=\d\) on all ranks",
    consolidate_to_nobody: r"ValueError: .*ranks 0 to 1",
    state_of_another_model: r"ValueError: .*states for parameters \[7\]",
    groups_of_another_model: r"ValueError: loaded state dict has a different number of parameter groups",
    added_group_of_strangers: r"in none of DDP's buckets",
    weights_that_are_elsewhere_too: r"ValueError: 1 computes with a packed copy of its weight",
    master_weights_of_another_optimizer: r"ValueError: 0 has its weights from ipex.optimize",
    replaced_state_dict: r"TypeError: .*load_state_dict was replaced on this optimizer by builtins.print",
}


CASES = [
    pytest.param(case, marks=needs_ddp_option("skip_all_reduce_unused_params")) if case is skipped_buckets else case
    for case in REFUSALS
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_both_ranks_are_told_what_is_wrong(case: Callable[[], None]) -> None:
    for rank, outcome in enumerate(try_ranks(2, case, limit=60, group_timeout=15)):
        assert outcome.error is not None, f"rank {rank} was not refused"
        last = outcome.error.strip().splitlines()[-1]
        assert re.search(REFUSALS[case], outcome.error.replace("\n", " ")), last
        assert outcome.seconds < 12, "refused by a timeout, not by a check"
