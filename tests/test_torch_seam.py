"""torch's private names: each is in the torch that is installed, what is missing says so, and nothing else uses one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zerolap
from zerolap import _torch
from zerolap._torch import lookup, versions
from zerolap._torch.names import NAMES, Kind, PrivateName
from zerolap_conformance.ranks import run_ranks

ROOT = Path(__file__).parent.parent
SEAM = Path(_torch.__file__).parent


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_torch_has_the_name(name: PrivateName) -> None:
    if name.kind in (Kind.RECENT, Kind.NOT_ALL) and not lookup.is_there(name):
        pytest.skip(f"torch has no {name.path}: {name.without}")
    assert lookup.is_there(name), f"torch {torch.__version__} has no {name.path}: {name.without}. It {name.why}"


def test_a_name_that_torch_never_had_is_missing() -> None:
    for path in ("torch._no_such", "torch._no.such", "torch.nn.Module._no_such", "torch.Tensor._no.such"):
        assert not lookup.is_there(PrivateName(path, "", ""))
    assert not lookup.is_there(PrivateName("torch._version", "", "", written_in="optim/lr_scheduler.py"))
    assert not lookup.is_there(PrivateName("torch._version", "", "", written_in="optim/no_such.py"))


def test_every_name_has_one_row_and_every_row_a_use() -> None:
    paths = [name.path for name in NAMES]
    assert len(set(paths)) == len(paths)
    seam = "\n".join(file.read_text() for file in SEAM.glob("*.py") if file.name != "names.py")
    used = [name.path for name in NAMES if name.kind in (Kind.USED, Kind.RECENT, Kind.NOT_ALL)]
    assert [path for path in used if f'"{path}"' not in seam] == []


def _classes() -> Iterator[type]:
    """Every class of core."""
    for info in pkgutil.walk_packages(zerolap.__path__, "zerolap."):
        if info.name != "zerolap.__main__":
            module = importlib.import_module(info.name)
            for value in vars(module).values():
                if isinstance(value, type) and inspect.getsourcefile(module) == _file_of(value):
                    yield value


def _file_of(value: type) -> str | None:
    functions = [member for member in vars(value).values() if isinstance(member, FunctionType)]
    return functions[0].__code__.co_filename if functions else None


def test_every_private_name_of_torch_that_a_class_overrides_is_in_the_table() -> None:
    overridden, num_classes = set(), 0
    for value in _classes():
        for base in value.__mro__[1:]:
            if base.__module__.partition(".")[0] == "torch":
                num_classes += 1
                methods = [member for member in vars(base).values() if isinstance(member, FunctionType)]
                given = {*vars(base), *(name for method in methods for name in method.__code__.co_names)}
                overridden |= {name for name in vars(value) if re.fullmatch(r"_[a-z]\w*", name) and name in given}
    assert num_classes > 3
    overridden -= {"_abc_impl"}  # Python's
    assert overridden == {"_unscale_grads_"}
    assert overridden <= {name.attribute for name in NAMES if name.kind is Kind.OVERRIDDEN}


# --- the seam ---------------------------------------------------------------------------------------------------------


def test_what_is_called_often_costs_no_python_frame() -> None:
    assert _torch.current_graph_task_id is torch._C._current_graph_task_id
    assert _torch.foreach_copy_ is torch._foreach_copy_
    for name in (
        *("current_graph_task_id", "foreach_copy_", "queue_callback", "unscale_and_find_nonfinite_"),
        *("version_of", "parameters_of", "step_hooks_of", "join_config_of", "is_profiling"),
        *("reduce_scatter_of", "all_gather_of"),
    ):
        assert not isinstance(getattr(_torch, name), FunctionType), name


def test_a_missing_name_is_an_error_that_names_it_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("torch._gone", "torch._gone.thing", "torch.autograd.profiler._gone"):
        monkeypatch.setitem(lookup._BY_PATH, path, PrivateName(path, "does good", "nothing good is done"))
        for made in (lookup.used(path), lookup.reader(path)):
            with pytest.raises(
                zerolap.ZerolapError, match=rf"torch .* has no {re.escape(path)}: nothing good is done\."
            ):
                made(nn.Module())
    with pytest.raises(zerolap.ZerolapError, match=r"has no torch\.autograd\.profiler\._gone"):
        lookup.variable("torch.autograd.profiler._gone")()


def test_importing_the_seam_imports_nothing_slow() -> None:
    slow = (
        "[m for m in sys.modules if m in ('torch._dynamo', 'torch.distributed.checkpoint', 'torch.distributed.optim')]"
    )
    code = f"import sys, torch; before = {slow}; import zerolap._torch; print(before == {slow})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "True\n"


def test_modules_and_optimizers_are_read_and_written() -> None:
    module = nn.Linear(2, 3)
    assert [*_torch.parameters_of(module)] == ["weight", "bias"]
    vars(module)[_torch.PARAMETERS] = {"weight": module.weight}
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    compiled = torch.compile(module)
    assert (_torch.ORIGINAL in _torch.children_of(module), _torch.ORIGINAL in _torch.children_of(compiled)) == (
        False,
        True,
    )
    assert (_torch.original_of(module), _torch.original_of(compiled)) == (None, module)
    module.compile()
    assert _torch.compiled_call_of(module) is not None

    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    assert not any(_torch.step_hooks_of(optimizer))
    optimizer.register_step_post_hook(lambda *_: None)
    assert any(_torch.step_hooks_of(optimizer))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    vars(optimizer)[_torch.STEP_CALLED] = True
    scheduler.step()  # warns if it was not, and warnings are errors

    before = _torch.version_of(module.weight)
    with torch.no_grad():
        module.weight.add_(1)
    assert _torch.version_of(module.weight) == before + 1


def test_a_compiled_caller_is_seen_in_the_stack() -> None:
    seen = []

    @torch.compiler.disable
    def look(x: torch.Tensor) -> torch.Tensor:
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            seen.append(_torch.is_compile_wrapper(frame.f_code))
        return x

    look(torch.ones(1))
    assert not any(seen)
    torch.compile(lambda x: look(x) + 1, backend="eager")(torch.ones(1))
    assert any(seen)


def test_backwards_and_profilers_are_told() -> None:
    assert _torch.current_graph_task_id() == -1
    tasks, ended = [], []

    def hook(grad: torch.Tensor) -> None:
        tasks.append(_torch.current_graph_task_id())
        _torch.queue_callback(lambda: ended.append(True))

    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    y.backward()
    assert tasks[0] != -1
    assert ended == [True]
    assert inspect.isfunction(getattr(torch.autograd.graph, _torch.RUN_BACKWARD))

    assert not _torch.is_profiling()
    with torch.profiler.profile():
        assert _torch.is_profiling()
    assert not _torch.is_profiling()


def _read_ddp_and_its_group() -> None:
    group = dist.group.WORLD
    assert group is not None
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    assert not _torch.join_config_of(ddp).enable
    assert not _torch.has_python_reducer(ddp)
    assert _torch.logging_data_of(ddp)["bucket_sizes"]
    assert torch.device("cpu") in _torch.device_types_of(group)
    assert torch.device(_torch.device_for_objects(group)).type == "cpu"
    assert _torch.group_timeout(group, torch.device("cpu")) > timedelta(seconds=1)

    seen = set()

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP takes annotations for wrong that are strings
        seen.add(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    assert _torch.can_rebucket(ddp)
    for _ in range(3):
        ddp(torch.ones(1, 64)).sum().backward()
    assert seen == {0}
    _torch.rebucket(ddp, cap=64 * 65 * 4, first_cap=64 * 65 * 4)
    for _ in range(3):
        ddp(torch.ones(1, 64)).sum().backward()
    assert seen == {0, 1}


def test_ddp_and_its_group_are_read_and_given_other_buckets() -> None:
    run_ranks(1, _read_ddp_and_its_group)


def _drop_a_group_whose_collective_has_a_callback(rank_that_is_late: int) -> bool:
    group = zerolap.load_adapter("cpu_gloo").open_group(dist.group.WORLD, name="own")  # type: ignore[arg-type]
    sum_, called = torch.ones(3), threading.Event()
    dist.barrier()
    if dist.get_rank() == rank_that_is_late:
        time.sleep(0.5)  # so that the other's destructor waits for it
    work = group.allreduce([sum_])
    work.get_future().then(lambda _: called.set())
    del work, group
    return called.wait(10) and sum_.tolist() == [2, 2, 2]


def test_a_group_that_is_dropped_waits_for_its_collectives_without_holding_up_python() -> None:
    assert run_ranks(2, _drop_a_group_whose_collective_has_a_callback, 1, limit=60) == [True, True]


# --- versions of torch ------------------------------------------------------------------------------------------------


def test_the_torch_that_is_installed_was_tried_and_others_are_named_once(recwarn: pytest.WarningsRecorder) -> None:
    assert versions.untried(torch.__version__) is None
    assert [versions.untried(v) for v in ("2.6.0+cu124", "2.13.0", "2.15.0a0+git1")] == [None] * 3
    for version, name in (("2.16.1", "2.16"), ("2.5.1+cpu", "2.5"), ("3.0", "3.0"), ("odd", "odd")):
        for _ in range(2):
            versions.warn_if_untried(version)
        (said,) = [str(each.message) for each in recwarn]
        assert said.startswith(f"zerolap was not tried with torch {name}, but with 2.6 to 2.15: ")
        recwarn.clear()


def _make_optimizer_with_another_torch() -> list[str]:
    torch.__version__ = "2.16.0"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            zerolap.ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
    return [f"{each.category.__name__}: {each.message}"[:55] for each in said]


def test_one_rank_says_once_that_a_torch_was_not_tried() -> None:
    said = ["UserWarning: zerolap was not tried with torch 2.16, but"]
    assert run_ranks(2, _make_optimizer_with_another_torch) == [said, []]


AS_TORCH_2_8 = """
    import torch, torch.distributed as dist
    for owner, name in ((dist.ProcessGroup, "get_group_store"), (dist, "GroupName")):
        if hasattr(owner, name):  # or this is such a torch
            delattr(owner, name)

    from zerolap import ZeroRedundancyOptimizer, load_adapter
    from zerolap._torch import GroupName, store_of
    from zerolap.runtime.peers import all_gather_json
    from zerolap.runtime.failure_report import LastWords

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store_of(dist.group.WORLD).set("of", "the world")
    own = load_adapter("cpu_gloo").open_group(dist.group.WORLD, name="own")
    store_of(own).set("of", "ours")
    assert (store_of(dist.group.WORLD).get("of"), store_of(own).get("of")) == (b"the world", b"ours")
    assert (own.group_name, GroupName) == ("own", str)
    assert all_gather_json([1], group=own, what="trying") == [[1]]
    LastWords(own)

    param = torch.nn.Parameter(torch.ones(3))
    optimizer = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=0.5)
    param.grad = torch.ones(3)
    optimizer.step()
    assert param.tolist() == [0.5, 0.5, 0.5]
    dist.destroy_process_group()
    print("done")
"""


def test_what_torch_2_8_lacks_is_replaced() -> None:
    code = textwrap.dedent(AS_TORCH_2_8)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr


# --- nothing else uses private names ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_private_names", ROOT / "ci/check_private_names.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._C import _distributed_c10d",
        "from torch.optim.optimizer import _use_grad_for_differentiable",
        "from torch.distributed import GroupName",
        "import torch; torch._brand_new(x)",
        "import torch; torch._C._brand_new(x)",
        "import torch.distributed as dist; dist.distributed_c10d._world",
        "from torch import nn; nn.Module._ours",  # torch's, whatever ours is called
        "ddp._brand_new",
        "ddp._brand_new._ours",
        "ddp._brand_new = 1",
        "self._brand_new()",  # inherited
        "super()._brand_new()",
        "options._timeout",  # a name that torch and we have
        "group.get_group_store()",
        "getattr(ddp, '_brand_new', None)",
        "attrgetter('_version')",
        "vars(ddp)['_brand_new']",
        "getattr(torch, f'_foreach_{verb}_')",
        "importlib.import_module('torch._dynamo.eval_frame')",
    ],
)
def test_a_private_name_of_torch_is_found(check: ModuleType, line: str) -> None:
    ours = "class A:\n    def __init__(self):\n        self._timeout = self._ours = 1\n"
    assert check.problems_in({"core/src/zerolap/a.py": ours}) == []
    found = check.problems_in({"core/src/zerolap/a.py": ours, "core/src/zerolap/b.py": line})
    assert len(found) >= 1
    assert all(problem.startswith("core/src/zerolap/b.py:1: ") for problem in found)


@pytest.mark.parametrize(
    "line",
    [
        "engine._ours",
        "self._ours._ours",
        "from zerolap.a import _helper; _helper(x)",
        "getattr(engine, '_ours')",
        "self._timeout",
        "span._replace(end=1)",
        "import sys; sys._getframe(1)",
        "x = f'{a}_total'",
        "thread._zerolap_mark = 1",
        "('torch._utils', '_rebuild_tensor_v2')",  # in a file's format
        "class B:\n    __slots__ = ('_slot',)\n\n\nB()._slot",
    ],
)
def test_a_private_name_of_ours_is_not_taken_for_torchs(check: ModuleType, line: str) -> None:
    ours = "class A:\n    def __init__(self):\n        self._timeout = self._ours = 1\n\n\ndef _helper(x): ...\n"
    assert check.problems_in({"core/src/zerolap/a.py": ours, "core/src/zerolap/b.py": line}) == []


def test_no_source_but_the_seam_uses_a_private_name_of_torch(
    check: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main() == 0, capsys.readouterr().out
