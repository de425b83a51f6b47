"""`mmtrain profile`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides, RecipeFile


def profile(
    recipe: RecipeFile,
    overrides: Overrides,
    only: Annotated[
        list[str],
        typer.Option(
            metavar="UNIT", default_factory=list, show_default=False, help="Measure this unit alone. Repeatable."
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The cost table to write; one that is there is added to.")
    ] = Path("costs.json"),
    tp: Annotated[
        str | None,
        typer.Option(
            metavar="N,N", help="Tensor-parallel sizes. Default: those the recipe allows on the ranks of this machine."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what layers and messages take here.

    The table is for `cluster.costs`: plans then rest on it, not on a model of the hardware.
    Each kind of layer is timed forward and backward, with and without recomputation, on several loads like those of
    the recipe's data, by all local ranks at once; so are messages between them. Then loads in between are timed, to
    tell how far the table can be trusted.
    """
    import json
    import statistics

    from mmtrain.cli.options import require_writable
    from mmtrain.errors import DataError, writing
    from mmtrain.recipe import load_recipe

    settings = load_recipe(recipe, overrides).recipe  # a wrong recipe is told before torch has loaded
    from mmtrain.cli.local_cluster import resolve_cluster
    from mmtrain.costs.cost_table import CostTable
    from mmtrain.data import build_index
    from mmtrain.plan.search.profiled_sizes import sizes_to_measure
    from mmtrain.runtime.profiling.profile import ProfileRequest, empty_cost_table
    from mmtrain.runtime.profiling.profile import profile as measure

    ranks, hardware = resolve_cluster(settings)
    sizes = sizes_to_measure(settings, ranks, only, tp)
    try:
        lengths = build_index(settings).lengths
    except DataError as error:
        lengths = None
        typer.echo(f"mmtrain: measured on loads made up from the recipe, as its data cannot be read: {error}", err=True)
    request = ProfileRequest(settings, hardware, ranks, sizes, lengths)
    before = CostTable.load(out, "--out") if out.exists() else None
    if before is not None:
        before.merged(empty_cost_table(request))  # refused now rather than after minutes of measuring
    require_writable("--out", out, "cost table")
    found = measure(request)
    table = found.table if before is None else before.merged(found.table)
    with writing("--out", out, "cost table"):
        table.save(out)
    if as_json:
        report = {"table": str(out), "device": table.device, "errors": found.errors, "median_error": found.median_error}
        typer.echo(json.dumps(report))
        return
    typer.echo(f"{out}: {len(found.table.layers)} layers and {len(found.table.messages)} messages on {table.device}")
    for name, values in found.errors.items():
        typer.echo(f"  {name:<14} interpolated loads are off by {statistics.median(values):.1%} (median)")
    typer.echo(f"median error on loads held out: {found.median_error:.1%}; plan with --set cluster.costs={out}")
