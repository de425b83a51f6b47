"""Make tar shards, Parquet files and small media for the tests of readers."""

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import soundfile
from PIL import Image

from mmtrain.data.media.audio import HOP_SAMPLES, SAMPLE_RATE_HZ, load_wave, wave_log_mels
from mmtrain.data.media.images import Float32Array
from mmtrain.data.media.media_bytes import Media


def png(colour: str = "red", width: int = 16, height: int = 16) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, "png")
    return buffer.getvalue()


def wav(seconds: float = 0.1, rate: int = 8000, form: str = "WAV") -> bytes:
    buffer = io.BytesIO()
    wave = 0.1 * np.sin(np.arange(round(seconds * rate)) / 5)
    soundfile.write(buffer, wave, rate, format=form)
    return buffer.getvalue()


def movie(
    colours: Sequence[str | Image.Image],
    seconds_each: float = 0.2,
    width: int = 64,
    height: int = 48,
    rate: int = 20,
    form: str = "mp4",
    rotation: float | None = None,
    seconds_of_sound: float = 0,
    codec: str = "mpeg4",
    key_every: int = 4,
) -> bytes:
    """Encode a video of colours or pictures; players rotate it by `rotation` degrees to the left."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = key_every
        sound = container.add_stream("pcm_s16le", rate=8000, layout="mono") if seconds_of_sound else None
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for colour in colours:
            picture = colour if isinstance(colour, Image.Image) else Image.new("RGB", (width, height), colour)
            for _ in range(round(seconds_each * rate)):
                container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode(None))
        if sound is not None:
            samples = np.zeros((1, round(8000 * seconds_of_sound)), dtype=np.int16)
            frame = av.AudioFrame.from_ndarray(samples, "s16", "mono")
            frame.sample_rate = 8000
            container.mux(sound.encode(frame))
            container.mux(sound.encode(None))
    return buffer.getvalue()


def tar(path: Path, members: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def parquet(path: Path, columns: Mapping[str, Any], row_group_size: int = 2, **options: Any) -> Path:
    pyarrow.parquet.write_table(pa.table(dict(columns)), path, row_group_size=row_group_size, **options)
    return path


def load_log_mels(media: Media, frames: int, bins: int, silence_follows: bool = False) -> Float32Array:
    """Decode the first frames of a clip."""
    return wave_log_mels(load_wave(media, frames * HOP_SAMPLES / SAMPLE_RATE_HZ), frames, bins, silence_follows)
