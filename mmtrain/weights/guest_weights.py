"""The parameters of a guest: which tensor of its folder each is, and what a run says of them at its start."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from mmtrain.costs.layer_arithmetic import num_parameters as count_planned
from mmtrain.errors import ModelFolderError
from mmtrain.families import ModelFolder, read_model_folder
from mmtrain.families.stored_tensors import are_equal, read_headers
from mmtrain.families.weight_layouts import as_is
from mmtrain.models.guest_factory import GUEST_PREFIX, guest_parameters
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.recipe import Recipe

_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # that older versions stored beside parameters


def with_guest_weights(folder: ModelFolder) -> ModelFolder:
    """Return the folder of a guest with what its parameters are made of; that of a family as it is.

    Raises UserError and ModelFolderError for a model that `transformers` does not build here, or that is no guest.
    """
    if not folder.is_guest:
        return folder
    names = guest_parameters(folder.path)
    _require_tied(folder, names.copies)
    sources = tuple(as_is(f"{GUEST_PREFIX}{name}", name, shape) for name, shape in names.parameters.items())
    ignored = (*_BUFFERS, *names.copies)
    spellings = ((), ((f"{names.base}.", ""),))
    family = replace(folder.family, weights=lambda _: iter(sources), spellings=spellings, ignored=lambda _: ignored)
    return replace(folder, family=family)


def describe_guest(recipe: Recipe) -> str | None:
    """Say what the guest of a recipe is and cannot have, and how its plans are made; None for a model of a family.

    Raises as `with_guest_weights`.
    """
    path = recipe.model.hf
    if not recipe.model.guest or path is None:
        return None
    folder = read_model_folder(path, as_guest=True)
    names = guest_parameters(folder.path)
    num_parameters = sum(map(prod, names.parameters.values()))
    num_planned = sum(map(count_planned, build_model_shape(recipe).unit("llm").layers))
    return (
        f"guest: {names.model} has {num_parameters:,} parameters, in modules of transformers "
        f"{names.version}. It runs in `replicated` alone: no tensor, pipeline, context or expert parallelism, "
        f"LoRA, freezing or Muon, which the family nearest to it, {folder.nearest_family}, has. Plans take it for a "
        f"decoder of the same sizes, with {num_planned:,} parameters (docs/guests.md)"
    )


def _require_tied(folder: ModelFolder, copies: Mapping[str, str]) -> None:
    """Raise ModelFolderError for a folder that holds tied matrices with values of their own.

    copies: names of tied ones, with the name of the first.
    """
    try:
        stored = read_headers(folder.path)
    except ModelFolderError:
        return  # whoever opens the weights says so
    for copy, name in copies.items():
        if copy in stored and name in stored and not are_equal(folder.path, stored[copy], stored[name]):
            raise ModelFolderError(
                f"{folder.path} holds a {copy} of its own, although its config.json ties it to {name}; state "
                "`tie_word_embeddings: false` there"
            )
