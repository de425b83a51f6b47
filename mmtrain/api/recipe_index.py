"""The index of a recipe's data, for commands that do not train."""

import sys
from typing import TYPE_CHECKING

from mmtrain.recipe import Recipe

if TYPE_CHECKING:
    from mmtrain.data import DataIndex


def index_recipe(recipe: Recipe) -> "DataIndex":
    """Index the recipe's samples, or read the cached index; print remarks about the data to stderr."""
    from mmtrain.data import build_index

    index = build_index(recipe, notify=print_note)
    for remark in index.remarks():
        print_note(remark)
    return index


def print_note(line: str) -> None:
    """Print a line to stderr, so that stdout holds the command's result only."""
    print(line, file=sys.stderr, flush=True)
