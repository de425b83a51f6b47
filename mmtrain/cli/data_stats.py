"""`mmtrain data stats`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides


def stats(
    overrides: Overrides,
    sources: Annotated[list[Path], typer.Argument(metavar="SOURCE...", help="Data files.", show_default=False)],
    recipe: Annotated[
        Path | None,
        typer.Option(metavar="RECIPE", help="Count the tokens of this recipe's units, and apply its limits."),
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the histograms as PNG too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how long samples are.

    A histogram for each modality, how modalities go together, and what could not be used. Without a recipe text is
    counted in characters, images in pixels, sound in seconds. Headers are read, nothing is decoded.
    """
    import json
    from dataclasses import asdict

    from mmtrain.balance.summary import summarize_lengths
    from mmtrain.cli.recipe_index import print_note
    from mmtrain.data.index.stats import compute_stats, compute_stats_for_recipe
    from mmtrain.recipe import load_recipe
    from mmtrain.recipe.schema import SourceSettings
    from mmtrain.report.data_view import stats_picture, stats_text

    wanted = [SourceSettings(path=source.absolute()) for source in sources]
    seen = (
        compute_stats(wanted, print_note)
        if recipe is None
        else compute_stats_for_recipe(load_recipe(recipe, overrides).recipe, wanted, print_note)
    )
    summary = summarize_lengths(seen.names, seen.values)
    if png is not None:
        stats_picture(summary, png)
    if as_json:
        typer.echo(json.dumps({**asdict(summary), "quarantined": seen.quarantined}))
    else:
        typer.echo(stats_text(summary, seen.quarantined))
