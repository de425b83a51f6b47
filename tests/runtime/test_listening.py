"""Evaluation of a model that hears: its answers come from the clips, and silence takes them away."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from mmtrain.data import ChatTokenizer, build
from mmtrain.data.demo import train_tokenizer
from mmtrain.data.tokenize import AUDIO
from mmtrain.models.inputs import AudioInput, TextInput
from mmtrain.recipe import Recipe, dump
from mmtrain.runtime.evaluate import load_clips, questions_of, run
from mmtrain.runtime.generate import Model, Prompt, build_model, generate
from tests.runtime.models import recipe, save_in_halves

TONES = {"low": 300, "middle": 1000, "high": 3000}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Taught:
    """A model that knows three tones, alone and in pairs."""

    folder: Path
    settings: Recipe
    model: Model
    tokenizer: ChatTokenizer


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
    tokenizer.add_special_tokens([AUDIO])
    tokenizer.save(str(folder / "tokenizer.json"))
    plain = recipe(folder / "tokenizer.json", folder / "rows.json", folder / "rows.json").model_dump()
    unit = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 32, "mel_bins": 20, "max_frames": 40, "downsample": 2}
    plain["model"] |= {"audio": unit, "vision": None}
    plain["data"]["audio"] = {"max_seconds": 0.4}
    settings = Recipe.model_validate(plain)
    known = ChatTokenizer.load(folder / "tokenizer.json")
    return Taught(folder, settings, _teach(settings, known), known)


def _teach(settings: Recipe, tokenizer: ChatTokenizer) -> Model:
    """Train on the recipe's samples, all in one batch, until there is nothing left to learn."""
    index, model = build(settings), build_model(settings, CPU)
    samples = [tokenizer.encode(s, [], index.features(i, "audio")) for i, s in enumerate(index.samples)]
    ids, labels = (torch.from_numpy(np.concatenate([getattr(e, key) for e in samples])) for key in ("ids", "labels"))
    clips = [c for q in questions_of(index, tokenizer, None) for c in load_clips(q, settings, blank=False)]
    sound = AudioInput(tuple(len(c.mels) for c in clips), torch.from_numpy(np.concatenate([c.mels for c in clips])))
    places = {"audio": torch.nonzero(ids == tokenizer.item_ids["audio"]).flatten()}
    text = TextInput(tuple(len(e.ids) for e in samples), ids, labels, places)
    stages = torch.nn.ModuleList([*model.encoders.values(), model.body, model.head])
    adam = torch.optim.AdamW(stages.parameters(), lr=5e-3)
    for _ in range(300):
        features = {"audio": model.encoders["audio"](None, sound)}
        loss = model.head(model.body(None, text, features), TextInput(text.lengths, labels=labels))
        adam.zero_grad()
        loss.backward()
        adam.step()
        if float(loss.detach()) < 0.05:
            return model
    raise AssertionError(f"still a loss of {float(loss.detach())}")


def test_it_answers_by_ear(taught: Taught, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(dump(taught.settings))
    stages = [*taught.model.encoders.values(), taught.model.body, taught.model.head]
    save_in_halves(tmp_path / "checkpoints", 7, stages)
    result = run(tmp_path, limit=None, blank_images=False)
    counts = {s.template: (s.questions, s.exact) for s in result.templates}
    assert counts == {"1 tones": (3, 3), "2 tones": (2, 2)}
    assert all(s.blanked is not None and s.blanked < s.exact for s in result.templates)
    assert result.examples[0].images[0].endswith(".wav")


def test_answers_do_not_depend_on_the_batch(taught: Taught) -> None:
    index = build(taught.settings, "validation")
    questions = questions_of(index, taught.tokenizer, None)
    prompts = [Prompt(q.ids, (), load_clips(q, taught.settings, blank=False)) for q in questions]
    text_only = Prompt(prompts[0].ids[prompts[0].ids != taught.tokenizer.item_ids["audio"]], ())
    together = generate(taught.model, [*prompts, text_only], taught.tokenizer, 8)
    alone = [generate(taught.model, [p], taught.tokenizer, 8)[0] for p in (*prompts, text_only)]
    assert together == alone
