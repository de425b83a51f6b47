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
        typer.Option(metavar="RECIPE", help="Count tokens of this recipe's units and apply its limits."),
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Also save the histograms as a PNG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the distribution of sample lengths.

    Prints a histogram per modality, the correlation between modalities, and the samples that cannot be used. With
    --recipe, lengths are tokens; without it, text is counted in characters, images in pixels and audio in seconds.
    Reads headers only and decodes nothing.
    """
    import json
    from dataclasses import asdict

    from mmtrain.balance.summary import summarize_lengths
    from mmtrain.cli.recipe_index import print_note
    from mmtrain.data.index.stats import compute_stats, compute_stats_for_recipe
    from mmtrain.recipe import load_recipe
    from mmtrain.recipe.data_settings import SourceSettings
    from mmtrain.report.data_view import stats_picture, stats_text

    named_sources = [SourceSettings(path=source.absolute()) for source in sources]
    if recipe is None:
        lengths = compute_stats(named_sources, print_note)
    else:
        lengths = compute_stats_for_recipe(load_recipe(recipe, overrides).recipe, named_sources, print_note)
    summary = summarize_lengths(lengths.names, lengths.values)
    if png is not None:
        stats_picture(summary, png)
    if as_json:
        typer.echo(json.dumps({**asdict(summary), "quarantined": lengths.quarantined}))
    else:
        typer.echo(stats_text(summary, lengths.quarantined))
