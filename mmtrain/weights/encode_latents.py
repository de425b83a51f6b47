"""Encode the images that a recipe's generator learns to draw, once, with the autoencoder that the recipe names."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmtrain.data import DataIndex
from mmtrain.data.media.latent_files import LatentHeader, LatentWriter, check_header, image_key
from mmtrain.data.media.media_bytes import BadMediaError, Media
from mmtrain.data.media.target_images import TargetImageReader
from mmtrain.errors import ModelFolderError, UserError
from mmtrain.families import read_model_folder
from mmtrain.families.diffusers_vae import AUTOENCODER
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from mmtrain.weights.folder_tensors import FolderTensors
from mmtrain.weights.match_tensors import match_tensors

if TYPE_CHECKING:
    import torch

    from mmtrain.models.generator.autoencoder import Autoencoder

_SETTING = "model.generator.vae"
_HALF_RANGE = 127.5  # of a byte: pixels become numbers from -1 to 1, as autoencoders read them
_IMAGES_PER_BATCH = 8
_ENCODER_PARTS = ("encoder.", "quant_conv.")


@dataclass(frozen=True)
class EncodedImages:
    """What was done."""

    folder: Path
    added: int  # latents
    known: int  # images whose latents were there before, and repeated ones
    bad: tuple[str, ...]  # why images could not be decoded


def encode_latents(
    recipe: Recipe,
    indices: Iterable[DataIndex],
    device: "torch.device",
    progress: Callable[[int], None] = lambda _: None,
) -> EncodedImages:
    """Add the latents of all images to draw that are not yet in `model.generator.latents`.

    Images that cannot be decoded are left out: training computes nothing for them either. `progress` is called with the
    number of images of every batch.

    Raises UserError for a recipe without `model.generator.vae`, and for a folder that cannot be written;
    ModelFolderError for an autoencoder that cannot be read; DataError for a folder with latents of another kind.
    """
    settings = recipe.model.generator
    if settings is None or settings.vae is None or settings.latents is None or settings.image_size is None:
        raise UserError(
            "this recipe draws no latents; allowed: a recipe with model.generator.vae, model.generator.latents and "
            "model.generator.image_size"
        )
    model, weights_hash = load_autoencoder(settings.vae)
    model.to(device)
    header = LatentHeader.of(settings, weights_hash)
    reader = TargetImageReader(settings, recipe.data)
    added = known = 0
    bad: list[str] = []
    images = (image for index in indices for sample in index.samples for image in sample.target_images)
    with LatentWriter(settings.latents, header) as writer:
        for batch in _batches(images):
            fresh: dict[bytes, Media] = {}
            for image in batch:
                try:
                    fresh[image_key(image)] = image
                except BadMediaError as error:
                    bad.append(str(error))
            pixels: dict[bytes, np.ndarray] = {}
            for key, image in fresh.items():
                if key in writer.keys:
                    continue
                try:
                    pixels[key] = reader.load_pixels(image)
                except BadMediaError as error:
                    bad.append(str(error))
            for keys in _by_size(pixels):
                writer.add(keys, _encode(model, np.stack([pixels[key] for key in keys]), device))
            added += len(pixels)
            progress(len(batch))
            known += len(batch)
    return EncodedImages(settings.latents, added, known - added - len(bad), tuple(bad))


def load_autoencoder(path: Path) -> tuple["Autoencoder", str]:
    """Return the autoencoder in a folder of `diffusers`, and a hash of its encoder's weights.

    Raises ModelFolderError.
    """
    import torch

    from mmtrain.models.generator.autoencoder import Autoencoder

    try:
        folder = read_model_folder(path)
    except ModelFolderError as error:
        raise ModelFolderError(f"{_SETTING}: {error}") from None
    tensors = FolderTensors.of(path)
    sources = match_tensors(folder, tensors, _SETTING).sources
    model = Autoencoder(folder.settings.model[AUTOENCODER]).requires_grad_(False)
    digest = hashlib.blake2b(digest_size=16)
    for name, param in model.named_parameters():
        [block] = sources[f"{AUTOENCODER}.{name}"].blocks
        param.copy_(tensors.read(block.tensor, block.tensor_box))
        if name.startswith(_ENCODER_PARTS):  # latents depend on nothing else
            digest.update(param.to(torch.float32).numpy().tobytes())
    tensors.close()
    return model.eval(), digest.hexdigest()


def load_latent_decoder(settings: GeneratorSettings) -> "Autoencoder":
    """Return the autoencoder whose latents a generator learned, to turn what it draws into pixels.

    Raises ModelFolderError for an autoencoder that cannot be read, DataError if the latents are another one's.
    """
    assert settings.vae is not None
    model, weights_hash = load_autoencoder(settings.vae)
    if settings.latents is not None:
        check_header(settings.latents, LatentHeader.of(settings, weights_hash))
    return model


def _by_size(pixels: Mapping[bytes, np.ndarray]) -> list[list[bytes]]:
    """Return the keys of images of each size."""
    keys: dict[tuple[int, ...], list[bytes]] = {}
    for key, image in pixels.items():
        keys.setdefault(image.shape, []).append(key)
    return [*keys.values()]


def _encode(model: "Autoencoder", pixels: np.ndarray, device: "torch.device") -> np.ndarray:
    """Return the latents (n, channels, rows / 2^k, columns / 2^k) of images (n, rows, columns, 3)."""
    import torch

    with torch.no_grad():
        images = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2).float() / _HALF_RANGE - 1.0
        latents: np.ndarray = model(images).cpu().numpy()
    return latents


def _batches(images: Iterator[Media]) -> Iterator[list[Media]]:
    while batch := list(islice(images, _IMAGES_PER_BATCH)):
        yield batch
