"""Make tiny models and microbatches for the tests of this folder."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmtrain.costs import TokenLoad
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.layer_shape import WITHOUT_GRADIENT
from mmtrain.models.shapes.model_shape import ModelShape, build_model_shape
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.models.stage.stage_module import StageModule, StageSpec
from mmtrain.recipe.settings.audio_settings import AudioSettings
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from mmtrain.recipe.settings.llm_settings import LlmSettings
from mmtrain.recipe.settings.model_settings import ModelSettings
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.recipe.settings.vision_settings import VisionSettings

CPU = torch.device("cpu")
PATCH = 4
VISION: dict[str, Any] = {
    "layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "patch": PATCH, "max_side": 8,
    "downsample": "pixel_shuffle", "merge": 2,
}  # fmt: skip
# What Qwen2.5-VL adds to an encoder.
WINDOWED: dict[str, Any] = {
    "positions": "rotary", "norm": "rms", "gated_mlp": True, "activation": "silu", "window": 2,
    "full_attention_blocks": (1,), "projector": {"ffn": 64},
}  # fmt: skip
# What Qwen3-VL adds to an encoder, and to the LLM behind it.
DEEPSTACK: dict[str, Any] = {
    "positions": "rotary", "position_grid": 3, "deepstack": (0, 1), "activation": "gelu_tanh",
    "projector": {"ffn": 128},
}  # fmt: skip
# What InternViT-6B adds to an encoder, and InternVL to its projector.
SCALED: dict[str, Any] = {
    "class_token": True, "positions": "grid", "norm": "rms", "qk_norm": True, "layer_scale": True, "post_norm": False,
    "projector": {"norm": True, "norm_kind": "layer", "norm_eps": 1e-5},
}  # fmt: skip
# What Gemma 3 adds to an encoder.
POOLED: dict[str, Any] = {
    "downsample": "average_pool",
    "projector": {"kind": "linear", "bias": False, "norm": True, "norm_kind": "zero_centered_rms"},
}  # fmt: skip
# What GLM-4.5V adds to an encoder.
MERGED: dict[str, Any] = {
    "positions": "rotary", "position_grid": 3, "position_interpolation": "bicubic", "norm": "rms", "gated_mlp": True,
    "activation": "silu", "linear_bias": False, "qkv_bias": False, "patch_norm": True,
    "projector": {"kind": "merger", "ffn": 64, "bias": False, "activation": "silu", "norm_eps": 1e-5},
}  # fmt: skip
# What Mistral 3 adds to an encoder, and to its LLM.
PIXTRAL: dict[str, Any] = {
    "positions": "rotary", "rotary_frequencies": "alternating", "norm": "rms", "gated_mlp": True, "activation": "silu",
    "linear_bias": False, "qkv_bias": False, "patch_bias": False, "pre_norm": True, "downsample": "linear",
    "projector": {"bias": False, "norm_eps": 1e-4},
}  # fmt: skip
# What Gemma 4 adds to an encoder.
STANDARDIZED: dict[str, Any] = {
    "positions": "factorized_rotary", "rotary_base": 50.0, "norm": "rms", "gated_mlp": True,
    "activation": "gelu_tanh", "linear_bias": False, "qkv_bias": False, "patch_bias": False, "patch_order": "pixels",
    "head_norms": True, "post_norms": True, "post_norm": False, "downsample": "average_pool",
    "averages": "standardized", "projector": {"kind": "linear", "bias": False, "norm": True, "norm_kind": "plain_rms"},
}  # fmt: skip
GROWING: dict[str, Any] = {
    "query_growth": 0.4,
    "rope_scaling": {
        "kind": "llama3",
        "factor": 2,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_positions": 3,
    },
}
# What Gemma 4 adds to an LLM: two kinds of attention, norms of values, numbers of blocks, a cap of logits.
TWO_KINDS: dict[str, Any] = {
    "qk_norm": True, "value_norm": True, "head_dim": 12, "window": 5, "full_attention_blocks": (1,), "mlp": "geglu",
    "full_attention": {"head_dim": 24, "kv_heads": 1, "keys_as_values": True, "rope_width": 8},
    "window_rope_base": 100.0, "query_scale": 9.0, "post_norms": True, "block_scales": True, "logit_cap": 6.0,
}  # fmt: skip
# What its smaller sizes add: inputs of single blocks, and blocks that read keys and values of earlier ones.
SHARED_KV: dict[str, Any] = TWO_KINDS | {
    "layers": 4, "full_attention_blocks": (1, 3), "full_attention": {"head_dim": 24, "kv_heads": 1, "rope_width": 8},
    "per_layer_embeddings": {"width": 8}, "shared_kv": {"blocks": 2, "ffn": 112},
}  # fmt: skip
# Queries that attend to each image, where others merge patches.
RESAMPLED: dict[str, Any] = {
    "class_token": True, "downsample": "identity", "merge": 1,
    "projector": {"kind": "resampler", "queries": 5, "heads": 4},
}  # fmt: skip
AUDIO: dict[str, Any] = {
    "layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "mel_bins": 10, "max_frames": 80, "downsample": 2,
}  # fmt: skip
# What Qwen3-Omni adds to an encoder of clips: chunks of 20 frames, which are 3 tokens, and of which 2 are a window.
CONVOLVED: dict[str, Any] = {
    "conv_channels": 6, "chunk": 20, "window_chunks": 2, "clip_end": "mirrored", "downsample": 1,
    "projector": {"ffn": 32, "activation": "gelu"},
}  # fmt: skip
LLM: dict[str, Any] = {"layers": 3, "hidden": 48, "heads": 4, "kv_heads": 2, "ffn": 80, "vocab": 90}


def settings(
    vision: dict[str, Any] | None = None,
    llm: dict[str, Any] | None = None,
    audio: dict[str, Any] | None = None,
    generator: dict[str, Any] | None = None,
) -> ModelSettings:
    """Make settings of a model with a vision unit, with an audio unit if `audio` is given, and with a generator.

    `audio` may be `{}`; `generator` has all of its settings.
    """
    return ModelSettings(
        vision=VisionSettings(**{**VISION, **(vision or {})}),
        audio=None if audio is None else AudioSettings(**{**AUDIO, **audio}),
        generator=None if generator is None else GeneratorSettings(**generator),
        llm=LlmSettings(**{**LLM, **(llm or {})}),
    )


def shape_of(
    model: ModelSettings,
    freeze: Iterable[str] = (),
    lora: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
) -> ModelShape:
    recipe = {
        "name": "tiny",
        "model": model,
        "data": {"sources": [{"path": "samples.json"}], "tokenizer": "tokenizer.json", "seq_len": 64},
        "parallel": parallel or {},
        "train": {"steps": 1, "global_batch": 1, "optimizer": {"lr": 1e-3}, "freeze": tuple(freeze), "lora": lora},
    }
    return build_model_shape(Recipe.model_validate(recipe))


def stage(
    model: ModelSettings,
    unit: str,
    layers: tuple[int, int] | None = None,
    groups: ParallelGroups | None = None,
    recompute: Iterable[int] = (),
    attention: Any = "sdpa",
    seed: int = 1,
    freeze: Iterable[str] = (),
    sequence_parallel: bool = False,
    lora: dict[str, Any] | None = None,
    tp_chunks: int = 1,
    parallel: dict[str, Any] | None = None,
) -> StageModule:
    """Build a stage in fp32 on the CPU; all layers of the unit if none are named."""
    whole = shape_of(model, freeze, lora, parallel)
    spec = StageSpec(
        unit,
        layers or (0, len(whole.unit(unit).layers)),
        frozenset(recompute),
        sequence_parallel=sequence_parallel,
        tp_chunks=tp_chunks,
    )
    options = StageOptions(torch.float32, CPU, seed, attention)
    return build_stage(model, whole, spec, groups or ParallelGroups.single(), options)


def images(*sides: tuple[int, int], patch: int = PATCH, seed: int = 0) -> EncoderInput:
    """Make random images of (rows, cols) patches."""
    num_patches = sum(r * c for r, c in sides)
    patches = torch.randn(num_patches, 3 * patch * patch, generator=torch.Generator().manual_seed(seed))
    return EncoderInput(tuple(r for r, _ in sides), tuple(c for _, c in sides), patches)


def clips(*frames: int, bins: int = 10, seed: int = 0) -> EncoderInput:
    """Make random clips with these numbers of log-mel frames."""
    mels = torch.randn(sum(frames), bins, generator=torch.Generator().manual_seed(seed))
    return clips_of(frames, mels)


def clips_of(frames: Sequence[int], mels: Tensor | None) -> EncoderInput:
    """Make the encoder's input of clips with these numbers of log-mel frames, and of all frames (N, bins)."""
    return EncoderInput(tuple(frames), (1,) * len(frames), mels)


def text(*lengths: int, places: Iterable[int] = (), vocab: int = 90, seed: int = 0) -> TextInput:
    """Make random sequences; about a third of their tokens have no target."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    ids = torch.randint(0, vocab, (total,), generator=generator)
    labels = torch.randint(0, vocab, (total,), generator=generator)
    labels[torch.rand(total, generator=generator) < 1 / 3] = -100
    return TextInput(tuple(lengths), ids, labels, {"vision": torch.tensor(list(places), dtype=torch.int64)})


def load_of_text(inputs: TextInput) -> TokenLoad:
    """Return the load of sequences, of whose tokens those with a label are targets."""
    assert inputs.labels is not None
    return replace(TokenLoad.of(np.array(inputs.lengths)), targets=int((inputs.labels != -100).sum()))


def gradients(module: StageModule) -> dict[str, Tensor]:
    """Return gradients by plan-independent name; each parameter must have one, but those that never do."""
    gradients_by_name = {}
    for name, param in module.named_parameters():
        if name.endswith(WITHOUT_GRADIENT):
            continue
        assert param.grad is not None, f"{name} has no gradient"
        gradients_by_name[f"{module.unit}.{name}"] = param.grad
    return gradients_by_name


def randomize(module: torch.nn.Module, seed: int = 0) -> None:
    """Move every parameter off its initial value, so that norms and biases matter too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in module.parameters():
            param += 0.1 * torch.randn(param.shape, generator=generator)
