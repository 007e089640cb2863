"""The one seam to torch's private names: every one that is used has a plain name here, and a row in the table of ``names``.

Nothing else in the packages touches a private name, which ``ci/check_private_names.py`` sees to. What is called often is torch's own
function under another name, or an ``attrgetter``, and costs no Python frame. What differs between versions of torch is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import CodeType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zerolap._torch.ddp_buckets import are_buckets_current as are_buckets_current
from zerolap._torch.ddp_buckets import bucket_caps_of as bucket_caps_of
from zerolap._torch.ddp_buckets import can_free_buckets as can_free_buckets
from zerolap._torch.ddp_buckets import can_rebucket as can_rebucket
from zerolap._torch.ddp_buckets import hides_unused_buckets as hides_unused_buckets
from zerolap._torch.ddp_buckets import own_caps_of as own_caps_of
from zerolap._torch.ddp_buckets import rebucket as rebucket
from zerolap._torch.lookup import reader, text, used, variable, writer
from zerolap.errors import ZerolapError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend as Backend
    from torch._C._distributed_c10d import GradBucket as GradBucket
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import _DistributedBackendOptions as BackendOptions
    from torch.distributed import GroupName as GroupName
else:
    from torch.distributed import GradBucket, PrefixStore, Store  # public, but not to type checkers

    GroupName = getattr(dist, text("torch.distributed.GroupName"), str)
    Backend = used("torch._C._distributed_c10d.Backend")
    BackendOptions = used("torch._C._distributed_c10d._DistributedBackendOptions")

__all__ = ["Backend", "BackendOptions", "GradBucket", "GroupName", "PrefixStore", "Store"]

# --- tensors ----------------------------------------------------------------------------------------------------------

coalescing: Callable[..., AbstractContextManager[object]] = used("torch.distributed._coalescing_manager")
foreach_copy_: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = used("torch._foreach_copy_")
foreach_zero_: Callable[[Sequence[Tensor]], None] = used("torch._foreach_zero_")
unscale_and_find_nonfinite_: Callable[[Sequence[Tensor], Tensor, Tensor], None] = used(
    "torch._amp_foreach_non_finite_check_and_unscale_"
)
version_of: Callable[[Tensor], int] = reader("torch.Tensor._version")
make_wrapper_subclass: Callable[..., Any] = used("torch.Tensor._make_wrapper_subclass")
no_torch_function: Any = used(
    "torch._C._disabled_torch_function_impl"
)  # of a class whose operators torch dispatches only
schema_of: Callable[[Any], Any] = reader("torch._ops.OpOverload._schema")
tree_map_only: Callable[..., Any] = used("torch.utils._pytree.tree_map_only")
# The operators themselves, as they are dispatched.
FOREACH_NORM: Any = used("torch.ops.aten._foreach_norm.Scalar")
FOREACH_ZERO: Any = used("torch.ops.aten._foreach_zero_.default")
TO_COPY: Any = used("torch.ops.aten._to_copy.default")
UNSCALE: Any = used("torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default")
is_traceable_wrapper_subclass: Callable[[object], bool] = used(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass"
)

_FOREACH_TYPES = "torch.utils._foreach_utils._foreach_supported_types"


def take_for_foreach(kind: type[Tensor]) -> None:
    """Let torch's clipping treat many tensors of this class by one call; where it cannot be told, it treats them one by one."""
    try:
        known = variable(_FOREACH_TYPES)()
    except ZerolapError:
        return
    if kind not in known:
        known.append(kind)


# --- backward ---------------------------------------------------------------------------------------------------------

current_graph_task_id: Callable[[], int] = used("torch._C._current_graph_task_id")  # -1 outside of a backward
queue_callback: Callable[[Callable[[], object]], None] = used(
    "torch.autograd.Variable._execution_engine.queue_callback"
)
RUN_BACKWARD = text("torch.autograd.graph._engine_run_backward")  # the function's name, in a stack

# --- the profiler -----------------------------------------------------------------------------------------------------

is_profiling: Callable[[], bool] = variable("torch.autograd.profiler._is_profiler_enabled")

# --- modules and compilation ------------------------------------------------------------------------------------------

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = reader("torch.nn.Module._parameters")
PARAMETERS = text("torch.nn.Module._parameters")  # an attribute of objects
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = reader("torch.nn.Module._modules")
compiled_call_of: Callable[[nn.Module], Callable[..., Any] | None] = reader("torch.nn.Module._compiled_call_impl")
ORIGINAL = text("torch._dynamo.eval_frame.OptimizedModule._orig_mod")  # a child of what torch.compile has made
_COMPILE_WRAPPERS = (text("torch._dynamo.eval_frame.compile_wrapper"), text("torch._dynamo.eval_frame._fn"))
COMPILER_MODULES = ("torch._dynamo", "torch._inductor.config")  # to be imported ahead, by who has time for it


def original_of(compiled: object) -> object:
    """What torch.compile was given to make this; None if it did not make it."""
    return getattr(compiled, ORIGINAL, None)


def is_compile_wrapper(code: CodeType) -> bool:
    """Whether this is the function through which torch.compile calls what it has made."""
    from torch._dynamo import eval_frame  # takes a second, if nothing was compiled yet

    # Older versions call two functions by one name; the one that compiles has a callback for it.
    is_one = any(name in code.co_name for name in _COMPILE_WRAPPERS) and "callback" in code.co_freevars
    return is_one and code.co_filename == eval_frame.__file__


# --- optimizers -------------------------------------------------------------------------------------------------------

step_hooks_of: Callable[[Optimizer], tuple[dict[int, Any], dict[int, Any]]] = reader(  # before a step, and after it
    "torch.optim.Optimizer._optimizer_step_pre_hooks", "torch.optim.Optimizer._optimizer_step_post_hooks"
)
STEP_CALLED = text("torch.optim.Optimizer._opt_called")  # an attribute of objects
WRAPPED_BY_SCHEDULER = text("torch.optim.lr_scheduler.LRScheduler._wrapped_by_lr_sched")  # an attribute of a step()
devices_with_fused_kernels: Callable[[], list[str]] = used(
    "torch.utils._foreach_utils._get_fused_kernels_supported_devices"
)
_IN_BACKWARD = text("torch.Tensor._in_backward_optimizers")


def is_updated_in_backward(param: Tensor) -> bool:
    """Whether torch applies an optimizer of its own to the parameter in backward."""
    return hasattr(param, _IN_BACKWARD)


# Functions of torch.distributed.checkpoint.state_dict, known by their frames.
STATE_DICT_MODULE = "torch.distributed.checkpoint.state_dict"
READIES_STATES = text("torch.distributed.checkpoint.state_dict._init_optim_state")
ASKS_FOR_STATES = text("torch.distributed.checkpoint.state_dict._get_optim_state_dict")
ASKS_FOR_STATE_NAMES = text("torch.distributed.checkpoint.state_dict._unflatten_optim_state_dict")

# --- DDP --------------------------------------------------------------------------------------------------------------

join_config_of: Callable[[object], Any] = reader("torch.distributed.algorithms.join.Joinable._join_config")
has_python_reducer: Callable[[DistributedDataParallel], bool] = reader(
    "torch.nn.parallel.DistributedDataParallel._use_python_reducer"
)
logging_data_of: Callable[[DistributedDataParallel], dict[str, Any]] = used(
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data"
)

# --- streams ----------------------------------------------------------------------------------------------------------


def _as_it_is(stream: torch.Stream) -> AbstractContextManager[Any]:
    return stream


@contextmanager
def _made_current(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream(stream.device_index)
    device = torch.accelerator.current_device_index()
    torch.accelerator.set_stream(stream)  # makes its device the current one, too
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


# What is queued inside of ``with under(stream)`` goes to that stream. Streams can do it themselves from torch 2.7 on.
under: Callable[[torch.Stream], AbstractContextManager[Any]] = (
    _as_it_is if hasattr(torch.Stream, "__enter__") else _made_current
)

# --- process groups ---------------------------------------------------------------------------------------------------

device_types_of: Callable[[dist.ProcessGroup], list[torch.device]] = reader(
    "torch.distributed.ProcessGroup._device_types"
)
device_for_objects: Callable[[dist.ProcessGroup], str | torch.device] = used(
    "torch.distributed.distributed_c10d._get_object_coll_device"
)
# Of the group that they are called with: reduce_scatter_of(group)(received, sent, options).
reduce_scatter_of: Callable[[dist.ProcessGroup], Callable[..., dist.Work]] = reader(
    "torch.distributed.ProcessGroup._reduce_scatter_base"
)
all_gather_of: Callable[[dist.ProcessGroup], Callable[..., dist.Work]] = reader(
    "torch.distributed.ProcessGroup._allgather_base"
)
set_timeout: Callable[[object, timedelta], None] = writer("torch._C._distributed_c10d.Backend.Options._timeout")
_timeout_in: Callable[[Any], timedelta] = reader("torch._C._distributed_c10d.Backend.Options._timeout")
_backend_of: Callable[[dist.ProcessGroup, torch.device], Any] = used("torch.distributed.ProcessGroup._get_backend")
_set_default_backend: Callable[[dist.ProcessGroup, Any], None] = used(
    "torch.distributed.ProcessGroup._set_default_backend"
)
_register_backend: Callable[[dist.ProcessGroup, torch.device, Any, Backend], None] = used(
    "torch.distributed.ProcessGroup._register_backend"
)
_set_group_name: Callable[[dist.ProcessGroup, str], None] = used("torch.distributed.ProcessGroup._set_group_name")
_plugins_of: Callable[[type[dist.Backend]], dict[str, Any]] = reader("torch.distributed.Backend._plugins")
_store_of_registered: Callable[[dist.ProcessGroup], Store] = used(
    "torch.distributed.distributed_c10d._get_process_group_store"
)
_GET_STORE = text("torch.distributed.ProcessGroup.get_group_store")
# What our own groups were made of. The store, where torch cannot tell it; and the backend, so that it goes after its group: where the
# group is what ends it, older versions wait for what is in flight and keep all of Python waiting, callbacks of what is in flight included.
_made_of: WeakKeyDictionary[dist.ProcessGroup, tuple[Store, Backend]] = WeakKeyDictionary()


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a collective of the group may take; AttributeError if its backend does not tell. The setter is public."""
    return _timeout_in(_backend_of(group, device).options)


def registered_backend(name: str) -> Any | None:
    """What ``Backend.register_backend`` was given under this name."""
    return _plugins_of(dist.Backend).get(name.upper())


def group_around(
    backend: Backend, *, store: Store, rank: int, size: int, kind: Any, device: torch.device, name: str
) -> dist.ProcessGroup:
    """A process group that is not registered with torch."""
    group = dist.ProcessGroup(store, rank, size)
    _set_default_backend(group, kind)
    _register_backend(group, device, kind, backend)
    _set_group_name(group, name)
    _made_of[group] = store, backend
    return group


def store_of(group: dist.ProcessGroup) -> Store:
    """The store that a group was made with."""
    if hasattr(dist.ProcessGroup, _GET_STORE):
        return group.get_group_store()
    return _made_of[group][0] if group in _made_of else _store_of_registered(group)


# --- a device type of one's own ---------------------------------------------------------------------------------------

spare_device_name: Callable[[], str] = used("torch._C._get_privateuse1_backend_name")
register_device_module: Callable[[str, object], None] = used("torch._register_device_module")
_PYBIND = (
    text("torch._C._PYBIND11_COMPILER_TYPE"),
    text("torch._C._PYBIND11_STDLIB"),
    text("torch._C._PYBIND11_BUILD_ABI"),
)


def extension_macros() -> list[str]:
    """What an extension must define to know torch's classes, with older versions; newer ones ask for nothing."""
    return [f'-D{name[1:]}="{getattr(torch._C, name)}"' for name in _PYBIND if hasattr(torch._C, name)]
