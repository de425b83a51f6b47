"""`mmtrain evaluate`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.counting_bar import counting_bar
from mmtrain.cli.options import AsJson, CheckpointChoice, RunFolder, chosen_checkpoint, require_writable

if TYPE_CHECKING:
    from mmtrain.report import EvaluationResult


def evaluate(
    run: RunFolder,
    checkpoint: CheckpointChoice = "newest",
    limit: Annotated[int | None, typer.Option(min=1, help="Ask at most this many questions. Default: all.")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Most tokens of an answer. Default: as generation_config.json of the tokenizer says, or 8 more than "
            "the longest right answer.",
            show_default=False,
        ),
    ] = None,
    blank_images: Annotated[
        bool,
        typer.Option(
            "--blank-images",
            help="Replace images by gray, audio by silence, and captions of images to draw by nothing, to see whether "
            "the model uses them.",
        ),
    ] = False,
    ranks: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of local processes to start. The model is split among them; "
            "one with a generator runs whole in each.",
        ),
    ] = 1,
    draw: Annotated[
        int | None,
        typer.Option(min=1, help="Draw at most this many held-out samples. Default: 64.", show_default=False),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of DDIM, or of Euler's method, for an image. Default: 50.", show_default=False),
    ] = None,
    guidance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Scale of guidance without a classifier; 1 is none. Default: 3, or 1 for a model that was trained "
            "without context_dropout.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the noise that images are drawn from. Default: 0.")
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for drawn images. Default: samples in RUN.", show_default=False),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Score by this metric, too: contains, anls, f1, wer, 'regex=PATTERN', or a plug-in. Repeatable. "
            "Default: train.metrics of the run's recipe.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File for the answers, one line of JSON each, written as they come: id, question, media, expected, "
            "answer, score, tokens.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score a trained model on held-out questions.

    An answer is right if it matches exactly, apart from thoughts in front of it. The baseline always gives the most
    frequent answer of each question template. Under torchrun or SLURM each started process is one rank and holds only
    its own stages of the model; one with a generator runs whole on each, and is sharded if it is too large for that.

    A model with a generator also draws the images of held-out samples, beside what it draws with blanked captions, and
    shows how well it predicts noise (or direction) at ten levels of noise.
    """
    from mmtrain.api.plans import plan_for_started_ranks
    from mmtrain.runtime.evaluation.score_drawings import DrawingRequest
    from mmtrain.runtime.evaluation.score_run import EvaluateRequest
    from mmtrain.runtime.evaluation.score_run import run as evaluate_run

    if out is not None:
        require_writable("--out", out, "answers")
    metrics = tuple(metric) if metric else None
    drawing = DrawingRequest(draw, steps, guidance, seed, samples)
    show = partial(_show, as_json)
    asked = run, plan_for_started_ranks, show, limit, blank_images, ranks, drawing, max_new_tokens
    chosen = chosen_checkpoint(checkpoint)
    evaluate_run(EvaluateRequest(*asked, out=out, metrics=metrics, progress=counting_bar, checkpoint=chosen))


def _show(as_json: bool, report: "EvaluationResult") -> None:
    typer.echo(report.to_json() if as_json else report.to_text())
