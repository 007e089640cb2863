"""What is compared: models, and every way to train them, each as a function that makes one step."""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from zerolap_cpu_gloo import CpuGlooAdapter

ALONE = "compute alone"
REFERENCES = {"adamw": "DDP + fused AdamW", "muon": "DDP + Muon + fused AdamW"}  # by what is compared with
BY_MESSAGES = "zerolap by messages, interleaved eager"  # where ranks of one host would share memory
LENGTH = 128  # of a sequence
BFLOAT16 = dict.fromkeys(("reduce_dtype", "gather_dtype"), torch.bfloat16)
ADAMW = {"lr": 1e-4, "weight_decay": 0.01}


class Lm(nn.Module):
    """A decoder-only transformer."""

    def __init__(self, vocabulary: int, width: int, num_layers: int, num_heads: int, *, is_tied: bool = False) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(1, LENGTH, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, num_heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1]) + self.position
        x = self.head(self.norm(self.layers(x, mask=self.mask, is_causal=True)))
        return F.cross_entropy(x.flatten(0, 1), tokens[:, 1:].flatten())

    def batch(self, size: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, self.vocabulary, (size, LENGTH + 1), generator=generator)


class ManySmall(nn.Module):
    """Thousands of small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(1500))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.01 * torch.tanh(layer(x))
        return x.square().mean()

    def batch(self, size: int, generator: torch.Generator) -> Tensor:
        return torch.randn(8 * size, 32, generator=generator)


class Convnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [3, 64, 128, 256, 512]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(a, b, 3, stride=2, padding=1),
                    nn.GroupNorm(8, b),
                    nn.ReLU(),
                    nn.Conv2d(b, b, 3, padding=1),
                )
                for a, b in pairwise(widths)
            )
        )
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(x).mean((2, 3))), torch.zeros(len(x), dtype=torch.int64))

    def batch(self, size: int, generator: torch.Generator) -> Tensor:
        return torch.randn(4 * size, 3, 32, 32, generator=generator)


class _Computing(torch.autograd.Function):
    """Passes on what it is given, after a pause: twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Asleep(nn.Module):
    """Layers of 1 MB that take a millisecond a step for each row of a batch, as if there were a core for every rank: two rows are computed,
    and for the others it sleeps."""

    def __init__(self, num_layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        seconds = 1e-3 * len(x) / len(self.layers) / 3
        x = x[:2]
        for layer in self.layers:
            x = _Computing.apply(torch.tanh(layer(x)), seconds)
        return x.square().mean()

    def batch(self, size: int, generator: torch.Generator) -> Tensor:
        return torch.randn(size, 512, generator=generator)


MODELS: dict[str, Callable[[], Any]] = {
    "lm5": lambda: Lm(1024, 256, 6, 4),
    "lm27": lambda: Lm(8192, 512, 6, 8),
    "lm58": lambda: Lm(40000, 512, 12, 8, is_tied=True),
    "lm110": lambda: Lm(16384, 768, 12, 12),
    "many": ManySmall,
    "conv": Convnet,
    "asleep": Asleep,
}


class Entry:
    """One way to train: a step on a batch, what is left to do before its numbers are looked at, and what it holds."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer

    def step(self, batch: Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch).backward()
        self.optimizer.step()

    def finish(self) -> None:
        pass

    @property
    def is_settled(self) -> bool:
        """Whether it has found out by itself how to go on."""
        return True

    def note(self) -> str:
        """What it has chosen by itself."""
        return ""

    def params(self) -> list[Tensor]:
        return [param.detach() for param in self.model.parameters()]

    def state_bytes(self) -> int:
        held = getattr(self.optimizer, "optim", self.optimizer).state
        return sum(v.nbytes for state in held.values() for v in state.values() if isinstance(v, Tensor))


class Alone(Entry):
    """No communication: what computing costs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, torch.optim.AdamW(model.parameters(), **ADAMW, fused=True))


class Plain(Entry):
    def __init__(
        self, model: nn.Module, *, cap: float | None = None, fused: bool | None = None, as_view: bool = False
    ) -> None:
        ddp = DDP(model, bucket_cap_mb=cap, gradient_as_bucket_view=as_view)
        super().__init__(ddp, torch.optim.AdamW(ddp.parameters(), **ADAMW, fused=fused))


class TorchZero(Entry):
    def __init__(
        self, model: nn.Module, *, cap: float | None = None, fused: bool | None = None, as_view: bool = False
    ) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        ddp = DDP(model, bucket_cap_mb=cap, gradient_as_bucket_view=as_view)
        super().__init__(
            ddp,
            ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.AdamW, parameters_as_bucket_view=as_view, **ADAMW, fused=fused
            ),
        )


class Zerolap(Entry):
    def __init__(self, model: nn.Module, *, cap: float | None = None, as_view: bool = True, **options: Any) -> None:
        as_view = as_view and not options.get("shard_gradients")  # which frees what would be viewed
        ddp = DDP(model, bucket_cap_mb=cap, gradient_as_bucket_view=as_view)
        super().__init__(
            ddp,
            zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **ADAMW),
        )
        self.handle = zerolap.attach(ddp, self.optimizer, **options)
        self._is_auto = options.get("schedule") == "auto"

    def finish(self) -> None:
        self.handle.finish()

    @property
    def is_settled(self) -> bool:
        return self.handle.is_tuned

    def note(self) -> str:
        size = self.model.bucket_bytes_cap / 2**20
        return f"{self.handle.schedule} {self.handle.gather}, {size:g} MB" if self._is_auto else ""

    def params(self) -> list[Tensor]:
        self.finish()
        return super().params()


class _Timed(torch.optim.Optimizer):
    """Adds up the CPU time of its thread in updates; mixed into the real classes."""

    seconds = 0.0  # of all classes together

    def step(self, closure: Any = None) -> Any:
        start = time.thread_time()
        result = super().step(closure)
        _Timed.seconds += time.thread_time() - start
        return result


class TimedMuon(_Timed, torch.optim.Muon):
    pass


class TimedAdamW(_Timed, torch.optim.AdamW):
    is_elementwise = True


class _Both:
    """Two optimizers, as one that is stepped."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()

    @property
    def state(self) -> dict[Any, Any]:
        held: dict[Any, Any] = {}
        for each in self.optimizers:
            held.update(getattr(each, "optim", each).state)
        return held


class WithMuon(Entry):
    """Muon for the layers' matrices, AdamW for all others: replicated, by torch's ZeroRedundancyOptimizer, or by zerolap."""

    def __init__(self, model: Lm, *, kind: str, cap: float | None = None, **options: Any) -> None:
        matrices = [param for param in model.layers.parameters() if param.ndim == 2]
        known = set(matrices)
        others = [param for param in model.parameters() if param not in known]
        wrapped: Any = model
        if kind != "alone":
            wrapped = DDP(model, bucket_cap_mb=cap, gradient_as_bucket_view=not options.get("shard_gradients"))
        parts: list[tuple[list[nn.Parameter], Any, dict[str, Any]]] = [
            (matrices, TimedMuon, {"lr": 1e-3}),
            (others, TimedAdamW, {**ADAMW, "fused": True}),
        ]
        self.handle: zerolap.Handle | None = None
        if kind == "torch":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            made: list[Any] = [ZeroRedundancyOptimizer(params, cls, **how) for params, cls, how in parts]
        elif kind == "zerolap":
            made = [
                zerolap.ZeroRedundancyOptimizer(params, cls, overlap_with_ddp=True, **how) for params, cls, how in parts
            ]
            self.handle = zerolap.attach(wrapped, made, **options)
        else:
            made = [cls(params, **how) for params, cls, how in parts]
        super().__init__(wrapped, _Both(*made))
        self._update_seconds = 0.0
        self._num_steps = 0

    def step(self, batch: Tensor) -> None:
        _Timed.seconds = 0.0
        super().step(batch)
        self._update_seconds += _Timed.seconds
        self._num_steps += 1

    def finish(self) -> None:
        if self.handle is not None:
            self.handle.finish()

    def note(self) -> str:
        return f"update {1e3 * self._update_seconds / max(1, self._num_steps):.0f} ms"

    def params(self) -> list[Tensor]:
        self.finish()
        return super().params()


def entries_with_muon(cap: float) -> dict[str, Callable[[Any], Entry]]:
    """Every way to train with Muon and AdamW."""
    made: dict[str, Callable[[Any], Entry]] = {
        ALONE: lambda model: WithMuon(model, kind="alone"),
        REFERENCES["muon"]: lambda model: WithMuon(model, kind="plain"),
        f"DDP + Muon + fused AdamW, {cap:g} MB": lambda model: WithMuon(model, kind="plain", cap=cap),
        "torch ZeRO, both": lambda model: WithMuon(model, kind="torch"),
    }
    for schedule, gather in (
        ("interleaved", "eager"),
        ("interleaved", "lazy"),
        ("after_backward", "lazy"),
        ("on_step", "eager"),
    ):
        made[f"zerolap {schedule} {gather}, {cap:g} MB"] = lambda model, s=schedule, g=gather: WithMuon(
            model, kind="zerolap", cap=cap, schedule=s, gather=g
        )
    made["zerolap interleaved eager"] = lambda model: WithMuon(model, kind="zerolap")
    made[f"zerolap stage 2, interleaved lazy, {cap:g} MB"] = lambda model: WithMuon(
        model, kind="zerolap", cap=cap, gather="lazy", shard_gradients=True
    )
    return made


class Fsdp2(Entry):
    def __init__(self, model: nn.Module, *, reshards: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in getattr(getattr(model, "layers", None), "layers", []):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
        super().__init__(model, torch.optim.AdamW(model.parameters(), **ADAMW, fused=True))

    def params(self) -> list[Tensor]:
        return [param.full_tensor().detach() for param in self.model.parameters()]

    def state_bytes(self) -> int:
        return sum(
            value.to_local().nbytes if hasattr(value, "to_local") else value.nbytes
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )


class DeepSpeed(Entry):
    def __init__(self, model: nn.Module, *, stage: int, cap: float | None = None) -> None:
        import deepspeed

        sizes = {} if cap is None else dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), _elements(cap))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "overlap_comm": True, **sizes},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        super().__init__(engine, optimizer)

    def step(self, batch: Tensor) -> None:
        self.model.backward(self.model(batch))
        self.model.step()

    def params(self) -> list[Tensor]:
        return [param.detach() for param in self.model.module.parameters()]


class Fairscale(Entry):
    def __init__(self, model: nn.Module, *, cap: float | None = None) -> None:
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS

        optimizer = OSS(params=model.parameters(), optim=torch.optim.AdamW, **ADAMW, fused=True)
        size = {} if cap is None else {"reduce_buffer_size": _elements(cap)}
        super().__init__(ShardedDataParallel(model, optimizer, **size), optimizer)


def _elements(megabytes: float) -> int:
    return int(megabytes * 2**20 / 4)


def entries(cap: float) -> dict[str, Callable[[nn.Module], Entry]]:
    """Every way, at the peers' defaults and at ``cap`` MB a bucket."""
    made: dict[str, Callable[[nn.Module], Entry]] = {
        ALONE: Alone,
        "DDP + AdamW": Plain,
        REFERENCES["adamw"]: lambda model: Plain(model, fused=True, as_view=True),
        f"DDP + fused AdamW, {cap:g} MB": lambda model: Plain(model, fused=True, as_view=True, cap=cap),
        "torch ZeRO": TorchZero,
        "torch ZeRO, views, fused": lambda model: TorchZero(model, fused=True, as_view=True),
        f"torch ZeRO, views, fused, {cap:g} MB": lambda model: TorchZero(model, fused=True, as_view=True, cap=cap),
        "FSDP2": lambda model: Fsdp2(model, reshards=True),
        "FSDP2, not resharding": lambda model: Fsdp2(model, reshards=False),
    }
    for schedule in ("interleaved", "after_backward", "on_step"):
        for gather in ("eager", "lazy"):
            made[f"zerolap {schedule} {gather}, {cap:g} MB"] = lambda model, s=schedule, g=gather: Zerolap(
                model, cap=cap, schedule=s, gather=g
            )
    for gather in ("eager", "lazy"):
        made[f"zerolap stage 2, interleaved {gather}, {cap:g} MB"] = lambda model, g=gather: Zerolap(
            model, cap=cap, gather=g, shard_gradients=True
        )
    made["zerolap interleaved eager"] = lambda model: Zerolap(model)
    made["zerolap interleaved eager, no views"] = lambda model: Zerolap(model, as_view=False)
    made[f"zerolap interleaved eager, no views, {cap:g} MB"] = lambda model: Zerolap(model, cap=cap, as_view=False)
    made["zerolap stage 2, interleaved eager"] = lambda model: Zerolap(model, shard_gradients=True)
    made[BY_MESSAGES] = lambda model: Zerolap(model, adapter=CpuGlooAdapter(shares_memory=False))
    made[f"zerolap, bfloat16 on the wire, {cap:g} MB"] = lambda model: Zerolap(
        model, cap=cap, schedule="after_backward", gather="lazy", master_weights=True, **BFLOAT16
    )
    for wire, schedule, gather in (
        ("int8", "interleaved", "eager"),
        ("int8", "interleaved", "lazy"),
        ("int8", "after_backward", "lazy"),
        ("bf16", "interleaved", "lazy"),
        ("fp8", "interleaved", "lazy"),
    ):
        # Not the numbers of DDP, as the table's last column says.
        made[f"zerolap wire {wire}, {schedule} {gather}, {cap:g} MB"] = lambda model, w=wire, s=schedule, g=gather: (
            Zerolap(model, cap=cap, wire=w, schedule=s, gather=g)
        )
    made["zerolap auto"] = lambda model: Zerolap(model, schedule="auto")
    if importlib.util.find_spec("deepspeed"):
        warnings.filterwarnings("ignore")
        for stage in (1, 2):
            made[f"DeepSpeed ZeRO-{stage}"] = lambda model, n=stage: DeepSpeed(model, stage=n)
            made[f"DeepSpeed ZeRO-{stage}, {cap:g} MB"] = lambda model, n=stage: DeepSpeed(model, stage=n, cap=cap)
    if importlib.util.find_spec("fairscale"):
        made["fairscale OSS + ShardedDDP"] = Fairscale
        made[f"fairscale OSS + ShardedDDP, {cap:g} MB"] = lambda model: Fairscale(model, cap=cap)
    return made


ABSENT = [name for name in ("deepspeed", "fairscale") if not importlib.util.find_spec(name)]
