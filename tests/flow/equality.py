"""What the master test asserts: a plan's run has the losses, gradients and norms of one process, sample by sample."""

import pytest
import torch
from torch import Tensor

from mmtrain.models.named_shards import NamedShard
from mmtrain.plan import Plan
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.training.lr_schedule import learning_rate
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.flow.cases import Reference, samples_of, step_data
from tests.flow.gather import copy, whole

NUM_STEPS = 5
Step = tuple[float, float, dict[str, Tensor]]  # loss, gradient norm, gradients by name


def assert_equals_one_process(settings: Recipe, plan: Plan, texts_between: bool = False, timeout: float = 30) -> None:
    """Train five steps by the plan and in one process: losses and norms of all, and all gradients of the first.

    `texts_between`: every second step has samples of text alone. Weights after a step are not compared one by one:
    Adam turns the rounding of a tiny gradient into a whole step.
    """
    ranks = run_ranks(plan.world_size, _train, settings, plan, texts_between, timeout=timeout)
    wanted = _reference(settings, texts_between)
    for step, (loss, norm, _) in enumerate(wanted):
        found = sum(steps[step][0] for steps, _ in ranks)
        assert found == pytest.approx(loss, rel=1e-5), f"loss of step {step}"
        for steps, _ in ranks:
            assert steps[step][1] == pytest.approx(norm, rel=1e-4), f"gradient norm of step {step}"
    limit = settings.train.optimizer.clip_norm
    scale = 1.0 if limit is None else max(1.0, wanted[0][1] / limit)
    assert_close(whole([g for _, gradients in ranks for g in gradients]), wanted[0][2], scale)


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], scale: float = 1.0) -> None:
    """Hold each gradient to `|d| <= 1e-5 * max(|g|, 1e-3 * |all|)` in norms; `scale` undoes the clipping."""
    assert found.keys() == wanted.keys()
    everything = float(torch.cat([g.flatten() for g in wanted.values()]).norm())
    for name, gradient in wanted.items():
        distance = float((found[name].reshape(gradient.shape) * scale - gradient).norm())
        assert distance <= 1e-5 * max(float(gradient.norm()), 1e-3 * everything), f"{name}: off by {distance}"


def _train(settings: Recipe, plan: Plan, texts_between: bool) -> tuple[list[tuple[float, float]], list[NamedShard]]:
    """Run on every rank: (loss part, norm) of each step, and this rank's gradients of the first."""
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    job = build_rank_context(settings, plan, world)
    steps, gradients = [], []
    for step in range(NUM_STEPS):
        lr = learning_rate(settings.train.optimizer, step, NUM_STEPS)
        outcome = job.train(step_data(job, step, texts_between), lr)
        assert outcome.stepped
        assert outcome.grad_norm is not None
        steps.append((outcome.loss, outcome.grad_norm))
        if step == 0:
            gradients = [copy(g) for unit in job.optimizer.units.values() for g in unit.gradients()]
    return steps, gradients


_references: dict[tuple[str, str, bool], list[Step]] = {}


def _reference(settings: Recipe, texts_between: bool) -> list[Step]:
    """Five steps of the one process, kept for recipes that differ only in what it does not see."""
    seen = settings.train.model_dump_json(exclude={"global_batch"})
    key = (settings.model.model_dump_json(), seen, texts_between)
    if key not in _references:
        [_references[key]] = run_ranks(1, _run_reference, settings, texts_between)
    return _references[key]


def _run_reference(settings: Recipe, texts_between: bool) -> list[Step]:
    reference = Reference(settings)
    steps = [reference.step(samples_of(step, texts_between)) for step in range(NUM_STEPS)]
    return [(loss, norm, gradients if step == 0 else {}) for step, (loss, norm, gradients) in enumerate(steps)]
