"""The vision towers that several families put before an LLM, chosen by the `model_type` of their config."""

from collections.abc import Iterator

from mmtrain.families.clip import MEAN, STD, clip_settings, clip_weights, unused_clip_weights
from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Settings
from mmtrain.families.siglip import siglip_settings, siglip_weights, unused_siglip_weights
from mmtrain.families.weight_layouts import ParameterSource

TOWERS = ("clip_vision_model", "siglip_vision_model")


def tower_settings(tower: ConfigSection, feature_layer: int, strategy: str) -> Settings:
    """Return the settings of a tower without its projector.

    strategy: which of the tokens of `hidden_states[feature_layer]` are features: all (`full`), or all but the first one
        (`default`), which is the class token.
    """
    if _is_siglip(tower):
        if strategy != "full":
            tower.reject("model_type", f"{strategy!r} features of a tower without class token; supported: 'full'")
        return siglip_settings(tower, feature_layer)
    return {**clip_settings(tower, feature_layer), "class_feature": strategy == "full"}


def tower_images(tower: ConfigSection) -> Settings:
    """Return how pictures are prepared for a tower whose folder has no processor: as for its own release."""
    if _is_siglip(tower):
        half = (0.5, 0.5, 0.5)
        special: Settings = {"fit": "stretch", "mean": half, "std": half, "partial_patches": "drop"}
    else:
        special = {"fit": "crop", "mean": MEAN, "std": STD, "partial_patches": "reject"}
    return {
        "scheme": "fixed",
        "size": tower.integer("image_size", 224),
        "resample": "bicubic",
        "decode": "full",
        **special,
    }


def tower_weights(vision: Settings, model: str) -> Iterator[ParameterSource]:
    """Yield the weights of the tower, without its projector; `model` is the prefix of its tensors."""
    yield from clip_weights(vision, model) if vision["class_token"] else siglip_weights(vision, model)


def unused_tower_weights(vision: Settings, tower: ConfigSection, model: str) -> Iterator[ParameterSource]:
    """Yield the weights of the tower that the features do not depend on."""
    num_blocks = tower.integer("num_hidden_layers", 12)
    if vision["class_token"]:
        yield from unused_clip_weights(vision, num_blocks, model)
    else:
        has_head = tower.flag("vision_use_head", True)
        yield from unused_siglip_weights(vision, num_blocks, has_head, model)


def _is_siglip(tower: ConfigSection) -> bool:
    kind = tower.value("model_type") or TOWERS[0]
    if kind not in TOWERS:
        tower.reject("model_type", f"{kind!r} is not supported yet; supported: {', '.join(TOWERS)}")
    return bool(kind == TOWERS[1])
