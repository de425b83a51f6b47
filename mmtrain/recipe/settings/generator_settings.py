"""The settings of an image generator after the LLM."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmtrain.recipe.settings.base import PositiveFloat, PositiveInt, Section, setting
from mmtrain.recipe.settings.presets import GeneratorPreset
from mmtrain.recipe.settings.unit_settings import PRESET_DESCRIPTION

NUM_PIXEL_CHANNELS = 3  # of an image in RGB
_FEATURES_OF_POSITION = 4  # sine and cosine of row and of column
_POSITION_SCALE_SIDE = 64  # PixArt's positions keep their scale up to this side of the latent image (`diffusers`)


class GeneratorSettings(Section):
    """An image generator after the LLM.

    With sources of samples it draws the images in the assistant's turns: their pixels, or with `vae` their latents.

    `unet`: Stable Diffusion 2 (arXiv 2112.10752). `dit`: a diffusion transformer with cross-attention (PixArt, arXiv
    2310.00426).
    """

    preset: GeneratorPreset | None = setting(None, affects={"resume"}, description=PRESET_DESCRIPTION)
    hf: Path | None = setting(
        None,
        affects={"resume"},
        description="A folder of `diffusers` with a U-Net (Stable Diffusion 2) or a transformer (PixArt), from whose "
        "weights the generator starts, without the projector of its context.",
    )
    vae: Path | None = setting(
        None,
        affects={"resume"},
        description="A folder of `diffusers` with an autoencoder (`AutoencoderKL`), whose latents the generator draws. "
        "It is frozen. Its number of channels must be that of `channels`. Needs `latents`.",
    )
    latents: Path | None = setting(
        None,
        affects={"steps"},
        description="A folder with the latents of all images to draw, which `mmtrain data latents` computes once with "
        "`vae`.",
    )
    latent_scale: PositiveInt = setting(
        1,
        affects={"plan", "lengths", "steps", "resume"},
        description="Pixels along a side of the square that becomes one position of the latent. Follows from `vae`; 1 "
        "where pixels are drawn.",
    )
    kind: Literal["unet", "dit"] = setting(
        affects={"plan", "resume"},
        description="A U-Net (`unet`), whole on each of its ranks, or a diffusion transformer (`dit`).",
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
    channels: PositiveInt = setting(
        4,
        affects={"plan", "steps", "resume"},
        description="Channels of the latent image; 3 where it draws pixels, as it does with samples.",
    )
    patch: PositiveInt = setting(
        1,
        affects={"plan", "lengths", "steps", "resume"},
        description="Side of the square of latent positions that becomes one token. 1 for a U-Net.",
    )
    context_width: PositiveInt = setting(
        affects={"plan", "resume"}, description="Width of the context that cross-attention reads."
    )
    context_tokens: PositiveInt = setting(
        77, affects={"plan", "lengths", "steps", "resume"}, description="LLM tokens that condition one image."
    )
    image_size: PositiveInt | None = setting(
        None,
        affects={"plan", "lengths", "steps", "resume"},
        description="Side of the square images to draw, in pixels. Images of answers are resized until they cover it, "
        "and cropped at their centre. Needed with samples; stated lengths say the size of each image.",
    )
    bucket_step: PositiveInt | None = setting(
        None,
        affects={"plan", "lengths", "steps", "resume"},
        description="Draw images in buckets of several aspect ratios (SDXL), each about as large as the square of "
        "`image_size`, whose sides are multiples of so many pixels. An image goes to the bucket nearest to it in "
        "aspect ratio. Must divide `image_size`. Default: all images are square.",
    )
    max_aspect: PositiveFloat = setting(
        2.0,
        affects={"plan", "lengths", "steps", "resume"},
        description="Longer side of the narrowest bucket, as a multiple of its shorter one. Images that are narrower "
        "are cropped to it. Needs `bucket_step`.",
    )
    sample_size: PositiveInt = setting(
        64,
        affects={"resume"},
        description="Side of the latent images that a transformer's fixed positions are made for. Those of an image of "
        "any size are stretched to it.",
    )
    norm_groups: PositiveInt = setting(
        32,
        affects={"resume"},
        description="Groups of channels that each norm of a U-Net normalizes together. Must divide the `widths`.",
    )
    freeze: bool = setting(
        False,
        affects={"plan", "resume"},
        description="Do not train the generator. The projector of its context still trains.",
    )
    prediction: Literal["noise", "velocity", "flow"] = setting(
        "noise",
        affects={"resume"},
        description="What the generator learns to predict of a noisy image: its `noise` (DDPM, PixArt), its `velocity` "
        "(v-prediction, Stable Diffusion 2.1), or the direction to noise on a straight line (`flow` matching).",
    )
    noise_schedule: Literal["linear", "scaled_linear", "cosine"] = setting(
        "linear",
        affects={"resume"},
        description="How noise grows over the 1,000 steps of diffusion: `linear` as PixArt's, `scaled_linear` as "
        "Stable Diffusion's, or `cosine`. Flow matching has straight lines instead.",
    )
    flow_times: Literal["uniform", "logit_normal"] = setting(
        "uniform",
        affects={"resume"},
        description="How often flow matching trains at each time between image and noise: `uniform`, or "
        "`logit_normal`, which favours the middle (Stable Diffusion 3).",
    )
    flow_shift: PositiveFloat = setting(
        1.0,
        affects={"resume"},
        description="Above 1 it moves the times of flow matching towards noise, which larger images need (Stable "
        "Diffusion 3: 3).",
    )
    loss_weight: PositiveFloat = setting(
        1.0,
        affects={"resume"},
        description="Factor on the generator's loss, the mean squared error over all elements of the step's images, "
        "where it is added to the LLM's.",
    )
    context_dropout: float = setting(
        0.0,
        ge=0,
        lt=1,
        affects={"resume"},
        description="Share of images that learn to be drawn without what the LLM says of them, for guidance without a "
        "classifier.",
    )
    lr_scale: float = setting(1.0, ge=0, affects={"resume"}, description="Factor on the learning rate of this unit.")
    weight_decay: float | None = setting(
        None,
        ge=0,
        affects={"resume"},
        description="Weight decay of this unit. Default: train.optimizer.weight_decay.",
    )

    @property
    def stretched_side(self) -> float:
        """Return the side, in patches, to which the positions of a transformer are stretched, as in `diffusers`."""
        return self.sample_size // self.patch / max(self.sample_size // _POSITION_SCALE_SIDE, 1)

    @property
    def cell_features(self) -> int:
        """Return the elements of a patch of the latent."""
        return self.channels * self.patch**2

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
        if self.kind == "dit" and self.widths[0] % _FEATURES_OF_POSITION:
            problems.append(
                f"width {self.widths[0]} is not divisible by {_FEATURES_OF_POSITION}: a transformer's positions are "
                "sines and cosines of row and column"
            )
        if self.kind == "dit" and self.sample_size % self.patch:
            problems.append(f"sample_size {self.sample_size} is not divisible by patch {self.patch}")
        if self.kind == "unet":
            problems += [
                f"width {width} is not divisible by norm_groups {self.norm_groups}"
                for width in self.widths
                if width % self.norm_groups
            ]
        if self.kind == "unet" and self.patch > 1:
            problems.append(f"patch is {self.patch}, but a U-Net reads every position of the latent: set patch to 1")
        if self.prediction != "flow":
            problems += [
                f"{name} is {getattr(self, name)}, but prediction {self.prediction} has no times of flow matching: "
                "remove it, or set prediction to flow"
                for name in ("flow_times", "flow_shift")
                if getattr(self, name) != type(self).model_fields[name].default
            ]
        divisor = self.latent_scale * self.patch * 2 ** (len(self.widths) - 1)
        if self.image_size is not None and self.image_size % divisor:
            problems.append(f"image_size is {self.image_size}, but {self._dividers} it by {divisor}: take a multiple")
        problems += self._bucket_problems(divisor)
        if (self.vae is None) != (self.latents is None):
            missing, stated = ("vae", "latents") if self.vae is None else ("latents", "vae")
            problems.append(f"{stated} is set without {missing}: `mmtrain data latents` writes `latents` with `vae`")
        if self.latent_scale > 1 and self.vae is None:
            problems.append(f"latent_scale is {self.latent_scale} without a vae, whose config states it: remove it")
        return self._without(problems)

    @property
    def _dividers(self) -> str:
        """Name what divides the sides of images, with its verb."""
        dividers = "the patch divides" if self.kind == "dit" else "the U-Net divides"
        return f"the autoencoder and {dividers.removesuffix('s')}" if self.latent_scale > 1 else dividers

    def _bucket_problems(self, divisor: int) -> Iterator[str]:
        """Yield what contradicts the buckets of aspect ratios; `divisor` divides the sides of all images."""
        step, max_aspect = self.bucket_step, self.max_aspect
        if step is None:
            if max_aspect != type(self).model_fields["max_aspect"].default:
                yield f"max_aspect is {max_aspect} without bucket_step, so that all images are square: remove it"
            return
        if max_aspect <= 1:
            yield f"max_aspect is {max_aspect}; allowed: above 1, the longer side over the shorter one"
        if self.image_size is None:
            yield "bucket_step is set without image_size, whose square says how large buckets are: set image_size"
        elif self.image_size % step:
            yield f"bucket_step is {step}, which does not divide image_size {self.image_size}: take a divisor of it"
        if step % divisor:
            yield f"bucket_step is {step}, but {self._dividers} the sides of every bucket by {divisor}: take a multiple"
