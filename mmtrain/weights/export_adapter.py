"""Write the adapters of a run as a folder that `peft` loads on top of the model that the run started from."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmtrain.checkpoint import Checkpoint, LocalStorage
from mmtrain.checkpoint.tensorfile import TensorEntry, header_bytes, tensor_bytes
from mmtrain.errors import UserError
from mmtrain.families import ParameterSource
from mmtrain.families.trained_processors import differing_processors
from mmtrain.models.shapes.layer_shape import LoraShape
from mmtrain.models.shapes.model_shape import ModelShape, build_model_shape
from mmtrain.recipe import Recipe
from mmtrain.weights.adapters import adapted_weights, adapter_names, read_parameter
from mmtrain.weights.export_weights import media_settings, source_folder
from mmtrain.weights.write_tensors import TORCH_NAMES, ExportDtype, ExportedFolder, draft_folder, require_new

if TYPE_CHECKING:
    import torch

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"  # what `peft` looks for
_PREFIX = "base_model.model."  # of the names of modules inside a model of `peft`


@dataclass(frozen=True)
class _Adapted:
    """A weight of the folder with an adapter: its module in `transformers`, and what our weight is made of."""

    module: str
    source: ParameterSource
    lora: LoraShape

    @property
    def rows(self) -> int:
        """Rows of the folder's tensor."""
        return self.source.tensor_shapes()[f"{self.module}.weight"][0]

    @property
    def inputs(self) -> int:
        """Columns of the folder's tensor."""
        return self.source.tensor_shapes()[f"{self.module}.weight"][1]


def export_adapter(
    recipe: Recipe, checkpoint: Checkpoint, out: Path, dtype: ExportDtype | None = None
) -> ExportedFolder:
    """Write the adapters of a checkpoint, in whatever sharding, to a new folder; in fp32 without `dtype`.

    An adapter on a joint linear becomes one on each of the folder's linears: all with its A, each with its rows of B.
    The folder appears by rename when it is complete.

    Raises UserError for a run without adapters, with other trained weights or without `model.hf`, and for an `out` that
    exists or cannot be written; ModelFolderError; CheckpointError.
    """
    shape = build_model_shape(recipe)
    _require_adapters_only(recipe, shape)
    folder = source_folder(recipe)
    if folder is None:
        raise UserError(
            "--adapter: the units of this run did not all start from one folder that the adapter could be loaded on; "
            "leave --adapter out to export the model with the adapters merged"
        )
    if recipe.model.llm.vocab != folder.settings.model["llm"]["vocab"]:
        raise UserError(
            f"--adapter: the run has {recipe.model.llm.vocab} tokens, more than {folder.path}, and an adapter's folder "
            "does not hold the rows of new ones; leave --adapter out to export the model with the adapters merged"
        )
    require_new(out)
    weights = adapted_weights(shape)
    modules = [
        _Adapted(tensor.removesuffix(".weight"), source, weights[source.name])
        for source in folder.family.weights(folder.settings)
        if source.name in weights
        for tensor in source.tensor_shapes()
    ]
    unnamed = [module.module for module in modules if any(block.is_transposed for block in module.source.blocks)]
    if unnamed:
        raise UserError(
            f"--adapter: {unnamed[0]} is a bare matrix in folders of this family, on which no adapter can be "
            "loaded; leave --adapter out to export the model with the adapters merged"
        )
    torch_name = TORCH_NAMES[dtype or "fp32"]
    entries = [entry for module in modules for entry in _entries(module, torch_name)]
    with draft_folder(out, "adapter") as draft:
        LocalStorage().write(draft / WEIGHTS_NAME, _chunks(entries, modules, checkpoint, torch_name))
        config = _config(recipe, folder.path, [module.module for module in modules])
        (draft / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    num_bytes = sum(entry.num_bytes for entry in entries)
    notes = differing_processors(folder, media_settings(recipe))
    return ExportedFolder(out, checkpoint.step, 1, num_bytes, (torch_name,), notes)


def _require_adapters_only(recipe: Recipe, shape: ModelShape) -> None:
    """Raise UserError if the run has no adapters, or trained more than an adapter's folder can hold."""
    if recipe.train.lora is None:
        raise UserError("--adapter: this run has no adapters (train.lora); leave --adapter out to export the model")
    if recipe.model.hf is None:
        raise UserError(
            "--adapter: this run started from random weights, so there is no folder to load the adapter on; leave "
            "--adapter out to export the model with the adapters merged"
        )
    trained = [
        f"{unit.name}.layers.{i}" for unit in shape.units for i, layer in enumerate(unit.layers) if layer.trains_weights
    ]
    if trained:
        raise UserError(
            f"--adapter: train.lora.also_train trained weights of {', '.join(trained)}, which an adapter's folder does "
            "not hold; leave --adapter out to export the model with the adapters merged"
        )


def _entries(module: _Adapted, torch_name: str) -> tuple[TensorEntry, TensorEntry]:
    a, b = (f"{_PREFIX}{module.module}.lora_{half}.weight" for half in "AB")
    rank = module.lora.rank
    return TensorEntry(a, torch_name, (rank, module.inputs)), TensorEntry(b, torch_name, (module.rows, rank))


def _chunks(
    entries: list[TensorEntry], modules: list[_Adapted], checkpoint: Checkpoint, torch_name: str
) -> Iterator[bytes | memoryview]:
    import torch

    yield header_bytes(entries, metadata={"format": "pt"})
    for module in modules:
        a, b = (read_parameter(checkpoint, name) for name in adapter_names(module.source.name))
        for half in (a, _rows_of_module(module, b)):
            yield tensor_bytes(half.to(getattr(torch, torch_name)))


def _rows_of_module(module: _Adapted, b: "torch.Tensor") -> "torch.Tensor":
    """Return B (rows, rank) of one of the folder's linears, cut out of that of ours: the rows that its weight has."""
    rows = b.new_empty((module.rows, b.shape[-1]))
    for block in module.source.blocks:
        if block.tensor == f"{module.module}.weight":
            lo, hi = block.tensor_box[0]
            view = tuple(slice(start, stop) for start, stop in block.view_box[:-1])
            rows[lo:hi] = b[view].reshape(hi - lo, -1)
    return rows


def _config(recipe: Recipe, folder: Path, modules: list[str]) -> Mapping[str, Any]:
    """Return the config by which `peft` makes the same adapters."""
    lora = recipe.train.lora
    assert lora is not None
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(folder),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": modules,
    }
