"""Write the adapters of a run as a folder that `peft` loads on top of the model that the run started from."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmtrain.checkpoint import Checkpoint
from mmtrain.checkpoint.storage import write_durably
from mmtrain.checkpoint.tensorfile import TensorEntry, header_bytes, tensor_bytes
from mmtrain.errors import UserError
from mmtrain.families import ModelFolder, ParameterSource
from mmtrain.families.trained_processors import differing_processors
from mmtrain.models.shapes.freezing import all_parameter_names
from mmtrain.models.shapes.layer_shape import LinearParts, LoraShape, is_adapter, is_of_expert
from mmtrain.models.shapes.model_shape import ModelShape, build_model_shape
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.recipe import Recipe
from mmtrain.weights.adapters import (
    adapted_weights,
    adapter_names,
    part_of_tensor,
    parts_of_weight,
    read_parameter,
    row_places,
)
from mmtrain.weights.expert_adapters import (
    EXPERT_TENSORS,
    TARGETED_AS_PARAMETERS,
    experts_by_linear,
    join_experts,
    joined_shapes,
    module_in_transformers,
)
from mmtrain.weights.export_weights import media_settings, source_folder
from mmtrain.weights.import_weights import open_pretrained
from mmtrain.weights.peft_adapter import CONFIG_NAME, PREFIX, WEIGHTS_NAME
from mmtrain.weights.write_tensors import TORCH_NAMES, ExportDtype, ExportedFolder, draft_folder, require_new

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Adapted:
    """A linear of `transformers` with an adapter, or a tensor of all experts of a block with one each."""

    module: str  # by `peft`'s name
    target: str  # what the config says to have an adapter: the module, or a parameter
    tensor: str | None  # of the folder: the linear's weight; None for experts
    sources: tuple[ParameterSource, ...]  # what our weight is made of; of experts those of all, in their order
    lora: LoraShape
    part: int = 0  # which of the A's of a joint linear is that of this tensor

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of A and of B."""
        if self.tensor is not None:
            rows, inputs = self.sources[0].tensor_shapes()[self.tensor]
            return (self.lora.rank, inputs), (rows, self.lora.rank)
        return joined_shapes(self.sources, self.lora.rank)

    def read(self, checkpoint: Checkpoint) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return A and B in the form of `peft`."""
        halves = [
            (read_parameter(checkpoint, a), read_parameter(checkpoint, b))
            for a, b in (adapter_names(source.name) for source in self.sources)
        ]
        if self.tensor is None:
            return join_experts(halves)
        [(a, b)] = halves
        first = self.part * self.lora.rank
        return a[first : first + self.lora.rank], self._rows_of(self.tensor, b)

    def _rows_of(self, tensor: str, b: "torch.Tensor") -> "torch.Tensor":
        """Return B (rows, rank) of one of the folder's linears, cut out of that of ours: the rows of its weight."""
        rows = b.new_empty(self.shapes[1])
        for of_tensor, place in row_places(self.sources[0], tensor):
            rows[of_tensor] = b[place].reshape(rows[of_tensor].shape)
        return rows


def _adapted_modules(sources: Sequence[ParameterSource], weights: Mapping[str, LoraShape]) -> list[_Adapted]:
    """Return what has adapters in `transformers`, for those of our weights that have them."""
    adapted = [source for source in sources if source.name in weights]
    has_experts = any(is_of_expert(source.name) for source in sources)
    of_experts = experts_by_linear(adapted)
    modules = []
    for source in adapted:
        for tensor in () if is_of_expert(source.name) else source.tensor_shapes():
            module = module_in_transformers(tensor)
            target = tensor if has_experts and module.endswith(TARGETED_AS_PARAMETERS) else module
            lora = weights[source.name]
            part = _number_of_part(source, tensor, parts_of_weight(lora, source.name))
            if part is not None:
                modules.append(_Adapted(module, target, tensor, (source,), lora, part))
    for (module, linear), of_linear in of_experts.items():
        tensor, around = EXPERT_TENSORS[linear]
        has_both = all((module, other) in of_experts for other in EXPERT_TENSORS)
        name, target = module + around * has_both, f"{module}.{tensor}"
        modules.append(_Adapted(name, target, None, tuple(of_linear), weights[of_linear[0].name]))
    return modules


def _number_of_part(source: ParameterSource, tensor: str, parts: LinearParts | None) -> int | None:
    """Return which of a linear's A's is on one of its tensors, counted from 0; None if none is.

    Raises UserError for a tensor that holds several parts whose adapters are their own.
    """
    if parts is None:
        return 0
    part = part_of_tensor(source, tensor, parts)
    if part is None:
        raise UserError(
            f"--adapter: {tensor} is joint in folders of this family, and has one adapter there, but the run has "
            f"adapters apart on {', '.join(parts.adapted)} (train.lora.targets); leave --adapter out to export the "
            "model with the adapters merged"
        )
    return parts.adapted.index(part) if part in parts.adapted else None


def export_adapter(
    recipe: Recipe,
    checkpoint: Checkpoint,
    out: Path,
    dtype: ExportDtype | None = None,
    further_files: Mapping[str, str] | None = None,
) -> ExportedFolder:
    """Write the adapters of a checkpoint, in whatever sharding, to a new folder; in fp32 without `dtype`.

    An adapter on a joint linear becomes one on each of the folder's linears: all with its A, each with its rows of B.
    Parts with adapters of their own have an A each.
    Those on all experts of a block become one on each tensor of experts: see `expert_adapters`.
    The folder, with the texts `further_files`, appears by rename when it is complete.

    Raises UserError for a run without adapters, with other trained weights or without `model.hf`, for one whose weights
    are not those of that folder, and for an `out` that exists or cannot be written; ModelFolderError; CheckpointError.
    """
    folder, modules = check_adapter(recipe)
    require_new(out)
    _require_base_of_folder(recipe, build_model_shape(recipe), checkpoint)
    torch_name = TORCH_NAMES[dtype or "fp32"]
    entries = [entry for module in modules for entry in _entries(module, torch_name)]
    with draft_folder(out, "adapter", further_files) as draft:
        write_durably(draft / WEIGHTS_NAME, _chunks(entries, modules, checkpoint, torch_name))
        config = _config(recipe, folder.path, modules)
        (draft / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    num_bytes = sum(entry.num_bytes for entry in entries)
    notes = differing_processors(folder, media_settings(recipe))
    return ExportedFolder(out, checkpoint.step, 1, num_bytes, (torch_name,), notes)


def check_adapter(recipe: Recipe) -> tuple[ModelFolder, list[_Adapted]]:
    """Return the folder that the adapters of a run are for, and what has them there.

    Raises UserError as `export_adapter` does for what no checkpoint can change; ModelFolderError.
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
    modules = _adapted_modules(list(folder.family.weights(folder.settings)), adapted_weights(shape))
    unnamed = [
        module.module
        for module in modules
        if module.tensor is not None and any(block.is_transposed for block in module.sources[0].blocks)
    ]
    if unnamed:
        raise UserError(
            f"--adapter: {unnamed[0]} is a bare matrix in folders of this family, on which no adapter can be "
            "loaded; leave --adapter out to export the model with the adapters merged"
        )
    return folder, modules


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


def _require_base_of_folder(recipe: Recipe, shape: ModelShape, checkpoint: Checkpoint) -> None:
    """Raise UserError if a run that started from another, or from an adapter, has other weights than its folder."""
    import torch

    if recipe.train.init_from is None:
        return
    base = open_pretrained(recipe)
    assert base is not None, "such runs are refused before"
    for name in all_parameter_names(shape.units, recipe):
        if is_adapter(name):
            continue
        saved = read_parameter(checkpoint, name)
        of_folder = torch.empty_like(saved)
        if base.fill(of_folder, ParamSpec(name, tuple(saved.shape), None), 0, 1) and not of_folder.equal(saved):
            raise UserError(
                f"--adapter: this run started from {recipe.train.init_from}, whose {name} is not that of "
                f"{recipe.model.hf}, so the adapter would be loaded on other weights; leave --adapter out to export "
                "the model with the adapters merged"
            )
    base.close()


def _entries(module: _Adapted, torch_name: str) -> tuple[TensorEntry, TensorEntry]:
    a, b = (f"{PREFIX}{module.module}.lora_{half}.weight" for half in "AB")
    of_a, of_b = module.shapes
    return TensorEntry(a, torch_name, of_a), TensorEntry(b, torch_name, of_b)


def _chunks(
    entries: list[TensorEntry], modules: list[_Adapted], checkpoint: Checkpoint, torch_name: str
) -> Iterator[bytes | memoryview]:
    import torch

    yield header_bytes(entries, metadata={"format": "pt"})
    for module in modules:
        for half in module.read(checkpoint):
            yield tensor_bytes(half.to(getattr(torch, torch_name)))


def _config(recipe: Recipe, folder: Path, modules: list[_Adapted]) -> Mapping[str, Any]:
    """Return the config by which `peft` makes the same adapters."""
    lora = recipe.train.lora
    assert lora is not None
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(folder),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.scaling == "rslora",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [module.target for module in modules if module.target == module.module],
        "target_parameters": [module.target for module in modules if module.target != module.module],
    }
