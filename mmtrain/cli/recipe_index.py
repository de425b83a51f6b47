"""The index of a recipe's data, for commands that are no training."""

from typing import TYPE_CHECKING

from mmtrain.recipe import Recipe

if TYPE_CHECKING:
    from mmtrain.data import DataIndex


def index_recipe(recipe: Recipe) -> "DataIndex":
    """Index the recipe's samples, or read the index kept; what is worth knowing goes to stderr, a line each."""
    from mmtrain.data import build_index

    index = build_index(recipe, notify=print_note)
    for remark in index.remarks():
        print_note(remark)
    return index


def print_note(line: str) -> None:
    """Say something beside a command's output."""
    import typer

    typer.echo(line, err=True)
