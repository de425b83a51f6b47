"""`mmtrain evaluate`."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import AsJson, RunFolder

if TYPE_CHECKING:
    from mmtrain.balance import SampleLengths
    from mmtrain.plan import Plan
    from mmtrain.recipe import Recipe
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
    from mmtrain.runtime.evaluate import Request
    from mmtrain.runtime.evaluate import run as evaluate_run

    evaluate_run(Request(run, _plan, partial(_show, as_json), limit, blank_images, ranks))


def _plan(recipe: "Recipe", lengths: "SampleLengths", num_ranks: int) -> "Plan":
    from mmtrain.cli.cluster import cluster_of
    from mmtrain.plan import plan
    from mmtrain.recipe import sha256

    _, hardware = cluster_of(recipe)
    return plan(recipe, lengths, world_size=num_ranks, hardware=hardware, recipe_sha256=sha256(recipe))


def _show(as_json: bool, report: "EvaluationResult") -> None:
    typer.echo(report.to_json() if as_json else report.to_text())
