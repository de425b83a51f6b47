"""Qwen2.5-VL (arXiv 2502.13923), as `Qwen2_5_VLForConditionalGeneration` of `transformers` computes it."""

from collections.abc import Iterator

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import decoder_buffers, decoder_weights
from mmtrain.families.family import TINY_QWEN_TOWER, Family, FolderSettings, Settings
from mmtrain.families.qwen2_vl import (
    DECODER,
    MEDIA_SETTINGS,
    SPELLINGS,
    TINY,
    TINY_IMAGES,
    TOWER,
    text_settings,
    tower_settings,
    tower_weights,
)
from mmtrain.families.weight_layouts import ParameterSource, as_is, gate_and_up

_DEFAULT_FULL_BLOCKS = [7, 15, 23, 31]
_TINY = {
    **TINY,
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "text_config": {**TINY["text_config"], "model_type": "qwen2_5_vl_text"},
    "vision_config": {
        "model_type": "qwen2_5_vl_vision",
        **TINY_QWEN_TOWER,
        "tokens_per_second": 2,
        "window_size": 32,
        "fullatt_block_indexes": [1],
    },
}


def _settings(config: ConfigSection) -> FolderSettings:
    llm = text_settings(config)
    tower = config.section("vision_config")
    per_second = float(tower.integer("tokens_per_second", 4))
    vision = {
        **windowed_tower_settings(tower, llm["hidden"]),
        "time_positions_per_second": per_second,
        "patch_seconds": "sampled",
    }
    tower.finish()
    return FolderSettings({"vision": vision, "llm": llm}, MEDIA_SETTINGS)


def windowed_tower_settings(tower: ConfigSection, llm_hidden: int) -> Settings:
    """Return the settings of an encoder with windows, but those of time."""
    common = tower_settings(tower, tower.integer("hidden_size", 3584))
    tower.require("out_hidden_size", llm_hidden, default=3584)
    tower.require("hidden_act", "silu", default="silu")
    patch, merge = common["patch"], common["merge"]
    return {
        **common,
        "ffn": tower.integer("intermediate_size", 3420),
        "activation": "silu",
        "gated_mlp": True,
        "norm": "rms",
        "window": tower.integer("window_size", 112) // merge // patch * merge,  # whole merged squares
        "full_attention_blocks": _full_attention_blocks(tower, common["layers"]),
    }


def _full_attention_blocks(tower: ConfigSection, num_blocks: int) -> tuple[int, ...]:
    value = tower.value("fullatt_block_indexes")
    blocks = _DEFAULT_FULL_BLOCKS if value is None else value
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        tower.reject("fullatt_block_indexes", f"found {blocks}, allowed: a list of whole numbers")
        return ()
    return tuple(block for block in blocks if 0 <= block < num_blocks)


def _weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    yield from windowed_tower_weights(settings)
    yield from decoder_weights(settings, DECODER)


def windowed_tower_weights(settings: FolderSettings, joint_projections: bool = True) -> Iterator[ParameterSource]:
    """Yield the weights of the encoder and its merger; see `qwen2_vl.tower_weights`."""
    vision = settings.model["vision"]
    hidden, ffn = vision["hidden"], vision["ffn"]
    yield from tower_weights(settings, ("weight",), joint_projections)
    for block in range(vision["layers"]):
        ours, theirs = f"vision.layers.{block + 1}.mlp.", f"{TOWER}blocks.{block}.mlp."
        for kind, inputs, inner_inputs in (("weight", (hidden,), (ffn,)), ("bias", (), ())):
            gate, up = f"{theirs}gate_proj.{kind}", f"{theirs}up_proj.{kind}"
            yield gate_and_up(f"{ours}linear_fc1.{kind}", gate, up, (ffn, *inputs))
            yield as_is(f"{ours}linear_fc2.{kind}", f"{theirs}down_proj.{kind}", (hidden, *inner_inputs))


QWEN2_5_VL = Family(
    "qwen2_5_vl",
    ("Qwen2_5_VLForConditionalGeneration",),
    _settings,
    _weights,
    {
        "config.json": _TINY,
        "preprocessor_config.json": {**TINY_IMAGES, "processor_class": "Qwen2_5_VLProcessor"},
    },
    spellings=SPELLINGS,
    video_type="Qwen2VLVideoProcessor",
    ignored=decoder_buffers,
)
