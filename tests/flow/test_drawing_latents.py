"""A generator from a folder of `diffusers` learns latents of an autoencoder, and is exported as it was trained."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import PixArtTransformer2DModel
from PIL import Image

from mmtrain.report import read_metrics
from tests.flow.drawing import LLM_SETTINGS, VISION, write_samples
from tests.forked_command import run_forked
from tests.models.generator.test_autoencoder import saved_vae
from tests.models.generator.tiny import shuffle

NUM_STEPS = 3


def write_recipe(folder: Path, **generator: Any) -> None:
    """Write samples, a transformer, an autoencoder, and the recipe that trains one on latents of the other."""
    write_samples(folder)
    saved_vae(folder / "vae")
    torch.manual_seed(0)
    transformer = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, cross_attention_dim=12, sample_size=8
    )
    shuffle(transformer)
    transformer.save_pretrained(folder / "pixart")
    settings = {
        "name": "latents",
        "model": {
            "vision": VISION,
            "llm": LLM_SETTINGS,
            "generator": {
                "hf": "pixart", "vae": "vae", "latents": "latents", "image_size": 16, "context_tokens": 3, **generator
            },
        },
        "data": {
            "sources": [{"path": "train.json"}], "validation": [{"path": "train.json"}],
            "tokenizer": "tokenizer.json", "seq_len": 96,
            "image": {"min_pixels": 16, "max_pixels": 256}, "workers": 0,
        },
        "cluster": {"hardware": "cpu-core", "ranks": 1},
        "train": {
            "validate_every": 0, "steps": NUM_STEPS, "global_batch": 4, "precision": "fp32", "optimizer": {"lr": 1e-3}
        },
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(settings))


def run(folder: Path, *arguments: str) -> str:
    done = run_forked(folder, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "trained"])
def test_a_generator_of_latents_trains_and_is_exported(freeze: bool, tmp_path: Path) -> None:
    write_recipe(tmp_path, freeze=freeze)
    refused = run_forked(tmp_path, "train", "recipe.yaml")
    assert refused.returncode != 0
    assert "holds no latents" in refused.stderr + refused.stdout
    assert "latents: 6 latents added" in run(tmp_path, "data", "latents", "recipe.yaml")
    run(tmp_path, "train", "recipe.yaml", "--set", "name=again")
    losses = [row["loss"] for row in read_metrics(tmp_path / "runs" / "again")]
    assert len(losses) == NUM_STEPS
    drawn = json.loads(run(tmp_path, "evaluate", "runs/again", "--json", "--draw", "2", "--steps", "2"))["drawings"]
    assert drawn["samples"] == 2
    assert all(math.isfinite(bucket["loss"]) for bucket in drawn["losses"])
    for file in sorted((tmp_path / "runs" / "again" / "samples" / "drawn").iterdir()):
        with Image.open(file) as image:
            assert image.size == (16, 16)
            assert len(np.unique(np.asarray(image))) > 1
    if not freeze:
        saved_vae(tmp_path / "vae", seed=1)  # another one
        other = run_forked(tmp_path, "evaluate", "runs/again", "--draw", "2", "--steps", "2")
        assert other.returncode != 0
        assert "holds latents of another kind: encoder_hash is" in other.stderr
    run(tmp_path, "export", "runs/again", "--out", "exported", "--generator")
    before = PixArtTransformer2DModel.from_pretrained(tmp_path / "pixart").state_dict()
    after = PixArtTransformer2DModel.from_pretrained(tmp_path / "exported").state_dict()
    assert before.keys() == after.keys()
    is_same = all(torch.equal(before[name], after[name]) for name in before)
    assert is_same == freeze
