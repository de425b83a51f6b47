"""`mmtrain data group`."""

from typing import Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides, RecipeFile


def group(
    recipe: RecipeFile,
    overrides: Overrides,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="LLM replicas that run side by side. Default: parallel.llm.dp, or a divisor of train.global_batch "
            "near 64.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the grouping methods on a recipe's samples.

    Groups one epoch by each method. The table shows the number of groups, samples per group, how full groups are, what
    padding would waste, and how long replicas would wait for each other.
    """
    import json
    import time
    from dataclasses import asdict

    from mmtrain.api.recipe_index import index_recipe
    from mmtrain.balance import Grouping
    from mmtrain.data.stream.recipe_summaries import compare_grouping_methods
    from mmtrain.recipe import load_recipe
    from mmtrain.report.data_view import grouping_text

    settings = load_recipe(recipe, overrides).recipe
    index = index_recipe(settings)
    grouping = Grouping.of(settings.data, settings.train.global_batch)
    num_replicas = replicas or settings.parallel.llm.dp or grouping.row_size
    scores = compare_grouping_methods(index, grouping, settings.train.seed, num_replicas, time.perf_counter)
    if as_json:
        rows = [{**asdict(row), "chosen": row.method == grouping.method} for row in scores]
        typer.echo(json.dumps({"replicas": num_replicas, "methods": rows}))
    else:
        typer.echo(grouping_text(scores, grouping.method, num_replicas, lambda i: str(index.samples[i])))
