"""The door to `mmtrain.guests`, which nothing else imports: stages and parameters of models of `transformers`.

The room imports `transformers`, so it is imported where one is built.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from mmtrain.models.shapes.model_shape import ModelShape
from mmtrain.recipe.settings.model_settings import ModelSettings

if TYPE_CHECKING:
    from mmtrain.guests import GuestNames
    from mmtrain.models.megatron import LayerFactory
    from mmtrain.models.stage.guest_stage import GuestStage
    from mmtrain.models.stage.stage_module import StageSpec

GUEST_PREFIX = "llm.guest."  # of the plan-independent names of parameters, before the names of `transformers`


def guest_parameters(folder: Path) -> "GuestNames":
    """Return the parameters of the model in a folder.

    Raises UserError and ModelFolderError for a model that is no guest; see `mmtrain.guests.guest_names`.
    """
    from mmtrain.guests import guest_names

    return guest_names(folder)


def build_guest_stage(
    settings: ModelSettings, shape: ModelShape, spec: "StageSpec", factory: "LayerFactory"
) -> "GuestStage":
    """Build the whole LLM as one stage, with uninitialized weights. Raises as `guest_parameters`."""
    from mmtrain.guests import PACKED_ATTENTION, attending, build_guest
    from mmtrain.models.stage.guest_stage import GuestParts, GuestStage

    assert settings.hf is not None, "a guest starts from a folder"
    modules = build_guest(settings.hf, factory.dtype)
    packs = attending if modules.attention == PACKED_ATTENTION else None
    return GuestStage(settings, shape, spec, factory, GuestParts(modules.model, modules.blocks, modules.base, packs))
