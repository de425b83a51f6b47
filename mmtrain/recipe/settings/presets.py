"""Published models by name: `preset: internvit-6b` in a unit's settings supplies all that the recipe leaves out.

Each entry names the source of its figures and the number of parameters there: of an encoder without projector, of an
LLM with embeddings. Presets are shapes. Details that no setting expresses (layer scale, norms of queries and keys) are
left out; a test compares the count of parameters within the stated tolerance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

VisionPreset = Literal[
    "eva-clip-18b",
    "eva-clip-1b",
    "eva-clip-4b",
    "eva-clip-8b",
    "internvit-300m",
    "internvit-6b",
    "optimus-vit-11b",
    "optimus-vit-22b",
    "optimus-vit-3b",
    "optimus-vit-5b",
    "orchmllm-vit-10b",
    "orchmllm-vit-18b",
    "orchmllm-vit-84b",
    "qwen2-vl-vit",
    "vit-huge",
]
AudioPreset = Literal["whisper-6b", "whisper-large"]
GeneratorPreset = Literal["pixart-alpha", "stable-diffusion-2.1"]
LlmPreset = Literal[
    "gpt-11b",
    "gpt-175b",
    "internlm2-20b",
    "llama3-13b",
    "llama3-70b",
    "llama3-7b",
    "llama3-8b",
    "qwen1.5-110b",
    "qwen2-14b",
    "qwen2-72b",
    "qwen2-7b",
    "yi-34b",
]

PresetValue = int | float | str | bool | tuple[int, ...]
PresetSettings = Mapping[str, PresetValue]


@dataclass(frozen=True)
class ModelPreset:
    """The settings of a published unit, and the publication."""

    settings: PresetSettings
    parameters: float  # as published
    source: str
    tolerance: float = 0.01  # allowed relative difference between the published count and the count of this shape


def _vit(layers: int, hidden: int, ffn: int, heads: int, **more: PresetValue) -> PresetSettings:
    return {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, **more}


def _llm(layers: int, hidden: int, ffn: int, heads: int, vocab: int, **more: PresetValue) -> PresetSettings:
    return {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "vocab": vocab, **more}


_EVA: PresetSettings = {"qkv_bias": False, "class_token": True, "positions": "grid", "max_side": 16}
_INTERN: PresetSettings = {"class_token": True, "positions": "grid", "max_side": 32}
_OPTIMUS = "Optimus (arXiv 2408.03505), table of its encoders; heads of 128 as in its LLMs"
_ORCH = "OrchMLLM (arXiv 2503.23830), table of its models"
_MMSCALE = "DistTrain (arXiv 2408.04275), table of its LLM backbones; Llama-3's vocabulary"
_QWEN: PresetSettings = {"rope_base": 1e6, "norm_eps": 1e-6, "qkv_bias": True}

VISION_PRESETS: Mapping[VisionPreset, ModelPreset] = {
    "vit-huge": ModelPreset(
        _vit(32, 1280, 5120, 16, class_token=True), 632e6, "ViT (arXiv 2010.11929), table 1: ViT-Huge"
    ),
    "internvit-300m": ModelPreset(
        _vit(24, 1024, 4096, 16, **_INTERN), 304e6, "OpenGVLab/InternViT-300M-448px: model card and config.json"
    ),
    "internvit-6b": ModelPreset(
        _vit(45, 3200, 12800, 25, qkv_bias=False, **_INTERN),
        5.54e9,
        "OpenGVLab/InternViT-6B-448px-V1-5: model card and config.json",
    ),
    "eva-clip-1b": ModelPreset(
        _vit(40, 1408, 6144, 16, **_EVA), 1.01e9, "EVA-CLIP (arXiv 2303.15389), table of architectures: EVA01-CLIP-g"
    ),
    "eva-clip-4b": ModelPreset(
        _vit(64, 1792, 15360, 16, **_EVA), 4.35e9, "EVA-CLIP (arXiv 2303.15389), table of architectures: EVA02-CLIP-E"
    ),
    "eva-clip-8b": ModelPreset(
        _vit(32, 4096, 20480, 32, **_EVA), 7.53e9, "EVA-CLIP-18B (arXiv 2402.04252), table of architectures"
    ),
    "eva-clip-18b": ModelPreset(
        _vit(48, 5120, 25600, 40, **_EVA), 17.5e9, "EVA-CLIP-18B (arXiv 2402.04252), table of architectures"
    ),
    "qwen2-vl-vit": ModelPreset(
        _vit(32, 1280, 5120, 16, activation="quick_gelu", downsample="pixel_shuffle", merge=2, patch_bias=False),
        675e6,
        "Qwen2-VL (arXiv 2409.12191) and its config.json; the published count includes the merger of 44M",
        tolerance=0.07,
    ),
    # The published width gives the 11B model 9.7e9 parameters; the published name is kept.
    "optimus-vit-3b": ModelPreset(_vit(48, 2304, 9216, 18), 3e9, _OPTIMUS, tolerance=0.04),
    "optimus-vit-5b": ModelPreset(_vit(48, 3072, 12288, 24), 5e9, _OPTIMUS, tolerance=0.1),
    "optimus-vit-11b": ModelPreset(_vit(48, 4096, 16384, 32), 11e9, _OPTIMUS, tolerance=0.13),
    "optimus-vit-22b": ModelPreset(_vit(48, 6144, 24576, 48), 22e9, _OPTIMUS, tolerance=0.02),
    # The paper gives layers and widths. Heads are our choice: 128 wide, or 100 if 128 does not divide the width.
    "orchmllm-vit-10b": ModelPreset(_vit(36, 2048, 8192, 16), 1.8e9, _ORCH, tolerance=0.03),
    "orchmllm-vit-18b": ModelPreset(
        _vit(40, 2400, 9600, 24, downsample="pixel_shuffle", merge=2), 2.8e9, _ORCH, tolerance=0.03
    ),
    "orchmllm-vit-84b": ModelPreset(
        _vit(45, 3200, 12800, 25, downsample="pixel_shuffle", merge=2), 5.5e9, _ORCH, tolerance=0.03
    ),
}

AUDIO_PRESETS: Mapping[AudioPreset, ModelPreset] = {
    "whisper-large": ModelPreset(
        {"layers": 32, "hidden": 1280, "ffn": 5120, "heads": 20, "mel_bins": 128},
        635e6,
        "Whisper (arXiv 2212.04356), encoder of large, with large-v3's 128 mel bands",
    ),
    "whisper-6b": ModelPreset(
        {"layers": 48, "hidden": 3072, "ffn": 12288, "heads": 24, "mel_bins": 128},
        5.5e9,
        f"{_ORCH}: Whisper's encoder, 48 layers of 3072",
        tolerance=0.02,
    ),
}

LLM_PRESETS: Mapping[LlmPreset, ModelPreset] = {
    "llama3-8b": ModelPreset(
        _llm(32, 4096, 14336, 32, 128256, kv_heads=8, rope_base=500000),
        8.03e9,
        "meta-llama/Meta-Llama-3-8B: config.json",
    ),
    "llama3-7b": ModelPreset(_llm(32, 4096, 11008, 32, 128256, rope_base=500000), 7e9, _MMSCALE, tolerance=0.08),
    "llama3-13b": ModelPreset(_llm(40, 5120, 13824, 40, 128256, rope_base=500000), 13e9, _MMSCALE, tolerance=0.08),
    "llama3-70b": ModelPreset(
        _llm(80, 8192, 28672, 64, 128256, kv_heads=8, rope_base=500000), 70e9, _MMSCALE, tolerance=0.02
    ),
    "internlm2-20b": ModelPreset(
        _llm(48, 6144, 16384, 48, 92544, kv_heads=8, rope_base=1e6), 19.86e9, "internlm/internlm2-20b: config.json"
    ),
    "yi-34b": ModelPreset(
        _llm(60, 7168, 20480, 56, 64000, kv_heads=8, rope_base=5e6), 34.4e9, "01-ai/Yi-34B: config.json"
    ),
    "qwen2-7b": ModelPreset(
        _llm(28, 3584, 18944, 28, 152064, kv_heads=4, **_QWEN), 7.62e9, "Qwen/Qwen2-7B: config.json"
    ),
    "qwen2-14b": ModelPreset(
        _llm(48, 5120, 13824, 40, 152064, kv_heads=8, **_QWEN),
        14.77e9,
        "Qwen/Qwen2.5-14B: config.json; there is no Qwen2 of this size",
    ),
    "qwen2-72b": ModelPreset(
        _llm(80, 8192, 29568, 64, 152064, kv_heads=8, **_QWEN), 72.7e9, "Qwen/Qwen2-72B: config.json"
    ),
    "qwen1.5-110b": ModelPreset(
        _llm(80, 8192, 49152, 64, 152064, kv_heads=8, **_QWEN), 111.2e9, "Qwen/Qwen1.5-110B: config.json"
    ),
    # Rotary positions and RMS norms replace GPT's learned positions and layer norms; plans do not differ.
    "gpt-11b": ModelPreset(
        _llm(80, 3072, 12288, 24, 50257, mlp="gelu"),
        11e9,
        "Optimus (arXiv 2408.03505), table of its LLMs: 80 layers of 3072 have 9.4e9 parameters; the name is kept",
        tolerance=0.16,
    ),
    "gpt-175b": ModelPreset(
        _llm(96, 12288, 49152, 96, 50257, mlp="gelu"), 175e9, "GPT-3 (arXiv 2005.14165), table 2.1", tolerance=0.01
    ),
}

GENERATOR_PRESETS: Mapping[GeneratorPreset, ModelPreset] = {
    "stable-diffusion-2.1": ModelPreset(
        {
            "kind": "unet",
            "widths": (320, 640, 1280, 1280),
            "heads": (5, 10, 20, 20),
            "layers": 2,
            "context_width": 1024,
        },
        865.91e6,
        "stabilityai/stable-diffusion-2-1: unet/config.json",
        tolerance=1e-4,
    ),
    "pixart-alpha": ModelPreset(
        {
            "kind": "dit",
            "widths": (1152,),
            "heads": (16,),
            "layers": 28,
            "patch": 2,
            "context_width": 1152,
            "context_tokens": 120,
        },
        0.6e9,
        "PixArt-alpha (arXiv 2310.00426): DiT-XL/2 with cross-attention",
        tolerance=0.03,
    ),
}
