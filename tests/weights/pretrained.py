"""Tiny pretrained models, written by `transformers`, and recipes that start from them."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmtrain.models.optim.parameter_specs import stage_param_specs
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.recipe import Recipe, load_recipe
from tests.models.factory import randomize

VOCAB = 61  # padded to 64; what `tests.flow.cases` draws its words from


def qwen2(**changes: Any) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings: dict[str, Any] = {
        "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "rope_theta": 1e6, "tie_word_embeddings": True,
    }  # fmt: skip
    return _random(Qwen2ForCausalLM(Qwen2Config(**settings | changes)))


def qwen3(**changes: Any) -> nn.Module:
    """Make a Qwen3 whose heads are together wider than the residual stream."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings: dict[str, Any] = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 20, "vocab_size": VOCAB, "rope_theta": 1e6,
    }  # fmt: skip
    return _random(Qwen3ForCausalLM(Qwen3Config(**settings | changes)))


def qwen3_moe(**changes: Any) -> nn.Module:
    """Make a Qwen3 with mixtures of experts in all blocks but the third."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings: dict[str, Any] = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 20, "vocab_size": VOCAB, "rope_theta": 1e6, "num_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 28, "norm_topk_prob": True, "mlp_only_layers": [2],
    }  # fmt: skip
    return _random(Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings | changes)))


def mixtral(**changes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    settings: dict[str, Any] = {
        "hidden_size": 48, "intermediate_size": 28, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "num_local_experts": 6, "num_experts_per_tok": 2,
    }  # fmt: skip
    return _random(MixtralForCausalLM(MixtralConfig(**settings | changes)))


def qwen2_moe(**changes: Any) -> nn.Module:
    """Make a Qwen2 with mixtures of experts, and a shared expert with a gate, in every second block."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    settings: dict[str, Any] = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 28, "shared_expert_intermediate_size": 36, "decoder_sparse_step": 2,
    }  # fmt: skip
    return _random(Qwen2MoeForCausalLM(Qwen2MoeConfig(**settings | changes)))


def glm4_moe(**changes: Any) -> nn.Module:
    """Make a GLM-4.5 whose first block is dense; its selection biases decide which experts compute a token."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    settings: dict[str, Any] = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 24, "vocab_size": VOCAB, "n_routed_experts": 8, "n_shared_experts": 2,
        "num_experts_per_tok": 3, "moe_intermediate_size": 28, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2, "attention_bias": True, "use_qk_norm": True,
        "rope_theta": 1e6,
    }  # fmt: skip
    return _with_selection_biases(_random(Glm4MoeForCausalLM(Glm4MoeConfig(**settings | changes))))


def _with_selection_biases(model: nn.Module) -> nn.Module:
    """Let selection biases decide which experts compute a token."""
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.linspace(-0.3, 0.3, len(bias)).roll(3))
    return model


def gemma3_text(**changes: Any) -> nn.Module:
    """Make the LLM of a Gemma 3 whose second and fourth layer see all tokens."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    settings: dict[str, Any] = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 20, "vocab_size": VOCAB, "sliding_window": 16,
        "sliding_window_pattern": 2, "query_pre_attn_scalar": 33,
        "pad_token_id": None,  # else its embedding has no gradient in `transformers`
    }  # fmt: skip
    return _random(Gemma3ForCausalLM(Gemma3TextConfig(**settings | changes)))


def gemma4_text(**changes: Any) -> nn.Module:
    """Make the LLM of a Gemma 4 whose second and fourth layer see all tokens, with heads of another width."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    settings: dict[str, Any] = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 20, "global_head_dim": 32, "vocab_size": VOCAB, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 2.0,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 0,
        "pad_token_id": None,  # else its embedding has no gradient in `transformers`
    }  # fmt: skip
    model = _random(Gemma4ForCausalLM(Gemma4TextConfig(**settings | changes)))
    for i, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.7 + 0.1 * i)
    return model


def gemma4_small(**changes: Any) -> nn.Module:
    """Make the LLM of a small Gemma 4: inputs of single layers, and layers that read keys and values of others."""
    kinds = ["sliding_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"]
    settings: dict[str, Any] = {
        "num_hidden_layers": len(kinds), "layer_types": kinds, "attention_k_eq_v": False, "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "num_key_value_heads": 1,
    }  # fmt: skip
    return gemma4_text(**settings | changes)


def gemma4(standardize: bool = True, pooling: int = 2, **text: Any) -> nn.Module:
    """Make a Gemma 4 that joins squares of `pooling` x `pooling` patches, with pictures that see themselves."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4VisionConfig

    tower = Gemma4VisionConfig(
        hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        head_dim=8, patch_size=PATCH, pooling_kernel_size=pooling, position_embedding_size=64, standardize=standardize,
    )  # fmt: skip
    decoder = gemma4_text(**{"use_bidirectional_attention": "vision", "pad_token_id": 0} | text).config
    tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": 1, "audio_token_id": 2}
    config = Gemma4Config(text_config=decoder, vision_config=tower, audio_config=None, **tokens)
    model = _random(Gemma4ForConditionalGeneration(config))
    for name, buffer in model.named_buffers():
        if name.endswith(("std_bias", "std_scale", "layer_scalar")):
            buffer.copy_(torch.linspace(0.5, 1.5, len(buffer)).roll(3))
    return model


GEMMA_END_TOKEN = 2  # behind an image


def gemma3(window: int = 16, num_features: int = 4, tower: Any = None, **text: Any) -> nn.Module:
    """Make a Gemma 3 with `num_features` for each image of `IMAGE_SIDE` x `IMAGE_SIDE` patches."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    decoder = gemma3_text(**{"sliding_window": window} | text).config
    config = Gemma3Config(
        text_config=decoder, vision_config=tower or siglip(image_size=IMAGE_SIDE * PATCH, vision_use_head=False),
        mm_tokens_per_image=num_features, boi_token_index=1, eoi_token_index=GEMMA_END_TOKEN,
        image_token_index=IMAGE_TOKEN,
    )  # fmt: skip
    return _random(Gemma3ForConditionalGeneration(config))


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    settings: dict[str, Any] = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "rope_parameters": rope,
    }  # fmt: skip
    return _random(LlamaForCausalLM(LlamaConfig(**settings | changes)))


def mistral(window: int | None = None) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=12, vocab_size=VOCAB, sliding_window=window,
    )  # fmt: skip
    return _random(MistralForCausalLM(config))


IMAGE_TOKEN = 3
IMAGE_SIDE, PATCH = 4, 4  # patches on an image's side, pixels on a patch's side


def clip(**changes: Any) -> Any:
    """Make the config of a CLIP tower."""
    from transformers import CLIPVisionConfig

    return CLIPVisionConfig(**_tower() | {"projection_dim": 16} | changes)


def siglip(**changes: Any) -> Any:
    """Make the config of a SigLIP tower, whose pictures have a rest beside whole patches."""
    from transformers import SiglipVisionConfig

    return SiglipVisionConfig(**_tower() | {"image_size": IMAGE_SIDE * PATCH + 2} | changes)


def _tower() -> dict[str, Any]:
    return {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "image_size": IMAGE_SIDE * PATCH, "patch_size": PATCH,
    }  # fmt: skip


def llava(
    text: str = "llama",
    feature_layer: int = -2,
    image_token: int = IMAGE_TOKEN,
    tower: Any = None,
    strategy: str = "default",
    **changes: Any,
) -> nn.Module:
    """Make a LLaVA whose last encoder block has no effect, as in LLaVA-1.5."""
    from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen2Config

    settings: dict[str, Any] = {
        "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB,
    } | changes  # fmt: skip
    decoder = LlamaConfig(**settings) if text == "llama" else Qwen2Config(**settings)
    config = LlavaConfig(
        vision_config=tower or clip(), text_config=decoder, image_token_index=image_token,
        vision_feature_layer=feature_layer, vision_feature_select_strategy=strategy, image_seq_length=IMAGE_SIDE**2,
    )  # fmt: skip
    return _random(LlavaForConditionalGeneration(config))


def llava_next(text: str = "mistral", tower: Any = None, strategy: str = "default", **changes: Any) -> nn.Module:
    """Make a LLaVA-NeXT whose canvases are up to three tiles long."""
    from transformers import AutoConfig, LlavaNextConfig, LlavaNextForConditionalGeneration

    decoder = AutoConfig.for_model(
        text, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=12, vocab_size=VOCAB, sliding_window=None,
    )  # fmt: skip
    tower = tower or clip()
    config = LlavaNextConfig(
        vision_config=tower, text_config=decoder, image_token_index=IMAGE_TOKEN,
        vision_feature_select_strategy=strategy, image_seq_length=IMAGE_SIDE**2,
        image_grid_pinpoints=canvases(tower.image_size), **changes,
    )  # fmt: skip
    return _random(LlavaNextForConditionalGeneration(config))


def llava_onevision(most_tiles: int = 2, **changes: Any) -> nn.Module:
    """Make a LLaVA-OneVision whose joined pictures have features of at most so many tiles."""
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, Qwen2Config

    decoder = Qwen2Config(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB,
    )  # fmt: skip
    tower = siglip(vision_use_head=False)
    config = LlavaOnevisionConfig(
        vision_config=tower, text_config=decoder, image_token_index=IMAGE_TOKEN, video_token_index=VIDEO_TOKEN,
        image_grid_pinpoints=canvases(tower.image_size), vision_aspect_ratio=f"anyres_max_{most_tiles}", **changes,
    )  # fmt: skip
    return _random(LlavaOnevisionForConditionalGeneration(config))


def canvases(tile: int) -> list[list[int]]:
    """Return those of LLaVA-NeXT for tiles of so many pixels."""
    return [[tile * rows, tile * cols] for rows, cols in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))]


AUDIO_TOKEN = 3
CLIP_FRAMES, MEL_BINS = 100, 20  # of the longest clip, of one frame


def qwen2_audio(audio_token: int = AUDIO_TOKEN, **changes: Any) -> nn.Module:
    """Make a Qwen2-Audio for clips of a second."""
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    encoder = {
        "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "num_mel_bins": MEL_BINS, "max_source_positions": CLIP_FRAMES // 2,
    }  # fmt: skip
    text: dict[str, Any] = {
        "model_type": "qwen2", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
    } | changes  # fmt: skip
    config = Qwen2AudioConfig(audio_config=encoder, text_config=text, audio_token_index=audio_token)
    return _random(Qwen2AudioForConditionalGeneration(config))


def clip_extractor() -> Any:
    """Make the feature extractor of this model."""
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=CLIP_FRAMES // 100)


def internvl(text: str = "qwen2", downsample_ratio: float = 0.5, **tower: Any) -> nn.Module:
    """Make an InternVL with tiles of `IMAGE_SIDE` x `IMAGE_SIDE` patches."""
    from transformers import (
        AutoConfig,
        InternVLConfig,
        InternVLForConditionalGeneration,
        InternVLVisionConfig,
    )

    vision = InternVLVisionConfig(**_tower() | {"attention_bias": True} | tower)
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "norm_topk_prob": True}
    decoder = AutoConfig.for_model(
        text, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCAB, tie_word_embeddings=False, **experts if text == "qwen3_moe" else {},
    )  # fmt: skip
    config = InternVLConfig(
        vision_config=vision, text_config=decoder, image_token_id=IMAGE_TOKEN, downsample_ratio=downsample_ratio,
        image_seq_length=int(IMAGE_SIDE * downsample_ratio) ** 2, tie_word_embeddings=text == "qwen2",
    )  # fmt: skip
    return _random(InternVLForConditionalGeneration(config))


VIDEO_TOKEN = 2
PATCH_OF_FRAMES, MERGE = 2, 2  # side of a patch in pixels; of a merged square in patches


def qwen2_vl(frames: int = 2, **changes: Any) -> nn.Module:
    """Make a Qwen2-VL whose patches join `frames` frames."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {
        "depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 4, "mlp_ratio": 2, "patch_size": PATCH_OF_FRAMES,
        "spatial_merge_size": MERGE, "temporal_patch_size": frames,
    }  # fmt: skip
    config = Qwen2VLConfig(text_config=_qwen2_vl_text() | changes, vision_config=vision, **_QWEN2_VL_TOKENS)
    return _random(Qwen2VLForConditionalGeneration(config))


SECONDS_PER_PATCH, POSITIONS_PER_SECOND = 1.3, 3  # of a video


def qwen2_5_vl(frames: int = 2, **changes: Any) -> nn.Module:
    """Make a Qwen2.5-VL with windows of 4 x 4 patches, which join `frames` frames."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "depth": 3, "hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 44, "num_heads": 4,
        "patch_size": PATCH_OF_FRAMES, "spatial_merge_size": MERGE, "temporal_patch_size": frames,
        "window_size": 4 * PATCH_OF_FRAMES, "fullatt_block_indexes": [1], "tokens_per_second": POSITIONS_PER_SECOND,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(text_config=_qwen2_vl_text() | changes, vision_config=vision, **_QWEN2_VL_TOKENS)
    return _random(Qwen2_5_VLForConditionalGeneration(config))


def qwen3_vl(frames: int = 2, deepstack: tuple[int, ...] = (0, 2), **changes: Any) -> nn.Module:
    """Make a Qwen3-VL with a table of 3 x 3 positions, whose patches join `frames` frames."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = {
        "depth": 4, "hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 44, "num_heads": 4,
        "patch_size": PATCH_OF_FRAMES, "spatial_merge_size": MERGE, "temporal_patch_size": frames,
        "num_position_embeddings": 9, "deepstack_visual_indexes": list(deepstack),
    }  # fmt: skip
    text: dict[str, Any] = _qwen2_vl_text() | {"num_hidden_layers": 3, "head_dim": 16}
    sections = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **sections}} | changes
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **_QWEN2_VL_TOKENS)
    return _random(Qwen3VLForConditionalGeneration(config))


def qwen3_vl_moe(frames: int = 2, deepstack: tuple[int, ...] = (0, 2), **changes: Any) -> nn.Module:
    """Make a Qwen3-VL as `qwen3_vl` does, with mixtures of experts in the first and the last block of its LLM."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    vision = {
        "depth": 4, "hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 44, "num_heads": 4,
        "patch_size": PATCH_OF_FRAMES, "spatial_merge_size": MERGE, "temporal_patch_size": frames,
        "num_position_embeddings": 9, "deepstack_visual_indexes": list(deepstack),
    }  # fmt: skip
    text: dict[str, Any] = _qwen2_vl_text() | {"num_hidden_layers": 3, "head_dim": 16}
    text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "mlp_only_layers": [1]}
    sections = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **sections}} | changes
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, **_QWEN2_VL_TOKENS)
    return _random(Qwen3VLMoeForConditionalGeneration(config))


def qwen3_5(frames: int = 2, **changes: Any) -> nn.Module:
    """Make a Qwen3.5 with a table of 3 x 3 positions, whose third block has attention."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = _qwen3_5_text() | changes
    config = Qwen3_5Config(text_config=text, vision_config=_qwen3_5_tower(frames), **_QWEN2_VL_TOKENS)
    return _random(Qwen3_5ForConditionalGeneration(config))


def qwen3_5_moe(frames: int = 2, **changes: Any) -> nn.Module:
    """Make a Qwen3.5 as `qwen3_5` does, with a mixture of experts in every block."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    text = _qwen3_5_text() | _QWEN3_5_EXPERTS | changes
    config = Qwen3_5MoeConfig(text_config=text, vision_config=_qwen3_5_tower(frames), **_QWEN2_VL_TOKENS)
    return _random(Qwen3_5MoeForConditionalGeneration(config))


def qwen3_5_moe_text(**changes: Any) -> nn.Module:
    """Make the LLM of a Qwen3.5 as `qwen3_5_moe` does."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    return _random(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**_qwen3_5_text() | _QWEN3_5_EXPERTS | changes)))


_QWEN3_5_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "shared_expert_intermediate_size": 36,
}  # fmt: skip


def qwen3_5_text(**changes: Any) -> nn.Module:
    """Make the LLM of a Qwen3.5 as `qwen3_5` does."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return _random(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_qwen3_5_text() | changes)))


def _qwen3_5_tower(frames: int) -> dict[str, Any]:
    return {
        "depth": 3, "hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 44, "num_heads": 4,
        "patch_size": PATCH_OF_FRAMES, "spatial_merge_size": MERGE, "temporal_patch_size": frames,
        "num_position_embeddings": 9,
    }  # fmt: skip


def _qwen3_5_text() -> dict[str, Any]:
    turning = {"partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2], "mrope_interleaved": True}
    return {
        **_qwen2_vl_text(), "num_hidden_layers": 4, "head_dim": 24,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **turning},
    }  # fmt: skip


def glm4v_moe(frames: int = 2, **changes: Any) -> nn.Module:
    """Make a GLM-4.5V with a table of 3 x 3 positions and a dense first block, whose patches join `frames` frames."""
    from transformers import Glm4vMoeConfig, Glm4vMoeForConditionalGeneration

    vision = {
        "depth": 3, "hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 44, "num_heads": 4,
        "patch_size": PATCH_OF_FRAMES, "spatial_merge_size": MERGE, "temporal_patch_size": frames,
        "image_size": 3 * PATCH_OF_FRAMES,
    }  # fmt: skip
    sections = {"mrope_section": [2, 3, 1], "partial_rotary_factor": 0.5}
    text: dict[str, Any] = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 24, "vocab_size": VOCAB, "n_routed_experts": 8, "n_shared_experts": 2,
        "num_experts_per_tok": 3, "moe_intermediate_size": 28, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2, "bos_token_id": None, "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **sections},
    } | changes  # fmt: skip
    tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN}
    model = _random(Glm4vMoeForConditionalGeneration(Glm4vMoeConfig(text_config=text, vision_config=vision, **tokens)))
    return _with_selection_biases(model)


BREAK_TOKEN, END_TOKEN = 1, 2  # behind a row of an image's features, and behind the last one
GROWING_ROPE: dict[str, Any] = {  # of queries that grow every five tokens
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 5, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 4.0, "beta_slow": 0.25, "llama_4_scaling_beta": 0.3,
}  # fmt: skip


def mistral3(text: str = "ministral3", merge: int = 2, **changes: Any) -> nn.Module:
    """Make a Mistral 3 before whose LLM, of the type `text`, squares of `merge` x `merge` patches become one."""
    from transformers import AutoConfig, Mistral3Config, Mistral3ForConditionalGeneration, PixtralVisionConfig

    rope = GROWING_ROPE if text == "ministral3" else {"rope_type": "default", "rope_theta": 1e4}
    decoder = AutoConfig.for_model(
        text, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCAB, sliding_window=None, rope_parameters=rope, rms_norm_eps=1e-6, pad_token_id=None,
    )  # fmt: skip
    tower = PixtralVisionConfig(
        hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4, image_size=8 * PATCH,
        patch_size=PATCH, hidden_act="silu",
    )  # fmt: skip
    settings: dict[str, Any] = {"tie_word_embeddings": False} | changes
    config = Mistral3Config(
        text_config=decoder, vision_config=tower, spatial_merge_size=merge, image_token_index=IMAGE_TOKEN, **settings
    )
    return _random(Mistral3ForConditionalGeneration(config))


OMNI_AUDIO_TOKEN = 1  # beside the tokens of images and videos above
OMNI_BORDERS = {"vision": (4, 5), "audio": (6, 7)}  # tokens before and after the features of a medium


def qwen2_5_omni(frames: int = 2, half_chunk: int = 5, **changes: Any) -> nn.Module:
    """Make the thinker of a Qwen2.5-Omni, whose encoder hears chunks of twice `half_chunk` frames."""
    from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

    vision = {
        "depth": 3, "hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 44, "num_heads": 4,
        "patch_size": PATCH_OF_FRAMES, "spatial_merge_size": MERGE, "temporal_patch_size": frames,
        "window_size": 4 * PATCH_OF_FRAMES, "fullatt_block_indexes": [1],
    }  # fmt: skip
    audio = {
        "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "num_mel_bins": MEL_BINS, "max_source_positions": CLIP_FRAMES // 2, "n_window": half_chunk, "output_dim": 48,
    }  # fmt: skip
    config = Qwen2_5OmniThinkerConfig(
        text_config=_qwen2_vl_text() | changes, vision_config=vision, audio_config=audio,
        image_token_index=IMAGE_TOKEN, video_token_index=VIDEO_TOKEN, audio_token_index=OMNI_AUDIO_TOKEN,
        vision_start_token_id=OMNI_BORDERS["vision"][0], audio_start_token_id=OMNI_BORDERS["audio"][0],
        audio_end_token_id=OMNI_BORDERS["audio"][1], position_id_per_seconds=POSITIONS_PER_SECOND,
    )  # fmt: skip
    return _random(Qwen2_5OmniThinkerForConditionalGeneration(config))


def qwen3_omni_moe(frames: int = 2, deepstack: tuple[int, ...] = (0, 2), **changes: Any) -> nn.Module:
    """Make the thinker of a Qwen3-Omni, whose encoder hears windows of two chunks of 100 frames."""
    from transformers import Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration

    config = Qwen3OmniMoeThinkerConfig(**qwen3_omni_thinker(frames, deepstack, **changes))
    return _random(Qwen3OmniMoeThinkerForConditionalGeneration(config))


def qwen3_omni_thinker(frames: int, deepstack: tuple[int, ...], **changes: Any) -> dict[str, Any]:
    """Return the config of that thinker; `changes` are those of its LLM."""
    vision = {
        "depth": 4, "hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 44, "num_heads": 4,
        "patch_size": PATCH_OF_FRAMES, "spatial_merge_size": MERGE, "temporal_patch_size": frames,
        "num_position_embeddings": 9, "deepstack_visual_indexes": list(deepstack),
    }  # fmt: skip
    audio = {
        "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "num_mel_bins": MEL_BINS, "n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 6, "output_dim": 48,
    }  # fmt: skip
    text: dict[str, Any] = _qwen2_vl_text() | {"num_hidden_layers": 3, "head_dim": 16}
    text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "mlp_only_layers": [1]}
    sections = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **sections}} | changes
    return {
        "text_config": text, "vision_config": vision, "audio_config": audio,
        "image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN, "audio_token_id": OMNI_AUDIO_TOKEN,
        "vision_start_token_id": OMNI_BORDERS["vision"][0], "audio_start_token_id": OMNI_BORDERS["audio"][0],
        "position_id_per_seconds": POSITIONS_PER_SECOND,
    }  # fmt: skip


_QWEN2_VL_TOKENS = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN, "tie_word_embeddings": True}


def _qwen2_vl_text() -> dict[str, Any]:
    return {
        "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 3]},
    }  # fmt: skip


def _random(model: nn.Module) -> nn.Module:
    randomize(model)  # biases and norms away from 0 and 1
    return model.eval()


def save(model: nn.Module, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Save as `transformers` does."""
    model.to(dtype).save_pretrained(folder, **options)
    return folder


def recipe_from(folder: Path, *overrides: str) -> Recipe:
    """Load a recipe that starts from the folder."""
    path = folder.parent / f"{folder.name}.yaml"
    path.write_text(
        f"""
name: pretrained
model: {{hf: {folder}}}
data: {{sources: [{{path: none.json}}], tokenizer: {folder}, seq_len: 64}}
train:
  steps: 5
  global_batch: 4
  precision: fp32
  optimizer: {{lr: 0.01, weight_decay: 0.1, clip_norm: null, schedule: constant}}
""",
        encoding="utf-8",
    )
    return load_recipe(path, overrides, env={}).recipe


def specs_of(stage: StageModule) -> dict[str, ParamSpec]:
    """Describe the parameters of an unsharded stage by their plan-independent names."""
    return {spec.name: spec for spec in stage_param_specs(stage, stage.unit, tp=1).values()}
