"""What the settings of a modality's encoder and data demand of each other."""

from collections.abc import Callable, Iterator, Mapping
from math import isqrt

from mmtrain.recipe.raw_tree import Problem
from mmtrain.recipe.schema import Recipe

LOG_MEL_FRAMES_PER_SECOND = 100  # one frame every 10 ms, as in Whisper


def check_image_size(recipe: Recipe) -> Iterator[Problem]:
    """The sides of images are multiples of a merged patch, and within the positions of the encoder."""
    vision, image = recipe.model.vision, recipe.data.image
    if vision is None:
        return
    merged_patch = vision.patch * vision.merge
    factors = f"model.vision.patch {vision.patch} x merge {vision.merge}"
    if image.scheme == "native":
        yield from _check_native_area(recipe, merged_patch, factors)
        name, side = "max_pixels", isqrt(image.max_pixels) // vision.patch
    else:
        name, pixels = ("size", image.size) if image.scheme == "fixed" else ("tile", image.tile)
        side = pixels // vision.patch
        if pixels % merged_patch:
            yield Problem(("data", "image", name), f"{pixels} is not a multiple of {merged_patch} ({factors})")
    if side > vision.max_side:
        text = f"a square image becomes {side} patches a side, model.vision.max_side is {vision.max_side}"
        yield Problem(("data", "image", name), text)


def _check_native_area(recipe: Recipe, merged_patch: int, factors: str) -> Iterator[Problem]:
    image = recipe.data.image
    if image.min_pixels > image.max_pixels:
        text = f"{image.min_pixels} is above data.image.max_pixels {image.max_pixels}"
        yield Problem(("data", "image", "min_pixels"), text)
    if image.max_pixels < merged_patch**2:
        text = f"{image.max_pixels} is less than one merged patch of {merged_patch**2} pixels ({factors}, squared)"
        yield Problem(("data", "image", "max_pixels"), text)


def check_image_tokens(recipe: Recipe) -> Iterator[Problem]:
    """The largest image leaves space for text in a group."""
    vision, image, seq_len = recipe.model.vision, recipe.data.image, recipe.data.seq_len
    if vision is None:
        return
    num_tiles = image.max_tiles + 1 if image.max_tiles > 1 else 1  # one more tile shows the entire image
    largest_areas = {
        "fixed": ("size", image.size**2),
        "native": ("max_pixels", image.max_pixels),
        "tiles": ("max_tiles", num_tiles * image.tile**2),
    }
    name, area = largest_areas[image.scheme]
    tokens = area // (vision.patch * vision.merge) ** 2
    if tokens >= seq_len:
        text = f"one image becomes up to {tokens} LLM tokens, data.seq_len is {seq_len}; allowed: fewer than that"
        yield Problem(("data", "image", name), text)


def check_clip_length(recipe: Recipe) -> Iterator[Problem]:
    """The longest allowed clip is within the positions of the encoder, and its tokens merge without a rest."""
    audio, max_seconds = recipe.model.audio, recipe.data.audio.max_seconds
    if audio is None:
        return
    frames = max_seconds * LOG_MEL_FRAMES_PER_SECOND
    if frames > audio.max_frames:
        text = f"{max_seconds:g} s become {frames:g} frames, model.audio.max_frames is {audio.max_frames}"
        yield Problem(("data", "audio", "max_seconds"), text)
    elif audio.max_frames % (2 * audio.downsample):
        text = f"{audio.max_frames} is not a multiple of 2 x model.audio.downsample {audio.downsample}"
        yield Problem(("model", "audio", "max_frames"), text)


# By the name of the modality; for recipes whose sources hold samples.
ENCODER_CHECKS: Mapping[str, tuple[Callable[[Recipe], Iterator[Problem]], ...]] = {
    "vision": (check_image_size, check_image_tokens),
    "audio": (check_clip_length,),
}
