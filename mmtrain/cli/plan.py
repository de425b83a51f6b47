"""`mmtrain plan`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides, RecipeFile


def plan(
    recipe: RecipeFile,
    overrides: Overrides,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the plan as JSON, for `train --plan FILE`.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the alternatives to show.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Choose a parallel plan and show what it beat."""
    from mmtrain.errors import UserError
    from mmtrain.recipe import load

    settings = load(recipe, overrides).recipe  # a wrong recipe is told before anything slow starts
    from mmtrain.cli.cluster import plan_here
    from mmtrain.cli.indexing import indexed
    from mmtrain.report import plan_table

    chosen = plan_here(settings, indexed(settings).lengths, top=top)
    if out is not None:
        try:
            chosen.save(out)
        except OSError as error:
            raise UserError(f"--out {out}: cannot write the plan: {error.strerror}") from None
    typer.echo(chosen.model_dump_json(indent=2) if as_json else plan_table(chosen))
