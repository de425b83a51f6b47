"""The settings of the units of the model: encoders, LLM and generator, as shapes."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mmtrain.recipe.presets import AudioPreset, GeneratorPreset, LlmPreset, VisionPreset
from mmtrain.recipe.settings import PositiveInt, Section

_PRESET = "A published model, whose settings fill in those not written here."


class ProjectorSettings(Section):
    """The MLP that maps encoder features to the width of the LLM. It trains even when its encoder is frozen."""

    activation: Literal["gelu", "gelu_tanh", "silu"] = Field("gelu", description="Activation between its two linears.")
    norm: bool = Field(False, description="Layer-normalise the features before the first linear.")
    freeze: bool = Field(False, description="Keep the projector's weights fixed as well.")


class UnitSettings(Section):
    """What every unit of the model has."""

    layers: PositiveInt = Field(description="Number of transformer blocks.")
    hidden: PositiveInt = Field(description="Width of the residual stream.")
    lr_scale: float = Field(1.0, ge=0, description="Multiplies the learning rate of this unit.")
    weight_decay: float | None = Field(
        None, ge=0, description="Weight decay of this unit. Default: train.optimizer.weight_decay."
    )


class EncoderSettings(UnitSettings):
    """What every encoder in front of the LLM has.

    Its input are items (images, clips), each a grid of rows x cols cells (patches, log-mel frames). The properties
    below say how many tokens of the encoder and features for the LLM such an item becomes.
    """

    modality: ClassVar[str]  # key of `mmtrain.recipe.modalities.MODALITIES`
    activation: str = Field(description="Activation of the MLP.")
    norm_eps: float = Field(gt=0, description="Epsilon of the layer norms.")
    heads: PositiveInt = Field(description="Attention heads; divides `hidden`.")
    ffn: PositiveInt = Field(description="Width of the MLP's inner layer.")
    projector: ProjectorSettings = Field(ProjectorSettings(), description="The projector to the LLM's width.")
    freeze: bool = Field(False, description="Keep the encoder's weights fixed (the projector still trains).")

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
    def extra_tokens(self) -> int:
        """Return how many tokens each item has besides its cells; the projector drops them."""
        return 0

    @property
    def has_post_norm(self) -> bool:
        """Return whether a norm follows the last block."""
        return True


class VisionSettings(EncoderSettings):
    """A vision transformer over image patches, with downsampling and projector."""

    modality = "vision"
    preset: VisionPreset | None = Field(None, description=_PRESET)
    patch: PositiveInt = Field(14, description="Side of a square patch, in pixels.")
    activation: Literal["gelu", "gelu_tanh", "quick_gelu"] = Field("gelu", description="Activation of the MLP.")
    norm_eps: float = Field(1e-6, gt=0, description="Epsilon of the layer norms.")
    qkv_bias: bool = Field(True, description="Bias in the query, key and value projections.")
    patch_bias: bool = Field(True, description="Bias in the patch embedding.")
    positions: Literal["factorized", "grid"] = Field(
        "factorized",
        description="`factorized`: learned row plus learned column vectors, any image shape up to `max_side` patches; "
        "`grid`: one learned vector for each cell of a fixed `max_side` x `max_side` grid (CLIP, InternViT).",
    )
    max_side: PositiveInt = Field(64, description="Largest image side in patches that the positions cover.")
    class_token: bool = Field(
        False, description="Prepend a learned class token to each image (dropped before downsampling)."
    )
    pre_norm: bool = Field(False, description="Layer-normalise the embedded patches before the first block (CLIP).")
    post_norm: bool = Field(True, description="Layer-normalise the output of the last block.")
    downsample: Literal["identity", "pixel_shuffle"] = Field(
        "identity", description="How patches become LLM tokens: one to one, or `merge` x `merge` neighbours joined."
    )
    merge: PositiveInt = Field(
        1, description="Side of the square of patches that `pixel_shuffle` joins; 1 with `identity`."
    )

    @property
    def cell_features(self) -> int:
        """Return the size of a patch: RGB of `patch` x `patch` pixels."""
        return 3 * self.patch**2

    @property
    def tokens_per_feature(self) -> int:
        """Return the patches of a square that the projector merges."""
        return self.merge**2

    @property
    def extra_tokens(self) -> int:
        """Return 1 for models with a class token."""
        return int(self.class_token)

    @property
    def has_post_norm(self) -> bool:
        """Return whether the recipe asks for the norm after the last block."""
        return self.post_norm

    @model_validator(mode="after")
    def _consistent(self) -> "VisionSettings":
        problems = []
        if self.hidden % self.heads:
            problems.append(f"hidden {self.hidden} is not divisible by heads {self.heads}")
        if self.downsample == "identity" and self.merge != 1:
            problems.append(f"merge is {self.merge}, but downsample `identity` joins nothing: set merge to 1")
        return self._without(problems)


class AudioSettings(EncoderSettings):
    """A Whisper-shaped encoder over log-mel frames (10 ms each), with downsampling and projector.

    Two convolutions of kernel 3, the second of stride 2, then pre-norm blocks (Radford et al., arXiv 2212.04356).
    """

    modality = "audio"
    preset: AudioPreset | None = Field(None, description=_PRESET)
    mel_bins: PositiveInt = Field(80, description="Mel bands of a frame (Whisper: 80, large-v3: 128).")
    activation: Literal["gelu", "gelu_tanh"] = Field("gelu", description="Activation of convolutions and MLP.")
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon of the layer norms.")
    positions: Literal["sinusoidal", "learned"] = Field(
        "sinusoidal", description="`sinusoidal`: fixed waves, as in Whisper; `learned`: one vector for each place."
    )
    max_frames: PositiveInt = Field(3000, description="Longest clip in log-mel frames; even. 3000 are 30 s.")
    downsample: PositiveInt = Field(
        1, description="Neighbouring outputs (20 ms each) that are stacked to one LLM token."
    )

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


class LlmSettings(UnitSettings):
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention (Llama, Qwen2)."""

    preset: LlmPreset | None = Field(None, description=_PRESET)
    heads: PositiveInt = Field(description="Query heads.")
    kv_heads: PositiveInt | None = Field(
        None, description="Key and value heads; divides `heads`. Default: as many as heads."
    )
    head_dim: PositiveInt | None = Field(None, description="Width of one head. Default: hidden / heads.")
    ffn: PositiveInt = Field(description="Width of the MLP's inner layer.")
    mlp: Literal["swiglu", "gelu"] = Field(
        "swiglu", description="`swiglu`: two input projections, one gating the other; `gelu`: one (GPT)."
    )
    vocab: PositiveInt = Field(
        description="Rows of the embedding; at least the tokenizer's size. Padded up to a multiple of 64."
    )
    rope_base: float = Field(10000.0, gt=0, description="Base of the rotary frequencies.")
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon of the RMS norms.")
    qkv_bias: bool = Field(False, description="Bias in the query, key and value projections (Qwen2).")
    tie_embeddings: bool = Field(False, description="Use the embedding matrix as output projection too.")
    freeze: bool = Field(False, description="Keep the LLM's weights fixed.")

    @model_validator(mode="after")
    def _consistent(self) -> "LlmSettings":
        problems = []
        if self.heads % (self.kv_heads or self.heads):
            problems.append(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        if self.head_dim is None and self.hidden % self.heads:
            problems.append(f"hidden {self.hidden} is not divisible by heads {self.heads}; set head_dim")
        return self._without(problems)


class GeneratorSettings(Section):
    """An image generator after the LLM, as a shape to plan with; no version of mmtrain trains one yet.

    `unet`: Stable Diffusion 2 (arXiv 2112.10752); `dit`: a diffusion transformer with cross-attention (PixArt, arXiv
    2310.00426).
    """

    preset: GeneratorPreset | None = Field(None, description=_PRESET)
    kind: Literal["unet", "dit"] = Field(description="A U-Net, or a diffusion transformer.")
    widths: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = Field(
        description="Channels of each level of a U-Net, the finest first; the one width of a transformer."
    )
    heads: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = Field(
        description="Attention heads of each of the `widths`; divide them."
    )
    layers: PositiveInt = Field(
        description="Residual blocks of each level on the way down (one more on the way up); blocks of a transformer."
    )
    channels: PositiveInt = Field(4, description="Channels of the latent image.")
    patch: PositiveInt = Field(1, description="Side of a square of the latent that becomes one token; 1 for a U-Net.")
    context_width: PositiveInt = Field(description="Width of what cross-attention reads.")
    context_tokens: PositiveInt = Field(77, description="Tokens of the LLM that condition one image.")
    freeze: bool = Field(False, description="Keep the weights fixed (the projector of the context still trains).")

    @model_validator(mode="after")
    def _consistent(self) -> "GeneratorSettings":
        problems = []
        if len(self.heads) != len(self.widths):
            problems.append(f"{len(self.heads)} heads for {len(self.widths)} widths")
        problems += [
            f"width {w} is not divisible by {h} heads" for w, h in zip(self.widths, self.heads, strict=False) if w % h
        ]
        if self.kind == "dit" and len(self.widths) > 1:
            problems.append(f"{len(self.widths)} widths, but a transformer (`dit`) has one")
        if self.kind == "unet" and self.patch > 1:
            problems.append(f"patch is {self.patch}, but a U-Net reads every position of the latent: set patch to 1")
        return self._without(problems)


class ModelSettings(Section):
    """The units of the model."""

    vision: VisionSettings | None = Field(None, description="The image encoder; leave out for a text-only model.")
    audio: AudioSettings | None = Field(None, description="The audio encoder; leave out for a model without speech.")
    llm: LlmSettings = Field(description="The language model.")
    generator: GeneratorSettings | None = Field(
        None, description="An image generator after the LLM, to plan with: `train` refuses it."
    )

    @property
    def encoders(self) -> dict[str, EncoderSettings]:
        """Return the encoders of this model, by the name of their unit."""
        return {name: settings for name, settings in self if isinstance(settings, EncoderSettings)}
