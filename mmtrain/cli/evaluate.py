"""`mmtrain evaluate`."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import AsJson, RunFolder

if TYPE_CHECKING:
    from mmtrain.report import EvaluationResult


def evaluate(
    run: RunFolder,
    limit: Annotated[int | None, typer.Option(min=1, help="Ask at most this many questions. Default: all.")] = None,
    blank_images: Annotated[
        bool,
        typer.Option(
            "--blank-images",
            help="Replace images by gray and audio by silence, to see whether the model uses them.",
        ),
    ] = False,
    ranks: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of local processes to start; the model is split among them.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Score a trained model on held-out questions.

    An answer is right if it matches exactly. The baseline always gives the most frequent answer of each question
    template. Under torchrun or SLURM each started process is one rank and holds only its own stages of the model.
    """
    from mmtrain.cli.local_cluster import plan_here
    from mmtrain.runtime.evaluation.score_run import EvaluateRequest
    from mmtrain.runtime.evaluation.score_run import run as evaluate_run

    evaluate_run(EvaluateRequest(run, plan_here, partial(_show, as_json), limit, blank_images, ranks))


def _show(as_json: bool, report: "EvaluationResult") -> None:
    typer.echo(report.to_json() if as_json else report.to_text())
