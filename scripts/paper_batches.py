"""Answer what no plan does: how uneven work is where nothing balances it, and how long reordering a step takes."""

from typing import Any

import numpy as np
import numpy.typing as npt

from mmtrain.api.plans import make_plan
from mmtrain.api.simulated_steps import step_batches
from mmtrain.balance import SampleLengths
from mmtrain.balance.assign import assign
from mmtrain.balance.ordering.microbatch_order import SEARCH_ROUNDS
from mmtrain.balance.ordering.reordering import reorder_microbatches
from mmtrain.costs import input_grad_needed
from mmtrain.costs.cost_model import TokenLoad
from mmtrain.costs.layer_arithmetic import unit_flops
from mmtrain.data import DataIndex
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.evaluate.simulate_plan import plan_timing, simulate_plan
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.program import Forward
from mmtrain.recipe import Recipe
from scripts.measurements import least_seconds
from scripts.paper_data import Run

Figures = dict[str, Any]
Values = npt.NDArray[np.float64]
LLM = "llm"
NUM_DRAWS = 8  # of all ranks' mini-batches
NUM_STEPS = 4  # of 128 groups each: enough for two digits of a deviation
LLM_STAGES = 10  # of MMScale's 72B model
_PROBE_TOKENS = 4096  # of the loads that tell FLOPs of tokens from those of attention


def random_batch_figures(recipe: Recipe, index: DataIndex, run: Run) -> Figures:
    """Return how much longer the fullest of all ranks computes than the mean one, by unit and for all units together.

    Every rank draws equally many samples, as OrchMLLM does without balancing, whatever their lengths. Work is FLOPs of
    forward and backward. Units wait one after another, so the sum of their fullest ranks is that of a step.

    Raises:
        ValueError: `train.global_batch` is not in samples.
    """
    num_ranks, batch = recipe.cluster.ranks, recipe.train.global_batch
    if num_ranks is None or isinstance(batch, int) or "samples" not in batch:
        raise ValueError(f"{run.command}: set cluster.ranks, and train.global_batch in samples")
    work = _work_of_samples(recipe, index.lengths)
    per_rank = batch["samples"] // num_ranks
    random = np.random.default_rng(recipe.train.seed)
    fullest, mean = dict.fromkeys(work, 0.0), dict.fromkeys(work, 0.0)
    for _ in range(NUM_DRAWS):
        chosen = random.integers(len(index.lengths), size=(num_ranks, per_rank))
        for unit, of_sample in work.items():
            of_rank = of_sample[chosen].sum(axis=1)
            fullest[unit] += float(of_rank.max())
            mean[unit] += float(of_rank.mean())
    return {
        "samples": per_rank,
        "over_mean": {unit: fullest[unit] / mean[unit] for unit in work if mean[unit]},
        "together": sum(fullest.values()) / sum(mean.values()),
    }


def _work_of_samples(recipe: Recipe, lengths: SampleLengths) -> dict[str, Values]:
    """Return by unit the FLOPs of every sample (S,)."""
    shape = build_model_shape(recipe)
    input_grad = input_grad_needed(shape)
    work = {}
    for unit in shape.units:
        linear, with_pairs = (
            unit_flops(unit.layers, TokenLoad(_PROBE_TOKENS, pairs, _PROBE_TOKENS, 1), input_grad[unit.name])
            for pairs in (0, _PROBE_TOKENS**2)
        )
        of_token, of_pair = linear / _PROBE_TOKENS, (with_pairs - linear) / _PROBE_TOKENS**2
        if unit.name == LLM:
            tokens = np.asarray(lengths.tokens[:], float)
            work[unit.name] = of_token * tokens + of_pair * tokens**2
        elif unit.name in lengths.items:
            items = lengths.items[unit.name]
            tokens = np.asarray(items.tokens[:], float)
            before = np.concatenate([[0.0], np.cumsum(of_token * tokens + of_pair * tokens**2)])
            first = np.asarray(items.first[:])
            work[unit.name] = before[first[1:]] - before[first[:-1]]
    return work


def stage_spread_figures(recipe: Recipe, index: DataIndex, run: Run) -> Figures:
    """Return the mean and the deviation of input, forward time and memory, over all stages and of the first over time.

    Inputs and forwards are those of every microbatch of simulated steps; memory is what a rank holds at its fullest,
    so it differs over stages and not over time.
    """
    made = make_plan(recipe, index.lengths, PlanRequest(num_alternatives=0, baseline=run.baseline)).plan
    rows: dict[str, list[tuple[float, float]]] = {}
    for batch in step_batches(recipe, index, made, range(1, NUM_STEPS + 1)):
        loads = plan_timing(recipe, made, batch).loads.loads
        for span in simulate_plan(recipe, made, batch).spans:
            if isinstance(span.action, Forward):
                stage, mb = span.action.stage, span.action.mb
                row = (float(loads[mb].tokens), span.duration_s * 1000)
                rows.setdefault(f"{stage.unit}.{stage.index}", []).append(row)
    first = next(iter(rows))
    memory = list(made.predicted.peak_memory_gib.values())
    return {
        "stages": _spread([row for of_stage in rows.values() for row in of_stage]) | {"peak_gib": _of(memory)},
        "first": _spread(rows[first]) | {"name": first},
        "step_s": made.predicted.step_time_s,
        "mfu": made.predicted.mfu,
        "placement": made.placement,
        "meshes": _mesh_texts(made),
        "shard": made.shard,
    }


def _mesh_texts(made: Plan) -> dict[str, str]:
    return {name: unit.mesh_text for name, unit in made.units.items()}


def _spread(rows: list[tuple[float, float]]) -> Figures:
    tokens, forward_ms = zip(*rows, strict=True)
    return {"tokens": _of(tokens), "forward_ms": _of(forward_ms)}


def _of(values: Any) -> list[float]:
    """Return mean and standard deviation."""
    return [float(np.mean(values)), float(np.std(values))]


def reordering_figures(recipe: Recipe, index: DataIndex, run: Run) -> Figures:
    """Return the milliseconds of both of MMScale's reorderings of a step's groups, for `parallel.llm.dp` replicas.

    Inside: groups are laid out for replicas and microbatches. Between: the microbatches are ordered for a pipeline of
    the LLM's stages behind an encoder, which varies with the images and takes as long as a stage on average.

    Raises:
        ValueError: the replicas do not divide the step.
    """
    replicas, num_groups = recipe.parallel.llm.dp, recipe.train.num_groups
    if replicas is None or num_groups % replicas:
        raise ValueError(f"{run.command}: set a parallel.llm.dp that divides train.global_batch {num_groups}")
    random = np.random.default_rng(recipe.train.seed)
    of_group = max(1, round(recipe.data.group_tokens / float(np.mean(index.lengths.tokens[:]))))
    groups = list(random.integers(len(index.lengths), size=(num_groups, of_group)))
    num = num_groups // replicas
    units = [LLM, *index.lengths.items]
    meshes, counts = dict.fromkeys(units, replicas), dict.fromkeys(units, num)
    inside_s, _ = least_seconds(lambda: assign(0, 0, groups, index.lengths, meshes, counts))
    images = _work_of_samples(recipe, index.lengths)["vision"][np.stack(groups)].sum(axis=1)
    forward = np.ones((1, LLM_STAGES + 1, num))
    forward[0, 0] = images.reshape(num, replicas).max(axis=1)
    forward[0, 0] /= forward[0, 0].mean()
    between_s, _ = least_seconds(
        lambda: reorder_microbatches(
            forward, 2 * forward, np.arange(num), SEARCH_ROUNDS, np.random.default_rng(recipe.train.seed)
        )
    )
    return {"microbatches": num, "inside_ms": inside_s * 1000, "between_ms": between_s * 1000}
