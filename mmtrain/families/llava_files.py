"""Write the JSON files of a LLaVA folder from settings: its config, and those of its processors.

LLaVA-NeXT and LLaVA-OneVision are LLaVAs that join tiles, with processors of their own.
"""

from typing import Any

from mmtrain.families.decoder_config import decoder_config
from mmtrain.families.family import FolderWriter, JsonFiles, NewModel
from mmtrain.families.folder_files import CONFIG_FILE, IMAGE_PROCESSOR_FILE, PROCESSOR_FILE, VIDEO_PROCESSOR_FILE
from mmtrain.families.image_processors import (
    clip_image_processor,
    llava_next_image_processor,
    llava_onevision_processors,
)

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu"}


def _files(model: NewModel) -> JsonFiles:
    images = {**clip_image_processor(model.image), "processor_class": "LlavaProcessor"}
    return {
        CONFIG_FILE: _config(model),
        IMAGE_PROCESSOR_FILE: images,
        PROCESSOR_FILE: _processor(model, "LlavaProcessor"),
    }


def _next_files(model: NewModel) -> JsonFiles:
    """Return the files of a LLaVA-NeXT."""
    tiles = {"image_grid_pinpoints": _pinpoints(model)}
    config = {"architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next", **tiles}
    images = {**llava_next_image_processor(model.image), **tiles, "processor_class": "LlavaNextProcessor"}
    return {
        CONFIG_FILE: {**_config(model), **config},
        IMAGE_PROCESSOR_FILE: images,
        PROCESSOR_FILE: _processor(model, "LlavaNextProcessor"),
    }


def _onevision_files(model: NewModel) -> JsonFiles:
    """Return the files of a LLaVA-OneVision."""
    vision = model.units["vision"]
    name, tiles = "LlavaOnevisionProcessor", {"image_grid_pinpoints": _pinpoints(model)}
    aspect = f"anyres_max_{vision['max_joined_tiles'] or 9}"
    config = {
        **_config(model),
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "model_type": "llava_onevision",
        "video_token_index": model.video_token,
        "vision_aspect_ratio": aspect,
        **tiles,
    }
    images, videos = llava_onevision_processors(model.image)
    processor = {
        "processor_class": name,
        "num_image_tokens": vision["max_side"] ** 2,
        "vision_feature_select_strategy": _strategy(model),
        "vision_aspect_ratio": aspect,
    }
    return {
        CONFIG_FILE: config,
        IMAGE_PROCESSOR_FILE: {**images, **tiles, "processor_class": name},
        VIDEO_PROCESSOR_FILE: {**videos, "processor_class": name},
        PROCESSOR_FILE: processor,
    }


def _pinpoints(model: NewModel) -> list[list[int]]:
    return [list(canvas) for canvas in model.image["pinpoints"]]


def _processor(model: NewModel, name: str) -> dict[str, Any]:
    vision = model.units["vision"]
    return {
        "processor_class": name,
        "patch_size": vision["patch"],
        "vision_feature_select_strategy": _strategy(model),
        "num_additional_image_tokens": int(vision["class_token"]),
    }


def _strategy(model: NewModel) -> str:
    return "default" if model.units["vision"]["class_token"] else "full"


def _config(model: NewModel) -> dict[str, Any]:
    """Return the config of a model that has the features of its encoder's last block, before a last norm.

    An encoder with a class token, whose feature is dropped, is CLIP's; one without is SigLIP's.
    """
    vision = model.units["vision"]
    is_clip = vision["class_token"]
    text = decoder_config(model)
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": model.feature_tokens["vision"],
        "image_seq_length": vision["max_side"] ** 2,
        "projector_hidden_act": _ACTIVATIONS.get(vision["projector"]["activation"], "gelu"),
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": _strategy(model),
        "tie_word_embeddings": text["tie_word_embeddings"],
        "eos_token_id": text["eos_token_id"],
        "text_config": text,
        "vision_config": {
            "model_type": "clip_vision_model" if is_clip else "siglip_vision_model",
            "hidden_size": vision["hidden"],
            "intermediate_size": vision["ffn"],
            "num_hidden_layers": vision["layers"],
            "num_attention_heads": vision["heads"],
            "image_size": _image_size(model),
            "patch_size": vision["patch"],
            "hidden_act": _ACTIVATIONS.get(vision["activation"], "gelu"),
            "layer_norm_eps": vision["norm_eps"],
            **({} if is_clip else {"vision_use_head": False}),
        },
    }


def _image_size(model: NewModel) -> int:
    """Return the side of a picture in pixels, with those at its edge that fill no patch."""
    vision, image = model.units["vision"], model.image
    side: int = vision["max_side"] * vision["patch"]
    size: int = image["tile" if image["scheme"] == "pinpoints" else "size"]
    has_rest = (
        image["scheme"] in ("fixed", "pinpoints")
        and image["partial_patches"] == "drop"
        and 0 < size - side < vision["patch"]
    )
    return size if has_rest else side


_UNITS = frozenset({"vision", "llm"})
LLAVA_WRITER = FolderWriter(_UNITS, _files)
LLAVA_NEXT_WRITER = FolderWriter(_UNITS, _next_files)
LLAVA_ONEVISION_WRITER = FolderWriter(_UNITS, _onevision_files)
