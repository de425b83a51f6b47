"""The items of the vision unit: the grids that an image or video is cut into, and the patches of each item.

An image is one item or, with tiles, several. A video is one item for each frame, or for each group of frames that a
patch of the encoder joins. An item is addressed by its medium and by its part: its number in that medium.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from PIL import Image

from mmtrain.data.media.image_grids import (
    MAX_ASPECT,
    Grid,
    MediumItems,
    Patches,
    best_canvas,
    enlarge_to_patch,
    frame_grid,
    item_grids,
    num_tiles,
    size_on_canvas,
    tile_canvas,
    video_grid,
)
from mmtrain.data.media.images import Uint8Array, load_rgb_images, patchify, read_image_size
from mmtrain.data.media.media_bytes import BadMediaError, Media, describe_changed
from mmtrain.data.media.video import BadVideoError, FrameChoice, VideoHeader, load_video_frames, read_video_header
from mmtrain.errors import DataError
from mmtrain.recipe.settings.data_settings import ImageSettings, VideoSettings
from mmtrain.recipe.settings.modalities import MediaKind
from mmtrain.recipe.settings.vision_settings import VisionSettings

# Of `by_length`: the longest video in seconds, and its patches of frames each second.
_PATCHES_PER_SECOND = ((30, 3.0), (300, 1.0), (math.inf, 0.5))
_MOST_COUNTED_S = 2400


def check_image_settings(vision: VisionSettings, image: ImageSettings) -> None:
    """Raise `DataError` if the settings of images do not suit the encoder, whatever the images are."""
    merged_patch = vision.patch * vision.merge
    max_side = vision.patch * vision.max_side
    frames = vision.temporal_patch if image.pixel_limits == "frames" else 1
    fewest = frames * merged_patch**2
    if image.scheme == "native" and not fewest <= image.max_pixels >= image.min_pixels:
        of_frames = f" in {frames} frames" if frames > 1 else ""
        raise DataError(
            f"data.image.max_pixels is {image.max_pixels}; it must be at least data.image.min_pixels = "
            f"{image.min_pixels} and one merged patch of {merged_patch} x {merged_patch}{of_frames} = {fewest} pixels"
        )
    if image.scheme == "native":
        return
    name, pixels = ("size", image.size) if image.scheme == "fixed" else ("tile", image.tile)
    whole = pixels // vision.patch * vision.patch if image.partial_patches == "drop" else pixels
    if whole % merged_patch or not 0 < whole <= max_side:
        raise DataError(
            f"data.image.{name} is {pixels}; it must be a multiple of patch * merge = {merged_patch} and at most "
            f"patch * max_side = {max_side} pixels"
        )


def read_vision_items(
    kind: MediaKind, media: Media, image: ImageSettings, video: VideoSettings, vision: VisionSettings
) -> MediumItems:
    """Return the items of an image or video, from its header alone. Raises `BadMediaError`."""
    assert kind in ("image", "video"), kind
    patches = Patches.of(vision)
    if kind == "image":
        width, height = read_image_size(media, image.max_source_pixels)
        is_enlarged = image.pixel_limits == "frames"
        shown = enlarge_to_patch(width, height, patches.merged_side) if is_enlarged else (width, height)
        _check_aspect(media, *shown, image)
        return MediumItems(item_grids(width, height, image, patches), image_size=(width, height))
    whole = read_video_header(media, image.max_source_pixels)
    header = cut_header(whole, video)
    if header != whole and video.long_clips == "reject":
        seconds = whole.num_frames / whole.frames_per_second
        reason = f"{media}: {seconds:.1f} s is above data.video.max_seconds = {video.max_seconds:g}"
        raise BadVideoError("video_too_long", reason)
    num_frames = count_used_frames(header, video, vision.temporal_patch)
    num_items = -(-num_frames // vision.temporal_patch)
    of_frames = frame_settings(image, video)
    if video.pixel_limits == "video" and image.scheme == "native":
        _check_aspect(media, *enlarge_to_patch(header.width, header.height, patches.merged_side), image)
        grid = video_grid(header.width, header.height, max(num_frames, vision.temporal_patch), of_frames, patches)
    else:
        _check_aspect(media, header.width, header.height, image)
        grid = frame_grid(header.width, header.height, of_frames, patches)
    frames_per_second = num_frames / header.num_frames * header.frames_per_second
    times = _item_times(num_items, frames_per_second, video, vision)
    return MediumItems((grid,) * num_items, times, find_item_tenths(header, video, vision.temporal_patch))


def _check_aspect(media: Media, width: int, height: int, image: ImageSettings) -> None:
    """Raise `BadMediaError` for a picture that is too narrow for the processors whose scheme is `native`."""
    if image.scheme == "native" and max(width, height) / min(width, height) > MAX_ASPECT:
        reason = f"{media}: {width} x {height} pixels; allowed: a longer side of at most {MAX_ASPECT} shorter ones"
        raise BadMediaError("too_narrow", reason)


def _item_times(
    num_items: int, frames_per_second: float, video: VideoSettings, vision: VisionSettings
) -> tuple[int, ...] | None:
    """Return the rotary positions in time of a video's items; None if each is one behind the item before.

    They are computed in fp32, in the order in which `transformers` does: whole seconds must not fall to the position
    before.
    """
    per_second = vision.time_positions_per_second
    if per_second is None:
        return None
    if vision.patch_seconds != "sampled" and video.fps is not None:
        seconds = np.arange(num_items, dtype=np.float32) * np.float32(vision.temporal_patch / video.fps)
        positions = seconds * np.float32(per_second)
    else:
        item_s = np.float32(vision.temporal_patch / frames_per_second)
        positions = (np.arange(num_items) * (np.float32(per_second) * item_s)).astype(np.float32)
    return tuple(positions.astype(np.int64).tolist())


def frame_settings(image: ImageSettings, video: VideoSettings) -> ImageSettings:
    """Return how frames are resized: as images, within limits of their own where a recipe sets them."""
    limits = {"min_pixels": video.min_pixels, "max_pixels": video.max_pixels}
    return image.model_copy(update={name: value for name, value in limits.items() if value is not None})


class VisionItemDecoder:
    """Decodes items one at a time, and keeps the last medium decoded: usually its next part is wanted next."""

    def __init__(
        self, settings: ImageSettings, patch: int, temporal_patch: int = 1, video: VideoSettings | None = None
    ) -> None:
        """Decode into patches of `patch` x `patch` pixels of `temporal_patch` frames, preprocessed by `settings`.

        video: how frames are chosen.
        """
        self._settings = settings
        self._video = VideoSettings() if video is None else video
        self._patch = patch
        self._temporal_patch = temporal_patch
        self._cached_key: object = None
        self._cached: list[Image.Image] | BadMediaError = []  # the parts of the last medium, or why it is bad

    def patches(self, kind: MediaKind, media: Media, part: int, num_parts: int, grid: Grid) -> Uint8Array:
        """Return the patches (rows * cols, features of a patch) of one part of an image or video, as bytes.

        All `num_parts` parts of the medium have the same grid. Raises `BadMediaError`.
        """
        key = kind, media, num_parts, grid
        if self._cached_key != key:
            self._cached_key = key
            try:
                self._cached = self._decode(kind, media, num_parts, grid)
            except BadMediaError as bad:
                self._cached = bad
        if isinstance(self._cached, BadMediaError):
            raise self._cached
        if kind == "video":
            frames = self._cached[part * self._temporal_patch : (part + 1) * self._temporal_patch]
            return patchify(frames, self._patch)
        return patchify([self._cached[part]], self._patch, repeats=self._temporal_patch)

    def _decode(self, kind: MediaKind, media: Media, num_parts: int, grid: Grid) -> list[Image.Image]:
        image = self._settings
        side = image.size if image.scheme == "fixed" else image.tile
        # With a fixed side, pixels beyond the last whole patch belong to the picture until it is cut into patches.
        size = (grid[1] * self._patch, grid[0] * self._patch) if image.scheme == "native" else (side, side)
        if kind == "video":
            num_frames = num_parts * self._temporal_patch
            choose = frame_choice(self._video, num_frames, self._temporal_patch)
            return load_video_frames(media, num_frames, size, self._settings, choose)
        if self._settings.scheme in ("tiles", "pinpoints"):
            return _load_tiles(media, num_parts, self._settings)
        return load_rgb_images(media, [size], self._settings)


def _load_tiles(media: Media, expected_tiles: int, settings: ImageSettings) -> list[Image.Image]:
    """Return the tiles of an image, row-major, and one that shows all of it.

    With `tiles` this is the last one, where there are several; with `pinpoints` it is the first one. Without
    `tile_several`, an image among others is one tile.
    """
    side = settings.tile
    width, height = read_image_size(media, settings.max_source_pixels)
    is_alone = settings.tile_several or expected_tiles > 1  # in its sample
    if is_alone and num_tiles(width, height, settings) != expected_tiles:
        what = f"{media}: {width} x {height} pixels are not {expected_tiles} tiles"
        raise BadMediaError("undecodable", describe_changed(what))
    if expected_tiles == 1 and settings.scheme == "pinpoints":
        return load_rgb_images(media, [(side, side)], settings.model_copy(update={"fit": "pad"}))
    if settings.scheme == "pinpoints":
        canvas_size = best_canvas(width, height, settings.pinpoints)[::-1]
        size = size_on_canvas(width, height, canvas_size[::-1])
        resized, thumbnail = load_rgb_images(media, [size, (side, side)], settings)
        canvas = Image.new("RGB", canvas_size)
        canvas.paste(resized, ((canvas_size[0] - size[0]) // 2, (canvas_size[1] - size[1]) // 2))
        return [thumbnail, *_cut(canvas, side)]
    rows, cols = tile_canvas(width, height, side, settings.max_tiles)
    if (rows, cols) == (1, 1):
        return load_rgb_images(media, [(side, side)], settings)
    canvas, thumbnail = load_rgb_images(media, [(cols * side, rows * side), (side, side)], settings)
    return [*_cut(canvas, side), thumbnail]


def _cut(canvas: Image.Image, side: int) -> list[Image.Image]:
    """Cut a picture into squares, row-major."""
    tops, lefts = range(0, canvas.height, side), range(0, canvas.width, side)
    return [canvas.crop((left, top, left + side, top + side)) for top in tops for left in lefts]


def cut_header(header: VideoHeader, video: VideoSettings) -> VideoHeader:
    """Return the header of the first `max_seconds` of a video: of the frames that start before, and at least one."""
    if video.max_seconds is None:
        return header
    allowed_frames = max(1, math.ceil(video.max_seconds * header.frames_per_second))
    return replace(header, num_frames=min(header.num_frames, allowed_frames))


def count_used_frames(header: VideoHeader, video: VideoSettings, temporal_patch: int) -> int:
    """Return how many frames of a video are used.

    With `fps` they fill patches of `temporal_patch` frames, as `Qwen2VLVideoProcessor` of `transformers` samples them.
    """
    if video.sampling != "parts":
        return len(_sample(header, video, temporal_patch))
    if video.fps is None:
        return max(1, min(video.max_frames, header.num_frames))
    most = min(video.max_frames, header.num_frames) // temporal_patch * temporal_patch
    wanted = header.num_frames / header.frames_per_second * video.fps
    num_frames = math.floor(min(max(wanted, video.min_frames), most) / temporal_patch) * temporal_patch
    return max(num_frames, temporal_patch)  # a video of fewer frames shows its last one again


def find_item_tenths(header: VideoHeader, video: VideoSettings, temporal_patch: int) -> tuple[int, ...] | None:
    """Return when the items of a video are shown, in tenths of seconds; None where their text does not say it.

    An item is shown in the middle between its first and its last frame, as `Qwen3VLProcessor` of `transformers` says;
    with sampling `seconds`, in the last whole second up to its first frame, as `Glm4vProcessor` says; with `by_length`,
    with its first frame, as `Glm46VProcessor` does.
    """
    if not video.states_times:
        return None
    frames_s = [frame / header.frames_per_second for frame in _in_patches(header, video, temporal_patch)]
    if video.sampling == "seconds":
        return tuple(10 * int(first_s) for first_s in frames_s[::temporal_patch])
    middles_s = [
        (frames_s[first] + frames_s[first + temporal_patch - 1]) / 2
        for first in range(0, len(frames_s), temporal_patch)
    ]
    shown_s = frames_s[::temporal_patch] if video.sampling == "by_length" else middles_s
    return tuple(round(10 * float(f"{item_s:.1f}")) for item_s in shown_s)


def frame_choice(video: VideoSettings, count: int, temporal_patch: int) -> FrameChoice:
    """Return which frames are decoded of a video that shows `count` in whole patches."""
    if video.sampling != "parts":
        return lambda header: _in_patches(cut_header(header, video), video, temporal_patch)
    return lambda header: first_of_parts(cut_header(header, video).num_frames, count)


def first_of_parts(num_frames: int, count: int) -> list[int]:
    """Return the first frame of each of `count` equal parts, as `sample_frames` of most video processors does."""
    return [part * num_frames // count for part in range(count)]


def _sample(header: VideoHeader, video: VideoSettings, temporal_patch: int) -> list[int]:
    """Return the numbers of the frames that the video processor of `transformers` samples.

    That of Qwen3-VL takes them from end to end, that of InternVL in the middle of equal parts.
    """
    if video.sampling == "seconds":
        return _on_show(header, video)
    if video.sampling == "by_length":
        return _by_length(header, video, temporal_patch)
    wanted = video.max_frames
    if video.fps is not None:
        wanted = int(header.num_frames / header.frames_per_second * video.fps)
    count = min(max(wanted, video.min_frames), video.max_frames, header.num_frames)
    if video.sampling == "middles":
        length = header.num_frames / count
        return [int(np.float32(length / 2 + part * length)) for part in range(count)]  # as torch.arange computes it
    frames: list[int] = np.linspace(0, header.num_frames - 1, count).round().astype(int).tolist()
    return frames


def _on_show(header: VideoHeader, video: VideoSettings) -> list[int]:
    """Return the frames that `Glm4vVideoProcessor` of `transformers` samples, an even number.

    An upper limit of frames says up to which length of a video they are 1 / `fps` of a second apart.
    """
    last, rate = header.num_frames - 1, header.frames_per_second
    seconds = header.num_frames / rate
    if video.fps is not None and seconds <= video.max_frames / video.fps:
        count = max(math.floor(seconds * video.fps), 1)
        frames = [min(last, math.ceil(number * rate / video.fps)) for number in range(count)]
    elif video.max_frames >= header.num_frames:
        frames = list(range(header.num_frames))
    else:
        times_s = np.linspace(0, seconds, video.max_frames).tolist()
        frames = [min(last, math.ceil(time_s * rate)) for time_s in times_s]
    return _even(frames)


def _by_length(header: VideoHeader, video: VideoSettings, temporal_patch: int) -> list[int]:
    """Return the frames that `Glm46VVideoProcessor` of `transformers` samples, an even number.

    They are the first ones on show at evenly spaced times. Where these are too few or too many for the length of the
    video, its frames are evenly spaced by number.
    """
    num_frames, rate = header.num_frames, header.frames_per_second
    seconds = num_frames / rate
    counted_s = min(seconds, _MOST_COUNTED_S)
    patches_per_second = next(patches for most_s, patches in _PATCHES_PER_SECOND if counted_s <= most_s)
    wanted = max(1, min(int(counted_s * patches_per_second * temporal_patch), video.max_frames))
    if num_frames < wanted:
        return _even(np.linspace(0, num_frames - 1, wanted, dtype=int).tolist())
    frames: list[int] = []
    next_s = 0.0
    for frame in range(num_frames):
        if frame * (1 / rate) >= next_s:
            next_s += 1 / (temporal_patch * patches_per_second)
            frames.append(frame)
            if next_s >= int(seconds):
                break
    if len(frames) < wanted:
        return _even(np.linspace(frames[0], frames[-1], wanted, dtype=int).tolist())
    if len(frames) > wanted:
        return _even(np.linspace(0, num_frames - 1, wanted, dtype=int).tolist())
    return _even(frames)


def _even(frames: Sequence[int]) -> list[int]:
    """Return the different ones of ascending frames, the last one twice where the number is odd otherwise."""
    different = list(dict.fromkeys(frames))
    return different + different[-1:] * (len(different) % 2)


def _in_patches(header: VideoHeader, video: VideoSettings, temporal_patch: int) -> Sequence[int]:
    """Return the sampled frames; the last one is shown again to fill its patch."""
    frames = _sample(header, video, temporal_patch)
    return frames + frames[-1:] * (-len(frames) % temporal_patch)
