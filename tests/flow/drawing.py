"""A tiny model with three units, a vision encoder, an LLM and an image generator, and data to answer and to draw."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmtrain.data.synthetic.tiny_tokenizer import train_byte_level_bpe
from mmtrain.data.text.chat_tokenizer import DRAW_TOKENS, SPECIAL_TOKENS
from mmtrain.recipe.settings.schema import Recipe

DIT: dict[str, Any] = {
    "kind": "dit", "widths": (16,), "heads": (2,), "layers": 2, "channels": 3, "patch": 4, "context_width": 12,
    "context_tokens": 3, "image_size": 8, "sample_size": 8,
}  # fmt: skip
UNET: dict[str, Any] = {
    "kind": "unet", "widths": (8, 16), "heads": (2, 4), "layers": 1, "channels": 3, "context_width": 12,
    "context_tokens": 3, "norm_groups": 4, "image_size": 8,
}  # fmt: skip
VISION = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 24, "patch": 4, "max_side": 8}
LLM_SETTINGS = {"layers": 2, "hidden": 24, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": 512}
COLOURS = ("red", "lime", "blue", "white", "black", "yellow")
NUM_SAMPLES = 5 * len(COLOURS)


def write_samples(folder: Path, shows_images: bool = True) -> None:
    """Write samples of text alone, about an image, that draw one image or two, and that do both.

    Without `shows_images` there are those of text alone and those that only draw, and all images are squares.
    """
    rng = np.random.default_rng(0)
    for number, colour in enumerate(COLOURS):
        image = Image.new("RGB", (8 + 4 * (shows_images and number % 2), 8), colour)
        pixels = np.asarray(image) // 2 + rng.integers(0, 128, (image.height, image.width, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{colour}.png")
    rows = []
    for number, colour in enumerate(COLOURS):
        other = COLOURS[number - 1]
        rows += [
            ([f"say {colour}", colour], []),
            ([f"draw {colour}", "<image>"], [colour]),
            ([f"draw {colour} and {other}", f"<image> {colour}, then <image>"], [colour, other]),
        ]
        if shows_images:
            rows += [
                (["<image>what colour?", colour], [colour]),
                (["<image>draw its colour, then say it", "<image>", "again", colour], [other, other]),
            ]
    entries = []
    for texts, images in rows:
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        entries.append({"messages": turns, "images": [f"{image}.png" for image in images]})
    (folder / "train.json").write_text(json.dumps(entries))
    texts = (text for texts, _ in rows for text in texts)
    train_byte_level_bpe(texts, (*SPECIAL_TOKENS, *DRAW_TOKENS), 300).save(str(folder / "tokenizer.json"))


def recipe(folder: Path, **changes: Any) -> Recipe:
    """Return the recipe; `changes` are laid over it, nested by double underscores (`model__llm__freeze`)."""
    settings: dict[str, Any] = {
        "name": "drawing",
        "model": {"vision": dict(VISION), "llm": dict(LLM_SETTINGS), "generator": dict(DIT)},
        "data": {
            "sources": [{"path": folder / "train.json"}], "tokenizer": folder / "tokenizer.json", "seq_len": 96,
            "image": {"min_pixels": 16, "max_pixels": 256}, "workers": 0,
        },
        "train": {"steps": 4, "global_batch": 8, "seed": 7, "optimizer": {"lr": 1e-3}},
    }  # fmt: skip
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = settings
        for key in parents:
            section = section.setdefault(key, {})
        section[last] = value
    return Recipe.model_validate(settings)
