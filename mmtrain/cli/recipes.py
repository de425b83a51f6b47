"""`mmtrain recipes`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli.options import AsJson, text_width

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def list_recipes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the shipped recipes, or copy one.

    Those in `whatif` are published models on stated lengths of samples: they can be planned, not trained.
    """
    if context.invoked_subcommand is not None:
        return
    import json
    import textwrap

    from mmtrain.api.shipped_recipes import SLURM_JOB_FILE, shipped_job_file, shipped_recipes

    recipes = shipped_recipes()
    job_file = shipped_job_file(SLURM_JOB_FILE)
    if as_json:
        rows = [{"name": recipe.name, "summary": recipe.summary, "path": str(recipe.path)} for recipe in recipes]
        typer.echo(json.dumps({"recipes": rows, "job_file": None if job_file is None else str(job_file)}))
        return
    column = max(len(recipe.name) for recipe in recipes) + 2
    for recipe in recipes:
        start = recipe.name.ljust(column)
        width, indent = text_width(), " " * column
        typer.echo(textwrap.fill(recipe.summary, width, initial_indent=start, subsequent_indent=indent))
    typer.echo("\nStart from one: mmtrain recipes copy NAME")
    if job_file is not None:
        typer.echo(f"Job file for SLURM: {job_file}")


def _names(incomplete: str) -> list[str]:
    """Return the names that a shell completes."""
    from mmtrain.api.shipped_recipes import shipped_recipes

    return [recipe.name for recipe in shipped_recipes() if recipe.name.startswith(incomplete)]


@app.command()
def copy(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name that `mmtrain recipes` lists.", autocompletion=_names)
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to; it is made.")] = Path("recipes"),
    as_json: AsJson = False,
) -> None:
    """Copy a recipe with the files that it needs.

    Data paths start at the current folder, which is where the commands in the recipe's comment write data. No recipe
    is overwritten. The schema for editors is written beside it.
    """
    import json

    from mmtrain.api.shipped_recipes import copy_recipe

    done = copy_recipe(name, out, Path.cwd())
    if as_json:
        beside = [str(path) for path in done.beside]
        typer.echo(json.dumps({"recipe": str(done.recipe), "beside": beside}))
        return
    if done.recipe in done.already_there:
        typer.echo(f"{done.recipe}: there already, as it is shipped")
    else:
        typer.echo(f"{done.recipe}: written")
    if done.beside:
        typer.echo(f"  beside it: {', '.join(map(str, done.beside))}")
    typer.echo("Its first lines say how to run it.")
