"""Recipes and lengths of data that do not exist, for planning tests."""

from itertools import pairwise
from typing import Any

import numpy as np

from mmtrain.balance import ItemLengths, SampleLengths
from mmtrain.costs import machine_for
from mmtrain.plan.estimate.layer_costs import LayerCosts
from mmtrain.plan.planner import prepared
from mmtrain.plan.search.constraints import UnitChoices
from mmtrain.recipe.schema import Recipe

VISION: dict[str, Any] = {
    "layers": 3, "hidden": 96, "heads": 4, "ffn": 256, "patch": 8, "max_side": 8,
    "downsample": "pixel_shuffle", "merge": 2,
}  # fmt: skip
LLM: dict[str, Any] = {"layers": 4, "hidden": 128, "heads": 4, "ffn": 320, "vocab": 512}


def recipe(
    *,
    vision: dict[str, Any] | None = VISION,
    llm: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    global_batch: int = 8,
    seq_len: int = 384,
) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "test",
            "model": {"vision": vision, "llm": {**LLM, **(llm or {})}},
            "data": {"sources": [{"path": "samples.json"}], "tokenizer": "tokenizer.json", "seq_len": seq_len},
            "parallel": parallel or {},
            "cluster": cluster or {},
            "train": {"steps": 1, "global_batch": global_batch, "optimizer": {"lr": 1e-3}},
        }
    )


def lengths(num_samples: int = 300, seed: int = 0) -> SampleLengths:
    """Samples of up to three images of 4 to 36 patches, and some text."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4, num_samples)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    rows, cols = (2 * rng.integers(1, 4, first[-1]) for _ in range(2))
    features = rows * cols // 4
    text = rng.integers(20, 120, num_samples)
    tokens = text + np.array([features[a:b].sum() for a, b in pairwise(first)])
    items = ItemLengths(first, rows, cols, rows * cols, features)
    return SampleLengths(tokens.astype(np.int64), text.astype(np.int64) // 2, {"vision": items})


def text_lengths(num_samples: int = 300) -> SampleLengths:
    tokens = np.random.default_rng(0).integers(20, 200, num_samples).astype(np.int64)
    return SampleLengths(tokens, tokens // 2, {})


def layer_costs_for(settings: Recipe, hardware: str = "cpu-core") -> tuple[LayerCosts, dict[str, UnitChoices]]:
    """What `plan` prepares before it searches."""
    samples = lengths() if settings.model.vision else text_lengths()
    return prepared(settings, samples, machine_for(settings, hardware))
