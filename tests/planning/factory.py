"""Make recipes and lengths of made-up data for planning tests."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mmtrain.balance import ItemLengths, SampleLengths
from mmtrain.planning.artifact.layout import Layout, MeshSize
from mmtrain.planning.artifact.plan import SchedulePlan
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.layout_simulation import schedule_memory, scheduled_graph
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.layer_costs.layer_partition import anchored_partition, partitioned_layout
from mmtrain.planning.space.candidate import Candidate, FittedLayout, MeshAssignment, partition_of
from mmtrain.planning.space.constraints import UnitChoices
from mmtrain.planning.space.problem import PlanningProblem
from mmtrain.planning.space.sample_batches import BatchSplit
from mmtrain.program.ir.step_loads import StepLoads
from mmtrain.recipe.settings.schema import Recipe

VISION: dict[str, Any] = {
    "layers": 3, "hidden": 96, "heads": 4, "ffn": 256, "patch": 8, "max_side": 8,
    "downsample": "pixel_shuffle", "merge": 2,
}  # fmt: skip
AUDIO: dict[str, Any] = {"layers": 2, "hidden": 96, "heads": 4, "ffn": 256, "max_frames": 400, "downsample": 2}
UNET: dict[str, Any] = {
    "kind": "unet", "widths": (16, 32), "heads": (2, 4), "layers": 1, "context_width": 24, "context_tokens": 8,
    "norm_groups": 8,
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
    grad_reduce: str = "fp32",
) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "test",
            "model": {"vision": vision, "llm": {**LLM, **(llm or {})}},
            "data": {"sources": [{"path": "samples.json"}], "tokenizer": "tokenizer.json", "seq_len": seq_len},
            "parallel": parallel or {},
            "cluster": cluster or {},
            "train": {
                "steps": 1,
                "global_batch": global_batch,
                "optimizer": {"lr": 1e-3},
                "grad_reduce": grad_reduce,
            },
        }
    )


def lengths(num_samples: int = 300, seed: int = 0) -> SampleLengths:
    """Make lengths of samples with up to three images of 4 to 36 patches, and some text."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4, num_samples)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    rows, cols = (2 * rng.integers(1, 4, first[-1]) for _ in range(2))
    features = rows * cols // 4
    text = rng.integers(20, 120, num_samples)
    tokens = text + np.array([features[a:b].sum() for a, b in pairwise(first)])
    items = ItemLengths(first, rows, cols, rows * cols, features)
    return SampleLengths(tokens.astype(np.int64), text.astype(np.int64) // 2, {"vision": items})


def with_generator(settings: Recipe, file: Path, generator: dict[str, Any]) -> Recipe:
    """Return the recipe with some images to generate, as `file` then states the lengths of all samples."""
    file.write_text("count,text,vision,generator\n40,60,16,64\n20,100,36,\n20,30,,2x64\n", encoding="utf-8")
    plain = settings.model_dump()
    plain["model"]["generator"] = generator
    plain["data"] |= {"sources": [{"path": file}], "tokenizer": None}
    return Recipe.model_validate(plain)


def speech(vision: dict[str, Any] | None = VISION, parallel: dict[str, Any] | None = None) -> Recipe:
    plain = recipe(vision=vision, parallel=parallel).model_dump()
    plain["model"]["audio"] = AUDIO
    plain["data"]["audio"] = {"max_seconds": 4.0}
    return Recipe.model_validate(plain)


def heard(settings: Recipe) -> SampleLengths:
    """Return the factory's samples, with an audio clip in every third of them."""
    samples = lengths()
    frames = 4 * np.random.default_rng(1).integers(5, 60, len(samples) // 3)
    first = (np.arange(len(samples) + 1, dtype=np.int64) + 2) // 3
    clips = ItemLengths(first, frames, np.ones_like(frames), frames // 2, frames // 4)
    counts = np.zeros(len(samples), dtype=np.int64)
    counts[::3] = clips.features
    items = {"audio": clips} | (samples.items if settings.model.vision else {})
    return SampleLengths(samples.tokens + counts, samples.targets, items)


def text_lengths(num_samples: int = 300) -> SampleLengths:
    tokens = np.random.default_rng(0).integers(20, 200, num_samples).astype(np.int64)
    return SampleLengths(tokens, tokens // 2, {})


def problem_for(settings: Recipe, hardware: str = "cpu-core", world_size: int = 1) -> PlanningProblem:
    """Make the planning problem of a recipe on made-up data."""
    samples = lengths() if settings.model.vision else text_lengths()
    return formulate_problem(settings, samples, world_size=world_size, hardware=hardware, recipe_sha256="f" * 64)


def evaluator_for(settings: Recipe, hardware: str = "cpu-core") -> Evaluator:
    """Make an evaluator of that problem, without sequence parallelism."""
    return Evaluator(problem_for(settings, hardware))


def with_memory(evaluator: Evaluator, memory_bytes: float) -> Evaluator:
    """Return the evaluator for ranks of so much memory."""
    cluster = evaluator.problem.cluster
    small = replace(cluster, hardware=replace(cluster.hardware, memory_bytes=memory_bytes))
    return Evaluator(replace(evaluator.problem, cluster=small), evaluator.budget, evaluator.layer_costs)


def simulated(layout: Layout, evaluator: Evaluator, schedule: SchedulePlan | None = None) -> Candidate:
    """Simulate a layout as a candidate, whether it fits into memory or not."""
    meshes = {name: MeshSize(unit.tp, unit.pp, unit.dp, unit.vpp) for name, unit in layout.units.items()}
    candidate = evaluator.enumerated(MeshAssignment(layout.placement, meshes, layout.num_microbatches))
    schedule = schedule or SchedulePlan(num_microbatches=dict(layout.num_microbatches))
    graph = scheduled_graph(layout, schedule, evaluator.layer_costs)
    memory = schedule_memory(graph, schedule, evaluator.layer_costs)
    fit = FittedLayout(layout, graph, memory)
    return evaluator.simulate(candidate.partitioned(partition_of(layout)).fitted(fit, schedule))


def layer_costs_for(settings: Recipe, hardware: str = "cpu-core") -> tuple[LayerCosts, Mapping[str, UnitChoices]]:
    """Return the layer costs and the mesh choices of that problem."""
    problem = problem_for(settings, hardware)
    return LayerCosts(problem), problem.choices


def anchor_layout(
    assignment: MeshAssignment, layer_costs: LayerCosts, choices: Mapping[str, UnitChoices]
) -> Layout | None:
    """Divide every layer chain at its anchor."""
    partition = anchored_partition(assignment, layer_costs, choices)
    return None if partition is None else partitioned_layout(assignment, layer_costs, partition)


def loads_of_steps(layer_costs: LayerCosts, split: BatchSplit) -> list[StepLoads]:
    """Return loads and routes of every sampled batch under a split."""
    return [layer_costs.loads.of_step(split, batch) for batch in range(len(layer_costs.batches.groups))]
