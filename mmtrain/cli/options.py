"""Arguments and options that several commands share, and how wide they may print."""

import shutil
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer

from mmtrain.errors import writing

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe: a YAML file, see `mmtrain schema`.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that `train` wrote.")]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        default_factory=list,
        show_default=False,
        help="Change a setting: `--set train.steps=20`, `--set data.sources.0.path=x.json`. Repeatable.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

NARROWEST, WIDEST = 60, 160


def text_width() -> int:
    """Columns of the terminal, or what COLUMNS says; 120 where the output goes elsewhere."""
    return min(max(shutil.get_terminal_size((120, 24)).columns, NARROWEST), WIDEST)


def require_writable(option: str, path: Path, what: str) -> None:
    """Refuse a `path` in whose folder nothing can be written now, rather than after minutes of work. UserError."""
    with writing(option, path, what), TemporaryFile(dir=path.parent):
        pass
