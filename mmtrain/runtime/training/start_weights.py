"""Where the weights of a new run come from: random ones, those of a pretrained model, or those of another run."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mmtrain.checkpoint import NEWEST, find, open_chosen
from mmtrain.errors import CheckpointError, MmtrainError, UserError, first_lines
from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.guest_stage import GuestStage
from mmtrain.program import LLM
from mmtrain.recipe import Recipe
from mmtrain.report.console import Console
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.checkpointing import checkpoint_ranks
from mmtrain.runtime.execution.optimizer import Optimizer
from mmtrain.runtime.execution.rank_context import RankContext
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, load_run_recipe
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import World
from mmtrain.weights import (
    AdaptedWeights,
    DcpWeights,
    PretrainedWeights,
    RunWeights,
    describe_guest,
    is_adapter_folder,
    is_dcp_folder,
    open_adapted,
    open_dcp,
    open_pretrained,
    start_folders,
)

MAX_NAMES_IN_MESSAGE = 40  # another model lacks thousands
StartWeights = PretrainedWeights | AdaptedWeights | DcpWeights | RunWeights


def check_start_weights(recipe: Recipe) -> None:
    """Raise UserError or ModelFolderError for weights that a run of this recipe cannot start from.

    Reads names and headers only; shapes of another run's parameters are compared when the model is built.
    """
    if recipe.train.init_optimizer and not is_dcp_folder(recipe.train.init_from or Path()):
        raise UserError(
            f"train.init_optimizer: found true, but train.init_from ({recipe.train.init_from}) is no folder of "
            "torch.distributed.checkpoint, which alone gives an optimizer to start from; --resume continues a run with "
            "its own. Leave train.init_optimizer out to start the optimizer anew"
        )
    is_run = recipe.train.init_from is not None and not (
        is_dcp_folder(recipe.train.init_from) or is_adapter_folder(recipe.train.init_from)
    )
    if recipe.train.init_checkpoint != NEWEST and not is_run:
        raise UserError(
            f"train.init_checkpoint: found {recipe.train.init_checkpoint}, but train.init_from "
            f"({recipe.train.init_from}) is no folder of a run, which alone has several checkpoints; leave it out"
        )
    if recipe.train.init_from is None:
        open_pretrained(recipe)
    elif is_dcp_folder(recipe.train.init_from):
        open_dcp(recipe).close()
    elif is_adapter_folder(recipe.train.init_from):
        open_adapted(recipe).close()
    else:
        _require_checkpoint(recipe.train.init_from)


def open_start_weights(
    request: TrainRequest, world: World, activity: Activity, console: Console
) -> StartWeights | None:
    """Open the weights that a run starts from; None for random ones, and for a run that has a checkpoint.

    Raises ModelFolderError, UserError, CheckpointError.
    """
    recipe = request.recipe
    if request.resume and world.on_first(lambda: bool(find(request.run_dir / CHECKPOINTS_FOLDER))):
        return None
    if recipe.train.init_from is not None and is_dcp_folder(recipe.train.init_from):
        return open_dcp(recipe)
    if recipe.train.init_from is not None and is_adapter_folder(recipe.train.init_from):
        return open_adapted(recipe)
    if recipe.train.init_from is not None:
        return _open_run(recipe, recipe.train.init_from, world, activity, lambda text: console.print(text, style="red"))
    return open_pretrained(recipe)


def _open_run(recipe: Recipe, run: Path, world: World, activity: Activity, on_bad: Callable[[str], None]) -> RunWeights:
    """Open the checkpoint of another run that the recipe chooses, on all ranks the same."""
    _require_checkpoint(run)
    source = load_run_recipe(run)
    activity.files.start()
    ranks = checkpoint_ranks(world, activity.files)
    try:
        chosen = recipe.train.init_checkpoint
        checkpoint = open_chosen(run / CHECKPOINTS_FOLDER, chosen, on_bad, ranks, activity.files.advance)
    except CheckpointError as error:
        raise CheckpointError(f"train.init_checkpoint: {error}") from None
    return RunWeights(checkpoint, source, recipe)


def _require_checkpoint(run: Path) -> None:
    try:
        load_run_recipe(run)
    except UserError as error:
        raise UserError(f"train.init_from: {error}") from None
    except MmtrainError as error:
        raise UserError(f"train.init_from: the recipe of the run in {run} cannot be read: {error}") from None
    if not find(run / CHECKPOINTS_FOLDER):
        raise UserError(f"train.init_from: the run in {run} has no checkpoint yet; let it save one")


def start_optimizer(optimizer: Optimizer, weights: StartWeights | None, recipe: Recipe) -> None:
    """Continue the optimizer of the folder that a run starts from, if the recipe says so (`train.init_optimizer`).

    Master weights, moments and the number of updates are those of the folder, bit for bit. Parameters that it lacks
    keep their random values. Raises UserError for an optimizer of another kind.
    """
    if not recipe.train.init_optimizer or not isinstance(weights, DcpWeights):
        return

    def read(piece: NamedShard) -> Tensor:
        values = torch.empty(piece.tensor.numel(), dtype=piece.tensor.dtype)
        first = 0 if piece.flat is None else piece.flat[0]
        is_held = weights.fill_saved(values, piece.name, piece.spec, piece.tp_rank, piece.tp, first)
        return values if is_held else piece.tensor.detach().clone()

    for unit in optimizer.units.values():
        unit.load(read)
    optimizer.num_updates = weights.num_updates


def require_fitting_weights(weights: StartWeights | None, recipe: Recipe, world: World) -> None:
    """Raise UserError with all parameters that the other run lacks, has beside ours, or has in another shape.

    All ranks call this, after each has filled its part of the model.
    """
    if not isinstance(weights, RunWeights):
        return
    misshaped = {line for lines in world.all_gather(weights.misshaped) for line in lines}  # type: ignore[attr-defined]
    problems = [*weights.differing_names, *sorted(misshaped)]
    if not problems:
        return
    raise UserError(
        f"train.init_from: the run in {recipe.train.init_from} trained another model, {len(problems)} parameters "
        "differ:" + first_lines(problems, MAX_NAMES_IN_MESSAGE)
    )


def introduce_start_weights(console: Console, recipe: Recipe, weights: StartWeights) -> None:
    """Print where the weights of a new run come from, and which units, modules and tokens have none there."""
    if isinstance(weights, RunWeights):
        merged = f", {weights.num_merged} adapters merged into their weights" if weights.num_merged else ""
        text = f"starting from the weights in {weights.checkpoint.folder}{merged}"
    elif isinstance(weights, DcpWeights):
        with_optimizer = ""
        if recipe.train.init_optimizer:
            with_optimizer = f", and from its optimizer after {weights.num_updates} updates"
        text = f"starting from the weights in {weights.folder}{_random_units(recipe, weights)}{with_optimizer}"
    elif isinstance(weights, AdaptedWeights):
        text = (
            f"starting from the weights in {recipe.model.hf} with the adapter in {recipe.train.init_from}: "
            f"{weights.num_continued} weights go on with their adapters, {weights.num_merged} with theirs merged"
        )
    else:
        folders = ", ".join(str(folder.path) for folder in start_folders(recipe))
        text = f"starting from the weights in {folders}{_random_units(recipe, weights)}"
    console.print(text, highlight=False, soft_wrap=True)
    if weights.num_new_tokens:
        _introduce_new_tokens(console, recipe, weights.num_new_tokens)


def introduce_guest(console: Console, recipe: Recipe, rank_context: RankContext) -> None:
    """Print what a guest is and cannot have, and how its samples lie; nothing for a model of a family."""
    text = describe_guest(recipe)
    if text is None:
        return
    console.print(text, highlight=False, soft_wrap=True)
    for stage in rank_context.units[LLM].stages.values():
        if isinstance(stage, GuestStage) and stage.packing_note is not None:
            console.print(stage.packing_note, style="yellow", highlight=False, soft_wrap=True)


def _random_units(recipe: Recipe, weights: PretrainedWeights) -> str:
    """Say which units and modules start from random weights; empty if none does."""
    units = [unit.name for unit in build_model_shape(recipe).units if unit.name not in weights.units]
    fresh = ", ".join((*units, *weights.fresh_modules))
    return f"; random weights for {fresh}, which no folder holds" if fresh else ""


def _introduce_new_tokens(console: Console, recipe: Recipe, num_new: int) -> None:
    """Print how the vocabulary grows, and warn of rows that would never train."""
    vocab = recipe.model.llm.vocab
    text = f"{num_new} new tokens, {vocab} with them: their weights start as the mean of the others"
    console.print(text, highlight=False, soft_wrap=True)
    frozen = [name for name, trains in build_model_shape(recipe).token_matrices.items() if not trains]
    if frozen:
        remedy = "model.llm.freeze and train.freeze say so"
        if recipe.train.lora is not None:
            remedy = "name them in train.lora.also_train to train them"
        text = f"the rows of new tokens in {' and '.join(frozen)} are frozen and stay equal; {remedy}"
        console.print(text, style="yellow", highlight=False, soft_wrap=True)
