"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

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
