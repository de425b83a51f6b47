"""Data files with anything in them are read: each entry becomes a sample, or is set aside with a reason."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.formats.sample import QUARANTINE_REASONS, Quarantined
from mmtrain.errors import MmtrainError
from mmtrain.recipe.settings.data_settings import LimitSettings, SourceSettings
from tests.fuzz.mutations import mutate

ASKED: dict[str, Any] = {
    "role": "user",
    "content": [{"type": "text", "text": "why"}, {"type": "image", "image": "a.png"}],
}
NO_JSON = ("", "9" * 5000, "[" * 100_000, "\0", "}", '"', "\ud800", "\ufeff")
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
ROWS: tuple[dict[str, Any], ...] = (
    {
        "id": "1",
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image>why"}, {"from": "gpt", "value": "red"}],
    },
    {"id": 2, "images": ["a.png", "b.png"], "messages": [ASKED, {"role": "assistant", "content": "red"}]},
    {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
    },
    {"prompt": "why", "completion": "red", "images": ["a.png"]},
    {"query": "<audio>why", "response": "red", "history": [["a", "b"]], "audios": ["a.wav"]},
    {"instruction": "why", "input": "sky", "output": "red", "system": "be kind"},
    {"text": "all of it"},
    {"videos": ["a.mp4"], "conversations": [{"from": "human", "value": "<video>"}, {"from": "gpt", "value": "x"}]},
)


def check(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    rows = []
    for _ in range(3):
        entry: Any = rng.choice(ROWS)
        for _ in range(rng.choice((1, 1, 2, 4))):
            entry = mutate(entry, rng)
        rows.append(entry)
    if rng.random() < 0.5:
        path = folder / "rows.json"
        text = json.dumps(rows)
    else:
        path = folder / "rows.jsonl"
        text = "\n".join(map(json.dumps, rows))
    if rng.random() < 0.3:  # also what is no JSON at all
        place = rng.randrange(len(text) + 1)
        text = text[:place] + rng.choice(NO_JSON) + text[place:]
    path.write_bytes(text.encode("utf-8", rng.choice(["surrogatepass", "replace"])))
    try:
        for entry in read_samples(SourceSettings(path=path), LimitSettings()):
            if isinstance(entry, Quarantined):
                assert entry.kind in QUARANTINE_REASONS
    except MmtrainError:
        return
    except Exception as error:
        path.rename(folder / "found.txt")
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}; {text[:300]}") from error


def test_rows(tmp_path: Path) -> None:
    for seed in range(300):
        check(seed, tmp_path)


@pytest.mark.slow  # a minute
def test_many_rows(tmp_path: Path) -> None:
    for seed in range(300, 10_000):
        check(seed, tmp_path)
