"""Sets of lengths that no part of balancing was tuned to, for `bench_balance`: other sources, in other shares."""

from collections.abc import Callable, Sequence

import numpy as np

Table = np.ndarray  # (n, 3) LLM tokens, image tiles and audio tokens of samples
Draw = Callable[[np.random.Generator, int], Table]

TILE_TOKENS, FRAME_TOKENS, AUDIO_TOKENS_PER_S = 256, 96, 25
LONGEST_TEXT = 4034  # tokens, of groups of 4,096
SEED = 101


def drawn_sets(tables: Sequence[np.ndarray], num_samples: int) -> dict[str, tuple[Table, np.ndarray]]:
    """Return sets by name: lengths, and (n,) the number of the source of each sample.

    tables: lengths of AI2D, ChartQA, COCO and speech, as `bench_balance` reads them.
    """
    ai2d, chartqa, coco, speech = (_samples_of(table) for table in tables)
    parts: dict[str, list[tuple[float, Draw]]] = {
        "other shares": [(0.3, ai2d), (0.1, chartqa), (0.2, coco), (0.1, speech), (0.3, _texts(6.2, 1.1))],
        "documents": [(1.0, _documents)],
        "texts and few long clips": [(0.9, _texts(5.5, 1.0)), (0.1, _clips)],
        "video": [(1.0, _videos)],
        "video and texts": [(0.5, _videos), (0.5, _texts(5.5, 1.0))],
        "five drawn sources": [
            (0.15, _documents), (0.25, chartqa), (0.2, _clips), (0.15, _videos), (0.25, _texts(6.5, 1.2)),
        ],
        "ChartQA and long texts": [(0.3, chartqa), (0.7, _texts(7.5, 0.8))],
    }  # fmt: skip
    return {
        name: _mixed(of_set, num_samples, np.random.default_rng(SEED + number))
        for number, (name, of_set) in enumerate(parts.items())
    }


def _mixed(parts: Sequence[tuple[float, Draw]], num_samples: int, rng: np.random.Generator) -> tuple[Table, np.ndarray]:
    kind = rng.choice(len(parts), num_samples, p=[share for share, _ in parts])
    lengths = np.zeros((num_samples, 3), dtype=np.int64)
    for number, (_, draw) in enumerate(parts):
        (rows,) = np.nonzero(kind == number)
        lengths[rows] = draw(rng, len(rows))
    return lengths, kind


def _samples_of(table: np.ndarray) -> Draw:
    def draw(rng: np.random.Generator, count: int) -> Table:
        lengths = np.zeros((count, 3), dtype=np.int64)
        lengths[:, : table.shape[1]] = table[rng.integers(len(table), size=count)]
        return lengths

    return draw


def _texts(mean: float, deviation: float) -> Draw:
    """Return texts whose tokens are log-normal."""

    def draw(rng: np.random.Generator, count: int) -> Table:
        tokens = np.clip(rng.lognormal(mean, deviation, count), 16, LONGEST_TEXT)
        return _table(tokens, 0, 0)

    return draw


def _documents(rng: np.random.Generator, count: int) -> Table:
    """Draw pages of many tiles; two of the largest do not fit into a group."""
    tiles = rng.choice([3, 5, 7, 9, 10, 13], count, p=[0.1, 0.15, 0.25, 0.2, 0.15, 0.15])
    return _table(TILE_TOKENS * tiles + np.clip(rng.lognormal(5.0, 0.8, count), 20, 700), tiles, 0)


def _clips(rng: np.random.Generator, count: int) -> Table:
    """Draw speech of seconds, and of minutes in one clip of 33."""
    seconds = np.where(rng.random(count) < 0.97, rng.uniform(1, 16, count), rng.uniform(60, 140, count))
    audio = np.ceil(AUDIO_TOKENS_PER_S * seconds)
    return _table(audio + np.ceil(3 * seconds) + 40, 0, audio)


def _videos(rng: np.random.Generator, count: int) -> Table:
    """Draw videos of 2 to 32 frames; a frame is a tile with fewer tokens in the LLM."""
    frames = rng.choice([2, 4, 8, 16, 32], count, p=[0.1, 0.2, 0.3, 0.25, 0.15])
    return _table(FRAME_TOKENS * frames + np.clip(rng.lognormal(4.5, 0.8, count), 20, 800), frames, 0)


def _table(tokens: np.ndarray, tiles: np.ndarray | int, audio: np.ndarray | int) -> Table:
    columns = np.broadcast_arrays(tokens, tiles, audio)
    return np.stack(columns, axis=1).astype(np.int64)
