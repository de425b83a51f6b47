"""Conversations for tiny models: about sums and short words, about tones, and about pictures and tones together."""

import json
import random
import wave
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mmtrain.data.formats.sample import AUDIO_MARK
from mmtrain.data.synthetic.demo import generate_demo, write_json

_SYSTEM_TEXT = "You answer in one word."
_SYSTEM_SHARE = 0.3  # of conversations
_WORDS = ["apple", "bird", "cat", "door", "egg", "fish", "green", "hat", "jam", "lamp", "moon", "oak", "queen", "sun"]
_NUMBERS = range(20)
_HELDOUT_ONE_IN = 8  # one question, or one clip, in eight is held out
CLIPS_FOLDER = "clips"
_SAMPLE_RATE_HZ = 16_000
_TONES_HZ = {"low": 220, "middle": 660, "high": 1980}
_NUM_CLIPS = 120
_TEXT_SHARE = 0.1  # of conversations
_TWO_CLIPS_SHARE = 0.2
_AMPLITUDE = 8000  # of 16-bit samples
_NOISE = 300
_SOUNDS_FOLDER = "sounds"
_BOTH_SHARE = 1 / 3  # of conversations; the others are about pictures or about clips, equally often


def write_toy_chats(out: Path, seed: int, train: int, heldout: int) -> None:
    """Write `train.json` and `heldout.json` in the `messages` format. No question occurs in both."""
    rng = random.Random(seed)
    for name, count, is_heldout in (("train", train, False), ("heldout", heldout, True)):
        rows = [{"messages": list(_draw_turns(rng, is_heldout))} for _ in range(count)]
        write_json(out / f"{name}.json", rows)


def _draw_turns(rng: random.Random, is_heldout: bool) -> Iterator[dict[str, str]]:
    """Yield the turns of one conversation: one or two questions, in some after a system turn."""
    if rng.random() < _SYSTEM_SHARE:
        yield {"role": "system", "content": _SYSTEM_TEXT}
    for _ in range(rng.randint(1, 2)):
        question, answer = _draw_question(rng, is_heldout)
        yield {"role": "user", "content": question}
        yield {"role": "assistant", "content": answer}


def _draw_question(rng: random.Random, is_heldout: bool) -> tuple[str, str]:
    while True:
        question, answer = rng.choice(_QUESTIONS)(rng)
        if (zlib.crc32(question.encode()) % _HELDOUT_ONE_IN == 0) == is_heldout:
            return question, answer


def _sum(rng: random.Random) -> tuple[str, str]:
    first, second = rng.choice(_NUMBERS), rng.choice(_NUMBERS)
    return f"What is {first} plus {second}?", str(first + second)


def _first_letter(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(_WORDS)
    return f"What is the first letter of {word}?", word[0]


def _longer(rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(_WORDS, 2)
    answer = "neither" if len(first) == len(second) else max(first, second, key=len)
    return f"Which word is longer, {first} or {second}?", answer


_QUESTIONS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (_sum, _first_letter, _longer)


def write_toy_clips(out: Path, seed: int, train: int, heldout: int) -> None:
    """Write `clips/`, and `train.json` and `heldout.json` in the `messages` format. No clip is in both."""
    rng = random.Random(seed)
    (out / CLIPS_FOLDER).mkdir()
    clips = {f"{CLIPS_FOLDER}/{number:03d}.wav": _draw_clip(rng) for number in range(_NUM_CLIPS)}
    for number, (name, tones) in enumerate(clips.items()):
        _write_clip(out / name, tones, rng, np.random.default_rng([seed, number]))
    names = list(clips)
    splits = {
        "train": (train, [name for number, name in enumerate(names) if number % _HELDOUT_ONE_IN]),
        "heldout": (heldout, names[::_HELDOUT_ONE_IN]),
    }
    for split, (count, of_split) in splits.items():
        rows = [_draw_row(rng, clips, of_split) for _ in range(count)]
        write_json(out / f"{split}.json", rows)


def _draw_clip(rng: random.Random) -> list[str]:
    return rng.choices(list(_TONES_HZ), k=rng.randint(1, 4))


def _write_clip(path: Path, tones: list[str], rng: random.Random, noise: np.random.Generator) -> None:
    """Write tones of a fifth to two fifths of a second each, as mono WAV."""
    parts = []
    for tone in tones:
        times = np.arange(rng.randint(_SAMPLE_RATE_HZ // 5, 2 * _SAMPLE_RATE_HZ // 5)) / _SAMPLE_RATE_HZ
        parts.append(_AMPLITUDE * np.sin(2 * np.pi * _TONES_HZ[tone] * times) * np.hanning(len(times)))
    samples = np.concatenate(parts)
    samples += noise.normal(0, _NOISE, len(samples))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_SAMPLE_RATE_HZ)
        file.writeframes(samples.round().astype("<i2").tobytes())


def _draw_row(rng: random.Random, clips: dict[str, list[str]], names: list[str]) -> dict[str, Any]:
    """Return a conversation about one clip, about two, or about none."""
    kind = rng.random()
    if kind < _TEXT_SHARE:
        first, second = rng.sample(list(_TONES_HZ), 2)
        question = f"Which tone is higher, {first} or {second}?"
        return {"messages": _turns(question, max(first, second, key=_TONES_HZ.__getitem__))}
    if kind < _TEXT_SHARE + _TWO_CLIPS_SHARE:
        first, second = rng.sample(names, 2)
        question = f"{AUDIO_MARK}{AUDIO_MARK}Which clip has more tones?"
        counts = len(clips[first]), len(clips[second])
        answers = {-1: "the second", 0: "neither", 1: "the first"}
        answer = answers[int(np.sign(counts[0] - counts[1]))]
        return {"messages": _turns(question, answer), "audios": [first, second]}
    name = rng.choice(names)
    return {"messages": _turns(f"{AUDIO_MARK}Which tones do you hear?", " ".join(clips[name])), "audios": [name]}


def _turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


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
        write_json(out / f"{split}.json", rows)
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
