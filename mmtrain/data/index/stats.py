"""What is in data files: how much of each modality every sample has, with a recipe's eyes or with none."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.balance.methods import unit_tokens
from mmtrain.data.callbacks import NotifyCallback
from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.formats.sample import Quarantined, Sample
from mmtrain.data.index.data_index import build_index
from mmtrain.data.index.sample_lengths import HEADER_THREADS, notify_progress
from mmtrain.data.media.audio import HOP_SAMPLES, SAMPLE_RATE_HZ, read_num_frames
from mmtrain.data.media.images import read_image_size
from mmtrain.data.media.media_bytes import BadMediaError
from mmtrain.recipe.schema import AudioDataSettings, ImageSettings, LimitSettings, Recipe, SourceSettings

_ANY_LENGTH = AudioDataSettings(max_seconds=1e9)


@dataclass(frozen=True)
class DataStats:
    """Measures of the usable samples, and what is wrong with the others."""

    names: tuple[str, ...]
    values: npt.NDArray[np.float64]  # (samples, measures)
    quarantined: dict[str, int]  # by kind


def compute_stats_for_recipe(
    recipe: Recipe, sources: Sequence[SourceSettings], notify: NotifyCallback = lambda _: None
) -> DataStats:
    """Tokens of each unit of the recipe's model, were these its sources. Raises `DataError` as indexing does.

    notify: told how reading goes on, and whether an index was there already.
    """
    data = recipe.data.model_copy(update={"sources": tuple(sources), "max_bad_rate": 1.0})
    index = build_index(recipe.model_copy(update={"data": data}), notify=notify)
    if index.cache_folder is not None:
        notify(index.remarks()[0])
    units, tokens = unit_tokens(index.lengths)
    names = tuple("LLM tokens" if unit == "llm" else f"{unit} tokens" for unit in units)
    return DataStats(names, tokens.astype(np.float64), dict(Counter(q.kind for q in index.quarantined)))


def compute_stats(sources: Sequence[SourceSettings], notify: NotifyCallback = lambda _: None) -> DataStats:
    """Characters, pixels and seconds, which need no model; from headers, without decoding.

    A sample with an image or clip that cannot be used is counted by what is wrong with it, and in nothing else.
    notify: told how reading goes on. Raises `DataError` if a source cannot be read.
    """
    entries = (entry for source in sources for entry in read_samples(source, LimitSettings()))
    with ThreadPoolExecutor(HEADER_THREADS) as pool:
        found = list(notify_progress(pool.map(_measured, entries), notify))
    rows = [row for row in found if not isinstance(row, str)]
    names = ("characters of text", "images", "pixels of images", "videos", "seconds of sound")
    values = np.array(rows, dtype=np.float64).reshape(-1, len(names))
    return DataStats(names, values, dict(Counter(kind for kind in found if isinstance(kind, str))))


def _measured(entry: Sample | Quarantined) -> tuple[float, ...] | str:
    """The measures of a sample, or the kind of what is wrong with it."""
    if isinstance(entry, Quarantined):
        return entry.kind
    try:
        sizes = [read_image_size(image, ImageSettings().max_source_pixels) for image in entry.images]
        frames = sum(read_num_frames(clip, _ANY_LENGTH, 1) for clip in entry.clips)
    except BadMediaError as bad:
        return bad.kind
    text = sum(len(turn.text) for turn in entry.turns)
    pixels = sum(width * height for width, height in sizes)
    return text, len(sizes), pixels, len(entry.videos), frames * HOP_SAMPLES / SAMPLE_RATE_HZ
