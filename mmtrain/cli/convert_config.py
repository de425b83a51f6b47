"""`mmtrain convert-config`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli.options import AsJson


def convert_config(
    config: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML or JSON, or a script with `--key value` arguments.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Recipe to write. Default: print it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn the configuration of another trainer into a recipe.

    Reads those of transformers' Trainer, TRL, LLaMA-Factory, ms-swift, axolotl and Megatron-LM. Comments in the recipe
    say what has no match here, what is not needed, and what to check.
    """
    import json

    from mmtrain.api.converted_config import convert_config as convert
    from mmtrain.cli.options import require_writable
    from mmtrain.errors import UserError, writing

    converted = convert(config)
    text = converted.text(config.name)
    if out is not None:
        if out.exists():
            raise UserError(f"--out: {out} exists; name another file, or remove it")
        require_writable("--out", out, "recipe")
        with writing("--out", out, "recipe"):
            out.write_text(text, encoding="utf-8")
    if as_json:
        described = {
            "trainer": converted.trainer,
            "recipe": text,
            "unmatched": converted.unmatched,
            "not_needed": converted.not_needed,
            "to_check": converted.to_check,
        }
        typer.echo(json.dumps(described))
    elif out is None:
        typer.echo(text, nl=False)
    else:
        counts = f"{len(converted.settings)} settings, {len(converted.unmatched)} keys without a match"
        typer.echo(f"{out} written: {counts}; see its comments")
