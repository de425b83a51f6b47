"""A folder that holds an adapter in the form of `peft`: which matrices it has for which of our weights."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mmtrain.errors import ModelFolderError, first_lines
from mmtrain.families import ParameterSource
from mmtrain.families.stored_tensors import read_header
from mmtrain.foreign_json import parse_json
from mmtrain.models.shapes.layer_shape import is_of_expert
from mmtrain.weights.expert_adapters import (
    EXPERT_TENSORS,
    experts_by_linear,
    joined_shapes,
    module_in_transformers,
    split_experts,
)
from mmtrain.weights.folder_tensors import DTYPES, FolderTensors

if TYPE_CHECKING:
    import torch

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"  # what `peft` looks for
PREFIX = "base_model.model."  # of the names of modules inside a model of `peft`
MAX_NAMES_IN_MESSAGE = 10
_AROUND = ".base_layer"  # in the names of modules with several adapters
_ALLOWED: Mapping[str, tuple[Any, ...]] = {  # of keys that change what an adapter computes, or that it holds more
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "trainable_token_indices": ([],),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others change the model's own weights
}


@dataclass(frozen=True)
class AdapterPart:
    """The adapter on one tensor of a folder's model, or on an expert's part of the tensor of all experts."""

    tensor: str | None  # that one of our weights is made of; None for an expert's
    key: str  # of A and B in the file, before `.lora_A.weight`
    expert: int = 0
    num_experts: int = 1


@dataclass(frozen=True)
class PeftAdapter:
    """The adapters of a folder, by the weight of ours that they are on."""

    parts: Mapping[str, tuple[AdapterPart, ...]]
    rank: int
    scale: float
    stored: FolderTensors
    _of_experts: dict[str, "list[tuple[torch.Tensor, torch.Tensor]]"] = field(default_factory=dict)

    def read(self, part: AdapterPart) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return A (rank, inputs) and B (rows, rank)."""
        if part.tensor is not None:
            return self._read(part.key)
        if part.key not in self._of_experts:
            while len(self._of_experts) >= len(EXPERT_TENSORS):  # those of one block
                self._of_experts.pop(next(iter(self._of_experts)))
            self._of_experts[part.key] = split_experts(*self._read(part.key), part.num_experts)
        return self._of_experts[part.key][part.expert]

    def _read(self, key: str) -> "tuple[torch.Tensor, torch.Tensor]":
        a, b = (
            self.stored.read(name, tuple((0, size) for size in self.stored.tensors[name].shape))
            for name in _names_of(key)
        )
        return a, b


def is_adapter_folder(path: Path) -> bool:
    """Return whether a folder holds an adapter of `peft`."""
    return (path / CONFIG_NAME).is_file()


def open_adapter(folder: Path, sources: Iterable[ParameterSource]) -> PeftAdapter:
    """Open an adapter for a model whose weights `sources` describe.

    Raises ModelFolderError for a config with what is not read, and for matrices that fit no weight of the model.
    """
    config = _read_config(folder)
    rank, alpha = config["r"], config["lora_alpha"]
    stored = FolderTensors(folder, read_header(folder, WEIGHTS_NAME))
    parts, problems = _match(list(sources), stored, rank)
    if problems:
        raise ModelFolderError(
            f"the adapter in {folder} does not fit the model of model.hf, {len(problems)} tensors differ:"
            + first_lines(problems, MAX_NAMES_IN_MESSAGE)
        )
    return PeftAdapter(parts, rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), stored)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    try:
        config = parse_json(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it holds no mapping")
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"cannot read {path}: {error}") from None
    problems = [
        f"{key}: found {config[key]!r}, allowed: {' or '.join(map(repr, allowed))}"
        for key, allowed in _ALLOWED.items()
        if config.get(key) is not None and config[key] not in allowed
    ]
    problems += [
        f"{key}: found {config.get(key)!r}, allowed: a number above 0"
        for key, kinds in (("r", (int,)), ("lora_alpha", (int, float)))
        if type(config.get(key)) not in kinds or config[key] <= 0
    ]
    if problems:
        raise ModelFolderError(f"{path}: {'; '.join(problems)}")
    return config


class _Fit(NamedTuple):
    """What of ours the adapter on a module of `transformers` may be on."""

    shapes: tuple[tuple[int, ...], ...]  # of A and B
    weights: list[str]  # one, or those of all experts
    tensor: str | None = None  # see `AdapterPart`

    def parts(self, key: str) -> Iterator[tuple[str, AdapterPart]]:
        for number, weight in enumerate(self.weights):
            yield weight, AdapterPart(self.tensor, key, number, len(self.weights))


def _match(
    sources: list[ParameterSource], stored: FolderTensors, rank: int
) -> tuple[dict[str, tuple[AdapterPart, ...]], list[str]]:
    """Return the adapters by our weight, and what is wrong with those that fit none."""
    fits = _fits(sources, rank)
    parts: dict[str, list[AdapterPart]] = {}
    problems = []
    for key in _keys(stored):
        module = key.removeprefix(PREFIX).removesuffix(_AROUND)
        found = {name: stored.tensors[name] for name in _names_of(key) if name in stored.tensors}
        shapes = tuple(weight.shape for weight in found.values())
        fit = next((fit for fit in fits.get(module, ()) if fit.shapes == shapes), None)
        if fit is None:
            problems.append(_misfit(module, list(found), shapes, fits))
            continue
        problems += [
            f"{name}: is stored as {weight.dtype}; allowed: {', '.join(DTYPES)}"
            for name, weight in found.items()
            if weight.dtype not in DTYPES
        ]
        for weight, part in fit.parts(key):
            parts.setdefault(weight, []).append(part)
    return {name: tuple(of_weight) for name, of_weight in parts.items()}, problems


def _fits(sources: list[ParameterSource], rank: int) -> dict[str, list[_Fit]]:
    """Return what an adapter of a rank may be on, by module of `transformers`."""
    fits: dict[str, list[_Fit]] = {}
    for source in sources:
        for tensor, shape in () if is_of_expert(source.name) else source.tensor_shapes().items():
            if len(shape) == 2 and tensor.endswith(".weight"):
                shapes = (rank, shape[1]), (shape[0], rank)
                fits.setdefault(module_in_transformers(tensor), []).append(_Fit(shapes, [source.name], tensor))
    for (module, _), experts in experts_by_linear(sources).items():
        fits.setdefault(module, []).append(_Fit(joined_shapes(experts, rank), [expert.name for expert in experts]))
    return fits


def _misfit(
    module: str, found: list[str], shapes: Sequence[tuple[int, ...]], fits: Mapping[str, Sequence[_Fit]]
) -> str:
    """Say why the adapter on a module is not read."""
    if module not in fits:
        nearest = get_close_matches(module, fits, n=1, cutoff=0.6)
        return f"{module}: no linear of this model" + (f" (the nearest name is {nearest[0]})" if nearest else "")
    expected = " or ".join(_pair_text(fit.shapes) for fit in fits[module])
    return f"{', '.join(found)}: found {_pair_text(shapes)}, expected A and B of {expected}"


def _pair_text(shapes: Sequence[tuple[int, ...]]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)


def _keys(stored: FolderTensors) -> Iterator[str]:
    """Yield the names of what has an adapter; of tensors that belong to none their own names."""
    suffixes = (".lora_A.weight", ".lora_B.weight")
    yield from dict.fromkeys(
        next((name.removesuffix(suffix) for suffix in suffixes if name.endswith(suffix)), name)
        for name in stored.tensors
    )


def _names_of(key: str) -> tuple[str, str]:
    return f"{key}.lora_A.weight", f"{key}.lora_B.weight"
