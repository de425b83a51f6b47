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
            help="Show the model grey images and play it silence instead, to see whether it looks and listens.",
        ),
    ] = False,
    ranks: Annotated[
        int, typer.Option(min=1, metavar="N", help="Processes to start here, each with its share of the model.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Score a trained model on held-out questions.

    An answer counts when it matches exactly; the baseline gives each question template its most frequent answer.
    Under torchrun or SLURM each process started is one rank, and holds its own stages of the model alone.
    """
    from mmtrain.cli.local_cluster import plan_here
    from mmtrain.runtime.evaluation.score_run import EvaluateRequest
    from mmtrain.runtime.evaluation.score_run import run as evaluate_run

    evaluate_run(EvaluateRequest(run, plan_here, partial(_show, as_json), limit, blank_images, ranks))


def _show(as_json: bool, report: "EvaluationResult") -> None:
    typer.echo(report.to_json() if as_json else report.to_text())
