"""`mmtrain evaluate`."""

from typing import Annotated

import typer

from mmtrain.cli.options import AsJson, RunFolder


def evaluate(
    run: RunFolder,
    limit: Annotated[int | None, typer.Option(min=1, help="Ask at most this many questions. Default: all.")] = None,
    blank_images: Annotated[
        bool,
        typer.Option(
            "--blank-images",
            help="Show the model grey images and play it silence instead, to see whether it looks and listens.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Score a trained model on held-out questions.

    An answer counts when it matches exactly; the baseline gives each question template its most frequent answer.
    """
    from mmtrain.runtime.evaluate import run as evaluate_run

    report = evaluate_run(run, limit=limit, blank_images=blank_images)
    typer.echo(report.to_json() if as_json else report.to_text())
