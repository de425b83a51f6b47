"""Measure what data files hold: how much of each modality every sample has, for a recipe or for no model at all."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.balance.grouping.methods import unit_tokens
from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.formats.sample import Quarantined, Sample
from mmtrain.data.index.data_index import DataIndex, build_index
from mmtrain.data.index.reading_bounds import reading_bounds
from mmtrain.data.index.sample_lengths import HEADER_THREADS, notify_progress
from mmtrain.data.media.audio import HOP_SAMPLES, SAMPLE_RATE_HZ, read_num_frames
from mmtrain.data.media.images import read_image_size
from mmtrain.data.media.media_bytes import BadMediaError
from mmtrain.errors import HostileFileError
from mmtrain.limited_reads import now_reading_item, read_within, reads_in_one_thread
from mmtrain.recipe.settings.data_settings import AudioDataSettings, ImageSettings, LimitSettings, SourceSettings
from mmtrain.recipe.settings.schema import Recipe

_ANY_LENGTH = AudioDataSettings(max_seconds=1e9)


@dataclass(frozen=True)
class DataStats:
    """Measures of the usable samples, and how many others there are of each quarantine kind."""

    names: tuple[str, ...]  # of the measures
    values: npt.NDArray[np.float64]  # (samples, measures)
    quarantined: dict[str, int]  # kind -> number of samples


def compute_stats_for_recipe(
    recipe: Recipe, sources: Sequence[SourceSettings], notify: NotifyCallback = lambda _: None
) -> tuple[DataStats, DataIndex]:
    """Count the tokens of each unit of the recipe's model, as if the recipe had these sources; return the index too.

    `notify` is called while a large source is read, and if the index was cached. Raises `DataError` as `build_index`
    does.
    """
    data = recipe.data.model_copy(update={"sources": tuple(sources), "max_bad_rate": 1.0})
    index = build_index(recipe.model_copy(update={"data": data}), notify=notify)
    if index.cache_folder is not None:
        notify(index.remarks()[0])
    for warning in index.warnings:
        notify(warning)
    units, tokens = unit_tokens(index.lengths)
    names = tuple("LLM tokens" if unit == "llm" else f"{unit} tokens" for unit in units)
    return DataStats(names, tokens.astype(np.float64), dict(Counter(q.kind for q in index.quarantined))), index


def compute_stats(sources: Sequence[SourceSettings], notify: NotifyCallback = lambda _: None) -> DataStats:
    """Count characters, pixels and seconds, which need no model; from headers, without decoding.

    A sample with a medium that cannot be used counts only by its quarantine kind. `notify` is called while a large
    source is read. Raises `DataError` if a source cannot be read.
    """

    def read(notify_parent: NotifyCallback) -> list[tuple[float, ...] | str]:
        entries = (entry for source in sources for entry in read_samples(source, LimitSettings()))
        with ThreadPoolExecutor(1 if reads_in_one_thread() else HEADER_THREADS) as pool:
            return list(notify_progress(pool.map(_measure, entries), notify_parent))

    results = read_within(reading_bounds(LimitSettings(), sources), read, notify)
    rows = [result for result in results if not isinstance(result, str)]
    kinds = [result for result in results if isinstance(result, str)]
    names = ("characters of text", "images", "pixels of images", "videos", "seconds of sound")
    values = np.array(rows, dtype=np.float64).reshape(-1, len(names))
    return DataStats(names, values, dict(Counter(kinds)))


def _measure(entry: Sample | Quarantined) -> tuple[float, ...] | str:
    """Return the measures of a sample, or its quarantine kind."""
    if isinstance(entry, Quarantined):
        return entry.kind
    sizes: list[tuple[int, int]] = []
    num_frames = 0
    try:
        for image in (*entry.images, *entry.target_images):
            now_reading_item(str(image))
            sizes.append(read_image_size(image, ImageSettings().max_source_pixels))
        for clip in entry.clips:
            now_reading_item(str(clip))
            num_frames += read_num_frames(clip, _ANY_LENGTH, 1)
    except BadMediaError as bad:
        return bad.kind
    except HostileFileError:
        return "deadly"
    num_characters = len(entry.tools) + sum(len(turn.text) + len(turn.fields) for turn in entry.turns)
    num_pixels = sum(width * height for width, height in sizes)
    seconds_of_sound = num_frames * HOP_SAMPLES / SAMPLE_RATE_HZ
    return num_characters, len(sizes), num_pixels, len(entry.videos), seconds_of_sound
