"""Open sound files, measure them exactly and decode them second by second.

libsndfile decodes what it knows and what states its length. FFmpeg, by way of PyAV, decodes the rest: AAC, WMA, AMR,
sound in films, and files whose headers state no length or a wrong one. These are decoded once to be measured.
"""

import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from mmtrain.data.media.media_bytes import BadMediaError, FileMedia, Media, TarMember
from mmtrain.data.media.media_errors import media_errors, open_container
from mmtrain.data.media.sound_lengths import classify_stated_length
from mmtrain.data.optional_packages import require_package
from mmtrain.errors import DataError
from mmtrain.recipe.settings.source_path import is_url

# Containers that hold their sound themselves: FFmpeg would follow playlists to any file and into the network.
_CONTAINERS = (
    "aac,ac3,aiff,amr,ape,asf,au,avi,caf,dsf,dts,eac3,flac,flv,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,mpc,mpc8,mpeg,"
    "mpegts,nut,ogg,sox,tak,tta,voc,w64,wav,wv"
)
_INSTALL_PYAV = "pip install 'mmtrain[video]'"
_MISSING_SECONDS_ALLOWED = 0.1  # between the length that a film states and that of its sound


class BadAudioError(BadMediaError):
    """A clip that cannot be used."""

    missing_kind, other_kind, packages = "missing_audio", "not_audio", ("soundfile", "av")


@dataclass(frozen=True)
class SoundLength:
    """How long a clip is."""

    num_samples: int  # of each channel; at least so many where measuring stopped early
    rate: int  # in Hz
    num_channels: int


@dataclass(frozen=True)
class SoundPiece:
    """Some samples of a clip, about a second."""

    samples: npt.NDArray[np.float32]  # (n, channels)
    rate: int


def require_soundfile() -> ModuleType:
    """Import the library that decodes sound. Raises `DataError`, with what to install, if it is missing."""
    return require_package("soundfile", "audio", "an audio encoder: reading audio")


def read_sound_length(media: Media, max_seconds: float) -> SoundLength:
    """Return the exact length of a clip; one that must be decoded is measured until it is above `max_seconds`.

    Raises `BadAudioError`.
    """
    with _open_clip(media) as clip:
        return clip.length(max_seconds)


def decode_sound(media: Media) -> Iterator[SoundPiece]:
    """Decode a clip second by second, so that one of many channels is never in memory as a whole.

    Raises `BadAudioError`.
    """
    with _open_clip(media) as clip:
        for piece in clip.pieces():
            if not np.isfinite(piece.samples).all():
                raise BadAudioError("undecodable", f"{media}: holds samples that are not finite")
            yield piece


class _Clip(Protocol):
    """A clip that a library has opened."""

    def length(self, max_seconds: float) -> SoundLength:
        """Return the length."""

    def pieces(self) -> Iterator[SoundPiece]:
        """Decode from the start."""


@dataclass(frozen=True)
class _SndfileClip:
    """A clip that libsndfile decodes, and whose header states its length."""

    media: Media
    sound: Any  # a `soundfile.SoundFile`

    def length(self, max_seconds: float) -> SoundLength:
        return SoundLength(self.sound.frames, self.sound.samplerate, self.sound.channels)

    def pieces(self) -> Iterator[SoundPiece]:
        num_stated = self.sound.frames
        rate = self.sound.samplerate
        num_decoded = 0
        while len(samples := self.sound.read(rate, dtype="float32", always_2d=True)):
            num_decoded += len(samples)
            yield SoundPiece(samples, rate)
        if num_decoded < num_stated:
            raise BadAudioError("truncated", f"{self.media}: {num_decoded} of {num_stated} samples are there")


@dataclass(frozen=True)
class _FFmpegClip:
    """A clip that FFmpeg decodes: the sound of a container that it calls the best."""

    media: Media
    container: Any  # an `av.container.InputContainer`
    stream: Any

    def length(self, max_seconds: float) -> SoundLength:
        num_samples = 0
        rate = 0
        num_channels = 0
        for frame in self._frames():
            rate = frame.sample_rate
            num_channels = len(frame.layout.channels)
            num_samples += frame.samples
            if num_samples > max_seconds * rate:
                break
        return SoundLength(num_samples, rate, num_channels)

    def pieces(self) -> Iterator[SoundPiece]:
        waiting: list[npt.NDArray[np.float32]] = []
        rate = 0
        for frame in self._frames():
            rate = frame.sample_rate
            waiting.append(_frame_samples(frame))
            if sum(map(len, waiting)) >= rate:
                yield SoundPiece(np.concatenate(waiting), rate)
                waiting = []
        if waiting:
            yield SoundPiece(np.concatenate(waiting), rate)

    def _frames(self) -> Iterator[Any]:
        first = None
        num_samples = 0
        for frame in self.container.decode(self.stream):
            first = first or frame
            if (frame.sample_rate, len(frame.layout.channels)) != (first.sample_rate, len(first.layout.channels)):
                raise BadAudioError("undecodable", f"{self.media}: its rate or its channels change on the way")
            num_samples += frame.samples
            yield frame
        seconds = num_samples / first.sample_rate if first is not None else 0.0
        stated_s = self._stated_seconds()
        if seconds < stated_s - _MISSING_SECONDS_ALLOWED:
            reason = f"{self.media}: {seconds:.2f} of {stated_s:.2f} s are there"
            raise BadAudioError("truncated", reason)

    def _stated_seconds(self) -> float:
        """Return the length that a container states with certainty; 0 for others."""
        if "mp4" in self.container.format.name and self.stream.duration is not None:
            return float(self.stream.duration * self.stream.time_base)
        if "matroska" in self.container.format.name and len(self.container.streams) == 1:
            return float(self.container.duration or 0) / 1e6
        return 0.0


def _frame_samples(frame: Any) -> npt.NDArray[np.float32]:
    """Return the samples (n, channels) of a frame of FFmpeg, whole numbers scaled as libsndfile scales them."""
    values = frame.to_ndarray()
    samples = values.T if frame.format.is_planar else values.reshape(-1, len(frame.layout.channels))
    if samples.dtype == np.uint8:
        samples = (samples.astype(np.float32) - 128) / 128
    elif samples.dtype.kind == "i":
        samples = samples / -float(np.iinfo(samples.dtype).min)
    return np.asarray(samples, dtype=np.float32)


@contextmanager
def _open_clip(media: Media) -> Iterator[_Clip]:
    """Open a clip; every error, here or in the body, becomes a `BadAudioError`."""
    require_soundfile()
    with (
        media_errors(media, BadAudioError, "not_audio"),  # whatever follows from damaged numbers in a header
        _open_fully(media) as file,
        ExitStack() as closing,
    ):
        clip = _choose_decoder(media, file, closing)
        with media_errors(media, BadAudioError, "undecodable"):
            yield clip


def _choose_decoder(media: Media, file: BinaryIO, closing: ExitStack) -> _Clip:
    """Open a clip with libsndfile, or where this cannot measure it, with FFmpeg."""
    soundfile = require_soundfile()
    try:
        sound = closing.enter_context(_forward_reader()(file))
    except soundfile.LibsndfileError as error:
        return _open_with_ffmpeg(media, file, closing, "not_audio", error.error_string)
    position = file.tell()
    length = classify_stated_length(sound.format, sound.subtype, sound.frames, file)
    file.seek(position)  # where libsndfile goes on
    if length == "exact":
        return _SndfileClip(media, sound)
    if length == "too_long":
        raise BadAudioError("truncated", f"{media}: the end of the {sound.format} file is missing")
    kind = "audio_length" if sound.frames > 0 else "empty_audio"
    return _open_with_ffmpeg(media, file, closing, kind, "its header does not say how long it is")


@cache
def _forward_reader() -> Any:
    """Return a `SoundFile` that does not seek to where it is after each read: an MP3 decoder forgets what it needs."""

    class ForwardSoundFile(require_soundfile().SoundFile):  # type: ignore[misc]
        def seekable(self) -> bool:
            return False

    return ForwardSoundFile


def _open_with_ffmpeg(media: Media, file: BinaryIO, closing: ExitStack, kind: str, why: str) -> _FFmpegClip:
    """Open a clip that libsndfile cannot read, for the reason `why`; it is bad, of this kind, without PyAV."""
    try:
        av = require_package("av", "video", "sound")
    except DataError:
        reason = f"{media}: {why}; FFmpeg may read it: {_INSTALL_PYAV}"
        raise BadAudioError(kind, reason) from None
    file.seek(0)
    container = closing.enter_context(open_container(av, file, _CONTAINERS))
    stream = container.streams.best("audio")
    if stream is None:
        raise BadAudioError("not_audio", f"{media}: it has no sound")
    stream.codec_context.thread_count = 1  # loaders decode several files at a time
    return _FFmpegClip(media, container, stream)


def _open_fully(media: Media) -> BinaryIO:
    """Open a clip; a remote one is read before, since libsndfile would swallow the errors of its server."""
    is_remote = (isinstance(media, FileMedia) and is_url(media.path)) or (
        isinstance(media, TarMember) and is_url(media.shard)
    )
    if not is_remote:
        return media.open()
    with media.open() as file:
        return io.BytesIO(file.read())
