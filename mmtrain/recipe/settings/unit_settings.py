"""What the settings of encoders and the LLM have in common."""

from pathlib import Path

from mmtrain.recipe.settings.base import PositiveInt, Section, setting

PRESET_DESCRIPTION = "Name of a published model. Its settings are used for all that the recipe does not set itself."


class UnitSettings(Section):
    """What encoders and the LLM have in common."""

    layers: PositiveInt = setting(affects={"plan", "steps", "resume"}, description="Number of transformer blocks.")
    hidden: PositiveInt = setting(affects={"plan", "steps", "resume"}, description="Width of the residual stream.")
    hf: Path | None = setting(
        None,
        affects={"resume"},
        description="A pretrained model, named as in `model.hf`, from which this unit alone starts: an encoder without "
        "its projector, or an LLM with its tokenizer.",
    )
    lr_scale: float = setting(1.0, ge=0, affects={"resume"}, description="Factor on the learning rate of this unit.")
    weight_decay: float | None = setting(
        None,
        ge=0,
        affects={"resume"},
        description="Weight decay of this unit. Default: train.optimizer.weight_decay.",
    )
