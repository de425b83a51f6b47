"""Parts of image generators in folders of `diffusers`: a U-Net or a transformer, and the autoencoder beside it.

These folders are parts of pipelines, beside a text encoder, which is not read here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.diffusers_pixart import (
    pixart_config,
    pixart_ignored,
    pixart_settings,
    pixart_weights,
)
from mmtrain.families.diffusers_unet import unet_config, unet_settings, unet_weights
from mmtrain.families.diffusers_vae import (
    AUTOENCODER,
    OLDER_ATTENTION,
    autoencoder_settings,
    autoencoder_weights,
)
from mmtrain.families.family import Family, FolderSettings, Settings
from mmtrain.families.weight_layouts import ParameterSource

GENERATOR_CLASS_KEY = "_class_name"  # of a config of `diffusers`


def _unet(config: ConfigSection) -> FolderSettings:
    return FolderSettings({"generator": unet_settings(config)})


def _pixart(config: ConfigSection) -> FolderSettings:
    return FolderSettings({"generator": pixart_settings(config)})


def _unet_weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    yield from unet_weights(settings.model["generator"])


def _pixart_weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    yield from pixart_weights(settings.model["generator"])


def _autoencoder(config: ConfigSection) -> FolderSettings:
    return FolderSettings({AUTOENCODER: autoencoder_settings(config)})


def _autoencoder_weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    yield from autoencoder_weights(settings.model[AUTOENCODER])


UNET = Family("stable-diffusion-unet", ("UNet2DConditionModel",), _unet, _unet_weights, {})
PIXART = Family(
    "pixart",
    ("PixArtTransformer2DModel", "Transformer2DModel"),  # the second in folders of before 2024
    _pixart,
    _pixart_weights,
    {},
    ignored=lambda _: pixart_ignored(),
)
VAE = Family(
    "autoencoder-kl",
    ("AutoencoderKL",),
    _autoencoder,
    _autoencoder_weights,
    {},
    spellings=((), OLDER_ATTENTION),
)
_CONFIGS = {"unet": unet_config, "dit": pixart_config}
_FAMILIES = {"unet": UNET, "dit": PIXART}


def generator_weights(settings: Settings) -> Iterator[ParameterSource]:
    """Yield what tensors of `diffusers` the parameters of a generator are made of."""
    yield from _FAMILIES[settings["kind"]].weights(FolderSettings({"generator": settings}))


def generator_config(settings: Settings) -> Mapping[str, Any]:
    """Return the `config.json` that `diffusers` reads for a generator with these settings."""
    return _CONFIGS[settings["kind"]](settings)
