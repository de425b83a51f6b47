"""Arguments and options that several commands share, and the width of their output."""

import shutil
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.errors import UserError, writing

if TYPE_CHECKING:
    from mmtrain.checkpoint import ChosenCheckpoint

RecipeFile = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="Recipe, a YAML file; `mmtrain schema` describes it.")
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, written by `train`.")]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        default_factory=list,
        show_default=False,
        help="Override a setting: `--set train.steps=20`, `--set data.sources.0.path=x.json`. Repeatable.",
    ),
]
CheckpointChoice = Annotated[
    str,
    typer.Option(
        "--checkpoint",
        metavar="newest|best|STEP",
        help="Take the newest good checkpoint, the best one by train.best of the recipe, or that of a step.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

MIN_TEXT_COLUMNS = 60  # a plan table is unreadable below this
MAX_TEXT_COLUMNS = 160


def text_width() -> int:
    """Return the columns of the terminal, or of the variable COLUMNS; 120 where stdout is no terminal."""
    return min(max(shutil.get_terminal_size((120, 24)).columns, MIN_TEXT_COLUMNS), MAX_TEXT_COLUMNS)


def chosen_checkpoint(text: str) -> "ChosenCheckpoint":
    """Parse the value of `--checkpoint`. Raises UserError."""
    if text == "newest":
        return "newest"
    if text == "best":
        return "best"
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--checkpoint: found {text!r}; allowed: newest, best, or the step of a checkpoint")
    return int(text)


def require_writable(option: str, path: Path, what: str) -> None:
    """Raise UserError if nothing can be written in the folder of `path`, now and not after minutes of work."""
    with writing(option, path, what), TemporaryFile(dir=path.parent):
        pass
