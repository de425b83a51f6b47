"""A frozen autoencoder of images (Rombach et al., arXiv 2112.10752), equal to `AutoencoderKL` of `diffusers`.

Modules have the names that their weights have in folders of `diffusers`.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from mmtrain.families.family import Settings

_NORM_EPS = 1e-6  # of every norm
_NUM_PIXEL_CHANNELS = 3
_NUM_MOMENTS = 2  # mean and variance of each latent number


class Autoencoder(nn.Module):
    """Maps images to the latent images that generators learn, and back."""

    def __init__(self, settings: Settings) -> None:
        """Build the autoencoder of `autoencoder_settings`; its weights are uninitialized."""
        super().__init__()
        channels = settings["latent_channels"]
        moments = _NUM_MOMENTS * settings["latent_channels"]
        self.encoder = LatentEncoder(settings, moments)
        self.quant_conv = nn.Conv2d(moments, moments, 1) if settings["has_quantizing"] else nn.Identity()
        self.post_quant_conv = nn.Conv2d(channels, channels, 1) if settings["has_dequantizing"] else nn.Identity()
        self.decoder = LatentDecoder(settings)
        self._scale, self._shift = settings["scale"], settings["shift"]

    def forward(self, pixels: Tensor) -> Tensor:
        """Map pixels from -1 to 1 (n, 3, rows, columns) to latents (n, channels, rows / 2^k, columns / 2^k).

        Latents are the means of their distributions, shifted and scaled to about unit variance.
        """
        mean, _ = self.quant_conv(self.encoder(pixels)).chunk(_NUM_MOMENTS, dim=1)
        latents: Tensor = (mean - self._shift) * self._scale
        return latents

    def decode(self, latents: Tensor) -> Tensor:
        """Map latents (n, channels, rows, columns) to pixels from about -1 to 1 (n, 3, rows * 2^k, columns * 2^k)."""
        pixels: Tensor = self.decoder(self.post_quant_conv(latents / self._scale + self._shift))
        return pixels


class LatentEncoder(nn.Module):
    """Residual blocks down the levels, attention in the middle, and the moments of the latents."""

    def __init__(self, settings: Settings, moments: int) -> None:
        """Build the part of an autoencoder; its weights are uninitialized."""
        super().__init__()
        widths, groups = settings["widths"], settings["norm_groups"]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(_NUM_PIXEL_CHANNELS, widths[0], 3, padding=1)
        self.down_blocks = nn.ModuleList(
            EncoderLevel(widths[max(level - 1, 0)], width, settings["layers"], groups, is_last=level == last)
            for level, width in enumerate(widths)
        )
        self.mid_block = AutoencoderMiddle(widths[-1], groups, settings["has_attention"])
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], eps=_NORM_EPS)
        self.conv_out = nn.Conv2d(widths[-1], moments, 3, padding=1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map (n, 3, rows, columns) to moments (n, 2 * latent channels, rows / 2^k, columns / 2^k)."""
        features = self.conv_in(pixels)
        for block in self.down_blocks:
            features = block(features)
        moments: Tensor = self.conv_out(F.silu(self.conv_norm_out(self.mid_block(features))))
        return moments


class EncoderLevel(nn.Module):
    """Residual blocks, and a convolution that halves both sides unless the level is the last."""

    def __init__(self, width: int, out: int, num_blocks: int, groups: int, is_last: bool) -> None:
        """Build the part of an autoencoder; its weights are uninitialized."""
        super().__init__()
        self.resnets = nn.ModuleList(
            AutoencoderResidual(width if i == 0 else out, out, groups) for i in range(num_blocks)
        )
        self.downsamplers = nn.ModuleList([] if is_last else [HalvingConvolution(out)])

    def forward(self, features: Tensor) -> Tensor:
        """Map features (n, channels, rows, columns)."""
        for module in (*self.resnets, *self.downsamplers):
            features = module(features)
        return features


class LatentDecoder(nn.Module):
    """Attention in the middle, and residual blocks up the levels to pixels."""

    def __init__(self, settings: Settings) -> None:
        """Build the part of an autoencoder; its weights are uninitialized."""
        super().__init__()
        widths, groups = settings["widths"][::-1], settings["norm_groups"]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(settings["latent_channels"], widths[0], 3, padding=1)
        self.mid_block = AutoencoderMiddle(widths[0], groups, settings["has_attention"])
        self.up_blocks = nn.ModuleList(
            DecoderLevel(widths[max(level - 1, 0)], width, settings["layers"] + 1, groups, is_last=level == last)
            for level, width in enumerate(widths)
        )
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], eps=_NORM_EPS)
        self.conv_out = nn.Conv2d(widths[-1], _NUM_PIXEL_CHANNELS, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        """Map (n, latent channels, rows, columns) to (n, 3, rows * 2^k, columns * 2^k)."""
        features = self.mid_block(self.conv_in(latents))
        for block in self.up_blocks:
            features = block(features)
        pixels: Tensor = self.conv_out(F.silu(self.conv_norm_out(features)))
        return pixels


class DecoderLevel(nn.Module):
    """Residual blocks, and a convolution that doubles both sides unless the level is the last."""

    def __init__(self, width: int, out: int, num_blocks: int, groups: int, is_last: bool) -> None:
        """Build the part of an autoencoder; its weights are uninitialized."""
        super().__init__()
        self.resnets = nn.ModuleList(
            AutoencoderResidual(width if i == 0 else out, out, groups) for i in range(num_blocks)
        )
        self.upsamplers = nn.ModuleList([] if is_last else [DoublingConvolution(out)])

    def forward(self, features: Tensor) -> Tensor:
        """Map features (n, channels, rows, columns)."""
        for module in (*self.resnets, *self.upsamplers):
            features = module(features)
        return features


class AutoencoderMiddle(nn.Module):
    """Two residual blocks with attention between them."""

    def __init__(self, width: int, groups: int, has_attention: bool) -> None:
        """Build the part of an autoencoder; its weights are uninitialized."""
        super().__init__()
        self.resnets = nn.ModuleList(AutoencoderResidual(width, width, groups) for _ in range(2))
        self.attentions = nn.ModuleList([AutoencoderAttention(width, groups)] if has_attention else [])

    def forward(self, features: Tensor) -> Tensor:
        """Map features (n, channels, rows, columns) to the same shape."""
        first, second = self.resnets
        features = first(features)
        for attention in self.attentions:
            features = attention(features)
        out: Tensor = second(features)
        return out


class AutoencoderResidual(nn.Module):
    """Two convolutions with norms before them, beside a residual connection."""

    def __init__(self, width: int, out: int, groups: int) -> None:
        """Build the part of an autoencoder; its weights are uninitialized."""
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, width, eps=_NORM_EPS)
        self.conv1 = nn.Conv2d(width, out, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, out, eps=_NORM_EPS)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, features: Tensor) -> Tensor:
        """Map features (n, channels, rows, columns)."""
        inner = self.conv1(F.silu(self.norm1(features)))
        added: Tensor = self.conv2(F.silu(self.norm2(inner)))
        residual: Tensor = self.conv_shortcut(features)
        return added + residual


class AutoencoderAttention(nn.Module):
    """Attention of all positions of an image to each other, in one head, beside a residual connection."""

    def __init__(self, width: int, groups: int) -> None:
        """Build the part of an autoencoder; its weights are uninitialized."""
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, width, eps=_NORM_EPS)
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, features: Tensor) -> Tensor:
        """Map features (n, channels, rows, columns) to the same shape."""
        positions = self.group_norm(features).flatten(2).transpose(1, 2)
        attended = F.scaled_dot_product_attention(self.to_q(positions), self.to_k(positions), self.to_v(positions))
        added: Tensor = self.to_out[0](attended).transpose(1, 2).reshape(features.shape)
        return features + added


class HalvingConvolution(nn.Module):
    """A convolution that halves both sides, padded at the right and at the bottom alone."""

    def __init__(self, width: int) -> None:
        """Build the part of an autoencoder; its weights are uninitialized."""
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, features: Tensor) -> Tensor:
        """Map features (n, channels, rows, columns) to half the rows and columns."""
        out: Tensor = self.conv(F.pad(features, (0, 1, 0, 1)))
        return out


class DoublingConvolution(nn.Module):
    """A convolution behind every pixel repeated twice in both directions."""

    def __init__(self, width: int) -> None:
        """Build the part of an autoencoder; its weights are uninitialized."""
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, features: Tensor) -> Tensor:
        """Map features (n, channels, rows, columns) to twice the rows and columns."""
        out: Tensor = self.conv(F.interpolate(features, scale_factor=2.0, mode="nearest"))
        return out
