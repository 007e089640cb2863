"""The options of `zerolap plan`, as its user gave them. What they mean is in plan_inputs.py. No torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from zerolap.cli.console import AsJson
from zerolap.cli.numbers import number, whole_number
from zerolap.forecast.forecast import Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Each field is an option of the command: text and numbers, None where nothing was given."""

    world_size: Annotated[int, typer.Option(parser=whole_number(1, 10**6), help="Ranks.")]
    model: Annotated[
        str | None, typer.Option(help="MODULE:CALLABLE that makes the model; no memory is taken for it.")
    ] = None
    shapes: Annotated[Path | None, typer.Option(help="A JSON list of the parameters' shapes, in their order.")] = None
    params: Annotated[
        float | None,
        typer.Option(parser=number(0, 1e15), help="So many parameters, in a decoder's typical layers."),
    ] = None
    bandwidth: Annotated[str | None, typer.Option(help="Of a rank's link, each way, for example 100Gbit.")] = None
    latency: Annotated[str | None, typer.Option(help="Of an exchange of nothing, for example 10us.")] = None
    exchange_pattern: Annotated[
        str, typer.Option("--exchange", help="staged, as the CPU adapter does it, or ring, as collective libraries do.")
    ] = "staged"
    forward: Annotated[str | None, typer.Option(help="Time of forward, for example 0.12 or 120ms.")] = None
    backward: Annotated[str | None, typer.Option(help="Time of backward.")] = None
    flops: Annotated[str | None, typer.Option(help="Instead: operations a second reached, for example 150T.")] = None
    tokens: Annotated[
        int | None, typer.Option(parser=whole_number(1, 10**12), help="With --flops: tokens of a rank in a step.")
    ] = None
    optimizer: Annotated[
        str,
        typer.Option(
            help="A class of torch.optim, or MODULE:CLASS; two as in muon+adamw, of which the first has the matrices of hidden layers."
        ),
    ] = "AdamW"
    optimizer_options: Annotated[str, typer.Option(help="Its options, as a JSON object; of two a list.")] = "{}"
    param_dtype: Annotated[str | None, typer.Option(help="The parameters' dtype, if not the model's own.")] = None
    master_weights: Annotated[bool, typer.Option("--master-weights", help="As in attach.")] = False
    reduce_dtype: Annotated[str | None, typer.Option(help="As in attach.")] = None
    gather_dtype: Annotated[str | None, typer.Option(help="As in attach.")] = None
    wire: Annotated[
        str | None,
        typer.Option(help="As in attach: int8, fp8 or bf16, or GRADIENTS,PARAMETERS. Other numbers than DDP's."),
    ] = None
    bucket_cap_mb: Annotated[
        float | None, typer.Option(parser=number(0, 1e6), help="As in DDP; 25, the first 1, if not given.")
    ] = None
    step_ns: Annotated[
        float | None, typer.Option(parser=number(0, 1e9), help="Time of the update of an element; 0.05.")
    ] = None
    host_us: Annotated[float | None, typer.Option(parser=number(0, 1e9), help="Host time a bucket takes; 0.")] = None
    cpu_ns_per_byte: Annotated[
        float | None,
        typer.Option(parser=number(0, 1e9), help="CPU time a byte takes where the CPU computes, too; 0."),
    ] = None
    cores: Annotated[
        float | None, typer.Option(parser=number(0.1, 1e6), help="Cores of a rank that share all this; 1.")
    ] = None
    changes_gradients: Annotated[
        bool, typer.Option("--clip", help="Gradients are clipped, unscaled or skipped before the update.")
    ] = False
    shards_gradients: Annotated[
        bool, typer.Option("--shard-gradients", help="Gradients are freed as they are used: ZeRO stage 2.")
    ] = False
    calibrates: Annotated[
        bool, typer.Option("--calibrate", help="Measure the model on two ranks of this CPU first.")
    ] = False
    batch: Annotated[
        str | None, typer.Option(help="With --calibrate: MODULE:CALLABLE that makes the model's arguments.")
    ] = None

    @property
    def exchange(self) -> Pattern:
        """ValueError if there is no such pattern."""
        if self.exchange_pattern not in (pattern.value for pattern in Pattern):
            raise ValueError(f"--exchange is staged or ring, got {self.exchange_pattern[:200]!r}")
        return Pattern(self.exchange_pattern)


def with_plan_options(command: Callable[[PlanOptions, bool], None]) -> Callable[..., None]:
    """A command with one parameter for each field of ``PlanOptions``, from which typer makes its options."""

    @functools.wraps(command)
    def run(*, as_json: bool, **options: Any) -> None:
        command(PlanOptions(**options), as_json)

    hints = {**get_type_hints(PlanOptions, include_extras=True), "as_json": AsJson}
    defaults = {field.name: field.default for field in fields(PlanOptions)} | {"as_json": False}
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[name],
            default=inspect.Parameter.empty if default is MISSING else default,
        )
        for name, default in defaults.items()
    ]
    run.__annotations__ = hints
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which inspect.signature() looks for
    return run
