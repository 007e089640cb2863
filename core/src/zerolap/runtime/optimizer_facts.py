"""What an optimizer class does, found by stepping it on small tensors: a claim that was not tried is not a fact.

Four questions decide how a class can be sharded, and a wrong answer to any of them gives wrong numbers without an error:

* does the update of one parameter depend on the others? Then it cannot be sharded at all (``refuse_inseparable``);
* can its state be moved to another rank, and does it go on there as before (``refuse_immovable``)?
* is every element updated by itself, so that a parameter may be cut, and where (``exact_cut``)?
* does its fused implementation give what the other one gives (``fused_is_same``)?

Answers are of one process. The caller makes sure that all ranks act on the same one. torch's own classes are known: their
answers to the first two, and mostly to the third, are here as a table, which a test compares with what the probe finds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerolap._logging import logger_of
from zerolap.runtime.modes import begin_training
from zerolap.runtime.param_groups import Options, ParamGroup, options_of, params_of
from zerolap.runtime.shard_optimizer import LocalOptimizer, stand_in_for
from zerolap.runtime.state_pieces import by_param
from zerolap.runtime.state_transfer import check_sendable
from zerolap.runtime.wrapped_tensors import is_wrapped
from zerolap.schedule.ownership import Piece

logger = logger_of(__name__)

Factory = Callable[[list[ParamGroup]], Optimizer]

# Known by exact type: a subclass may do otherwise. One that treats every element by itself, too, says so by a class attribute
# ``is_elementwise = True``, which is tried before it is believed.
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
)
_SEPARABLE = _ELEMENTWISE | {getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)}

_NUM_FUSED_STEPS = 4
_NUM_STEPS = 20  # some classes begin with steps of another kind, or find their pace only slowly
_NUM_SAMPLES = 8
_FAST = 1.0  # a learning rate at which everything moves
_MOST_ELEMENTS = 2**16  # of a sample; a larger parameter is represented by a part of it
_LONGEST_SIDE = 128  # of such a part: classes that factor or quantise their states do so from about this size on

# Elements of a tensor whose kernels several threads share, with a tail for each: more than three times torch's GRAIN_SIZE, and odd.
_SHARED_BY_THREADS = 7 * 14287


def is_elementwise(optimizer_class: Any) -> bool:
    """Whether a class is known, or says of itself, that it updates every element by itself."""
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer):
        return optimizer_class in _ELEMENTWISE or vars(optimizer_class).get("is_elementwise") is True
    return False


# --- samples: small tensors in place of the parameters -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """A small tensor in place of a parameter: where it starts, where its gradients pull it, and what disturbs them.

    Gradients of a bowl, not of chance: a class that measures progress over all parameters must see some. Half of the values
    start at zero, where even the smallest update shows.
    """

    group: int
    piece: Piece
    param: Tensor  # whose marks it has
    start: Tensor
    target: Tensor
    noise: Tensor

    @classmethod
    def of(cls, param: Tensor, shape: Sequence[int], *, dtype: torch.dtype, group: int, index: int) -> _Sample:
        generator = torch.Generator("cpu").manual_seed(17 + index)
        start, target, noise, chance = (
            torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu") for _ in range(4)
        )
        start *= 0.1 * (chance < 0)
        start, target, noise = (each.to(param.device, dtype) for each in (start, target * (1 + index), noise * 0.1))
        piece = Piece(index, 0, start.numel())
        return cls(group=group, piece=piece, param=param, start=start, target=target, noise=noise)

    def cut(self, first: int, last: int) -> _Sample:
        values = {name: getattr(self, name).reshape(-1)[first:last] for name in ("start", "target", "noise")}
        return replace(self, piece=Piece(self.piece.param, first, last), **values)

    def gradient(self, value: Tensor, step: int) -> Tensor:
        return value.detach() - self.target + (self.noise if step % 2 else -self.noise)


def _samples(groups: Sequence[ParamGroup], *, in_full_precision: bool = False) -> list[_Sample]:
    """A few parameters of each kind, from every group: a class may treat each in another way. The largest come first."""
    kinds: dict[Any, list[tuple[int, Tensor]]] = {}
    for place, group in enumerate(groups):
        for param in sorted(params_of(group), key=lambda param: -param.numel()):
            if param.requires_grad and param.is_floating_point() and param.numel():
                kind = (place, param.ndim, param.dtype, tuple(vars(param)))
                kinds.setdefault(kind, []).append((place, param))
    by_turns = [each for turn in zip_longest(*map(_other_shapes_first, kinds.values())) for each in turn if each]
    return [
        _Sample.of(
            param,
            _clipped(param.shape),
            dtype=torch.float32 if in_full_precision and param.itemsize < 4 else param.dtype,
            group=place,
            index=index,
        )
        for index, (place, param) in enumerate(by_turns[:_NUM_SAMPLES])
    ]


def _other_shapes_first(params: Sequence[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """Sorting is stable: the first of each shape, then the second of each."""
    seen: Counter[torch.Size] = Counter()
    turns = []
    for each in params:
        seen[each[1].shape] += 1
        turns.append((seen[each[1].shape], each))
    return [each for _, each in sorted(turns, key=lambda turn: turn[0])]


def _clipped(shape: Sequence[int]) -> tuple[int, ...]:
    sides = list(shape)
    if math.prod(sides) > _MOST_ELEMENTS and len(sides) > 1:
        sides = [min(side, _LONGEST_SIDE) for side in sides]
    while math.prod(sides) > _MOST_ELEMENTS:
        longest = sides.index(max(sides))
        sides[longest] = -(-sides[longest] // 2)
    return tuple(sides)


class _Trial:
    """One optimizer over some samples, as a rank would have it."""

    def __init__(
        self,
        factory: Factory,
        options: Sequence[Options],
        samples: Sequence[_Sample],
        values: Sequence[Tensor] | None = None,
    ) -> None:
        self._samples = samples
        self.tensors: list[Tensor] = []
        groups: list[dict[str, Any]] = [{**given, "params": {}} for given in options]
        for sample, value in zip(samples, values or [sample.start for sample in samples], strict=True):
            tensor = stand_in_for(sample.param, memory=value.detach().clone())
            self.tensors.append(tensor)
            groups[sample.group]["params"][sample.piece] = tensor
        self.local = LocalOptimizer(factory, groups, None, False)
        begin_training(self.local.optimizer)

    def run(self, num_steps: int, *, after: int = 0) -> _Trial:
        for step in range(after, after + num_steps):
            for sample, tensor in zip(self._samples, self.tensors, strict=True):
                tensor.grad = sample.gradient(tensor, step)
            self.local.step()
        return self


@contextmanager
def _unnoticed(device: torch.device) -> Iterator[None]:
    """Random numbers go on as if nothing had been tried."""
    module: Any = torch.get_device_module(device) if device.type != "cpu" else None
    state = module.get_rng_state() if hasattr(module, "get_rng_state") else None
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(17)
        try:
            yield
        finally:
            if state is not None:
                module.set_rng_state(state)


def _difference(samples: Sequence[_Sample], one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The largest difference between two ways to move the samples, as a share of how far they moved."""
    worst = 0.0
    for sample, a, b in zip(samples, one, other, strict=True):
        start, a, b = (each.detach().cpu().double() for each in (sample.start, a, b))
        moved = max(float((a - start).norm()), float((b - start).norm()))
        if 0 < moved < math.inf:  # a class that flies off to infinity has been compared on its way
            worst = max(worst, float((a - b).norm()) / moved)
    return worst


def _tolerance(samples: Sequence[_Sample]) -> float:
    """Rounding, if a class computes several parameters at once in another order; what depends on others differs by far more."""
    return max([1e-3, *(30 * torch.finfo(sample.start.dtype).eps for sample in samples)])


def _class_of(factory: Factory, options: Sequence[Options]) -> type[Optimizer]:
    """The class that a factory makes, which may be a function."""
    return type(factory([{**given, "params": []} for given in options]))


# --- can it be sharded, and moved? --------------------------------------------------------------------------------------


def refuse_inseparable(factory: Factory, groups: Sequence[ParamGroup]) -> None:
    """ValueError if stepping parameters apart gives other results than stepping them together."""
    options = [options_of(group) for group in groups]
    kind = _class_of(factory, options)
    if kind in _SEPARABLE:
        return
    # In full precision, where what depends on others is not taken for rounding.
    samples = _samples(groups, in_full_precision=True)
    if len(samples) < 2:
        return
    with _unnoticed(samples[0].param.device):
        try:
            together = _Trial(factory, options, samples).run(1)
        except Exception as error:  # it needs what is not here: a closure, another mode, a model
            logger.warning(
                "%s cannot be tried on small tensors, so whether it may be sharded is not known: %s: %s",
                kind.__name__,
                type(error).__name__,
                error,
            )
            return
        difference, number = _apart(factory, options, samples, together)
        if number is None and all("lr" in each for each in options):
            # What a class estimates over all parameters may not show at a low rate in so few steps.
            fast = [{**each, "lr": _FAST} for each in options]
            with suppress(Exception):  # it is only tried
                _, number = _apart(factory, fast, samples, _Trial(factory, fast, samples).run(1))
    if difference > _tolerance(samples):
        raise ValueError(
            f"{kind.__name__} cannot be sharded: its update of one parameter depends on others, which another rank may own. Small "
            f"tensors stepped apart were up to {difference:.0%} of their way from where they are together. Use it without "
            "ZeroRedundancyOptimizer, or use a class that updates every parameter by itself"
        )
    if number is not None:
        raise ValueError(
            f"{kind.__name__} cannot be sharded: it keeps a number over all of its parameters, {number}, which comes out otherwise where they "
            "are stepped apart. Use it without ZeroRedundancyOptimizer, or use a class that updates every parameter by itself"
        )
    logger.info("%s, tried on small tensors: every parameter is updated by itself", kind.__name__)


def _apart(
    factory: Factory, options: Sequence[Options], samples: Sequence[_Sample], together: _Trial
) -> tuple[float, str | None]:
    """How far samples that are stepped in two halves are from where they are together, and a number of the groups that differs."""
    halves = [_Trial(factory, options, samples[i::2]).run(1) for i in range(2)]
    difference = 0.0
    for step in range(1, _NUM_STEPS):
        for trial in (together, *halves):
            trial.run(1, after=step)
        apart = [halves[i % 2].tensors[i // 2] for i in range(len(samples))]
        difference = max(difference, _difference(samples, together.tensors, apart))
    return difference, next((found for half in halves if (found := _other_number(together, half))), None)


def _other_number(one: _Trial, other: _Trial) -> str | None:
    """The name of a number in the param groups that two optimizers have made of the same options, and that differs."""
    for mine, theirs in zip(one.local.options(), other.local.options(), strict=True):
        for key, value in mine.items():
            also = theirs.get(key)
            if isinstance(value, float) and isinstance(also, float) and not math.isclose(value, also, rel_tol=1e-3):
                return repr(key)
    return None


_WHY_MOVED = "which overlap must do when DDP rebuilds its buckets"
_STAY = "Use overlap_with_ddp=False, where states stay where they are"


def refuse_immovable(factory: Factory, groups: Sequence[ParamGroup]) -> None:
    """ValueError if states cannot be taken to another optimizer of the class, or it does not go on there as before."""
    options = [options_of(group) for group in groups]
    kind = _class_of(factory, options)
    samples = [] if kind in _SEPARABLE else _samples(groups)
    if not samples:
        return
    half, difference = _NUM_STEPS // 2, 0.0
    with _unnoticed(samples[0].param.device):
        try:
            stays = _Trial(factory, options, samples).run(half)
        except Exception:  # which the constructor has told
            return
        try:
            _refuse_opaque_tensors(stays.local)
            states = stays.local.flat_states()
            check_sendable(states)
            moved = _Trial(factory, stays.local.options(), samples, stays.tensors)
            moved.local.inherit(stays.local)
            moved.local.load(by_param(states))
            moved.local.take_options(stays.local.options())
            for step in range(half, _NUM_STEPS):
                moved.run(1, after=step)
                stays.run(1, after=step)
                difference = max(difference, _difference(samples, stays.tensors, moved.tensors))
        except Exception as error:
            raise ValueError(
                f"the state of {kind.__name__} cannot be moved between ranks, {_WHY_MOVED}: {type(error).__name__}: {error}. {_STAY}"
            ) from error
    if difference > _tolerance(samples):
        raise ValueError(
            f"{kind.__name__} does not go on as before when its state is moved between ranks, {_WHY_MOVED}: small tensors were "
            f"up to {difference:.0%} of their way elsewhere, so it keeps something outside of its state. {_STAY}"
        )


def _refuse_opaque_tensors(local: LocalOptimizer) -> None:
    for state in local.states().values():
        for key, value in state.items():
            if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter) and not is_wrapped(value):
                raise TypeError(
                    f"its {key!r} is not a plain tensor but a {type(value).__name__}, which has no __tensor_flatten__ to take it apart by"
                )


# --- may it be cut, and where? ------------------------------------------------------------------------------------------


def exact_cuts(
    factory: Factory, groups: Sequence[ParamGroup], *, cut: int, stepped_as: Callable[[torch.dtype], torch.dtype]
) -> dict[torch.dtype, int | None]:
    """By the dtype of parameters: ``cut``, if stepping pieces cut at its multiples is bitwise stepping the whole; else None.

    An adapter states its cut for kernels that one thread runs. A kernel that several share has a tail for each of them, at places
    that depend on the tensor's size: where vectors and tails round differently, a piece then differs from its part of the whole
    wherever it is cut. ``stepped_as`` says in which dtype a parameter's shard is stepped.
    """
    options = [options_of(group) for group in groups]
    is_known = _class_of(factory, options) in _SEPARABLE
    has_tails = cut > 1 and torch.get_num_threads() > 1
    found: dict[torch.dtype, int | None] = {}
    for place, group in enumerate(groups):
        for param in {param.dtype: param for param in params_of(group)}.values():
            dtype = stepped_as(param.dtype)
            # torch's classes are known to be exact but for the tails of threads, which round alike in full precision.
            needs_trial = not is_known or (has_tails and dtype.itemsize < 4)
            is_exact = found.get(param.dtype, cut) is not None and (
                not needs_trial or _is_exact(factory, options, param, dtype=dtype, group=place, cut=cut)
            )
            found[param.dtype] = cut if is_exact else None
    return found


def _is_exact(
    factory: Factory, options: Sequence[Options], param: Tensor, *, dtype: torch.dtype, group: int, cut: int
) -> bool:
    numel = _SHARED_BY_THREADS if cut > 1 and torch.get_num_threads() > 1 else 8 * cut + 7
    shape = (7, numel // 7) if param.ndim > 1 else (numel,)  # the whole has a shape, its pieces have none
    whole = _Sample.of(param, shape, dtype=dtype, group=group, index=0)
    numel = whole.start.numel()
    ends = [0, *(numel * part // 4 // cut * cut for part in (1, 2, 3)), numel]
    try:
        with _unnoticed(param.device):
            (one,) = _Trial(factory, options, [whole]).run(_NUM_STEPS // 2).tensors
            pieces = (
                _Trial(factory, options, [whole.cut(*each) for each in pairwise(ends)]).run(_NUM_STEPS // 2).tensors
            )
    except Exception as error:
        logger.warning("pieces of a parameter cannot be stepped: %s: %s", type(error).__name__, error)
        return False
    joined = torch.cat([piece.detach() for piece in pieces])
    return torch.allclose(one.detach().reshape(-1), joined, rtol=0, atol=0, equal_nan=True)


# --- is the fused implementation the same? ------------------------------------------------------------------------------


def fused_is_same(factory: Factory, options: Options, param: Tensor, *, dtype: torch.dtype) -> bool:
    """Whether ``fused=True`` moves a tensor as ``fused=False`` does, but for rounding: two units in the last place a step."""
    sample = _Sample.of(param, (1000,), dtype=dtype, group=0, index=0)
    size = sample.start.abs().double()  # of what is rounded: the value, and the way that it has come
    allowed = torch.zeros_like(size)
    try:
        with _unnoticed(param.device):
            plain, fused = (_Trial(factory, [{**options, "fused": each}], [sample]) for each in (False, True))
            for step in range(_NUM_FUSED_STEPS):
                before = plain.tensors[0].detach().double()
                plain.run(1, after=step)
                fused.run(1, after=step)
                size += (plain.tensors[0].detach().double() - before).abs()
                allowed += 2 * torch.finfo(dtype).eps * size
                difference = (plain.tensors[0].detach().double() - fused.tensors[0].detach().double()).abs()
                if not (difference <= allowed).all():
                    return False
    except Exception as error:  # a device or dtype that the kernel does not take
        logger.info("fused=True is not used for %s: %s: %s", dtype, type(error).__name__, error)
        return False
    return True
