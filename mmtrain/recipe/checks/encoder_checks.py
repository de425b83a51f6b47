"""What the settings of a modality's encoders and data demand of each other."""

from collections.abc import Callable, Iterator, Mapping
from math import isqrt
from typing import cast

from mmtrain.recipe.raw_tree import Problem
from mmtrain.recipe.settings.audio_settings import LOG_MEL_FRAMES_PER_SECOND, AudioSettings
from mmtrain.recipe.settings.data_settings import ImageSettings
from mmtrain.recipe.settings.modalities import dotted_unit, unit_path
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.recipe.settings.vision_settings import VisionSettings


def check_image_size(recipe: Recipe) -> Iterator[Problem]:
    """The sides of images are multiples of a merged patch of each encoder, and within its positions."""
    for name, vision in _vision_encoders(recipe).items():
        yield from _check_image_size(recipe, name, vision)


def _check_image_size(recipe: Recipe, encoder: str, vision: VisionSettings) -> Iterator[Problem]:
    image = recipe.data.image
    merged_patch = vision.patch * vision.merge
    path = f"model.{dotted_unit(encoder)}"
    factors = f"{path}.patch {vision.patch} x merge {vision.merge}"
    if image.scheme == "native":
        yield from _check_native_area(recipe, merged_patch, factors)
        name, side = "max_pixels", isqrt(image.max_pixels) // vision.patch
    else:
        name, pixels = ("size", image.size) if image.scheme == "fixed" else ("tile", image.tile)
        side = pixels // vision.patch
        is_whole = side % vision.merge == 0 and side > 0
        if image.partial_patches == "drop" and not is_whole:
            text = f"{pixels} holds {side} patches a side, not a multiple of merge {vision.merge} ({factors})"
            yield Problem(("data", "image", name), text)
        if image.partial_patches == "reject" and pixels % merged_patch:
            yield Problem(("data", "image", name), f"{pixels} is not a multiple of {merged_patch} ({factors})")
    if side > vision.max_side:
        text = f"a square image becomes {side} patches a side, {path}.max_side is {vision.max_side}"
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
    """The largest image, as all encoders together show it to the LLM, leaves space for text in a group."""
    image, max_tokens = recipe.data.image, recipe.data.sample_tokens
    num_tiles = image.max_tiles + 1 if image.max_tiles > 1 else 1  # one more tile shows the entire image
    encoders = _vision_encoders(recipe)
    tokens = 0
    for vision in encoders.values():
        merged_patch = vision.patch * vision.merge
        largest = {
            "fixed": ("size", vision.item_features((image.size // merged_patch) ** 2)),
            "native": ("max_pixels", vision.item_features(_largest_native_area(image, merged_patch))),
            "tiles": ("max_tiles", num_tiles * vision.item_features((image.tile // merged_patch) ** 2)),
            "pinpoints": ("pinpoints", _largest_canvas_features(recipe, vision)),
        }
        name, num_features = largest[image.scheme]
        tokens += num_features
    if tokens >= max_tokens:
        of_all = f" from {' and '.join(encoders)} together" if len(encoders) > 1 else ""
        limit = "data.seq_len" if max_tokens == recipe.data.seq_len else "data.max_sample_tokens"
        text = f"one image becomes up to {tokens} LLM tokens{of_all}, {limit} is {max_tokens}; allowed: fewer than that"
        yield Problem(("data", "image", name), text)


def _largest_native_area(image: ImageSettings, merged_patch: int) -> int:
    """Return the merged patches of the largest image, whose sides may be rounded up to whole ones."""
    if image.pixel_limits == "sides":
        return (-(-isqrt(image.max_pixels) // merged_patch)) ** 2
    return image.max_pixels // merged_patch**2


def _largest_canvas_features(recipe: Recipe, vision: VisionSettings) -> int:
    """Return the most LLM tokens of an image on one of the canvases, with the tile that shows all of it."""
    image = recipe.data.image
    side = image.tile // (vision.patch * vision.merge)
    canvases = [(height // image.tile, width // image.tile) for height, width in image.pinpoints]
    if vision.join_tiles:
        sizes = [vision.joined_size(rows * side, cols * side, side) for rows, cols in canvases]
        return side**2 + max((rows * (cols + 1) for rows, cols in sizes), default=0)
    most_tiles = 1 + max((rows * cols for rows, cols in canvases), default=0)
    return most_tiles * vision.item_features(side**2)


def check_joined_tiles(recipe: Recipe) -> Iterator[Problem]:
    """Tiles are joined where canvases are cut into them, and all features of an image come from one encoder."""
    encoders = _vision_encoders(recipe)
    for name, vision in encoders.items():
        where = ("model", *unit_path(name), "join_tiles")
        if vision.join_tiles and recipe.data.image.scheme != "pinpoints":
            yield Problem(where, f"is set; allowed with data.image.scheme pinpoints, found {recipe.data.image.scheme}")
        if vision.join_tiles and len(encoders) > 1:
            yield Problem(where, f"is set; allowed with one vision encoder, found {' and '.join(encoders)}")


def check_time_positions(recipe: Recipe) -> Iterator[Problem]:
    """A patch of a video takes a whole number of positions in time, of an LLM whose positions are not rounded."""
    fps = recipe.data.video.fps
    for name, vision in _vision_encoders(recipe).items():
        per_second = vision.time_positions_per_second
        if vision.patch_seconds != "stated_exactly" or per_second is None:
            continue
        where, path = ("data", "video", "fps"), f"model.{dotted_unit(name)}"
        rule = f"{per_second:g} {path}.time_positions_per_second x {vision.temporal_patch} temporal_patch / fps"
        if fps is None:
            yield Problem(where, f"is not set, but videos are timed by it ({rule}); set it, such as 1")
        elif per_second * vision.temporal_patch % fps:
            positions = per_second * vision.temporal_patch / fps
            yield Problem(where, f"found {fps:g}, of which {rule} is {positions:g}; allowed: those that make it whole")


def check_clip_length(recipe: Recipe) -> Iterator[Problem]:
    """The longest allowed clip is within the positions of each encoder, and its tokens merge without a rest."""
    for name, audio in _audio_encoders(recipe).items():
        yield from _check_clip_length(recipe, name, audio)


def _check_clip_length(recipe: Recipe, encoder: str, audio: AudioSettings) -> Iterator[Problem]:
    max_seconds = recipe.data.audio.max_seconds
    frames = max_seconds * LOG_MEL_FRAMES_PER_SECOND
    path = f"model.{dotted_unit(encoder)}"
    if audio.longest_clip_frames is not None and frames > audio.longest_clip_frames:
        text = f"{max_seconds:g} s become {frames:g} frames, {path}.max_frames is {audio.longest_clip_frames}"
        yield Problem(("data", "audio", "max_seconds"), text)
    elif audio.chunk is None and audio.max_frames % (2 * audio.downsample):
        text = f"{audio.max_frames} is not a multiple of 2 x {path}.downsample {audio.downsample}"
        yield Problem(("model", *unit_path(encoder), "max_frames"), text)


def check_clip_items(recipe: Recipe) -> Iterator[Problem]:
    """Clips become several items only where attention ends with a chunk, and alike for all encoders that hear them."""
    seconds = recipe.data.audio.item_seconds
    if seconds is None:
        return
    where = ("data", "audio", "item_seconds")
    encoders = _audio_encoders(recipe)
    if len(encoders) > 1:
        yield Problem(where, f"found {seconds:g}, allowed with one audio encoder, found {' and '.join(encoders)}")
        return
    for name, audio in encoders.items():
        if audio.chunk is None:
            text = f"found {seconds:g}, allowed where model.{dotted_unit(name)}.chunk is set: else attention sees all"
            yield Problem(where, f"{text} of a clip; leave item_seconds out")


def _vision_encoders(recipe: Recipe) -> dict[str, VisionSettings]:
    encoders = recipe.model.all_encoders.items()
    return {name: cast(VisionSettings, settings) for name, settings in encoders if settings.modality == "vision"}


def _audio_encoders(recipe: Recipe) -> dict[str, AudioSettings]:
    encoders = recipe.model.all_encoders.items()
    return {name: cast(AudioSettings, settings) for name, settings in encoders if settings.modality == "audio"}


# By the name of the modality; for recipes whose sources hold samples.
ENCODER_CHECKS: Mapping[str, tuple[Callable[[Recipe], Iterator[Problem]], ...]] = {
    "vision": (check_image_size, check_image_tokens, check_joined_tiles, check_time_positions),
    "audio": (check_clip_length, check_clip_items),
}
