"""The settings of the model's units: encoders, LLM and generator."""

import re
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from mmtrain.recipe.presets import AudioPreset, GeneratorPreset, LlmPreset, VisionPreset
from mmtrain.recipe.settings import (
    NOTHING,
    PositiveFloat,
    PositiveInt,
    Section,
    holds_named_sections,
    section_types,
    setting,
)

STATED_LENGTHS_COLUMNS = ("count", "text")  # columns of `data.index.stated_lengths` that belong to no unit

_PRESET = "Name of a published model. Its settings are used for all that the recipe does not set itself."
_MODALITY = "What the encoder reads: `vision` (images and videos) or `audio`. Required under `model.encoders`."


class ProjectorSettings(Section):
    """What maps encoder features to the width of the LLM. It trains even if its encoder is frozen."""

    kind: Literal["mlp", "linear"] = setting(
        "mlp",
        affects={"plan", "resume"},
        added_later=True,
        description="`mlp`: two linear layers with an activation between them. `linear`: one (Qwen2-Audio).",
    )
    activation: Literal["gelu", "gelu_tanh", "silu"] = setting(
        "gelu", affects={"plan", "resume"}, description="Activation between the two linear layers."
    )
    norm: bool = setting(
        False, affects={"plan", "resume"}, description="Apply a norm to the merged tokens before the first linear."
    )
    norm_kind: Literal["layer", "rms"] | None = setting(
        None, affects={"plan", "resume"}, added_later=True, description="Kind of that norm. Default: the encoder's."
    )
    norm_eps: float | None = setting(
        None, gt=0, affects={"resume"}, added_later=True, description="Epsilon of that norm. Default: the encoder's."
    )
    ffn: PositiveInt | None = setting(
        None,
        affects={"plan", "resume"},
        added_later=True,
        description="Width between the two linears. Default: the width of the LLM.",
    )
    freeze: bool = setting(False, affects={"plan", "resume"}, description="Do not train the projector.")


class UnitSettings(Section):
    """What encoders and the LLM have in common."""

    layers: PositiveInt = setting(affects={"plan", "steps", "resume"}, description="Number of transformer blocks.")
    hidden: PositiveInt = setting(affects={"plan", "steps", "resume"}, description="Width of the residual stream.")
    hf: Path | None = setting(
        None,
        affects={"resume"},
        added_later=True,
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


class EncoderSettings(UnitSettings):
    """What all encoders in front of the LLM have in common.

    Their inputs are items (images, clips), each a grid of rows x cols cells (patches, log-mel frames). The properties
    below say how many tokens of the encoder, and how many features for the LLM, such an item becomes.
    """

    # A key of `mmtrain.recipe.modalities.MODALITIES`. Another one brings other settings, which declare their effects.
    modality: str
    heads: PositiveInt = setting(
        affects={"plan", "steps", "resume"}, description="Attention heads. Must divide `hidden`."
    )
    ffn: PositiveInt = setting(affects={"plan", "steps", "resume"}, description="Width of the MLP's hidden layer.")
    activation: str = setting(affects={"plan", "steps", "resume"}, description="Activation of the MLP.")
    norm_eps: float = setting(gt=0, affects={"plan", "steps", "resume"}, description="Epsilon of the layer norms.")
    projector: ProjectorSettings = setting(
        ProjectorSettings(), affects={"plan", "resume"}, description="The projector to the width of the LLM."
    )
    freeze: bool = setting(
        False, affects={"plan", "resume"}, description="Do not train the encoder. Its projector still trains."
    )

    @property
    def cell_features(self) -> int:
        """Return how many numbers one cell holds."""
        raise NotImplementedError

    @property
    def cells_per_token(self) -> int:
        """Return how many cells the embedding layer joins to one token."""
        return 1

    @property
    def tokens_per_feature(self) -> int:
        """Return how many tokens the projector merges into one feature."""
        return 1

    @property
    def pools(self) -> bool:
        """Return whether the projector averages these tokens, before the last norm, instead of joining them."""
        return False

    @property
    def extra_tokens(self) -> int:
        """Return how many tokens each item has besides its cells."""
        return 0

    @property
    def extra_features(self) -> int:
        """Return how many of the extra tokens become features for the LLM. The projector drops the others."""
        return 0

    @property
    def cells_per_feature(self) -> int:
        """Return how many cells become one feature."""
        return self.cells_per_token * self.tokens_per_feature

    @property
    def has_post_norm(self) -> bool:
        """Return whether a norm follows the last block."""
        return True


class VisionSettings(EncoderSettings):
    """A vision transformer over image patches, with downsampling and projector."""

    modality: Literal["vision"] = setting("vision", affects=NOTHING, description=_MODALITY)
    preset: VisionPreset | None = setting(None, affects={"steps", "resume"}, description=_PRESET)
    patch: PositiveInt = setting(
        14, affects={"plan", "lengths", "steps", "resume"}, description="Side of a square patch in pixels."
    )
    temporal_patch: PositiveInt = setting(
        1,
        affects={"plan", "lengths", "steps", "resume"},
        added_later=True,
        description="Frames of a video that one patch joins (Qwen2-VL: 2). An image is a video that stands still.",
    )
    time_positions_per_second: PositiveFloat | None = setting(
        None,
        affects={"lengths", "steps", "resume"},
        added_later=True,
        description="Rotary positions in time that a second of a video takes in an LLM with `rope_sections` "
        "(Qwen2.5-VL). Default: one for each patch in time.",
    )
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "silu"] = setting(
        "gelu", affects={"plan", "steps", "resume"}, description="Activation of the MLP."
    )
    gated_mlp: bool = setting(
        False,
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="Gate the MLP by the activation of a second input projection (SwiGLU with `silu`; Qwen2.5-VL).",
    )
    norm: Literal["layer", "rms"] = setting(
        "layer",
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="Kind of all norms of the encoder and its projector. `layer`: layer norms. `rms`: RMS norms.",
    )
    norm_eps: float = setting(
        1e-6, gt=0, affects={"plan", "steps", "resume"}, description="Epsilon of the layer norms."
    )
    qkv_bias: bool = setting(
        True, affects={"plan", "steps", "resume"}, description="Bias in the query, key and value projections."
    )
    qk_norm: bool = setting(
        False,
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="Apply an RMS norm to the queries of all heads together, and one to the keys (InternViT-6B).",
    )
    layer_scale: bool = setting(
        False,
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="Multiply what attention and MLP add to the residual stream by a learned vector each (InternViT).",
    )
    patch_bias: bool = setting(True, affects={"plan", "steps", "resume"}, description="Bias in the patch embedding.")
    positions: Literal["factorized", "grid", "rotary"] = setting(
        "factorized",
        affects={"plan", "steps", "resume"},
        description="Position embeddings. `factorized`: one learned vector for each row plus one for each column, for "
        "images of any shape up to `max_side` patches. `grid`: one learned vector for each position of a fixed "
        "`max_side` x `max_side` grid (CLIP, InternViT). `rotary`: one half of every query and key is rotated by the "
        "row, the other by the column (Qwen2-VL).",
    )
    max_side: PositiveInt = setting(
        64,
        affects={"plan", "lengths", "steps", "resume"},
        description="Longest side of an image in patches that the position embeddings cover.",
    )
    window: int = setting(
        0,
        ge=0,
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="Side in patches of the squares inside which patches attend to each other (Qwen2.5-VL). 0: all "
        "patches of an image do.",
    )
    full_attention_blocks: tuple[int, ...] = setting(
        (),
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="With `window`: numbers, from 0, of the blocks in which all patches of an image attend to each "
        "other nevertheless.",
    )
    class_token: bool = setting(
        False,
        affects={"plan", "lengths", "steps", "resume"},
        description="Prepend a learned class token to each image. It is dropped before downsampling.",
    )
    class_feature: bool = setting(
        False,
        affects={"plan", "lengths", "steps", "resume"},
        added_later=True,
        description="Keep the class token as the first feature of each image instead (LLaVA's strategy `full`).",
    )
    pre_norm: bool = setting(
        False,
        affects={"plan", "steps", "resume"},
        description="Apply a layer norm to the embedded patches before the first block (CLIP).",
    )
    post_norm: bool = setting(
        True, affects={"plan", "steps", "resume"}, description="Apply a layer norm to the output of the last block."
    )
    downsample: Literal["identity", "pixel_shuffle"] = setting(
        "identity",
        affects={"plan", "steps", "resume"},
        description="How patches become LLM tokens. `identity`: one token for each patch. `pixel_shuffle`: one token "
        "for each square of `merge` x `merge` patches.",
    )
    merge: PositiveInt = setting(
        1,
        affects={"plan", "lengths", "steps", "resume"},
        description="Side in patches of the square that `pixel_shuffle` merges into one token. 1 with `identity`.",
    )

    @property
    def cell_features(self) -> int:
        """Return the size of a patch: RGB of `patch` x `patch` pixels of each of its frames."""
        return 3 * self.temporal_patch * self.patch**2

    @property
    def tokens_per_feature(self) -> int:
        """Return the patches of the square that the projector merges."""
        return self.merge**2

    @property
    def extra_tokens(self) -> int:
        """Return 1 for models with a class token."""
        return int(self.class_token)

    @property
    def extra_features(self) -> int:
        """Return 1 for models that keep their class token."""
        return int(self.class_feature)

    @property
    def has_post_norm(self) -> bool:
        """Return whether the recipe asks for a norm after the last block."""
        return self.post_norm

    @model_validator(mode="after")
    def _consistent(self) -> "VisionSettings":
        problems = []
        if self.hidden % self.heads:
            problems.append(f"hidden {self.hidden} is not divisible by heads {self.heads}")
        if self.downsample == "identity" and self.merge != 1:
            problems.append(f"merge is {self.merge}, but downsample `identity` merges nothing: set merge to 1")
        if self.positions == "rotary" and self.hidden // self.heads % 4:
            width = self.hidden // self.heads
            problems.append(f"a head is {width} wide; allowed with positions `rotary`: multiples of 4")
        if self.class_token and (self.positions == "rotary" or self.window):
            problems.append("class_token is set; it has no place with positions `rotary` or with `window`")
        problems += self._window_problems()
        if self.post_norm and self.projector.norm and self.projector.norm_kind not in (None, self.norm):
            problems.append(f"projector.norm_kind differs from norm `{self.norm}`; allowed only without post_norm")
        if self.class_feature and not (self.class_token and self.merge == 1):
            problems.append("class_feature keeps the class token beside patches: set class_token, and merge to 1")
        return self._without(problems)

    def _window_problems(self) -> list[str]:
        outside = [block for block in self.full_attention_blocks if not 0 <= block < self.layers]
        problems = (
            [f"full_attention_blocks names {outside[0]}, but blocks are 0 to {self.layers - 1}"] if outside else []
        )
        if self.full_attention_blocks and not self.window:
            problems.append("full_attention_blocks is set, but without `window` all blocks attend to the whole image")
        return problems


class AudioSettings(EncoderSettings):
    """A Whisper-shaped encoder over log-mel frames of 10 ms, with downsampling and projector.

    Two convolutions with kernel 3, the second with stride 2, then pre-norm blocks (Radford et al., arXiv 2212.04356).
    """

    modality: Literal["audio"] = setting("audio", affects=NOTHING, description=_MODALITY)
    preset: AudioPreset | None = setting(None, affects={"steps", "resume"}, description=_PRESET)
    mel_bins: PositiveInt = setting(
        80, affects={"plan", "steps", "resume"}, description="Mel bands of a frame (Whisper: 80, large-v3: 128)."
    )
    activation: Literal["gelu", "gelu_tanh"] = setting(
        "gelu", affects={"plan", "steps", "resume"}, description="Activation of the convolutions and the MLP."
    )
    norm_eps: float = setting(
        1e-5, gt=0, affects={"plan", "steps", "resume"}, description="Epsilon of the layer norms."
    )
    key_bias: bool = setting(
        True,
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="Bias in the key projection, beside those of queries and values. Whisper has none.",
    )
    positions: Literal["sinusoidal", "learned", "fixed"] = setting(
        "sinusoidal",
        affects={"plan", "steps", "resume"},
        description="Position embeddings. `sinusoidal`: computed, as in Whisper. `learned`: one vector for each "
        "position. `fixed`: the same, but they never train (Whisper and Qwen2-Audio in `transformers`, whose folders "
        "store the sinusoids).",
    )
    max_frames: PositiveInt = setting(
        3000,
        affects={"plan", "steps", "resume"},
        description="Longest clip in log-mel frames of 10 ms that the positions cover. Even; 3000 frames are 30 s.",
    )
    clip_end: Literal["zeros", "silence"] = setting(
        "zeros",
        affects={"lengths", "steps", "resume"},
        added_later=True,
        description="What the convolutions see behind a clip. `zeros`: nothing. `silence`: the log-mel frames of "
        "silence, as if the clip were padded to `max_frames` (Qwen2-Audio); a clip then has the tokens of its own "
        "frames, and one frame more that is only looked at.",
    )
    downsample: PositiveInt = setting(
        1,
        affects={"plan", "lengths", "steps", "resume"},
        description="Neighboring outputs of 20 ms that are merged into one LLM token.",
    )
    pooling: Literal["join", "mean"] = setting(
        "join",
        affects={"plan", "steps", "resume"},
        added_later=True,
        description="How `downsample` outputs become one. `join`: side by side, after the last norm. `mean`: their "
        "average, before the last norm (Qwen2-Audio).",
    )

    @property
    def pools(self) -> bool:
        """Return whether the features are averages of tokens."""
        return self.pooling == "mean"

    @property
    def cell_features(self) -> int:
        """Return the mel bands of a log-mel frame."""
        return self.mel_bins

    @property
    def cells_per_token(self) -> int:
        """Return the stride of the second convolution."""
        return 2

    @property
    def tokens_per_feature(self) -> int:
        """Return the neighboring tokens that the projector merges."""
        return self.downsample

    @model_validator(mode="after")
    def _consistent(self) -> "AudioSettings":
        problems = []
        if self.hidden % self.heads:
            problems.append(f"hidden {self.hidden} is not divisible by heads {self.heads}")
        if self.positions == "sinusoidal" and self.hidden % 2:
            problems.append(f"hidden {self.hidden} is odd, but sinusoidal positions are pairs of sine and cosine")
        if self.max_frames % 2:
            problems.append(f"max_frames {self.max_frames} is odd, but the second convolution halves it")
        return self._without(problems)


AnyEncoderSettings: TypeAlias = Annotated[VisionSettings | AudioSettings, Field(discriminator="modality")]


class RopeScalingSettings(Section):
    """How rotary positions are stretched over contexts longer than those of pretraining.

    `linear` slows all rotations down (arXiv 2306.15595); `llama3` (Llama 3.1, arXiv 2407.21783) and `yarn` (arXiv
    2309.00071) only those that turn seldom within the context of pretraining. `dynamic` does nothing within that
    context, and longer samples are rejected.
    """

    kind: Literal["llama3", "linear", "yarn", "dynamic"] = setting(
        "llama3",
        affects={"resume"},
        added_later=True,
        description="`linear`: all rotations are slowed down. `llama3`, `yarn`: slow rotations are; between slow and "
        "fast ones the factor changes with the turns (`llama3`) or from one pair of features to the next (`yarn`). "
        "`dynamic`: none are in samples of up to `original_positions` tokens, and longer ones cannot be trained on.",
    )
    factor: float = setting(gt=0, affects={"resume"}, description="Slow rotations are this much slower.")
    low_freq_factor: float | None = setting(
        None,
        gt=0,
        affects={"resume"},
        description="Rotations that turn fewer times than this within `original_positions` are slow (`beta_slow` of "
        "YaRN). Not with `linear` and `dynamic`.",
    )
    high_freq_factor: float | None = setting(
        None,
        gt=0,
        affects={"resume"},
        description="Rotations that turn more often than this within `original_positions` stay as they are "
        "(`beta_fast` of YaRN). Not with `linear` and `dynamic`.",
    )
    original_positions: PositiveInt | None = setting(
        None, affects={"resume"}, description="Context of pretraining in tokens. Not with `linear`."
    )
    amplitude: float | None = setting(
        None,
        gt=0,
        affects={"resume"},
        added_later=True,
        description="Factor on cosines and sines with `yarn`. Default: 0.1 ln(factor) + 1.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "RopeScalingSettings":
        ramp = {
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_positions": self.original_positions,
        }
        used = {"linear": (), "dynamic": ("original_positions",)}.get(self.kind, tuple(ramp))
        missing = [name for name in used if ramp[name] is None]
        unused = [name for name, value in ramp.items() if value is not None and name not in used]
        problems = []
        if unused:
            problems.append(f"{', '.join(unused)}: `{self.kind}` does not use this; remove it")
        if missing:
            problems.append(f"{self.kind} needs {', '.join(missing)}")
        if self.kind != "yarn" and self.amplitude is not None:
            problems.append(f"amplitude: only `yarn` has one, but kind is `{self.kind}`; remove it")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            problems.append(f"low_freq_factor {low:g} is not below high_freq_factor {high:g}")
        return self._without(problems)


class LlmSettings(UnitSettings):
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention (Llama, Qwen, Gemma)."""

    preset: LlmPreset | None = setting(None, affects={"resume"}, description=_PRESET)
    heads: PositiveInt = setting(affects={"plan", "resume"}, description="Query heads.")
    kv_heads: PositiveInt | None = setting(
        None,
        affects={"plan", "resume"},
        description="Key and value heads. Must divide `heads`. Default: `heads`.",
    )
    head_dim: PositiveInt | None = setting(
        None, affects={"plan", "resume"}, description="Width of one head. Default: hidden / heads."
    )
    ffn: PositiveInt = setting(affects={"plan", "resume"}, description="Width of the MLP's hidden layer.")
    mlp: Literal["swiglu", "geglu", "gelu"] = setting(
        "swiglu",
        affects={"plan", "resume"},
        description="Kind of MLP. `swiglu`: two input projections, one of which gates the other. `geglu`: the same "
        "with the tanh approximation of GELU in place of SiLU (Gemma). `gelu`: one (GPT).",
    )
    vocab: PositiveInt = setting(
        affects={"plan", "lengths", "resume"},
        description="Rows of the embedding table; at least the tokenizer's size. Padded to a multiple of 64.",
    )
    rope_base: float = setting(10000.0, gt=0, affects={"plan", "resume"}, description="Base of the rotary frequencies.")
    rope_scaling: RopeScalingSettings | None = setting(
        None,
        affects={"resume"},
        added_later=True,
        description="Scaling of the rotary frequencies for long contexts. Default: none.",
    )
    rope_sections: tuple[PositiveInt, PositiveInt, PositiveInt] | None = setting(
        None,
        affects={"resume"},
        added_later=True,
        description="How many pairs of features of a head are rotated by time, by row and by column (M-RoPE of "
        "Qwen2-VL, arXiv 2409.12191). Features of an image have the position of the text before it, plus their place "
        "in the image. Their sum is half the width of a head. Default: one position for each token.",
    )
    window: PositiveInt | None = setting(
        None,
        affects={"plan", "resume"},
        added_later=True,
        description="Tokens of a sliding window: each token attends to itself and to the `window` - 1 before it "
        "(Mistral, arXiv 2310.06825). Default: to all earlier tokens of its sample.",
    )
    window_rope_base: float | None = setting(
        None,
        gt=0,
        affects={"resume"},
        added_later=True,
        description="Base of the rotary frequencies in blocks with a window, which `rope_scaling` leaves as they are "
        "(Gemma 3). Default: `rope_base`, scaled, in all blocks.",
    )
    full_attention_blocks: tuple[Annotated[int, Field(ge=0)], ...] = setting(
        (),
        affects={"plan", "resume"},
        added_later=True,
        description="Blocks, counted from 0, in which tokens attend to all earlier ones in spite of `window`.",
    )
    norm_eps: float = setting(1e-5, gt=0, affects={"plan", "resume"}, description="Epsilon of the RMS norms.")
    qkv_bias: bool = setting(
        False, affects={"plan", "resume"}, description="Bias in the query, key and value projections (Qwen2)."
    )
    qk_norm: bool = setting(
        False,
        affects={"plan", "resume"},
        added_later=True,
        description="Apply an RMS norm to every head of the queries and of the keys, before rotation (Qwen3). Its "
        "weight, of `head_dim`, is the same for all heads of a block.",
    )
    query_scale: float | None = setting(
        None,
        gt=0,
        affects={"resume"},
        added_later=True,
        description="Scores of attention are divided by the square root of this (`query_pre_attn_scalar` of Gemma). "
        "Default: `head_dim`.",
    )
    post_norms: bool = setting(
        False,
        affects={"plan", "resume"},
        added_later=True,
        description="Apply a norm also to the outputs of attention and of the MLP, before they are added to the "
        "residual stream (Gemma 2 and 3).",
    )
    zero_centered_norms: bool = setting(
        False,
        affects={"plan", "resume"},
        added_later=True,
        description="RMS norms multiply by 1 + weight, in fp32, and their weights start at 0 (Gemma).",
    )
    scale_embeddings: bool = setting(
        False,
        affects={"resume"},
        added_later=True,
        description="Multiply the embeddings of tokens by the square root of `hidden` (Gemma).",
    )
    tie_embeddings: bool = setting(
        False, affects={"plan", "resume"}, description="Use the embedding table as output projection too."
    )
    freeze: bool = setting(False, affects={"plan", "resume"}, description="Do not train the LLM.")

    @model_validator(mode="after")
    def _consistent(self) -> "LlmSettings":
        problems = []
        if self.heads % (self.kv_heads or self.heads):
            problems.append(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        if self.head_dim is None and self.hidden % self.heads:
            problems.append(f"hidden {self.hidden} is not divisible by heads {self.heads}; set head_dim")
        if self.full_attention_blocks and self.window is None:
            problems.append("full_attention_blocks: without `window` all blocks have full attention; remove it")
        if self.window_rope_base is not None and self.window is None:
            problems.append("window_rope_base: without `window` no block has one; remove it")
        if self.window_rope_base is not None and self.rope_sections is not None:
            problems.append("window_rope_base cannot be combined with rope_sections; remove one of them")
        if max(self.full_attention_blocks, default=0) >= self.layers:
            last = max(self.full_attention_blocks)
            problems.append(
                f"full_attention_blocks: found {last}, but the last of {self.layers} blocks is {self.layers - 1}"
            )
        return self._without(problems)


class GeneratorSettings(Section):
    """An image generator after the LLM, as a shape to plan with. This version of mmtrain cannot train one.

    `unet`: Stable Diffusion 2 (arXiv 2112.10752). `dit`: a diffusion transformer with cross-attention (PixArt, arXiv
    2310.00426).
    """

    preset: GeneratorPreset | None = setting(None, affects={"resume"}, description=_PRESET)
    kind: Literal["unet", "dit"] = setting(
        affects={"plan", "resume"}, description="A U-Net (`unet`) or a diffusion transformer (`dit`)."
    )
    widths: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = setting(
        affects={"plan", "resume"},
        description="Channels of each level of a U-Net, the finest level first; the one width of a transformer.",
    )
    heads: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = setting(
        affects={"plan", "resume"}, description="Attention heads for each of the `widths`. Must divide them."
    )
    layers: PositiveInt = setting(
        affects={"plan", "resume"},
        description="Residual blocks of each level of a U-Net on the way down (one more on the way up); blocks of a "
        "transformer.",
    )
    channels: PositiveInt = setting(4, affects={"plan", "resume"}, description="Channels of the latent image.")
    patch: PositiveInt = setting(
        1,
        affects={"plan", "resume"},
        description="Side of the square of latent positions that becomes one token. 1 for a U-Net.",
    )
    context_width: PositiveInt = setting(
        affects={"plan", "resume"}, description="Width of the context that cross-attention reads."
    )
    context_tokens: PositiveInt = setting(
        77, affects={"plan", "resume"}, description="LLM tokens that condition one image."
    )
    freeze: bool = setting(
        False,
        affects={"plan", "resume"},
        description="Do not train the generator. The projector of its context still trains.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "GeneratorSettings":
        problems = []
        if len(self.heads) != len(self.widths):
            problems.append(f"{len(self.heads)} heads for {len(self.widths)} widths")
        for width, heads in zip(self.widths, self.heads, strict=False):
            if width % heads:
                problems.append(f"width {width} is not divisible by {heads} heads")
        if self.kind == "dit" and len(self.widths) > 1:
            problems.append(f"{len(self.widths)} widths, but a transformer (`dit`) has one")
        if self.kind == "unet" and self.patch > 1:
            problems.append(f"patch is {self.patch}, but a U-Net reads every position of the latent: set patch to 1")
        return self._without(problems)


def _check_encoder_name(name: str) -> str:
    """Return the name of an encoder under `model.encoders`. Raises `ValueError` if another thing has this name."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise ValueError(f"found the name {name!r}; allowed: a letter, then letters, digits and underscores")
    if name in ModelSettings.model_fields:
        raise ValueError(f"{name} is a key of `model` itself; give this encoder another name")
    if name in STATED_LENGTHS_COLUMNS:
        raise ValueError(f"{name} is a column of files of stated lengths; give this encoder another name")
    return name


EncoderName: TypeAlias = Annotated[str, AfterValidator(_check_encoder_name)]


class ModelSettings(Section):
    """The units of the model."""

    hf: Path | None = setting(
        None,
        affects={"resume"},
        description="A pretrained model: a folder in the layout of Hugging Face, or a model of its hub, ORG/NAME or "
        "ORG/NAME@REVISION. It supplies the settings of the units that it holds, and training starts from its "
        "weights. Relative paths start at the recipe's folder. See docs/models.md.",
    )
    vision: VisionSettings | None = Field(None, description="The image encoder. Leave it out for a text-only model.")
    audio: AudioSettings | None = Field(None, description="The audio encoder. Leave it out for a model without speech.")
    encoders: dict[EncoderName, AnyEncoderSettings] = Field(
        {},
        description="Further encoders by name, each with its `modality` and the settings of `model.vision` or "
        "`model.audio`. All encoders of a modality encode every item of it. The LLM reads their features of an item "
        "one encoder after another, in the order in which they are written, `vision` and `audio` first.",
    )
    llm: LlmSettings = setting(affects={"plan", "lengths", "resume"}, description="The language model.")
    generator: GeneratorSettings | None = setting(
        None,
        affects={"plan", "resume"},
        description="An image generator after the LLM, to plan with. `mmtrain train` rejects recipes with one.",
    )

    @property
    def all_encoders(self) -> dict[str, EncoderSettings]:
        """Return the encoders of this model by the name of their unit, in the order in which the LLM reads them."""
        short_forms = {name: getattr(self, name) for name in self._short_forms()}
        encoders: dict[str, EncoderSettings] = {
            name: settings for name, settings in short_forms.items() if settings is not None
        }
        return encoders | self.encoders

    def unit(self, name: str) -> EncoderSettings | LlmSettings | GeneratorSettings:
        """Return the settings of a unit that the model has."""
        settings: EncoderSettings | LlmSettings | GeneratorSettings | None
        settings = self.encoders[name] if name in self.encoders else getattr(self, name)
        assert settings is not None, name
        return settings

    @classmethod
    def _short_forms(cls) -> list[str]:
        """Return the fields that hold one encoder each."""
        return [
            name
            for name, field in cls.model_fields.items()
            if not holds_named_sections(field.annotation)
            and any(issubclass(kind, EncoderSettings) for kind in section_types(field.annotation))
        ]
