"""Write a checkpoint of a run as a folder that other programs open, with its card."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mmtrain.errors import UserError
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.train_settings import ExportedPart

if TYPE_CHECKING:
    from mmtrain.checkpoint import ChosenCheckpoint
    from mmtrain.weights import ExportDtype, ExportedFolder


def export_checkpoint(
    run: Path,
    chosen: "ChosenCheckpoint",
    out: Path,
    dtype: "ExportDtype | None" = None,
    part: ExportedPart = "model",
    warn: Callable[[str], None] = print,
) -> "ExportedFolder":
    """Write part of a checkpoint of the run in the folder `run` to the new folder `out`, which appears by rename.

    Args:
        run: folder of the run.
        chosen: the newest good checkpoint, the best one, or that of a step.
        out: folder to write, which must not exist.
        dtype: of the stored weights; by default as in the folder that the run started from, else fp32.
        part: the model without a generator, the adapters alone, or the image generator alone.
        warn: hears of checkpoints that are damaged.

    Raises:
        UserError: `run` is no run, `out` exists, or the model has no such part.
        CheckpointError: no such checkpoint is good.
    """
    from mmtrain.checkpoint import open_chosen
    from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, load_run_recipe
    from mmtrain.runtime.training.model_card import CARD_FILE, model_card
    from mmtrain.weights import export_adapter, export_folder, export_generator

    recipe = load_run_recipe(run)
    opened = open_chosen(run / CHECKPOINTS_FOLDER, chosen, warn)
    card = {CARD_FILE: model_card(run, recipe, opened.step, part)}
    if part == "generator":
        return export_generator(recipe, opened, out, dtype, further_files=card)
    if part == "adapter":
        return export_adapter(recipe, opened, out, dtype, card)
    return export_folder(recipe, opened, out, dtype, further_files=card)


def require_exportable(recipe: Recipe) -> None:
    """Raise UserError for a run whose Hugging Face folders (`train.checkpoint.hf_every`) could never be written.

    Raises:
        UserError: no family can hold the model, or the run has no such part.
        ModelFolderError: the folder that the run starts from cannot be read.
        DataError: the tokenizer of a model that starts from random weights cannot be read.
    """
    from mmtrain.weights import check_exportable

    part = recipe.train.checkpoint.hf_part
    try:
        check_exportable(recipe, part)
    except UserError as error:
        raise type(error)(
            f"train.checkpoint.hf_every: found {recipe.train.checkpoint.hf_every}, but this run cannot be exported as "
            f"train.checkpoint.hf_part says ({part}): {error}"
        ) from None
