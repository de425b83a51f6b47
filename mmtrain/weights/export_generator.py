"""Write a run's image generator as a folder of `diffusers`: a U-Net or a transformer, to put into a pipeline."""

import json
from pathlib import Path

from mmtrain.checkpoint import Checkpoint
from mmtrain.checkpoint.tensorfile import TensorEntry
from mmtrain.errors import UserError
from mmtrain.families import CONFIG_FILE
from mmtrain.families.folder_files import DIFFUSERS_INDEX_FILE, DIFFUSERS_SINGLE_FILE
from mmtrain.families.generators import generator_config, generator_weights
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.recipe import Recipe
from mmtrain.weights.adapters import adapted_weights
from mmtrain.weights.write_tensors import (
    MAX_FILE_BYTES,
    TORCH_NAMES,
    ExportDtype,
    ExportedFolder,
    TensorTarget,
    WeightReader,
    draft_folder,
    require_new,
    split_targets,
    write_file,
    write_index,
)


def export_generator(
    recipe: Recipe,
    checkpoint: Checkpoint,
    out: Path,
    dtype: ExportDtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> ExportedFolder:
    """Write the generator of a checkpoint, in whatever sharding, to a new folder of `diffusers`; fp32 by default.

    The projector from the LLM's outputs to its context is no part of such a folder. One parameter at a time is in
    memory. The folder appears by rename when it is complete.

    Raises UserError for a run without a generator, and for an `out` that exists or cannot be written; CheckpointError.
    """
    if recipe.model.generator is None:
        raise UserError("--generator: the run has no generator (model.generator); leave the option out")
    require_new(out)
    settings = recipe.model.generator.model_dump()
    torch_name = TORCH_NAMES[dtype or "fp32"]
    targets = [
        TensorTarget(TensorEntry(tensor, torch_name, shape), source)
        for source in generator_weights(settings)
        for tensor, shape in source.tensor_shapes().items()
    ]
    files = split_targets(targets, max_file_bytes, DIFFUSERS_SINGLE_FILE)
    reader = WeightReader(None, checkpoint, adapted_weights(build_model_shape(recipe)))
    with draft_folder(out, "generator") as draft:
        for name, targets_of_file in files.items():
            write_file(draft / name, targets_of_file, reader)
        write_index(draft, files, DIFFUSERS_INDEX_FILE)
        config = json.dumps(generator_config(settings), indent=2)
        (draft / CONFIG_FILE).write_text(f"{config}\n", encoding="utf-8")
    num_bytes = sum(target.entry.num_bytes for target in targets)
    return ExportedFolder(out, checkpoint.step, len(files), num_bytes, (torch_name,))
