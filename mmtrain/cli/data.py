"""`mmtrain data ...`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli import data_check, data_group, data_latents, data_serve, data_stats, data_tiny_model
from mmtrain.cli.options import AsJson

app = typer.Typer(help="Generate, check and inspect training data.", no_args_is_help=True, rich_markup_mode=None)


app.command()(data_stats.stats)
app.command()(data_group.group)
app.command()(data_serve.serve)
app.command()(data_check.check)
app.command()(data_latents.latents)
app.command()(data_tiny_model.tiny_model)


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Output folder: images, training and held-out JSON, tokenizer.")
    ],
    samples: Annotated[int, typer.Option(min=1, help="Number of training samples.")] = 10000,
    heldout: Annotated[int, typer.Option(min=1, help="Number of held-out samples.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed makes the same files.")] = 0,
    drawing: Annotated[
        bool,
        typer.Option(
            "--drawing",
            help="Write captions of colored shapes to draw, and questions about such pictures, for models with an "
            "image generator.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Generate questions about drawn pictures, with answers.

    The pictures show colored shapes, digits and small charts. The samples are in LLaVA format, in a training and a
    held-out split, with a tokenizer trained on the training split.
    """
    import json
    from dataclasses import asdict

    from mmtrain.data.synthetic.demo import generate_demo
    from mmtrain.data.synthetic.drawing_demo import generate_drawing_demo

    generate = generate_drawing_demo if drawing else generate_demo
    summary = generate(out, seed=seed, train=samples, heldout=heldout)
    sentence = (
        f"{out}: {summary.train} training and {summary.heldout} held-out samples, {summary.images} images, "
        f"a tokenizer of {summary.vocab} tokens"
    )
    typer.echo(json.dumps(asdict(summary)) if as_json else sentence)


@app.command()
def digits(
    source: Annotated[Path, typer.Option(metavar="DIR", help="Folder of recordings named DIGIT_SPEAKER_INDEX.wav.")],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Output folder: audio, training and held-out JSON, tokenizer.")
    ],
    sequences: Annotated[int, typer.Option(min=0, help="Number of extra training samples of two to four digits.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed makes the same files.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make question-answer samples from recordings of spoken digits.

    The samples are in LLaVA format, in a training and a held-out split with the same speakers, with a tokenizer
    trained on the training split.
    """
    import json
    from dataclasses import asdict

    from mmtrain.data.synthetic.digits import prepare_digits

    summary = prepare_digits(source, out, seed=seed, sequences=sequences)
    sentence = (
        f"{out}: {summary.recordings} recordings of {summary.speakers} speakers, {summary.train} training and "
        f"{summary.heldout} held-out samples, a tokenizer of {summary.vocab} tokens"
    )
    typer.echo(json.dumps(asdict(summary)) if as_json else sentence)
