"""LLaVA-NeXT (LLaVA-1.6): a LLaVA that sees a picture as a whole and in tiles, whose features are joined again.

They are computed as `LlavaNextForConditionalGeneration` of `transformers` does.
"""

from collections.abc import Iterator
from dataclasses import replace

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import tied_by_outer
from mmtrain.families.family import Family, FolderSettings
from mmtrain.families.image_processors import LLAVA_NEXT_PINPOINTS, Canvases, read_canvases
from mmtrain.families.llava import (
    LLAVA_SPELLINGS,
    NEWLINE,
    TINY_IMAGES,
    TINY_LLAVA,
    TINY_PROCESSOR,
    llava_buffers,
    llava_settings,
    llava_weights,
)
from mmtrain.families.llava_files import LLAVA_NEXT_WRITER
from mmtrain.families.weight_layouts import ParameterSource, as_is

_TINY_PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]
_TINY = {
    **TINY_LLAVA,
    "architectures": ["LlavaNextForConditionalGeneration"],
    "model_type": "llava_next",
    "image_grid_pinpoints": _TINY_PINPOINTS,
}
_TINY_IMAGES = {
    **TINY_IMAGES,
    "image_processor_type": "LlavaNextImageProcessor",
    "image_grid_pinpoints": _TINY_PINPOINTS,
}


def _settings(config: ConfigSection) -> FolderSettings:
    folder = llava_next_settings(config, LLAVA_NEXT_PINPOINTS)
    return replace(folder, model={**folder.model, "llm": tied_by_outer(config, folder.model["llm"])})


def llava_next_settings(
    config: ConfigSection,
    pinpoints: Canvases,
    text_type: str = "llama",
    feature_layer: int = -2,
    strategy: str = "default",
) -> FolderSettings:
    """Return the settings of a LLaVA whose tiles are joined, with what the family assumes if the config does not say.

    pinpoints: its canvases; for the others see `llava_settings`.
    """
    config.require("use_image_newline_parameter", True, default=True)
    pinpoints = read_canvases(config, pinpoints)
    folder = llava_settings(config, text_type, feature_layer, strategy)
    vision, image = folder.model["vision"], folder.data["image"]
    if vision["class_feature"]:
        config.reject("vision_feature_select_strategy", '"full" is not supported with CLIP; supported: "default"')
    tiles = {key: value for key, value in image.items() if key not in ("fit", "size")}
    tiles |= {"scheme": "pinpoints", "tile": image["size"], "pinpoints": pinpoints}
    model = {**folder.model, "vision": {**vision, "class_feature": False, "join_tiles": True}}
    return replace(folder, model=model, data={**folder.data, "image": tiles})


def llava_next_weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    """Yield the weights of a LLaVA with a newline."""
    yield from llava_weights(settings)
    projector = settings.model["vision"]["layers"] + 1
    newline = as_is(f"vision.layers.{projector}.newline", NEWLINE, (settings.model["llm"]["hidden"],))
    yield replace(newline, may_be_missing=True)


LLAVA_NEXT = Family(
    "llava_next",
    ("LlavaNextForConditionalGeneration",),
    _settings,
    llava_next_weights,
    {
        "config.json": _TINY,
        "preprocessor_config.json": _TINY_IMAGES,
        "processor_config.json": {**TINY_PROCESSOR, "processor_class": "LlavaNextProcessor"},
    },
    spellings=LLAVA_SPELLINGS,
    ignored=llava_buffers,
    writer=LLAVA_NEXT_WRITER,
)
