"""Clips of tones, and conversations about them, on which a tiny audio model is fine-tuned."""

import json
import random
import wave
from pathlib import Path
from typing import Any

import numpy as np

from mmtrain.data.formats.sample import AUDIO_MARK

CLIPS_FOLDER = "clips"
_SAMPLE_RATE_HZ = 16_000
_TONES_HZ = {"low": 220, "middle": 660, "high": 1980}
_NUM_CLIPS = 120
_HELDOUT_ONE_IN = 8  # one in so many clips is held out
_TEXT_SHARE = 0.1  # of conversations
_TWO_CLIPS_SHARE = 0.2
_AMPLITUDE = 8000  # of 16-bit samples
_NOISE = 300


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
        (out / f"{split}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


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
