"""`mmtrain simulate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmtrain.cli.options import AsJson, Overrides

if TYPE_CHECKING:
    from mmtrain.api.simulated_steps import SimulatedSteps


def simulate(
    source: Annotated[
        Path,
        typer.Argument(metavar="RECIPE|PLAN|RUN", help="Recipe, folder of a run, or plan file (with --against)."),
    ],
    overrides: Overrides,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plan file, for a recipe. Default: the plan of --against, else make a plan."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Run to compare with; it must have recorded a trace (train.trace_steps)."),
    ] = None,
    step: Annotated[
        int, typer.Option(min=1, help="Step to simulate. With a run, the steps it recorded are simulated.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Save the timeline as a trace for Perfetto, beside the run's if there is one."
        ),
    ] = None,
    fault: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT",
            help="Say what a run does when a rank becomes slow, loses a message, or ends, or its node: "
            "slow:RANK:FACTOR, lost:RANK, dead:RANK or dead_node:NODE.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict a step and show its critical path.

    Simulates the plan's program on the batches that training will see. For a run with a trace, also shows the measured
    times and the prediction error of each stage and of the step. The time of a tensor-parallel stage includes its
    collectives, both predicted and measured. With --fault, the last lines say how long a step takes with it, or how a
    run ends and where it continues.
    """
    import json
    from dataclasses import asdict

    from mmtrain.api.faults import parse_fault
    from mmtrain.api.simulated_steps import simulate_source
    from mmtrain.cli.options import text_width
    from mmtrain.errors import writing
    from mmtrain.report.comparison import comparison_rows, comparison_text, critical_path_rows, overlay_trace

    parsed_fault = None if fault is None else parse_fault(fault)
    simulated = simulate_source(source, overrides, plan, against, step, parsed_fault)
    rows = comparison_rows(simulated.timelines, simulated.trace)
    path = critical_path_rows(simulated.timelines)
    bubbles = simulated.timelines[0].bubble_shares()
    if out is not None:
        trace = overlay_trace(simulated.timelines, simulated.trace, simulated.plan.sha256)
        with writing("--out", out, "trace"):
            out.write_text(json.dumps(trace), encoding="utf-8")
    if as_json:
        result: dict[str, Any] = {
            "seconds": [row.to_json() for row in rows],
            "bubbles": bubbles,
            "steps": simulated.steps,
            "critical": [row.to_json() for row in path],
            "critical_path": _critical_path_json(simulated),
        }
        if simulated.fault is not None:
            result["fault"] = asdict(simulated.fault)
        typer.echo(json.dumps(result))
    else:
        typer.echo(comparison_text(rows, bubbles, path, text_width()))
        if simulated.fault is not None:
            typer.echo(f"\n{simulated.fault.consequences}")


def _critical_path_json(simulated: "SimulatedSteps") -> list[dict[str, Any]]:
    """List the actions on the critical path of the first simulated step."""
    from mmtrain.program import action_to_text

    return [
        {
            "action": action_to_text(span.action),
            "rank": span.rank,
            "start_s": span.start_s,
            "seconds": span.duration_s,
        }
        for span in simulated.timelines[0].critical_path
    ]
