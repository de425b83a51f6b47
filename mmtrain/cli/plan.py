"""`mmtrain plan`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides, RecipeFile


def plan(
    recipe: RecipeFile,
    overrides: Overrides,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="HARDWARE:nodes=N", help="Plan for another cluster, for example h100:nodes=384."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Plan for several numbers of GPUs and compare, for example 64,128,256."),
    ] = None,
    within_days: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="DAYS", help="With --gpus: choose the cheapest number that runs all steps in this time."
        ),
    ] = None,
    within_money: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="MONEY",
            help="With --gpus: choose the fastest number that costs no more, at cluster.price_per_gpu_hour.",
        ),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Search one only: unified, disaggregated, colocated or replicated."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Run the best plans for three steps, here or on all ranks that torchrun or srun started, and choose "
            "the fastest.",
        ),
    ] = False,
    cuts: Annotated[
        int,
        typer.Option(
            min=1, help="With --measure: plans to run: the best sizes, other partitions of them, then further sizes."
        ),
    ] = 12,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="RULE", help="Return the plan of a rule of thumb, for example megatron, and compare."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help="Put a layout of yours into the ranking, with where it loses time: 'tp=8,pp=8,vpp=3', or arguments of "
            "Megatron-LM.",
        ),
    ] = None,
    diff: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN",
            help="Show only what differs between two plans, PLAN and RECIPE. Both may be a recipe, a plan file (.json) "
            "or the folder of a run.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the plan as JSON for `train --plan FILE`.")
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(
            metavar="TRAINER",
            help="Write the plan for another trainer, with a list of what that cannot express: megatron-lm, "
            "megatron-bridge, mimo, automodel or veomni.",
        ),
    ] = None,
    emit_to: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --emit: the file to write. Default: standard output, without the plan."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of alternatives to show.")] = 5,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Show every alternative, why it is slower, how evenly each fills its ranks, and what the choice is "
            "sensitive to.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Search the fastest plan and show the alternatives.

    The plan says where every layer runs, which layers are recomputed, and in what order each rank works. `train` makes
    the same plan by itself; use --out to save and reuse it.
    """
    from mmtrain.cli.run_plan import PlanOptions, run_plan

    run_plan(
        PlanOptions(
            recipe=recipe,
            overrides=tuple(overrides),
            cluster=cluster,
            gpus=gpus,
            within_days=within_days,
            within_money=within_money,
            placement=placement,
            measure=measure,
            cuts=cuts,
            baseline=baseline,
            compare=compare,
            diff=diff,
            out=out,
            emit=emit,
            emit_to=emit_to,
            top=top,
            explain=explain,
            as_json=as_json,
        )
    )
