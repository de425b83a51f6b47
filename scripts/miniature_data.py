"""Draw data for a miniature from a paper's lengths: as many images a sample, all of them fewer tokens long."""

import json
import math
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmtrain.balance import SampleLengths
from mmtrain.balance.batch_meta import ItemLengths
from mmtrain.data.formats.sample import AUDIO_MARK, IMAGE_MARK
from mmtrain.data.synthetic.tiny_tokenizer import train_byte_level_bpe
from mmtrain.data.text.chat_tokenizer import DRAW_TOKENS, SPECIAL_TOKENS
from mmtrain.recipe.settings.modalities import AUDIO, GENERATOR

PATCH = 8  # pixels of a patch's side
MERGE = 2  # patches of the side of a square that becomes one token of the LLM
VOCAB_SIZE = 512
MARKUP_TOKENS = 4  # of a question and its answer: a role and an end each
SAMPLE_RATE = 16_000  # of clips, hertz
SECONDS_PER_AUDIO_TOKEN = 0.02
VARIANTS = 4  # different images of a size


def write_data(folder: Path, lengths: SampleLengths, scale: int, num_samples: int, seed: int = 0) -> None:
    """Write `train.json`, `tokenizer.json` and media under `folder`.

    lengths: of the paper's recipe, of which samples are drawn; each item and each text has a `scale`-th of its tokens.
    """
    folder.mkdir(parents=True)
    draws = GENERATOR in lengths.items
    rng = np.random.default_rng(seed)
    rows = [
        _row(folder, lengths, int(sample), scale, rng) for sample in rng.integers(0, len(lengths.tokens), num_samples)
    ]
    (folder / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    special = (*SPECIAL_TOKENS, *([AUDIO.placeholder] if AUDIO.name in lengths.items else []))
    tokenizer = train_byte_level_bpe(["0 1"], (*special, *(DRAW_TOKENS if draws else ())), VOCAB_SIZE)
    tokenizer.save(str(folder / "tokenizer.json"))


def image_sides(patches: float) -> tuple[int, int]:
    """Return rows and columns of an image with about so many patches, multiples of `MERGE`, nearly a square."""
    rows = max(1, round(math.sqrt(patches) / MERGE)) * MERGE
    return rows, max(1, round(patches / rows / MERGE)) * MERGE


def _row(folder: Path, lengths: SampleLengths, sample: int, scale: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return a sample's row; write its media unless they are there."""
    of = {unit: range(items.first[sample], items.first[sample + 1]) for unit, items in lengths.items.items()}
    images = [
        _image(folder, patches / scale, rng) for patches in _tokens(lengths.items.get("vision"), of.get("vision"))
    ]
    clips = [
        _clip(folder, tokens / scale, rng) for tokens in _tokens(lengths.items.get(AUDIO.name), of.get(AUDIO.name))
    ]
    drawn = [_image(folder, 4 * PATCH, rng) for _ in of.get(GENERATOR, ())]
    text = lengths.tokens[sample] - sum(
        int(lengths.items[unit].features[numbers.start : numbers.stop].sum()) for unit, numbers in of.items()
    )
    digits = "".join(map(str, rng.integers(0, 10, max(2, round(text / scale) - MARKUP_TOKENS))))
    question = f"{IMAGE_MARK * len(images)}{AUDIO_MARK * len(clips)}{digits[:1]}"
    answer = f"{digits[1:]}{IMAGE_MARK * len(drawn)}"
    media = {key: paths for key, paths in (("image", images + drawn), ("audio", clips)) if paths}
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}], **media}


def _tokens(items: ItemLengths | None, numbers: range | None) -> Iterator[int]:
    """Yield the tokens of a sample's items; an encoder's class token is among them."""
    if items is not None and numbers is not None:
        yield from items.tokens[numbers.start : numbers.stop].tolist()


def _image(folder: Path, patches: float, rng: np.random.Generator) -> str:
    rows, cols = image_sides(patches)
    name = f"{rows}x{cols}-{rng.integers(VARIANTS)}.png"
    if not (folder / name).exists():
        noise = np.random.default_rng([rows, cols]).integers(0, 256, (rows * PATCH, cols * PATCH, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / name)
    return name


def _clip(folder: Path, tokens: float, rng: np.random.Generator) -> str:
    name = f"{round(tokens)}-{rng.integers(VARIANTS)}.wav"
    if not (folder / name).exists():
        num_values = round(round(tokens) * SECONDS_PER_AUDIO_TOKEN * SAMPLE_RATE)
        values = np.random.default_rng(round(tokens)).integers(-3000, 3000, num_values, dtype=np.int16)
        with wave.open(str(folder / name), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(values.itemsize)
            file.setframerate(SAMPLE_RATE)
            file.writeframes(values.tobytes())
    return name
