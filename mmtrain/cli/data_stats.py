"""`mmtrain data stats`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides


def stats(
    overrides: Overrides,
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SOURCE...]", help="Files or URLs. Default: those of --recipe.", show_default=False),
    ] = None,
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
    It also shows how the shares of modalities vary over the samples. With the recipe's own sources, a table shows which
    share of training each makes up, and how often it is passed through. For long sequences another shows how many
    samples context parallelism would cut. Reads headers only and decodes nothing.
    """
    import json
    from dataclasses import asdict

    from mmtrain.api.recipe_index import print_note, read_named_sources, sources_for_recipe
    from mmtrain.balance.grouping.summary import (
        CompositionShare,
        LongSamples,
        SourceSummary,
        composition_shares,
        summarize_lengths,
    )
    from mmtrain.data.index.stats import compute_stats, compute_stats_for_recipe
    from mmtrain.data.stream.count_groups import count_groups
    from mmtrain.data.stream.count_steps import EpochSize, estimate_epoch, with_counted_steps
    from mmtrain.data.stream.recipe_summaries import summarize_sources
    from mmtrain.errors import UserError
    from mmtrain.planning.space.budget import DEFAULT_BUDGET
    from mmtrain.planning.space.constraints import context_parallel_sizes
    from mmtrain.recipe import load_recipe
    from mmtrain.recipe.settings.data_settings import SourceSettings
    from mmtrain.report.data_view import composition_text, long_samples_text, sources_text, stats_picture, stats_text
    from mmtrain.report.epoch_text import epoch_text

    named_sources: list[SourceSettings] = []
    in_training: list[SourceSummary] = []
    long_samples: list[LongSamples] = []
    composition: list[CompositionShare] = []
    epoch: EpochSize | None = None
    if recipe is not None:
        settings = load_recipe(recipe, overrides).recipe
        named_sources = sources_for_recipe(sources, settings) if sources else []
        lengths, index = compute_stats_for_recipe(settings, named_sources or settings.data.sources, print_note)
        composition = composition_shares(index.lengths)
        if len(index.lengths):
            settings = count_groups(settings, index.lengths)
            sizes = [cp for cp in context_parallel_sizes(settings, DEFAULT_BUDGET.meshes) if cp > 1]
            long_samples = [LongSamples.count(index.lengths.tokens, settings.data.group_tokens, cp) for cp in sizes]
        if not named_sources and len(index.lengths):
            epoch = estimate_epoch(settings, index.lengths)
            settings = with_counted_steps(settings, index)
        if not named_sources:
            in_training = summarize_sources(settings, index)
    elif sources:
        lengths = compute_stats(read_named_sources(sources), print_note)
    else:
        raise UserError("data stats: name data files, or a recipe with --recipe whose sources are measured")
    summary = summarize_lengths(lengths.names, lengths.values)
    if png is not None:
        stats_picture(summary, png)
    if as_json:
        described = {
            **asdict(summary),
            "quarantined": lengths.quarantined,
            "composition": [asdict(entry) for entry in composition],
            "epoch": None if epoch is None else {**asdict(epoch), "steps_trained": settings.train.num_steps},
            "sources": [asdict(source) for source in in_training],
            "long_samples": [asdict(entry) for entry in long_samples],
        }
        typer.echo(json.dumps(described))
    else:
        typer.echo(stats_text(summary, lengths.quarantined))
        if composition:
            typer.echo("\n" + composition_text(composition))
        if long_samples:
            typer.echo("\n" + long_samples_text(long_samples))
        if epoch is not None:
            typer.echo("\n" + epoch_text(epoch.steps, epoch.samples_per_step, settings.train.num_steps))
        if in_training:
            typer.echo("\n" + sources_text(in_training, settings.train.num_steps))
