"""Read the number of log-mel frames of a sound file, and compute the frames when they are needed.

The front end is Whisper's (arXiv 2212.04356): 16 kHz, a Hann window of 25 ms every 10 ms, and Slaney's mel bands.
Values are log10 of the power, within eight decades of the clip's maximum. Clips keep their own length, or all get the
same.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mmtrain.data.media.images import Float32Array
from mmtrain.data.media.media_bytes import Media
from mmtrain.data.media.sound_files import BadAudioError, SoundLength, decode_sound, read_sound_length
from mmtrain.recipe.settings.data_settings import AudioDataSettings

SAMPLE_RATE_HZ = 16_000
WINDOW_SAMPLES = 400  # under one window
HOP_SAMPLES = 160  # from one frame to the next
MAX_SAMPLE_RATE_HZ = 384_000  # the highest rate of studio equipment
MAX_AUDIO_CHANNELS = 32  # a short clip of a thousand channels would fill the memory
_MIN_POWER = 1e-10
_MAX_DECADES = 8.0
_LINEAR_END_HZ = 1000.0  # Slaney's scale is linear up to here and logarithmic above
_LINEAR_END_MEL = 15.0
_LOG_STEP = math.log(6.4) / 27.0
_RESAMPLING_SILENCE_S = 0.1

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Wave:
    """A clip as the front end takes it."""

    samples: Float64Array  # (n,) the mean of its channels at 16 kHz
    length: SoundLength  # as decoded; at least so long where decoding stopped early


def read_num_frames(media: Media, settings: AudioDataSettings, multiple: int) -> int:
    """Return the number of log-mel frames of a clip: 10 ms each, rounded up to a multiple.

    It is exact: from the header where that is certain, and otherwise by decoding. Raises `BadAudioError` for what no
    decoder could use, and for a clip that is too long unless it is to be cut.
    """
    return count_frames(media, read_sound_length(media, settings.max_seconds), settings, multiple)


def count_frames(
    media: Media, length: SoundLength, settings: AudioDataSettings, multiple: int, whole_only: bool = False
) -> int:
    """Return the number of log-mel frames of a clip of this length, as `read_num_frames` does.

    whole_only: leave out a last frame that the samples do not fill.
    """
    num_samples = length.num_samples
    rate = length.rate
    if num_samples < 1 or rate < 1:
        raise BadAudioError("empty_audio", f"{media}: {num_samples} samples at {rate} Hz")
    if rate > MAX_SAMPLE_RATE_HZ or length.num_channels > MAX_AUDIO_CHANNELS:
        reason = (
            f"{media}: {length.num_channels} channels at {rate} Hz, "
            f"at most {MAX_AUDIO_CHANNELS} at {MAX_SAMPLE_RATE_HZ} Hz are decoded"
        )
        raise BadAudioError("audio_too_wide", reason)
    seconds = num_samples / rate
    max_seconds = settings.max_seconds
    is_too_long = seconds > max_seconds
    if is_too_long and settings.long_clips == "reject":
        reason = f"{media}: {seconds:.1f} s is above data.audio.max_seconds = {max_seconds:g}"
        raise BadAudioError("clip_too_long", reason)
    if settings.scheme == "fixed" or is_too_long:
        num_samples = round(max_seconds * SAMPLE_RATE_HZ)
        rate = SAMPLE_RATE_HZ
    if whole_only:
        return math.ceil(num_samples * SAMPLE_RATE_HZ / rate) // HOP_SAMPLES
    num_hops: int = math.ceil(num_samples * SAMPLE_RATE_HZ / (rate * HOP_SAMPLES))
    return math.ceil(num_hops / multiple) * multiple


def load_wave(media: Media, max_seconds: float) -> Wave:
    """Decode a clip; one above `max_seconds` not to its end. Raises `BadAudioError`."""
    mono = [np.zeros(0)]
    length = SoundLength(0, SAMPLE_RATE_HZ, 1)
    for piece in decode_sound(media):
        num_samples, num_channels = piece.samples.shape
        length = SoundLength(length.num_samples + num_samples, piece.rate, num_channels)
        mono.append(piece.samples.mean(axis=1, dtype=np.float64))
        if length.num_samples > max_seconds * piece.rate:
            break
    return Wave(resample(np.concatenate(mono), length.rate), length)


def wave_log_mels(wave: Wave, frames: int, bins: int, silence_follows: bool = False) -> Float32Array:
    """Return the log-mel frames (frames, bins) of a clip, cut, or padded with silence.

    silence_follows: the windows of the last frames see silence behind these frames, instead of a mirrored clip.
    """
    samples = wave.samples[: frames * HOP_SAMPLES]
    num_frames = frames + WINDOW_SAMPLES // HOP_SAMPLES if silence_follows else frames
    return log_mel(np.pad(samples, (0, num_frames * HOP_SAMPLES - len(samples))), bins)[:frames]


def mirrored_log_mels(wave: Wave, bins: int, max_seconds: float) -> Float32Array:
    """Return the whole log-mel frames (frames, bins) of a clip that is mirrored at its end, or at `max_seconds`."""
    return log_mel(wave.samples[: round(max_seconds * SAMPLE_RATE_HZ)], bins)


def resample(wave: Float64Array, rate: int) -> Float64Array:
    """Resample (n,) from `rate` to 16 kHz by way of the spectrum: ceil(n * 16000 / rate) band-limited samples."""
    if rate == SAMPLE_RATE_HZ:
        return wave
    num_wanted = math.ceil(len(wave) * SAMPLE_RATE_HZ / rate)
    # The spectrum is that of a periodic wave: silence at the end keeps the end from ringing into the start. Whole
    # seconds make the number of samples an integer at both rates.
    seconds = math.ceil(len(wave) / rate + _RESAMPLING_SILENCE_S)
    spectrum = np.fft.rfft(wave, seconds * rate)
    resampled_spectrum = np.zeros(seconds * SAMPLE_RATE_HZ // 2 + 1, dtype=spectrum.dtype)
    num_common = min(len(spectrum), len(resampled_spectrum))
    resampled_spectrum[:num_common] = spectrum[:num_common]
    resampled: Float64Array = np.fft.irfft(resampled_spectrum, seconds * SAMPLE_RATE_HZ)[:num_wanted]
    return resampled * (SAMPLE_RATE_HZ / rate)


def log_mel(wave: Float64Array, bins: int) -> Float32Array:
    """Return the log-mel frames (n / 160, bins) of (n,) samples at 16 kHz, of which the last may fill no frame.

    Scaled as Whisper does: the maximum is near 1, the minimum 2 below. n is above 200.
    """
    padded = np.pad(wave, WINDOW_SAMPLES // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW_SAMPLES)[::HOP_SAMPLES]
    windows = windows[: len(wave) // HOP_SAMPLES]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW_SAMPLES) / WINDOW_SAMPLES)
    power = np.abs(np.fft.rfft(windows * hann, axis=1)) ** 2
    log = np.log10(np.maximum(power @ mel_filters(bins), _MIN_POWER))
    log = np.maximum(log, log.max() - _MAX_DECADES)
    return np.ascontiguousarray((log + 4.0) / 4.0, dtype=np.float32)


@lru_cache(maxsize=4)
def mel_filters(bins: int) -> Float64Array:
    """Return (201, bins) triangles of equal area over the spectrum, evenly spaced on Slaney's mel scale, 0 to 8 kHz."""
    edges = _mel_to_hertz(np.linspace(0.0, _hertz_to_mel(SAMPLE_RATE_HZ / 2), bins + 2))
    frequencies = np.linspace(0.0, SAMPLE_RATE_HZ / 2, WINDOW_SAMPLES // 2 + 1)[:, None]
    lower, center, upper = edges[:-2], edges[1:-1], edges[2:]
    rising = (frequencies - lower) / (center - lower)
    falling = (upper - frequencies) / (upper - center)
    filters: Float64Array = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (upper - lower))
    return filters


def _hertz_to_mel(hertz: float) -> float:
    if hertz < _LINEAR_END_HZ:
        return hertz * _LINEAR_END_MEL / _LINEAR_END_HZ
    return _LINEAR_END_MEL + math.log(hertz / _LINEAR_END_HZ) / _LOG_STEP


def _mel_to_hertz(mel: Float64Array) -> Float64Array:
    linear = mel * _LINEAR_END_HZ / _LINEAR_END_MEL
    return np.where(mel < _LINEAR_END_MEL, linear, _LINEAR_END_HZ * np.exp(_LOG_STEP * (mel - _LINEAR_END_MEL)))
