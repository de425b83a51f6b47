"""Open the model of a run, or of a folder in Hugging Face's layout, to talk to it in this process."""

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mmtrain.errors import UserError
from mmtrain.families.folder_files import CONFIG_FILE
from mmtrain.families.hub_models import is_model_of_hub
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.recipe.checks.guest_checks import require_own_modules
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, RECIPE_FILE, load_run_recipe

if TYPE_CHECKING:
    from mmtrain.checkpoint import Checkpoint, ChosenCheckpoint
    from mmtrain.runtime.evaluation.dialogue import Dialogue
    from mmtrain.weights import PretrainedWeights

MAX_DIALOGUE_TOKENS = 8192  # of a model's folder, which says nothing of it; that of a run is `data.seq_len`


def open_dialogue(
    model: str,
    checkpoint: "ChosenCheckpoint" = "newest",
    max_new_tokens: int | None = None,
    system: str | None = None,
) -> "Dialogue":
    """Load a model into this process, on its GPU if there is one, and start a conversation with it.

    Args:
        model: folder of a run, folder of a model in Hugging Face's layout, or ORG/NAME of the hub.
        checkpoint: of a run: the newest good one, the best one, or that of a step.
        max_new_tokens: of an answer; by default as the model's folder says, or `DEFAULT_ANSWER_TOKENS`.
        system: a text in front of the conversation.

    Raises:
        UserError: it is neither, or a checkpoint is named for a folder of a model.
        CheckpointError: no checkpoint is good.
    """
    from mmtrain.data import load_recipe_tokenizer
    from mmtrain.runtime.evaluation.dialogue import Dialogue
    from mmtrain.runtime.evaluation.generate import load_generator
    from mmtrain.runtime.evaluation.score_run import start_own_world, whole_model

    recipe: Recipe
    weights: Checkpoint | PretrainedWeights
    if (Path(model) / RECIPE_FILE).is_file():
        recipe, weights = _open_run(Path(model), checkpoint)
    else:
        recipe, weights = _open_folder(model, checkpoint)
    require_own_modules(recipe, "chat")
    world = start_own_world()
    tokenizer = load_recipe_tokenizer(recipe)
    generator = load_generator(recipe, whole_model(recipe, 1), world, weights, tokenizer)
    return Dialogue(recipe, generator, tokenizer, world, max_new_tokens, system)


def _open_run(folder: Path, checkpoint: "ChosenCheckpoint") -> "tuple[Recipe, Checkpoint]":
    from mmtrain.checkpoint import open_chosen

    recipe = load_run_recipe(folder)
    return recipe, open_chosen(folder / CHECKPOINTS_FOLDER, checkpoint, lambda text: print(text, file=sys.stderr))


def _open_folder(model: str, checkpoint: "ChosenCheckpoint") -> "tuple[Recipe, PretrainedWeights]":
    """Open a model's folder by a recipe that names nothing but the model."""
    from mmtrain.weights import open_pretrained

    is_of_hub = is_model_of_hub(model)
    if not is_of_hub and not (Path(model) / CONFIG_FILE).is_file():
        problem = f"has neither {RECIPE_FILE} nor {CONFIG_FILE}" if Path(model).is_dir() else "there is no such folder"
        raise UserError(
            f"{model}: {problem}; allowed: the folder of a run, which `mmtrain train` wrote, that of a model in "
            "Hugging Face's layout, or ORG/NAME of the hub"
        )
    if checkpoint != "newest":
        raise UserError(f"--checkpoint: {checkpoint} found, but {model} is a model and no run; leave it out here")
    with tempfile.TemporaryDirectory(prefix="mmtrain-") as folder:
        path = Path(folder, "chat.yaml")
        settings = {
            "name": "chat",
            "model": {"hf": model if is_of_hub else str(Path(model).absolute())},
            "data": {"sources": [{"path": "no-samples.json"}], "seq_len": MAX_DIALOGUE_TOKENS},
            "train": {"steps": 1, "global_batch": 1, "optimizer": {"lr": 1.0}},  # required, and not used
        }
        path.write_text(json.dumps(settings), encoding="utf-8")  # JSON is a part of YAML
        recipe = load_recipe(path).recipe
    weights = open_pretrained(recipe)
    assert weights is not None, "the recipe names a folder"
    return recipe, weights
