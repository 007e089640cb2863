"""`zerolap plan`: forecast time, bytes and memory of a step."""

from __future__ import annotations

import json

import typer

from zerolap.cli.console import AsJson, err, fail, fails_plainly, need, out
from zerolap.cli.plan_options import PlanOptions, with_plan_options


@fails_plainly
@with_plan_options
def plan(options: PlanOptions, as_json: AsJson = False) -> None:
    """Forecast time, bytes and memory of a step for every schedule and gather, on machines that are not here.

    The code that decides in training decides here, too, in simulated time. What is given replaces what --calibrate measures.
    Exit code 2 if something is missing or cannot be, 1 if measuring failed.
    """
    need("torch")
    from zerolap.cli import plan as planning

    try:
        planned = planning.plan(options, say=err.print)
    except ValueError as error:
        raise fail(str(error), code=2) from error
    except RuntimeError as error:
        raise fail(f"measuring failed: {error}") from error
    if as_json:
        typer.echo(json.dumps(planning.to_json(planned), indent=1))
    else:
        planning.show(planned, out)
