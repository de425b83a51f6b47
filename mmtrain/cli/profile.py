"""`mmtrain profile`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides, RecipeFile

if TYPE_CHECKING:
    from mmtrain.data import DataIndex
    from mmtrain.recipe import Recipe


def profile(
    recipe: RecipeFile,
    overrides: Overrides,
    only: Annotated[
        list[str],
        typer.Option(
            metavar="UNIT", default_factory=list, show_default=False, help="Measure this unit only. Repeatable."
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Cost table to write; an existing table is extended.")
    ] = Path("costs.json"),
    tp: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Tensor-parallel sizes. Default: all that the recipe allows on this machine."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure layer and message costs on this hardware.

    Set `cluster.costs` to the table, and plans use it in place of the hardware preset. All local ranks measure at the
    same time. They time forward, backward and recomputation of each kind of layer on loads sampled from the recipe's
    data, and messages between ranks. Then they time other loads and report the table's interpolation error.

    Started by torchrun or srun on several nodes, it measures what the ranks of one machine cannot: messages and
    collectives between nodes, and how much all ranks differ in speed. Both kinds go into one table.
    """
    import json
    import statistics
    from dataclasses import replace

    from mmtrain.cli.options import require_writable
    from mmtrain.errors import UserError, writing
    from mmtrain.recipe import load_recipe
    from mmtrain.recipe.checks.guest_checks import require_own_modules

    settings = load_recipe(recipe, overrides).recipe  # report a wrong recipe before torch loads
    require_own_modules(settings, "profile")
    if settings.data.seq_len == "auto":
        raise UserError(
            "data.seq_len: auto says not up to which size of groups to measure layers; set the largest that plans may "
            "choose, like --set data.seq_len=32768"
        )
    if not settings.states_groups:  # layers cost the same however many groups a step has
        settings = settings.with_groups(settings.required_multiple, settings.data.group_tokens)
    from mmtrain.api.local_cluster import resolve_cluster
    from mmtrain.costs.cost_table import CostTable
    from mmtrain.planning.space.constraints import sizes_to_measure
    from mmtrain.report.plain_text import time_spread_text
    from mmtrain.runtime.profiling.loading_profiler import measure_loading
    from mmtrain.runtime.profiling.profile import (
        Profile,
        ProfileRequest,
        empty_cost_table,
        profile_node_links,
        require_this_hardware,
    )
    from mmtrain.runtime.profiling.profile import profile as measure
    from mmtrain.runtime.world import find_launched_world

    ranks, hardware = resolve_cluster(settings)
    address = find_launched_world(ranks)
    sizes = sizes_to_measure(settings, ranks, only, tp) if address is None else {}
    request = ProfileRequest(settings, hardware, ranks, sizes)
    require_this_hardware(request)
    existing = CostTable.load(out, "--out") if out.exists() else None
    if existing is not None:
        existing.merged(empty_cost_table(request))  # raises now, not after minutes of measuring
    require_writable("--out", out, "cost table")
    if address is None:
        index = _read_index(settings)
        result = measure(replace(request, lengths=None if index is None else index.lengths))
        if index is not None and not only:
            loading = measure_loading(settings, index, ranks)
            result = replace(result, table=result.table.model_copy(update={"loading": loading}))
    elif only or tp:
        raise UserError(
            "--only, --tp: these choose layers, and under a launcher `mmtrain profile` measures messages between nodes "
            "alone; leave them out, or start it without the launcher on one machine"
        )
    else:
        links = profile_node_links(request, address)
        if links is None:  # rank 0 has the table
            return
        result = Profile(links, {})
    table = result.table if existing is None else existing.merged(result.table)
    with writing("--out", out, "cost table"):
        table.save(out)
    if as_json:
        report = {
            "table": str(out),
            "device": table.device,
            "errors": result.errors,
            "median_error": result.median_error,
            "time_spread": None if table.time_spread is None else table.time_spread.model_dump(),
        }
        typer.echo(json.dumps(report))
        return
    typer.echo(f"{out}: {len(result.table.layers)} layers and {len(result.table.messages)} messages on {table.device}")
    for name, values in result.errors.items():
        if not values:  # too few different loads to hold one out
            continue
        typer.echo(f"  {name:<14} median interpolation error {statistics.median(values):.1%}")
    if result.errors:
        typer.echo(f"median interpolation error of all layers: {result.median_error:.1%}")
    if table.time_spread is not None:
        typer.echo(time_spread_text(table.time_spread.ranks, table.time_spread.layers))
    typer.echo(f"plan with --set cluster.costs={out}")


def _read_index(settings: "Recipe") -> "DataIndex | None":
    """Return the index of the recipe's data, or None, with a warning, if it cannot be read."""
    from mmtrain.data import build_index
    from mmtrain.errors import DataError

    try:
        return build_index(settings)
    except DataError as error:
        typer.echo(f"mmtrain: cannot read the recipe's data, measuring synthetic loads instead: {error}", err=True)
        return None
