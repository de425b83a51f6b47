"""`mmtrain data ...`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli import data_check, data_group, data_serve, data_stats
from mmtrain.cli.options import AsJson

app = typer.Typer(help="Make training data, and look at it.", no_args_is_help=True, rich_markup_mode=None)


app.command()(data_stats.stats)
app.command()(data_group.group)
app.command()(data_serve.serve)
app.command()(data_check.check)


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder to write: images, train and held-out JSON, tokenizer.")
    ],
    samples: Annotated[int, typer.Option(min=1, help="Training samples.")] = 10000,
    heldout: Annotated[int, typer.Option(min=1, help="Held-out samples.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same files.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Draw questions about pictures, with answers.

    Coloured shapes, digits and small charts in LLaVA format, in two splits, and a tokenizer trained on the first.
    """
    import json
    from dataclasses import asdict

    from mmtrain.data.synthetic.demo import generate_demo

    summary = generate_demo(out, seed=seed, train=samples, heldout=heldout)
    in_words = (
        f"{out}: {summary.train} training and {summary.heldout} held-out samples, {summary.images} images, "
        f"a tokenizer of {summary.vocab} tokens"
    )
    typer.echo(json.dumps(asdict(summary)) if as_json else in_words)


@app.command()
def digits(
    source: Annotated[Path, typer.Option(metavar="DIR", help="Recordings, called DIGIT_SPEAKER_INDEX.wav.")],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder to write: audio, train and held-out JSON, tokenizer.")
    ],
    sequences: Annotated[int, typer.Option(min=0, help="Training samples of two to four digits, harder to learn.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same files.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make questions of recordings of spoken digits.

    In LLaVA format, in two splits with the same speakers, and a tokenizer trained on the first.
    """
    import json
    from dataclasses import asdict

    from mmtrain.data.synthetic.digits import prepare_digits

    summary = prepare_digits(source, out, seed=seed, sequences=sequences)
    in_words = (
        f"{out}: {summary.recordings} recordings of {summary.speakers} speakers, {summary.train} training and "
        f"{summary.heldout} held-out samples, a tokenizer of {summary.vocab} tokens"
    )
    typer.echo(json.dumps(asdict(summary)) if as_json else in_words)
