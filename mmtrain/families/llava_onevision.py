"""LLaVA-OneVision (arXiv 2408.03326): LLaVA-NeXT with SigLIP and Qwen2, for pictures of any size and videos.

They are computed as `LlavaOnevisionForConditionalGeneration` of `transformers` does.
"""

import re
from dataclasses import replace

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import MEDIA_TOKENS, Family, FolderSettings, tiny_decoder, tiny_token_id
from mmtrain.families.image_processors import LLAVA_ONEVISION_PINPOINTS
from mmtrain.families.llava import LLAVA_SPELLINGS, TINY_LLAVA, llava_buffers
from mmtrain.families.llava_files import LLAVA_ONEVISION_WRITER
from mmtrain.families.llava_next import llava_next_settings, llava_next_weights
from mmtrain.families.siglip import TINY_SIGLIP
from mmtrain.families.video_processors import FRAME_COUNT

_HALF = (0.5, 0.5, 0.5)
_TINY_PINPOINTS = [[32 * rows, 32 * cols] for rows in (1, 2, 3) for cols in (1, 2, 3)]
_TINY_ASPECT = "anyres_max_4"
_TINY = {
    **TINY_LLAVA,
    "architectures": ["LlavaOnevisionForConditionalGeneration"],
    "model_type": "llava_onevision",
    "video_token_index": tiny_token_id(MEDIA_TOKENS["video"]),
    "image_grid_pinpoints": _TINY_PINPOINTS,
    "vision_aspect_ratio": _TINY_ASPECT,
    "text_config": tiny_decoder(model_type="qwen2"),
    "vision_config": TINY_SIGLIP,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
_TINY_IMAGES = {
    "image_processor_type": "LlavaOnevisionImageProcessor",
    "size": {"height": 32, "width": 32},
    "image_grid_pinpoints": _TINY_PINPOINTS,
    "image_mean": _HALF,
    "image_std": _HALF,
}
_TINY_VIDEOS = {
    "video_processor_type": "LlavaOnevisionVideoProcessor",
    "size": {"height": 32, "width": 32},
    "image_mean": _HALF,
    "image_std": _HALF,
}
_TINY_PROCESSOR = {
    "processor_class": "LlavaOnevisionProcessor",
    "num_image_tokens": 16,
    "vision_feature_select_strategy": "full",
    "image_token": MEDIA_TOKENS["image"],
    "video_token": MEDIA_TOKENS["video"],
    "vision_aspect_ratio": _TINY_ASPECT,
}


def _settings(config: ConfigSection) -> FolderSettings:
    config.pass_over("video_token_id", "video_token_index")  # they belong to text and tokenizer
    folder = llava_next_settings(config, LLAVA_ONEVISION_PINPOINTS, "qwen2", -1, "full")
    vision = {**folder.model["vision"], "max_joined_tiles": _most_tiles(config), "pool_frames": True}
    image = {**folder.data["image"], "tile_several": False}
    return replace(
        folder,
        model={**folder.model, "vision": vision},
        data={**folder.data, "image": image, "video": {"sampling": "parts", **FRAME_COUNT}},
    )


def _most_tiles(config: ConfigSection) -> int:
    """Return as many tiles as the joined picture may have features of."""
    aspect = config.value("vision_aspect_ratio") or "anyres_max_9"
    found = re.fullmatch(r"anyres_max_([1-9][0-9]*)", str(aspect))
    if found is None:
        config.reject("vision_aspect_ratio", f"{aspect!r} is not supported yet; supported: anyres_max_9 and alike")
        return 9
    return int(found[1])


LLAVA_ONEVISION = Family(
    "llava_onevision",
    ("LlavaOnevisionForConditionalGeneration",),
    _settings,
    llava_next_weights,
    {
        "config.json": _TINY,
        "preprocessor_config.json": _TINY_IMAGES,
        "video_preprocessor_config.json": _TINY_VIDEOS,
        "processor_config.json": _TINY_PROCESSOR,
    },
    spellings=LLAVA_SPELLINGS,
    video_type="LlavaOnevisionVideoProcessor",
    ignored=llava_buffers,
    writer=LLAVA_ONEVISION_WRITER,
)
