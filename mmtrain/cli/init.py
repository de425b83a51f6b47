"""`mmtrain init`."""

from pathlib import Path
from typing import Annotated

import typer


def init(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Folder of the model to start from, or ORG/NAME of the hub.", show_default=False
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Training data: a file, a folder or a URL.", show_default=False)
    ] = None,
    heldout: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Samples that training does not see. Default: none.", show_default=False),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of GPUs. Default: those of the machine.", show_default=False),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Kind of GPU, such as h100-80g. Default: the machine's.", show_default=False),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Most tokens of a sequence. Default: by the longest sample, up to 8192."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Recipe to write; it must not exist.")] = Path(
        "recipe.yaml"
    ),
) -> None:
    """Write a first recipe for your model and data.

    Asks for model, data and GPUs, unless options say them. Where stdin is no terminal, --model and --data are needed
    and nothing is asked. The recipe has comments, and can be planned and trained as it is.
    """
    import sys

    from mmtrain.api.new_recipe import RecipeAnswers, write_new_recipe
    from mmtrain.errors import UserError

    missing = [name for name, value in (("--model", model), ("--data", data)) if value is None]
    if missing and not sys.stdin.isatty():
        raise UserError(f"init asks for {' and '.join(missing)}, and stdin is no terminal: give the options")
    if missing:
        model = model or typer.prompt("Folder of the model, or ORG/NAME of the hub")
        data = data or typer.prompt("Training data: a file, a folder or a URL")
        heldout = heldout or typer.prompt("Held-out data (empty: none)", default="", show_default=False) or None
        hardware = (
            hardware or typer.prompt("Kind of GPU (empty: this machine's)", default="", show_default=False) or None
        )
        gpus = gpus or typer.prompt("Number of GPUs (0: all of the machine)", default=0, type=int) or None
    assert model is not None
    assert data is not None
    written = write_new_recipe(RecipeAnswers(model, data, heldout, gpus, hardware, seq_len), out)
    train = written.recipe.train
    typer.echo(f"{out} written: {written.num_samples:,} samples in {train.num_steps:,} steps.")
    left_out = [
        f"{count:,} {what}"
        for count, what in (
            (written.num_too_long, f"longer than {written.recipe.data.seq_len} tokens (--seq-len)"),
            (written.num_left_out, f"that cannot be used (`mmtrain data check {data}`)"),
        )
        if count
    ]
    if left_out:
        typer.echo(f"Set aside: {', '.join(left_out)}.")
    typer.echo(f"Next:\n  mmtrain plan {out}\n  mmtrain train {out}")
