"""From a sound file to log-mel frames: their number from the header alone, and the frames when they are needed.

The front end is Whisper's (arXiv 2212.04356): 16 kHz, a Hann window of 25 ms every 10 ms, Slaney's mel bands, log10 of
the power within eight decades of the clip's loudest. Clips keep their own length, or all get one.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from mmtrain.data.media.images import Float32Array
from mmtrain.data.media.media_bytes import BadMediaError, Media
from mmtrain.data.optional_packages import require_package
from mmtrain.recipe.schema import AudioDataSettings

SAMPLE_RATE_HZ = 16_000
WINDOW_SAMPLES = 400  # samples under one window
HOP_SAMPLES = 160  # samples from one frame to the next
MAX_SAMPLE_RATE_HZ, MAX_AUDIO_CHANNELS = 384_000, 32  # a short clip of a thousand channels would fill the memory
_SPARE_SECONDS = 0.1  # headers of compressed files are off by a packet
_FLOOR = 1e-10
_DECADES = 8.0
_LINEAR_END_HZ, _LINEAR_END_MEL = 1000.0, 15.0  # Slaney's scale is linear up to here, logarithmic above
_LOG_STEP = math.log(6.4) / 27.0

Float64Array = npt.NDArray[np.float64]


class BadAudioError(BadMediaError):
    """A clip that cannot be used."""


def require_soundfile() -> ModuleType:
    """The library that decodes; `DataError` says how to install it."""
    return require_package("soundfile", "audio", "model.audio: reading audio")


def read_num_frames(media: Media, settings: AudioDataSettings, multiple: int) -> int:
    """Log-mel frames of a clip, from its header: 10 ms each, rounded up to a multiple of `multiple`.

    Raises `BadAudioError` for what no decoder could use, and for a clip that is too long.
    """
    # libsndfile's errors, and whatever a damaged header makes of its numbers, mean that this is no sound
    with _opened(media, "not_audio") as sound:
        count, rate, channels = sound.frames, sound.samplerate, sound.channels
    if count < 1 or rate < 1:
        raise BadAudioError("empty_audio", f"{media}: {count} samples at {rate} Hz")
    if rate > MAX_SAMPLE_RATE_HZ or channels > MAX_AUDIO_CHANNELS:
        found = f"{media}: {channels} channels at {rate} Hz"
        raise BadAudioError(
            "audio_too_wide", f"{found}, at most {MAX_AUDIO_CHANNELS} at {MAX_SAMPLE_RATE_HZ} Hz are decoded"
        )
    seconds, most = count / rate, settings.max_seconds
    if seconds > most:
        reason = f"{media}: {seconds:.1f} s is above data.audio.max_seconds = {most:g}"
        raise BadAudioError("clip_too_long", reason)
    if settings.scheme == "fixed":
        count, rate = round(most * SAMPLE_RATE_HZ), SAMPLE_RATE_HZ
    hops: int = math.ceil(count * SAMPLE_RATE_HZ / (rate * HOP_SAMPLES))
    return math.ceil(hops / multiple) * multiple


def load_log_mels(media: Media, frames: int, bins: int) -> Float32Array:
    """Decode a clip, mix its channels and return its log-mel frames (frames, bins), silence after its end.

    Raises `BadAudioError`.
    """
    seconds = list(_decoded(media))
    rate = seconds[0].rate if seconds else SAMPLE_RATE_HZ
    mixed = np.concatenate([np.zeros(0), *(second.samples.mean(axis=1, dtype=np.float64) for second in seconds)])
    wave = resample(mixed, rate)[: frames * HOP_SAMPLES]
    return log_mel(np.pad(wave, (0, frames * HOP_SAMPLES - len(wave))), bins)


def decoded_duration_s(media: Media) -> float:
    """Decode a clip of any length without keeping it; its seconds. Raises `BadAudioError`."""
    return sum(len(second.samples) / second.rate for second in _decoded(media))


@dataclass(frozen=True)
class _Second:
    """A second of a clip, or what is left of it."""

    samples: Float32Array  # (n, channels)
    rate: int


def _decoded(media: Media) -> Iterator[_Second]:
    """Decode a clip second by second, so that one of many channels is never in memory whole."""
    with _opened(media, "undecodable") as sound:
        promised, rate, found = sound.frames, sound.samplerate, 0
        while len(samples := sound.read(rate, dtype="float32", always_2d=True)):
            if not np.isfinite(samples).all():
                raise BadAudioError("undecodable", f"{media}: holds samples that are not finite")
            found += len(samples)
            yield _Second(samples, rate)
        if found < promised - _SPARE_SECONDS * rate:
            raise BadAudioError("truncated", f"{media}: {found} of {promised} samples are there")


def resample(wave: Float64Array, rate: int) -> Float64Array:
    """Resample (n,) from `rate` to 16 kHz: ceil(n * 16000 / rate) samples, band-limited, by way of the spectrum."""
    if rate == SAMPLE_RATE_HZ:
        return wave
    wanted = math.ceil(len(wave) * SAMPLE_RATE_HZ / rate)
    # The spectrum is that of a wave that repeats: silence in between keeps the end from ringing at the start. Whole
    # seconds make both lengths whole.
    seconds = math.ceil(len(wave) / rate + 0.1)
    spectrum = np.fft.rfft(wave, seconds * rate)
    longer = np.zeros(seconds * SAMPLE_RATE_HZ // 2 + 1, dtype=spectrum.dtype)
    kept = min(len(spectrum), len(longer))
    longer[:kept] = spectrum[:kept]
    resampled: Float64Array = np.fft.irfft(longer, seconds * SAMPLE_RATE_HZ)[:wanted] * (SAMPLE_RATE_HZ / rate)
    return resampled


def log_mel(wave: Float64Array, bins: int) -> Float32Array:
    """Log-mel frames (n / 160, bins) of (n,) samples at 16 kHz, scaled as Whisper does: loudest near 1, floor 2 below.

    n is a multiple of 160, and longer than half a window.
    """
    assert len(wave) % HOP_SAMPLES == 0, f"{len(wave)} samples are not whole frames"
    around = np.pad(wave, WINDOW_SAMPLES // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(around, WINDOW_SAMPLES)[::HOP_SAMPLES][
        : len(wave) // HOP_SAMPLES
    ]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW_SAMPLES) / WINDOW_SAMPLES)
    power = np.abs(np.fft.rfft(windows * hann, axis=1)) ** 2
    log = np.log10(np.maximum(power @ mel_filters(bins), _FLOOR))
    log = np.maximum(log, log.max() - _DECADES)
    return np.ascontiguousarray((log + 4.0) / 4.0, dtype=np.float32)


@lru_cache(maxsize=4)
def mel_filters(bins: int) -> Float64Array:
    """(201, bins) triangles over the spectrum, evenly spaced on Slaney's mel scale from 0 to 8 kHz, of equal area."""
    edges = _hertz(np.linspace(0.0, _mel(SAMPLE_RATE_HZ / 2), bins + 2))
    frequencies = np.linspace(0.0, SAMPLE_RATE_HZ / 2, WINDOW_SAMPLES // 2 + 1)[:, None]
    lower, centre, upper = edges[:-2], edges[1:-1], edges[2:]
    rising = (frequencies - lower) / (centre - lower)
    falling = (upper - frequencies) / (upper - centre)
    filters: Float64Array = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (upper - lower))
    return filters


def _mel(hertz: float) -> float:
    if hertz < _LINEAR_END_HZ:
        return hertz * _LINEAR_END_MEL / _LINEAR_END_HZ
    return _LINEAR_END_MEL + math.log(hertz / _LINEAR_END_HZ) / _LOG_STEP


def _hertz(mel: Float64Array) -> Float64Array:
    linear = mel * _LINEAR_END_HZ / _LINEAR_END_MEL
    return np.where(mel < _LINEAR_END_MEL, linear, _LINEAR_END_HZ * np.exp(_LOG_STEP * (mel - _LINEAR_END_MEL)))


@contextmanager
def _opened(media: Media, broken: str) -> Iterator[Any]:
    """Open a clip as a `SoundFile`; what goes wrong, here or in the body, is a `BadAudioError` of kind `broken`."""
    soundfile = require_soundfile()
    try:
        with media.open() as file, soundfile.SoundFile(file) as sound:
            yield sound
    except FileNotFoundError:
        raise BadAudioError("missing_audio", f"{media}: no such file") from None
    except BadAudioError:
        raise
    except Exception as error:
        why = getattr(error, "error_string", error)  # libsndfile's own words, without the name of our stream
        raise BadAudioError(broken, f"{media}: {type(error).__name__}: {why}") from None
