"""Run a plan for a few steps, and compare losses and gradients with one process that trains sample by sample."""

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from mmtrain.balance import BatchMeta, SampleLengths, StepTargets, assign
from mmtrain.data import BatchBuilder, DataIndex
from mmtrain.data.loading.batch_builder import StepData
from mmtrain.data.loading.payload import PayloadNeed
from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.plan import Plan
from mmtrain.program import LLM
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.encoder_settings import EncoderSettings
from mmtrain.recipe.settings.llm_settings import LlmSettings
from mmtrain.recipe.settings.model_settings import ModelSettings
from mmtrain.report.verification import MAX_ROUNDED_DISTANCE, Difference, Verification, VerifiedStep
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.execution.unit_inputs import loss_scales
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.verification.compare_gradients import (
    MAX_RELATIVE_DISTANCE,
    compare_gradients,
    stage_of_parameter,
)
from mmtrain.runtime.verification.fewer_replicas import RankLimit, cut_replicas
from mmtrain.runtime.verification.one_process import OneProcess
from mmtrain.runtime.world import Address, join, leave

FFN_PER_RANK = 16  # features of an MLP's hidden layer on each rank of a TP group
HEAD_DIM = 8
LLM_WIDTH_PER_RANK = 16
MIN_LLM_WIDTH = 32
VOCAB = 150  # not a multiple of what the vocabulary is padded to
MAX_CANDIDATES = 1 << 20  # samples among which short ones are looked for
NUM_DISTINCT_SAMPLES = 24  # one process computes each of them once a step, however often they occur
# Adam's steps are near the sign of a gradient, so that rounding errors of tiny ones would grow to whole steps. With a
# large epsilon they are near the gradient itself.
ADAM_EPS = 0.1
LEARNING_RATE = 0.05


@dataclass(frozen=True)
class VerifyRequest:
    """What to verify."""

    recipe: Recipe
    plan: Plan
    index: DataIndex
    num_steps: int = 2
    whole_model: bool = False  # at its own width, not shrunk
    max_processes: int = 64


@dataclass(frozen=True)
class _Verified:
    """What all ranks know."""

    recipe: Recipe  # as it is trained here
    plan: Plan
    index: DataIndex
    num_steps: int
    folder: Path

    @property
    def expected_file(self) -> Path:
        """What one process computes: for every step the loss, and the gradients by name."""
        return self.folder / "expected.pt"

    @property
    def result_file(self) -> Path:
        """The comparison, by rank 0."""
        return self.folder / "result.json"

    def batch(self, step: int) -> BatchMeta:
        """Return the samples of a step as the plan lays them out."""
        counts = self.plan.schedule.num_microbatches
        dp = {name: unit.dp for name, unit in self.plan.units.items()}
        groups = draw_groups(self.index.lengths, dp[LLM] * counts[LLM], step)
        as_padded = self.recipe.parallel.balance_as_padded()
        targets = StepTargets(dispatch=self.plan.dispatch == "all", balance_as_padded=as_padded)
        return assign(step, 0, groups, self.index.lengths, dp, counts, targets)


def verify_plan(request: VerifyRequest) -> Verification:
    """Train `num_steps` under the plan and in one process, from the same random weights in fp32.

    A plan with more ranks than may run here is cut to fewer replica groups. Stops after the first step that differs.

    Raises:
        UserError: one replica group of the plan has more ranks than processes or GPUs may be used here.
        RunError: the plan cannot be run.
    """
    cut = cut_replicas(request.plan, build_model_shape(request.recipe), _limit(request.max_processes))
    plan = _in_fp32(cut.plan)
    with tempfile.TemporaryDirectory() as folder:
        shared = _Verified(_trained_here(request), plan, request.index, request.num_steps, Path(folder))
        launch_local(1, partial(_run_alone, shared))
        launch_local(plan.world_size, partial(_run_rank, shared))
        steps = json.loads(shared.result_file.read_text(encoding="utf-8"))
    verified = (
        VerifiedStep(**step | {"differences": tuple(Difference(**difference) for difference in step["differences"])})
        for step in steps
    )
    return Verification(tuple(verified), cut.plan.world_size, cut.note)


def _limit(max_processes: int) -> RankLimit:
    """Return how many ranks may run here."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else max_processes
    if num_gpus < max_processes:
        reason = f"this machine has {num_gpus} GPU{'s' * (num_gpus != 1)}"
        return RankLimit(num_gpus, reason, "Run it with processes on the CPU (--cpu)")
    return RankLimit(
        max_processes,
        f"--ranks-here allows {max_processes} processes",
        "Raise that where memory allows (about 300 MB for each)",
    )


def _trained_here(request: VerifyRequest) -> Recipe:
    """Return the recipe with a narrow model and an optimizer that does not enlarge rounding errors."""
    recipe = request.recipe
    model = recipe.model
    if not request.whole_model:
        model = shrink_model(model, {name: unit.tp for name, unit in request.plan.units.items()})
    optimizer = recipe.train.optimizer.model_copy(update={"lr": LEARNING_RATE, "eps": ADAM_EPS, "clip_norm": None})
    train = recipe.train.model_copy(update={"optimizer": optimizer, "precision": "fp32"})
    return recipe.model_copy(update={"model": model, "train": train})


def _in_fp32(plan: Plan) -> Plan:
    return plan.model_copy(update={"precision": "fp32"})


def draw_groups(lengths: SampleLengths, num_groups: int, step: int) -> list[np.ndarray]:
    """Draw one or two samples for each group of a step, from a few short ones that differ in their items.

    The shortest samples of every kind, that is with equal numbers of items of each encoder, are taken in turn. All of
    them occur if the groups have room. Of a large dataset, `MAX_CANDIDATES` evenly spaced samples are looked at.
    """
    samples = np.arange(0, len(lengths), -(-len(lengths) // MAX_CANDIDATES) or 1)
    tokens = lengths.tokens[samples]
    counts = np.stack(
        [
            np.zeros_like(tokens),
            *(items.first[samples + 1] - items.first[samples] for items in lengths.items.values()),
        ],
        axis=1,
    )
    kinds: dict[tuple[int, ...], list[int]] = {}
    for row in np.argsort(tokens, kind="stable").tolist():
        sample = int(samples[row])
        kind = tuple(np.minimum(counts[row], 3).tolist())
        if lengths.targets[sample] and len(kinds.setdefault(kind, [])) < NUM_DISTINCT_SAMPLES:
            kinds[kind].append(sample)
    in_turn = [samples[i] for i in range(NUM_DISTINCT_SAMPLES) for samples in kinds.values() if i < len(samples)]
    pool = np.array(in_turn[:NUM_DISTINCT_SAMPLES], dtype=np.int64)
    sizes = 1 + np.arange(num_groups) % 2
    num_drawn = int(sizes.sum())
    rng = np.random.default_rng(step)
    drawn = np.concatenate([rng.permutation(pool) for _ in range(-(-num_drawn // len(pool)))])[:num_drawn]
    return np.split(drawn, np.cumsum(sizes)[:-1])


def _run_alone(shared: _Verified, address: Address) -> None:
    """Train in one process; write what is expected of the plan."""
    world = join(address)
    recipe = shared.recipe
    alone = OneProcess(recipe, world.device)
    once = dict.fromkeys(shared.plan.units, 1)
    has_positions = recipe.model.llm.rope_sections is not None
    needs = [PayloadNeed(unit, 0, media=True) for unit in once if unit != LLM]
    needs.append(PayloadNeed(LLM, 0, ids=True, labels=True, position_ids=has_positions))
    builder = BatchBuilder(shared.index, recipe, tuple(needs), once)

    def load(step: int, sample: int) -> StepData:
        meta = assign(step, 0, [np.array([sample], dtype=np.int64)], shared.index.lengths, once, once)
        return _with_small_ids(builder.build(meta), recipe)

    batches = [shared.batch(step) for step in range(shared.num_steps)]
    steps = []
    for batch in batches:
        scales, num_tokens = loss_scales(recipe, batch), int(batch.tokens.sum())
        steps.append(alone.step(batch.sample_id.tolist(), scales, num_tokens, partial(load, batch.step)))
    torch.save(steps, shared.expected_file)
    leave()


def _run_rank(shared: _Verified, address: Address) -> None:
    """Train under the plan as one rank; rank 0 compares what all ranks hold with what is expected."""
    world = join(address)
    torch.set_num_threads(1)
    context = build_rank_context(shared.recipe, shared.plan, world)
    builder = BatchBuilder(shared.index, shared.recipe, context.needs, context.num_microbatches)
    is_rounded = shared.recipe.train.grad_reduce == "bf16"
    max_distance = MAX_ROUNDED_DISTANCE if is_rounded else MAX_RELATIVE_DISTANCE
    expected = torch.load(shared.expected_file, weights_only=True) if world.is_first else []
    steps: list[VerifiedStep] = []
    for step in range(shared.num_steps):
        data = _with_small_ids(builder.build(shared.batch(step)), shared.recipe)
        outcome = context.train(data, LEARNING_RATE)
        loss = world.all_reduce(outcome.loss)
        shards = [_copied(shard) for unit in context.optimizer.units.values() for shard in unit.gradients()]
        by_rank = cast(list[list[NamedShard]], world.gather_to_first(shards))
        if world.is_first:
            expected_loss, gradients = expected[step]
            differences = tuple(
                replace(found, stage=stage_of_parameter(context.graph, found.parameter))
                for found in compare_gradients(by_rank, gradients, max_distance)
            )
            steps.append(VerifiedStep(loss, expected_loss, differences, len(gradients), is_rounded))
        if not world.broadcast(not steps or steps[-1].is_equal):
            break
    if world.is_first:
        shared.result_file.write_text(json.dumps([asdict(step) for step in steps]), encoding="utf-8")
    leave()


def _with_small_ids(data: StepData, recipe: Recipe) -> StepData:
    """Fold the ids of all texts into the vocabulary of the model, after they have said where features go."""
    vocab = recipe.model.llm.vocab
    text = {}
    for key, payload in data.text.items():
        ids = None if payload.ids is None else payload.ids % vocab
        labels = payload.labels
        if labels is not None:
            labels = np.where(labels >= 0, labels % vocab, labels)
        text[key] = replace(payload, ids=ids, labels=labels)
    return replace(data, text=text)


def _copied(shard: NamedShard) -> NamedShard:
    return replace(shard, tensor=shard.tensor.detach().cpu().clone())


def shrink_model(model: ModelSettings, tp: Mapping[str, int]) -> ModelSettings:
    """Return the model with narrow units, short heads and a small vocabulary.

    What a plan divides stays as it is: the numbers of layers, of heads and of rows that images and clips become. So do
    all settings that say how something is computed. tp: the tensor-parallel size of each unit.
    """
    values = model.model_dump()
    width = max(MIN_LLM_WIDTH, LLM_WIDTH_PER_RANK * max(tp.values()))
    values["llm"] |= _narrow_llm(model.llm, tp["llm"], width)
    for unit, settings in model.all_encoders.items():
        of_unit = values["encoders"][unit] if unit in model.encoders else values[unit]
        of_unit |= _narrow_encoder(settings, tp[unit])
    return ModelSettings.model_validate(values | {"hf": None})


def _narrow_llm(settings: LlmSettings, tp: int, width: int) -> dict[str, Any]:
    narrow: dict[str, Any] = {
        "preset": None,
        "hf": None,
        "hidden": width,
        "head_dim": HEAD_DIM,
        "ffn": FFN_PER_RANK * tp,
        "vocab": min(settings.vocab, VOCAB),
    }
    if settings.rope_sections is not None:
        divisor = math.gcd(*settings.rope_sections)
        sections = tuple(pairs // divisor for pairs in settings.rope_sections)
        narrow |= {"rope_sections": sections, "head_dim": 2 * sum(sections)}
    if settings.rope_width is not None:
        narrow |= {"rope_width": narrow["head_dim"], "head_dim": 2 * narrow["head_dim"]}
    if settings.full_attention is not None:
        # Twice as wide as the others, and half of it turns, if not all of it does.
        turning = None if settings.full_attention.rope_width is None else HEAD_DIM
        changes = {"head_dim": 2 * HEAD_DIM, "rope_width": turning}
        narrow["full_attention"] = settings.full_attention.model_dump() | changes
    if settings.per_layer_embeddings is not None:
        narrow["per_layer_embeddings"] = {"width": HEAD_DIM}
    if settings.shared_kv is not None:
        ffn = None if settings.shared_kv.ffn is None else 2 * FFN_PER_RANK * tp
        narrow["shared_kv"] = settings.shared_kv.model_dump() | {"ffn": ffn}
    return narrow


def _narrow_encoder(settings: EncoderSettings, tp: int) -> dict[str, Any]:
    projector = settings.projector.model_dump()
    if settings.projector.ffn is not None:
        projector["ffn"] = FFN_PER_RANK * tp
    heads = math.lcm(settings.heads, settings.projector.heads or 1)
    return {
        "preset": None,
        "hf": None,
        "hidden": HEAD_DIM * heads,
        "ffn": FFN_PER_RANK * tp,
        "projector": projector,
    }
