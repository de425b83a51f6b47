"""`mmtrain data tiny-model`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli.options import AsJson


def tiny_model(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help="A family of models, such as qwen2 or llama.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output folder.")],
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed makes the same files.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write a tiny random model of a family, to try recipes on one core.

    The folder is one that `model.hf` and transformers open: config, weights, a tokenizer with a chat template, and
    conversations to train on.
    """
    import json
    from dataclasses import asdict

    from mmtrain.weights.tiny_model import CONVERSATIONS_FOLDER, find_family_by_name, write_tiny_model

    summary = write_tiny_model(find_family_by_name(family), out, seed)
    sentence = (
        f"{out}: a tiny {summary.family} of {summary.parameters:,} parameters, a tokenizer of {summary.vocab} tokens, "
        f"{summary.train:,} conversations to train on and {summary.heldout} held out in {out / CONVERSATIONS_FOLDER}"
    )
    typer.echo(json.dumps(asdict(summary)) if as_json else sentence)
