"""`mmtrain data show`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides
from mmtrain.printed_text import as_rendered


def show(
    overrides: Overrides,
    recipe: Annotated[
        Path, typer.Option(metavar="RECIPE", help="Whose tokenizer, chat template, preprocessing and limits to use.")
    ],
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SOURCE...]", help="Files or URLs. Default: the recipe's.", show_default=False),
    ] = None,
    sample: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", min=0, help="Number of a sample, from 0 through all sources. Repeatable. Default: the first."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write one HTML page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show samples as the model reads and learns them.

    Shows the text with special tokens, which of it is learned, how many tokens it has, and pictures, frames and
    spectrograms as the encoders get them. All of it is prepared by what prepares the steps of training.
    """
    import json
    import os
    import sys

    from mmtrain.api.recipe_index import sources_for_recipe
    from mmtrain.api.shown_samples import show_samples
    from mmtrain.cli.options import require_writable, text_width
    from mmtrain.recipe import load_recipe

    if out is not None:
        require_writable("--out", out, "page")
    settings = load_recipe(recipe, overrides).recipe
    shown = show_samples(settings, sources_for_recipe(sources or [], settings), sample or [0])
    if out is not None:
        shown.save(out)
    if as_json:
        typer.echo(json.dumps(shown.to_json()))
    elif out is not None:
        typer.echo(f"{out} written")
    else:
        has_colors = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        typer.echo(shown.to_text(text_width(), colors=has_colors), file=as_rendered(sys.stdout))
