"""The table of torch's private names: which are used, why, and what is lost with each. No torch.

``ci/draw_torch_names.py`` makes a page of it, ``tests/test_torch_seam.py`` looks for each name in the torch that is installed, and the
seam hands out nothing that has no row here.
"""

from __future__ import annotations

from zerolap._torch.private_name import Kind as Kind
from zerolap._torch.private_name import PrivateName as PrivateName

_C10D = "torch._C._distributed_c10d"
_GROUP = "torch.distributed.ProcessGroup"
_DDP = "torch.nn.parallel.DistributedDataParallel"
_DYNAMO = "torch._dynamo.eval_frame"
_DCP = "torch.distributed.checkpoint"
_LAZY = 'gather="lazy" and the search for late reads do not work'
_NO_OWN_GROUP = "an adapter cannot open a group of its own, so nothing overlaps"
_AUTO = 'schedule="auto" keeps the bucket size that DDP was made with'
_SHARDED = "attach() refuses shard_gradients=True"
_NO_STATE_DICT = "torch.distributed.checkpoint.state_dict does not work with sharded optimizers"
_NO_GRAD_TENSOR = 'with schedule="on_step" nothing can be trained'

_TENSORS = (
    PrivateName(
        "torch._foreach_copy_", "copies many tensors by one call", "masters and padded collectives cannot be copied"
    ),
    PrivateName("torch._foreach_zero_", "clears many gradients by one call", "zero_grad(set_to_none=False) fails"),
    PrivateName(
        "torch._amp_foreach_non_finite_check_and_unscale_",
        "unscales gradients and finds infinities in one pass",
        "GradScaler and nonfinite= do not work",
    ),
    PrivateName(
        "torch.Tensor._version",
        "tells whether a tensor was written to since",
        "changes of gradients, and of parameters on their way, cannot be noticed, so no update is made",
    ),
    PrivateName(
        "torch.Tensor._make_wrapper_subclass",
        "makes a tensor without memory, of which a rank holds some ranges",
        "optimizer state cannot be given to torch.distributed.checkpoint",
    ),
    PrivateName(
        "torch._C._disabled_torch_function_impl",
        "sends operators of a gradient in .grad straight to where they are done",
        _NO_GRAD_TENSOR,
    ),
    PrivateName("torch._ops.OpOverload._schema", "tells whether an operator writes, or returns views", _NO_GRAD_TENSOR),
    PrivateName(
        "torch.utils._pytree.tree_map_only", "finds gradients among the arguments of operators", _NO_GRAD_TENSOR
    ),
    PrivateName("torch.ops.aten._foreach_norm.Scalar", "is the operator by which torch clips", _NO_GRAD_TENSOR),
    PrivateName("torch.ops.aten._to_copy.default", "moves states to the CPU", _NO_STATE_DICT),
    PrivateName("torch.ops.aten._foreach_zero_.default", "is the operator by which optimizers clear", _NO_GRAD_TENSOR),
    PrivateName(
        "torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default",
        "is the operator by which a GradScaler unscales",
        _NO_GRAD_TENSOR,
    ),
    PrivateName(
        "torch.utils._foreach_utils._foreach_supported_types",
        "lists the classes that torch clips by one call",
        "torch clips gradients one by one",
        kind=Kind.NOT_ALL,
    ),
    PrivateName(
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        "recognises tensors that are made of others, as DTensor is",
        "such parameters cannot be refused, and so no optimizer can be made",
    ),
)

_BACKWARD = (
    PrivateName(
        "torch._C._current_graph_task_id",
        "tells whether a hook runs inside a backward, and inside which",
        "nested backwards and ranks that have joined cannot be told apart, so nothing overlaps",
    ),
    PrivateName(
        "torch.autograd.Variable._execution_engine.queue_callback",
        "runs something when a backward ends",
        "the end of a backward is not seen, so nothing overlaps",
    ),
    PrivateName(
        "torch.autograd.graph._engine_run_backward",
        "marks in a stack where a backward begins",
        "a backward inside of a recomputed region is taken for a part of it",
    ),
    PrivateName(
        "torch.autograd.profiler._is_profiler_enabled",
        "tells whether a profiler runs, which then gets labels",
        "whether it wants labels is not known, so no update is made",
    ),
)

_MODULES = (
    PrivateName(
        "torch.nn.Module._parameters", "is where modules look up their parameters, and there wait for them", _LAZY
    ),
    PrivateName("torch.nn.Module._modules", "shows whether a module is one that torch.compile made", _LAZY),
    PrivateName("torch.nn.Module._compiled_call_impl", "shows whether module.compile() was called", _LAZY),
    PrivateName(
        f"{_DYNAMO}.OptimizedModule._orig_mod",
        "is the module that torch.compile was given",
        "compiled modules are not recognised",
        written_in="_dynamo/eval_frame.py",
    ),
    PrivateName(
        f"{_DYNAMO}.compile_wrapper",
        "marks in a stack that the caller is compiled",
        "it is called _fn, the next one",
        kind=Kind.NOT_ALL,
        written_in="_dynamo/eval_frame.py",
    ),
    PrivateName(
        f"{_DYNAMO}._fn",
        "marks in a stack that the caller is compiled, in older versions",
        'schedule="auto" may choose gather="lazy" for a compiled training step, which then raises; newer ones do not need it',
        written_in="_dynamo/eval_frame.py",
    ),
    PrivateName(
        "torch._dynamo", "is imported ahead, where ranks are started in tests", "ranks of tests start more slowly"
    ),
    PrivateName(
        "torch._inductor.config",
        "is imported ahead, where ranks are started in tests",
        "ranks of tests start more slowly",
    ),
)

_OPTIMIZERS = (
    PrivateName(
        "torch.optim.Optimizer._optimizer_step_pre_hooks",
        "tells whether a step has hooks; without any it is called directly, which is faster",
        "shards cannot be stepped",
    ),
    PrivateName(
        "torch.optim.Optimizer._optimizer_step_post_hooks",
        "tells whether a step has hooks; without any it is called directly, which is faster",
        "shards cannot be stepped",
    ),
    PrivateName(
        "torch.optim.Optimizer._opt_called",
        "tells LR schedulers that an update was made, if backward made it",
        "LR schedulers warn that step() was not called",
        kind=Kind.OVERRIDDEN,
        written_in="optim/lr_scheduler.py",
    ),
    PrivateName(
        "torch.optim.lr_scheduler.LRScheduler._wrapped_by_lr_sched",
        "marks a step() that an LR scheduler has wrapped",
        "shard() refuses optimizers that an LR scheduler was made on",
        kind=Kind.OVERRIDDEN,
        written_in="optim/lr_scheduler.py",
    ),
    PrivateName(
        "torch.optim.Optimizer._step_supports_amp_scaling",
        "is where torch's GradScaler is told that it sees unreduced gradients only",
        "torch's GradScaler is not refused, and unscales the wrong gradients",
        kind=Kind.OVERRIDDEN,
        written_in="amp/grad_scaler.py",
    ),
    PrivateName(
        "torch.amp.GradScaler._unscale_grads_",
        "is where zerolap.GradScaler unscales the reduced gradients instead",
        "zerolap.GradScaler does not work",
        kind=Kind.OVERRIDDEN,
    ),
    PrivateName(
        "torch.utils._foreach_utils._get_fused_kernels_supported_devices",
        "lists the devices that have fused optimizers",
        "calibration and the conformance suite do not try fused optimizers, and fail",
    ),
    PrivateName(
        "torch.Tensor._in_backward_optimizers",
        "marks a parameter that torch updates in backward itself",
        "such parameters are not refused, and updated twice",
        written_in="distributed/optim/apply_optimizer_in_backward.py",
    ),
)

_DATA_PARALLEL = (
    PrivateName(
        "torch.distributed.algorithms.join.Joinable._join_config",
        "tells whether training runs under Join, and who comes first",
        "hooks cannot refuse what does not work under Join, so they do nothing",
    ),
    PrivateName(
        f"{_DDP}._use_python_reducer",
        "tells that DDP calls no hooks in backward",
        "attach() cannot check DDP, and fails",
    ),
    PrivateName(
        f"{_DDP}._get_ddp_logging_data",
        "has the sizes of DDP's buckets, which ranks compare",
        "attach() cannot compare ranks, and fails",
    ),
    PrivateName(
        f"{_DDP}._bucket_config",
        "is what DDP's buckets are made from",
        "DDP has public attributes instead, and the next one",
        kind=Kind.NOT_ALL,
    ),
    PrivateName(
        "torch.distributed._DEFAULT_FIRST_BUCKET_BYTES",
        "is the size of DDP's first bucket, in older versions",
        f"{_AUTO}, and attach() refuses shard_gradients=True; newer ones do not need it",
    ),
    PrivateName(f"{_DDP}._ddp_init_helper", "makes DDP's buckets anew", _AUTO),
    PrivateName(f"{_DDP}._build_params_for_reducer", "lists the parameters of new buckets", _AUTO),
    PrivateName(f"{_DDP}._build_debug_param_to_name_mapping", "names the parameters of new buckets", _AUTO),
    PrivateName(f"{_DDP}._comm_hooks", "lists the hooks that new buckets need again", _AUTO),
    PrivateName(
        "torch.distributed.Reducer._remove_autograd_hooks",
        "keeps the old buckets from being filled",
        'schedule="auto" cannot try another bucket size',
    ),
    PrivateName(
        f"{_C10D}._register_comm_hook",
        "gives a hook to new buckets",
        'schedule="auto" cannot try another bucket size',
    ),
    PrivateName(f"{_DDP}._has_rebuilt_buckets", "tells that DDP has made other buckets", _SHARDED),
    PrivateName(f"{_DDP}._set_static_graph", "lets new buckets learn a static graph", _SHARDED),
    PrivateName("torch.distributed.Reducer._set_optimizer_in_backward", "keeps DDP from using freed buckets", _SHARDED),
    PrivateName("torch.distributed._compute_bucket_assignment_by_size", "makes DDP's first buckets", _SHARDED),
)

_GROUPS = (
    PrivateName(f"{_C10D}.Backend", "is the type of what communicates in a group", "adapters cannot be typed"),
    PrivateName(
        f"{_C10D}._DistributedBackendOptions",
        "is what a registered backend is made from, if it asks for more than ranks",
        "an adapter of such a backend cannot open a group, so nothing overlaps",
    ),
    PrivateName(
        f"{_C10D}.Backend.Options._timeout",
        "is how long a collective may take; torch has a public setter only",
        "groups of zerolap cannot have the timeout of the user's, so none is opened",
    ),
    PrivateName(f"{_GROUP}._get_backend", "leads to a group's timeout", _NO_OWN_GROUP),
    PrivateName(f"{_GROUP}._set_default_backend", "makes a group that torch does not register", _NO_OWN_GROUP),
    PrivateName(f"{_GROUP}._register_backend", "makes a group that torch does not register", _NO_OWN_GROUP),
    PrivateName(f"{_GROUP}._set_group_name", "makes a group that torch does not register", _NO_OWN_GROUP),
    PrivateName(
        "torch.distributed.Backend._plugins",
        "has what was registered for a backend by Backend.register_backend()",
        "an adapter of such a backend cannot open a group, so nothing overlaps",
    ),
    PrivateName(
        f"{_GROUP}._reduce_scatter_base",
        "reduces and scatters one tensor, in a group that torch does not register",
        "buckets cannot be reduced on devices with streams",
    ),
    PrivateName(
        f"{_GROUP}._allgather_base",
        "gathers into one tensor, in a group that torch does not register",
        "parameters cannot be gathered on devices with streams",
    ),
    PrivateName(
        f"{_GROUP}._device_types",
        "lists the devices that a group communicates on",
        "checkpoints cannot be saved in the background",
    ),
    PrivateName(
        "torch.distributed.distributed_c10d._get_object_coll_device",
        "tells on which device a group exchanges plain data",
        "ranks cannot compare anything, so no optimizer can be made",
    ),
    PrivateName(
        f"{_GROUP}.get_group_store",
        "is the store that a group was made with",
        "there is a private function instead, the next one but one",
        kind=Kind.RECENT,
    ),
    PrivateName(
        "torch.distributed.GroupName",
        "is the type of a group's name",
        "it is a str",
        kind=Kind.RECENT,
    ),
    PrivateName(
        "torch.distributed.distributed_c10d._get_process_group_store",
        "is the store of a group in older versions",
        "ranks cannot compare anything, so no optimizer can be made; newer ones do not need it",
    ),
    PrivateName("torch.distributed._coalescing_manager", "joins collectives", "conformance cannot try that"),
)

_CHECKPOINTS = (
    PrivateName(
        f"{_DCP}.state_dict._init_optim_state", "is told which states there are, and makes no step", _NO_STATE_DICT
    ),
    PrivateName(f"{_DCP}.state_dict._get_optim_state_dict", "is given states, whole or in parts", _NO_STATE_DICT),
    PrivateName(f"{_DCP}.state_dict._unflatten_optim_state_dict", "is told which states there are", _NO_STATE_DICT),
    PrivateName(f"{_DCP}._traverse.set_element", "puts a value into nested containers", "checkpoints cannot be loaded"),
    PrivateName(
        "torch.distributed._shard._utils.narrow_tensor_by_index",
        "cuts out of a tensor what a rank asks for",
        "checkpoints cannot be loaded",
    ),
    PrivateName(
        f"{_DCP}.filesystem._StorageInfo",
        "says which bytes of a file a tensor has; it is in .metadata, too",
        "checkpoints cannot be loaded",
    ),
    PrivateName(
        f"{_DCP}.state_dict_saver._save_state_dict",
        "saves by one rank alone, in older versions",
        "checkpoints without a process group cannot be written; newer ones do not need it",
    ),
    PrivateName(
        f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
        "is in the .metadata of checkpoints",
        "checkpoints of this torch need another reader",
        kind=Kind.IN_FILES,
    ),
    PrivateName(
        "torch.serialization._get_layout",
        "is in the .metadata of checkpoints",
        "checkpoints of this torch need another reader",
        kind=Kind.IN_FILES,
    ),
    PrivateName(
        "torch._utils._rebuild_tensor_v2",
        "is in files of torch.save",
        "files of this torch need another reader",
        kind=Kind.IN_FILES,
    ),
    PrivateName(
        "torch._utils._rebuild_tensor_v3",
        "is in files of torch.save",
        "files of this torch need another reader",
        kind=Kind.IN_FILES,
    ),
    PrivateName(
        "torch._utils._rebuild_parameter",
        "is in files of torch.save",
        "files of this torch need another reader",
        kind=Kind.IN_FILES,
    ),
)

_OWN_DEVICE = (
    PrivateName(
        "torch._C._get_privateuse1_backend_name",
        "tells what torch's spare device type is called",
        "the simulated device cannot be installed",
    ),
    PrivateName(
        "torch._register_device_module",
        "makes torch.<device> for torch's spare device type",
        "the simulated device cannot be installed",
    ),
    *(
        PrivateName(
            f"torch._C._PYBIND11_{name}",
            "is part of what an extension must be compiled with to know torch's classes, in older versions",
            "extensions need no such thing",
            kind=Kind.NOT_ALL,
        )
        for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    ),
    PrivateName(
        "torch.<device>._is_in_bad_fork",
        "is asked of a device's module before its generator is seeded",
        "torch.manual_seed() asks the simulated device something else",
        kind=Kind.OVERRIDDEN,
        written_in="random.py",
    ),
    PrivateName(
        "torch.<device>._lazy_init",
        "is called before the device's first use",
        "the simulated device is asked for something else before its first use",
        kind=Kind.OVERRIDDEN,
        written_in="include/torch/csrc/utils/device_lazy_init.h",
    ),
    PrivateName(
        "torch.<device>._initialized",
        "is asked of a device's module before checkpointing saves its generator",
        "dropout on the simulated device differs when it is recomputed",
        kind=Kind.OVERRIDDEN,
        written_in="utils/checkpoint.py",
    ),
)

SECTIONS = {
    "Tensors": _TENSORS,
    "Backward and the profiler": _BACKWARD,
    "Modules and compilation": _MODULES,
    "Optimizers": _OPTIMIZERS,
    "DistributedDataParallel": _DATA_PARALLEL,
    "Process groups": _GROUPS,
    "Checkpoints": _CHECKPOINTS,
    "The simulated device": _OWN_DEVICE,
}

NAMES = tuple(name for section in SECTIONS.values() for name in section)
