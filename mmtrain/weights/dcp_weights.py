"""Start a rank from a folder of torch.distributed.checkpoint (DCP) that names tensors as Hugging Face folders do."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mmtrain.errors import ModelFolderError, UserError
from mmtrain.families import ModelFolder
from mmtrain.families.stored_tensors import StoredWeight
from mmtrain.families.weight_layouts import respell
from mmtrain.models.shapes.layer_shape import is_adapter
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.recipe import Recipe
from mmtrain.weights.dcp_folder import DcpFolder
from mmtrain.weights.export_dcp import MODEL_KEY, OPTIMIZER_KEYS, STATE_MARK, STEP_KEY
from mmtrain.weights.export_weights import source_folder
from mmtrain.weights.import_weights import OpenFolder, PretrainedWeights
from mmtrain.weights.match_tensors import match_tensors
from mmtrain.weights.new_folder import describe_new_folder

if TYPE_CHECKING:
    import torch

_SETTING = "train.init_from"
# Keys of what is no model: of ours, of torchtitan, and of torch's examples.
_OTHER_KEYS = ("optimizer", "optim", "lr_scheduler", "dataloader", "train_state")
_OPTIMIZER_PREFIXES = (".".join(OPTIMIZER_KEYS) + ".", "optim.state.")


class NamedTensors:
    """Some tensors of a DCP folder under names of their own."""

    def __init__(self, folder: DcpFolder, keys: Mapping[str, str]) -> None:
        """Show the tensors whose names there are the values of `keys`."""
        self._folder, self._keys = folder, keys
        self.folder = folder.folder
        self.tensors: Mapping[str, StoredWeight] = {name: folder.tensors[key] for name, key in keys.items()}

    def read(self, name: str, box: tuple[tuple[int, int], ...]) -> "torch.Tensor":
        """Read a box of a tensor. Raises ModelFolderError."""
        return self._folder.read(self._keys[name], box)

    def close(self) -> None:
        """Close all files."""
        self._folder.close()


class DcpWeights(PretrainedWeights):
    """The weights of a DCP folder, and the optimizer's state if it has any, of which every rank reads what it keeps."""

    def __init__(
        self, model: OpenFolder, states: Mapping[str, NamedTensors], num_updates: int, num_tokens: int
    ) -> None:
        """Read a model with a vocabulary of `num_tokens`, and `states` of its tensors by their kinds."""
        super().__init__([model], num_tokens)
        self._model = model
        self._states = {
            kind: PretrainedWeights([OpenFolder(tensors, model.sources, model.units, ())], num_tokens)
            for kind, tensors in states.items()
        }
        self.num_updates = num_updates

    @property
    def folder(self) -> Path:
        """Return the folder."""
        return self._model.tensors.folder

    @property
    def has_optimizer(self) -> bool:
        """Return whether the folder holds state of an optimizer."""
        return bool(self._states)

    def fill_saved(self, values: "torch.Tensor", name: str, spec: ParamSpec, tp_rank: int, tp: int, first: int) -> bool:
        """Fill elements of this rank's flattened shard of what a checkpoint would hold under `name`.

        Return False for parameters that the folder lacks, and for state of tensors that had none.

        Raises:
            UserError: the folder's optimizer holds nothing of this kind for any tensor.
        """
        _, mark, kind = name.partition(STATE_MARK)
        if not mark:
            return self.fill_range(values, spec, tp_rank, tp, first)
        if kind not in self._states:
            raise UserError(
                f"train.init_optimizer: the optimizer in {self.folder} holds no {kind}, which that of this recipe "
                f"needs; it holds {', '.join(self._states)}. Leave train.init_optimizer out to start the optimizer anew"
            )
        tensors, source = self._states[kind], self._model.sources.get(spec.name)
        if is_adapter(spec.name) or source is None:
            return False
        stored = tensors.tensors_of(spec)
        return all(name in stored for name in source.tensor_shapes()) and tensors.fill_range(
            values, spec, tp_rank, tp, first
        )


def open_dcp(recipe: Recipe) -> DcpWeights:
    """Open the DCP folder of `train.init_from` for the model of a recipe.

    Its tensors are named as in the folder of `model.hf`, or as a new folder of the model's family names them, with or
    without the prefix `model.`.

    Raises:
        ModelFolderError: the folder is damaged, or of another model.
        UserError: no family can hold the model, or there is no optimizer to start from.
    """
    path = recipe.train.init_from
    assert path is not None
    try:
        stored = DcpFolder(path)
    except ModelFolderError as error:
        raise ModelFolderError(f"{_SETTING}: {error}") from None
    described = _describe_model(recipe, path)
    model = NamedTensors(stored, _model_keys(stored, described))
    matched = match_tensors(described, model, _SETTING)
    fresh = tuple(dict.fromkeys(name.rpartition(".")[0] for name in matched.fresh))
    opened = OpenFolder(model, matched.sources, tuple(described.settings.model), fresh)
    states, num_updates = _optimizer_states(stored)
    if recipe.train.init_optimizer and not states:
        raise UserError(
            f"train.init_optimizer: {path} holds no state of an optimizer (keys that start with "
            f"{' or '.join(_OPTIMIZER_PREFIXES)}); leave train.init_optimizer out to start the optimizer anew"
        )
    weights = DcpWeights(opened, states, num_updates, recipe.model.llm.vocab)
    if recipe.train.init_optimizer and weights.num_new_tokens:
        raise UserError(
            f"train.init_optimizer: the recipe has {weights.num_new_tokens} tokens that {path} lacks, and so does its "
            "optimizer; leave train.init_optimizer out to start the optimizer anew"
        )
    return weights


def _describe_model(recipe: Recipe, path: Path) -> ModelFolder:
    """Return the family that names the tensors of the recipe's model; the model's folder stands for `path`."""
    source = source_folder(recipe)
    if source is not None:
        family, settings, has_own_head = source.family, source.settings, source.has_own_head
    else:
        new = describe_new_folder(recipe)
        family, settings, has_own_head = new.family, new.settings, False
    return ModelFolder(path, family, settings, has_own_head, config={}, config_sha256="")


def _model_keys(stored: DcpFolder, described: ModelFolder) -> dict[str, str]:
    """Return the keys of the model's tensors by the names that a Hugging Face folder gives them."""
    bare = {key: key for key in stored.tensors if key.partition(".")[0] not in _OTHER_KEYS}
    prefix = f"{MODEL_KEY}."
    inner = {key.removeprefix(prefix): key for key in bare if key.startswith(prefix)}
    family = described.family
    layouts = [layout for layout in (family.weights, family.other_layout) if layout is not None]
    expected = [
        {tensor for source in respell(layout(described.settings), spelling) for tensor in source.tensor_shapes()}
        for layout in layouts
        for spelling in family.spellings
    ]
    return max((bare, inner), key=lambda keys: max(len(names & keys.keys()) for names in expected))


def _optimizer_states(stored: DcpFolder) -> tuple[dict[str, NamedTensors], int]:
    """Return what the optimizer holds of tensors by kind, such as `exp_avg`, and the number of its updates."""
    keys_of_kind: dict[str, dict[str, str]] = {}
    num_updates = 0
    for key in stored.tensors:
        prefix = next((prefix for prefix in _OPTIMIZER_PREFIXES if key.startswith(prefix)), None)
        if prefix is None:
            continue
        name, _, kind = key.removeprefix(prefix).rpartition(".")
        if kind == STEP_KEY:
            num_updates = num_updates or int(stored.read(key, ()))
        else:
            keys_of_kind.setdefault(kind, {})[name] = key
    return {kind: NamedTensors(stored, keys) for kind, keys in keys_of_kind.items()}, num_updates
