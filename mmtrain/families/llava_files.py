"""Write the JSON files of a LLaVA folder from settings: its config, and those of its processors."""

from mmtrain.families.decoder_config import decoder_config
from mmtrain.families.folder_files import CONFIG_FILE, IMAGE_PROCESSOR_FILE, PROCESSOR_FILE
from mmtrain.families.new_image_processor import clip_image_processor
from mmtrain.families.new_model import FolderWriter, JsonFiles, NewModel

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu"}


def _files(model: NewModel) -> JsonFiles:
    """Return the files of a model that has the features of its encoder's last block, before a last norm.

    An encoder with a class token, whose feature is dropped, is CLIP's; one without is SigLIP's.
    """
    vision = model.units["vision"]
    is_clip = vision["class_token"]
    strategy = "default" if is_clip else "full"
    text = decoder_config(model)
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": model.feature_tokens["vision"],
        "image_seq_length": vision["max_side"] ** 2,
        "projector_hidden_act": _ACTIVATIONS.get(vision["projector"]["activation"], "gelu"),
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": strategy,
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
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": vision["patch"],
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": int(is_clip),
    }
    images = {**clip_image_processor(model.image), "processor_class": "LlavaProcessor"}
    return {CONFIG_FILE: config, IMAGE_PROCESSOR_FILE: images, PROCESSOR_FILE: processor}


def _image_size(model: NewModel) -> int:
    """Return the side of a picture in pixels, with those at its edge that fill no patch."""
    vision, image = model.units["vision"], model.image
    side: int = vision["max_side"] * vision["patch"]
    size: int = image["size"]
    has_rest = image["scheme"] == "fixed" and image["partial_patches"] == "drop" and 0 < size - side < vision["patch"]
    return size if has_rest else side


LLAVA_WRITER = FolderWriter(frozenset({"vision", "llm"}), _files)
