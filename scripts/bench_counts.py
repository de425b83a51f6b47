"""Predict how the number of an encoder's microbatches changes a step: `python scripts/bench_counts.py`.

Nothing is measured: costs are modelled for eight H100, and lengths are random. A vision unit of 0.3 billion parameters
feeds an LLM of 1.1 billion; the global batch is 32 groups.
"""

from itertools import pairwise
from typing import Any

import numpy as np

from mmtrain.balance import ItemLengths, SampleLengths
from mmtrain.plan import Plan
from mmtrain.plan.planner import plan_recipe
from mmtrain.recipe.schema import Recipe

NUM_SAMPLES = 2000
GLOBAL_BATCH = 32
MESHES: dict[str, dict[str, dict[str, int]]] = {
    "vision dp4, llm tp2 pp2": {"vision": {"tp": 1, "pp": 1, "dp": 4}, "llm": {"tp": 2, "pp": 2, "dp": 1}},
    "vision dp4, llm pp4": {"vision": {"tp": 1, "pp": 1, "dp": 4}, "llm": {"tp": 1, "pp": 4, "dp": 1}},
    "vision pp2 dp2, llm pp4": {"vision": {"tp": 1, "pp": 2, "dp": 2}, "llm": {"tp": 1, "pp": 4, "dp": 1}},
}
MODEL: dict[str, Any] = {
    "vision": {
        "layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096, "patch": 14, "max_side": 32,
        "downsample": "pixel_shuffle", "merge": 2,
    },
    "llm": {"layers": 16, "hidden": 2048, "heads": 16, "kv_heads": 8, "ffn": 8192, "vocab": 32000},
}  # fmt: skip


def main() -> None:
    lengths = sample_lengths()
    for name, meshes in MESHES.items():
        print(name)
        for count in (64, 32, 16, 8, 4, 2):
            predicted = plan_with(meshes, count, lengths).predicted
            peak_gib = max(predicted.peak_memory_gib.values())
            step_ms = predicted.step_time_s * 1e3
            print(f"  {count:3} microbatches: {step_ms:7.1f} ms, MFU {predicted.mfu:.1%}, {peak_gib:.1f} GiB")


def plan_with(meshes: dict[str, dict[str, int]], count: int, lengths: SampleLengths) -> Plan:
    """Plan with these meshes and `count` encoder microbatches per replica, for 32 of the LLM."""
    parallel = {"placement": "disaggregated", **meshes, "vision": {**meshes["vision"], "num_microbatches": count}}
    recipe = Recipe.model_validate(
        {
            "name": "counts",
            "model": MODEL,
            "data": {"sources": [{"path": "none.json"}], "tokenizer": "none.json", "seq_len": 2048},
            "parallel": parallel,
            "train": {"steps": 1, "global_batch": GLOBAL_BATCH, "optimizer": {"lr": 1e-3}},
        }
    )
    return plan_recipe(recipe, lengths, world_size=8, hardware="h100-80g", recipe_sha256="")


def sample_lengths() -> SampleLengths:
    """Return random samples of up to three images of 16 to 32 patches per side, and 20 to 400 tokens of text."""
    rng = np.random.default_rng(0)
    first = np.concatenate([[0], np.cumsum(rng.integers(0, 4, NUM_SAMPLES))]).astype(np.int64)
    rows, cols = (2 * rng.integers(8, 17, first[-1]) for _ in range(2))
    features = rows * cols // 4
    text = rng.integers(20, 400, NUM_SAMPLES)
    tokens = text + np.array([features[a:b].sum() for a, b in pairwise(first)])
    items = {"vision": ItemLengths(first, rows, cols, rows * cols, features)}
    return SampleLengths(tokens.astype(np.int64), text // 2, items)


if __name__ == "__main__":
    main()
