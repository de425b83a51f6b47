"""Media with bytes changed, removed or inserted are read, or rejected with a known kind; nothing else happens."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from PIL import Image

from mmtrain.data.formats.sample import QUARANTINE_REASONS
from mmtrain.data.media.audio import read_num_frames
from mmtrain.data.media.images import load_rgb_images, read_image_size, supported_formats
from mmtrain.data.media.media_bytes import BadMediaError, FileMedia, Media
from mmtrain.data.media.video import load_video_frames, read_video_header
from mmtrain.data.media.vision_items import frame_choice
from mmtrain.recipe.settings.data_settings import AudioDataSettings, ImageSettings, VideoSettings
from tests.data.archives import load_log_mels, movie, wav

LIMIT = 1_000_000
SETTINGS = ImageSettings(max_source_pixels=LIMIT)
PICTURE_FORMS = ("png", "jpeg", "webp", "gif", "tiff", *(("avif",) if "AVIF" in supported_formats() else ()))


def _picture(form: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)).save(buffer, form)
    return buffer.getvalue()


def _look_at_picture(media: Media) -> None:
    read_image_size(media, LIMIT)
    assert load_rgb_images(media, [(16, 16)], SETTINGS)[0].size == (16, 16)


def _listen(media: Media) -> None:
    frames = read_num_frames(media, AudioDataSettings(), 2)
    assert np.isfinite(load_log_mels(media, frames, 16)).all()


def _watch(media: Media) -> None:
    frames = min(3, read_video_header(media, LIMIT).num_frames)
    choose = frame_choice(VideoSettings(), frames, 1)
    assert len(load_video_frames(media, frames, (16, 16), SETTINGS, choose)) == frames


CASES: dict[str, tuple[Callable[[], bytes], Callable[[Media], None]]] = {
    **{form: (lambda form=form: _picture(form), _look_at_picture) for form in PICTURE_FORMS},  # type: ignore[misc]
    **{form: (lambda form=form: wav(0.2, 16000, form), _listen) for form in ("WAV", "FLAC", "MP3")},  # type: ignore[misc]
    **{form: (lambda form=form: movie(["red", "blue"], form=form), _watch) for form in ("mp4", "matroska")},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", CASES)
@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@seed(7)
def test_damaged_media_are_read_or_rejected_with_a_known_kind(tmp_path: Path, name: str, data: st.DataObject) -> None:
    make, use = CASES[name]
    content = make()
    use(FileMedia(str(_write(tmp_path, content))))
    places = st.integers(0, len(content) - 1)
    for position in data.draw(st.lists(places, min_size=1, max_size=4)):
        content = (
            content[:position] + data.draw(st.binary(max_size=8)) + content[position + data.draw(st.integers(0, 8)) :]
        )
    if data.draw(st.booleans()):
        content = content[: data.draw(places)]
    kind = None
    try:
        use(FileMedia(str(_write(tmp_path, content))))
    except BadMediaError as bad:
        kind = bad.kind
    assert kind is None or kind in QUARANTINE_REASONS


def _write(folder: Path, content: bytes) -> Path:
    (folder / "media").write_bytes(content)
    return folder / "media"
