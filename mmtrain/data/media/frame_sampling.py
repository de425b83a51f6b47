"""Choose the frames of a video, and say when they are shown."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mmtrain.data.media.video import FrameChoice, VideoHeader
from mmtrain.recipe.settings.data_settings import VideoSettings


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
        return len(_sample(header, video))
    if video.fps is None:
        return max(1, min(video.max_frames, header.num_frames))
    most = min(video.max_frames, header.num_frames) // temporal_patch * temporal_patch
    wanted = header.num_frames / header.frames_per_second * video.fps
    num_frames = math.floor(min(max(wanted, video.min_frames), most) / temporal_patch) * temporal_patch
    return max(num_frames, temporal_patch)  # a video of fewer frames shows its last one again


def find_item_tenths(header: VideoHeader, video: VideoSettings, temporal_patch: int) -> tuple[int, ...] | None:
    """Return when the items of a video are shown, in tenths of seconds; None where their text does not say it.

    An item is shown in the middle between its first and its last frame, as `Qwen3VLProcessor` of `transformers` says.
    """
    if video.sampling != "ends":
        return None
    frames_s = [frame / header.frames_per_second for frame in _in_patches(header, video, temporal_patch)]
    middles_s = [
        (frames_s[first] + frames_s[first + temporal_patch - 1]) / 2
        for first in range(0, len(frames_s), temporal_patch)
    ]
    return tuple(round(10 * float(f"{middle_s:.1f}")) for middle_s in middles_s)


def frame_choice(video: VideoSettings, count: int, temporal_patch: int) -> FrameChoice:
    """Return which frames are decoded of a video that shows `count` in whole patches."""
    if video.sampling != "parts":
        return lambda header: _in_patches(cut_header(header, video), video, temporal_patch)
    return lambda header: first_of_parts(cut_header(header, video).num_frames, count)


def first_of_parts(num_frames: int, count: int) -> list[int]:
    """Return the first frame of each of `count` equal parts, as `sample_frames` of most video processors does."""
    return [part * num_frames // count for part in range(count)]


def _sample(header: VideoHeader, video: VideoSettings) -> list[int]:
    """Return the numbers of the frames that the video processor of `transformers` samples.

    That of Qwen3-VL takes them from end to end, that of InternVL in the middle of equal parts.
    """
    wanted = video.max_frames
    if video.fps is not None:
        wanted = int(header.num_frames / header.frames_per_second * video.fps)
    count = min(max(wanted, video.min_frames), video.max_frames, header.num_frames)
    if video.sampling == "middles":
        length = header.num_frames / count
        return [int(np.float32(length / 2 + part * length)) for part in range(count)]  # as torch.arange computes it
    frames: list[int] = np.linspace(0, header.num_frames - 1, count).round().astype(int).tolist()
    return frames


def _in_patches(header: VideoHeader, video: VideoSettings, temporal_patch: int) -> Sequence[int]:
    """Return the sampled frames; the last one is shown again to fill its patch."""
    frames = _sample(header, video)
    return frames + frames[-1:] * (-len(frames) % temporal_patch)
