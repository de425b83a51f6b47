"""A tiny model over tiny data that the tests of generation and evaluation share."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mmtrain.balance import assign
from mmtrain.checkpoint import Ranks, Shard, ShardSpec, Snapshot, save
from mmtrain.data import BatchBuilder, PayloadNeed, build_index
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.optim import parameter_specs as params
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.stage_module import StageModule, StageSpec
from mmtrain.program import LLM, Microbatch
from mmtrain.recipe import Recipe, dump_recipe
from mmtrain.report import EvaluationResult
from mmtrain.runtime.evaluation.score_drawings import DEFAULT_DRAWING, DrawingRequest
from mmtrain.runtime.evaluation.score_run import EvaluateRequest, run
from mmtrain.runtime.execution.unit_inputs import unit_inputs
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, RECIPE_FILE

CPU = torch.device("cpu")
PATCH = 8


def recipe(tokenizer: Path, train: Path, heldout: Path | None, **llm: Any) -> Recipe:
    """Make a recipe with a model of about ten thousand parameters; keywords change its LLM."""
    return Recipe.model_validate(
        {
            "name": "tiny",
            "model": {
                "vision": {
                    "layers": 1, "hidden": 16, "heads": 2, "ffn": 32, "patch": PATCH, "max_side": 8,
                    "downsample": "pixel_shuffle", "merge": 2,
                },
                "llm": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 512} | llm,
            },
            "data": {
                "sources": [{"path": train}],
                "validation": [{"path": heldout}] if heldout else [],
                "tokenizer": tokenizer,
                "seq_len": 256,
                "image": {"min_pixels": 256, "max_pixels": 2304},
            },
            "train": {"steps": 50, "global_batch": 6, "optimizer": {"lr": 1e-3}},
        }
    )  # fmt: skip


def randomize(stages: Iterable[nn.Module]) -> None:
    """Move every parameter far off its initial value, so that answers are varied."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for stage in stages:
            for param in stage.parameters():
                param += 0.3 * torch.randn(param.shape, generator=generator)


def save_in_halves(root: Path, step: int, stages: Iterable[StageModule]) -> Path:
    """Save stages as two tensor-parallel ranks would; cut the pieces of the second rank again, as ZeRO-1 does."""
    shards: dict[str, list[Shard]] = {}
    for stage in stages:
        specs = params.stage_param_specs(stage, stage.unit, tp=1)
        for name, param in stage.named_parameters():
            spec = specs[name]
            full = param.detach().reshape(spec.full_shape)
            if spec.dim is None:
                shards[spec.name] = [Shard(spec.name, ShardSpec(spec.full_shape), full)]
                continue
            rows = spec.full_shape[spec.dim]
            first, second = full.split(rows // 2, dim=spec.dim)
            flat = second.reshape(-1)
            cut = second.numel() // 3
            shards[spec.name] = [Shard(spec.name, ShardSpec(spec.full_shape, spec.dim, 0, rows // 2), first)]
            for lo, hi in ((0, cut), (cut, second.numel())):
                piece = ShardSpec(spec.full_shape, spec.dim, rows // 2, rows, flat=(lo, hi))
                shards[spec.name].append(Shard(spec.name, piece, flat[lo:hi]))
    pieces = [
        piece for shards_of_one in shards.values() for piece in shards_of_one
    ]  # a tied embedding comes twice, and is saved once
    return save(root, Snapshot(step, pieces), keep=9, ranks=Ranks.alone())


def whole(settings: Recipe) -> dict[str, StageModule]:
    """Build every unit of the model as one stage; return the stages by unit."""
    model = build_model_shape(settings)
    return {
        unit.name: build_stage(
            settings.model,
            model,
            StageSpec(unit.name, (0, len(unit.layers))),
            ParallelGroups.single(),
            StageOptions(torch.float32, CPU, seed=1, attention="reference"),
        )
        for unit in model.units
    }


def teach(settings: Recipe, max_steps: int = 300) -> dict[str, StageModule]:
    """Train on the recipe's samples, all in one batch, until the model knows their answers."""
    index = build_index(settings)
    units = whole(settings)
    needs = tuple(PayloadNeed(name, 0, media=name != LLM, ids=name == LLM, labels=name == LLM) for name in units)
    samples = np.arange(len(index.samples))
    single_replica = dict.fromkeys(units, 1)
    meta = assign(0, 0, [samples], index.lengths, single_replica, single_replica)
    data = BatchBuilder(index, settings, needs, single_replica).build(meta)
    inputs = unit_inputs(data, {name: [unit] for name, unit in units.items()}, settings)
    adam = torch.optim.AdamW(nn.ModuleDict(units).parameters(), lr=5e-3)
    for _ in range(max_steps):
        features = {name: unit(None, inputs[Microbatch(name, 0, 0)]) for name, unit in units.items() if name != LLM}
        loss = units[LLM](None, inputs[Microbatch(LLM, 0, 0)], features)
        adam.zero_grad()
        loss.backward()
        adam.step()
        if float(loss.detach()) < 0.05:
            return units
    raise AssertionError(f"still a loss of {float(loss.detach())}")


def run_folder(folder: Path, settings: Recipe, units: dict[str, StageModule] | None = None, step: int = 7) -> Path:
    """Make the folder of a run, with a checkpoint of `units` if there are any."""
    folder.mkdir(exist_ok=True)
    (folder / RECIPE_FILE).write_text(dump_recipe(settings))
    if units is not None:
        save_in_halves(folder / CHECKPOINTS_FOLDER, step, units.values())
    return folder


def evaluated(
    run_dir: Path,
    limit: int | None = None,
    blank_images: bool = False,
    drawing: DrawingRequest = DEFAULT_DRAWING,
    out: Path | None = None,
    metrics: tuple[str, ...] | None = None,
) -> EvaluationResult:
    """Evaluate as `mmtrain evaluate` does, in this process alone."""
    results: list[EvaluationResult] = []
    run(
        EvaluateRequest(
            run_dir, _no_plan, results.append, limit, blank_images, drawing=drawing, out=out, metrics=metrics
        )
    )
    [result] = results
    return result


def _no_plan(*_: object) -> None:
    raise AssertionError("one rank needs no planner")
