"""Conversations about pictures, about clips and about both, on which a tiny model that sees and hears is fine-tuned."""

import json
import random
from pathlib import Path
from typing import Any

from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.data.synthetic.toy_clips import write_toy_clips

_SOUNDS_FOLDER = "sounds"
_BOTH_SHARE = 1 / 3  # of conversations; the others are about pictures or about clips, equally often


def write_toy_mixture(out: Path, seed: int, train: int, heldout: int) -> None:
    """Write `train.json` and `heldout.json` in the `messages` format, with the pictures and clips that they name."""
    generate_demo(out, seed, train, heldout)
    (out / "tokenizer.json").unlink()  # of the demo's own model
    sounds = out / _SOUNDS_FOLDER
    sounds.mkdir()
    write_toy_clips(sounds, seed, train, heldout)
    rng = random.Random(seed)
    for split in ("train", "heldout"):
        pictured = [_as_messages(row) for row in _read_rows(out / f"{split}.json")]
        heard = [_in_folder(row) for row in _read_rows(sounds / f"{split}.json")]
        rows = [_choose(rng, *pair) for pair in zip(pictured, heard, strict=True)]
        (out / f"{split}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        (sounds / f"{split}.json").unlink()


def _choose(rng: random.Random, pictured: dict[str, Any], heard: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation about a picture, one about a clip, or one of both."""
    if rng.random() >= _BOTH_SHARE:
        return rng.choice((pictured, heard))
    first, second = rng.sample((pictured, heard), 2)
    media: dict[str, Any] = {key: row[key] for row in (pictured, heard) for key in ("images", "audios") if key in row}
    if rng.random() < 0.5:
        return {"messages": [*first["messages"], *second["messages"]], **media}
    texts = zip(first["messages"], second["messages"], strict=True)
    joined = [{"role": a["role"], "content": f"{a['content']} {b['content']}"} for a, b in texts]
    return {"messages": joined, **media}


def _as_messages(row: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation in LLaVA's layout in that of `messages`."""
    roles = {"human": "user", "gpt": "assistant"}
    messages = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
    converted: dict[str, Any] = {"messages": messages}
    if "image" in row:
        converted["images"] = row["image"]
    return converted


def _in_folder(row: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation whose clips are named from the folder above."""
    if "audios" not in row:
        return row
    return {**row, "audios": [f"{_SOUNDS_FOLDER}/{name}" for name in row["audios"]]}


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return rows
