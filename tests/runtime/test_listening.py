"""Evaluate an audio model: its answers come from the clips, and silence removes them."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import soundfile

from mmtrain.data.synthetic.demo import train_tokenizer
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.modalities import AUDIO
from tests.runtime.models import evaluated, recipe, run_folder, teach

TONES = {"low": 300, "middle": 1000, "high": 3000}


@dataclass(frozen=True)
class Taught:
    """A model that knows three tones, alone and in pairs."""

    folder: Path
    settings: Recipe
    units: dict[str, StageModule]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    folder = tmp_path_factory.mktemp("listening")
    for name, hertz in TONES.items():
        wave = 0.3 * np.sin(2 * np.pi * hertz * np.arange(1600) / 8000)
        soundfile.write(folder / f"{name}.wav", wave, 8000)
    heard = [(name,) for name in TONES] + [("high", "low"), ("low", "middle")]
    rows = [
        {
            "audio": [f"{name}.wav" for name in names],
            "template": f"{len(names)} tones",
            "conversations": [
                {"from": "human", "value": "<audio>" * len(names) + "What is it?"},
                {"from": "gpt", "value": " ".join(names)},
            ],
        }
        for names in heard
    ]
    (folder / "rows.json").write_text(json.dumps(rows))
    tokenizer = train_tokenizer(iter(["What is it? low middle high low middle high"]))
    tokenizer.add_special_tokens([AUDIO.placeholder])
    tokenizer.save(str(folder / "tokenizer.json"))
    plain = recipe(folder / "tokenizer.json", folder / "rows.json", folder / "rows.json").model_dump()
    unit = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 32, "mel_bins": 20, "max_frames": 40, "downsample": 2}
    plain["model"] |= {"audio": unit, "vision": None}
    plain["data"]["audio"] = {"max_seconds": 0.4}
    settings = Recipe.model_validate(plain)
    return Taught(folder, settings, teach(settings))


def test_answers_follow_the_clips_and_silence_removes_them(taught: Taught, tmp_path: Path) -> None:
    result = evaluated(run_folder(tmp_path / "run", taught.settings, taught.units))
    counts = {s.template: (s.questions, s.exact) for s in result.templates}
    assert counts == {"1 tones": (3, 3), "2 tones": (2, 2)}
    assert all(s.blanked is not None and s.blanked < s.exact for s in result.templates)
    assert result.examples[0].clips[0].endswith(".wav")
    figures = json.loads(result.to_json())
    assert figures["exact_with_clips"] == 1.0
    assert figures["blanked_with_clips"] < 1.0
    assert "exact_with_images" not in figures
