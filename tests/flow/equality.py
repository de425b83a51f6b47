"""Assert that a plan computes the losses, gradients and norms of one process that trains sample by sample."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.planning import Plan
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.training.hooks.learning_rate import learning_rate
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.flow.cases import Reference, samples_of, step_data
from tests.flow.gather import copy, whole
from tests.waiting import MAX_WAIT_S

NUM_STEPS = 3  # where steps differ in kind: the third sees what one of text alone did to momentum and weight decay
NUM_LIKE_STEPS = 2  # where all steps are alike: the second sees the update
Step = tuple[float, float, dict[str, Tensor]]  # loss, gradient norm, gradients by name


def assert_equals_one_process(
    settings: Recipe,
    plan: Plan,
    texts_between: bool | range = False,
    timeout: float = MAX_WAIT_S,
    train: Callable[..., Any] | None = None,
    later_tolerance: float | None = None,
) -> None:
    """Train some steps by the plan and in one process; compare losses and norms, and all gradients of the first step.

    `texts_between`: see `samples_of`. Weights after a step are not compared one by one: Adam turns the rounding error
    of a tiny gradient into a step of full size. `train` stands for `train_steps`.
    `later_tolerance`: relative, of losses and norms after an update, where the plan's optimizer rounds otherwise.
    """
    ranks = run_ranks(plan.world_size, train or train_steps, settings, plan, texts_between, timeout=timeout)
    expected = _reference(settings, texts_between)
    for step, (loss, norm, _) in enumerate(expected):
        sum_of_ranks = sum(steps[step][0] for steps, _ in ranks)
        loss_tolerance, norm_tolerance = 1e-5, 1e-4
        if step > 0 and later_tolerance is not None:
            loss_tolerance = norm_tolerance = later_tolerance
        assert sum_of_ranks == pytest.approx(loss, rel=loss_tolerance), f"loss of step {step}"
        for steps, _ in ranks:
            assert steps[step][1] == pytest.approx(norm, rel=norm_tolerance), f"gradient norm of step {step}"
    limit = settings.train.optimizer.clip_norm
    scale = 1.0 if limit is None else max(1.0, expected[0][1] / limit)
    assert_close(whole([g for _, gradients in ranks for g in gradients]), expected[0][2], scale)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], scale: float = 1.0) -> None:
    """Assert `|d| <= max(1e-5 * |g|, 2^-25 * |all|)` in norms for each gradient; `scale` undoes the clipping.

    The second limit is half of what fp32 rounds a number to. Some gradients are sums over all tokens of a head that
    nearly cancel (of decays, for one), a thousandth of the norm of all.
    """
    assert actual.keys() == expected.keys()
    total_norm = float(torch.cat([g.flatten() for g in expected.values()]).norm())
    for name, gradient in expected.items():
        distance = float((actual[name].reshape(gradient.shape) * scale - gradient).norm())
        assert distance <= max(1e-5 * float(gradient.norm()), 2**-25 * total_norm), f"{name}: off by {distance}"


def _num_steps(texts_between: bool | range) -> int:
    return NUM_LIKE_STEPS if texts_between is False else NUM_STEPS


def train_steps(
    settings: Recipe, plan: Plan, texts_between: bool | range
) -> tuple[list[tuple[float, float]], list[NamedShard]]:
    """Run on every rank: (loss part, norm) of each step, and this rank's gradients of the first."""
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    context = build_rank_context(settings, plan, world)
    steps: list[tuple[float, float]] = []
    gradients: list[NamedShard] = []
    num_steps = _num_steps(texts_between)
    for step in range(num_steps):
        lr = learning_rate(settings.train.optimizer, step, num_steps)
        outcome = context.train(step_data(context, step, texts_between), lr)
        assert outcome.stepped
        assert outcome.grad_norm is not None
        steps.append((outcome.loss, outcome.grad_norm))
        if step == 0:
            gradients = [copy(g) for unit in context.optimizer.units.values() for g in unit.gradients()]
    return steps, gradients


_references: dict[tuple[str, str, bool | range], list[Step]] = {}


def _reference(settings: Recipe, texts_between: bool | range) -> list[Step]:
    """Train in one process; reuse the result for recipes that differ only in what one process does not use."""
    used = settings.train.model_dump_json(exclude={"global_batch"})
    key = (settings.model.model_dump_json(), used, texts_between)
    if key not in _references:
        [_references[key]] = run_ranks(1, _run_reference, settings, texts_between)
    return _references[key]


def _run_reference(settings: Recipe, texts_between: bool | range) -> list[Step]:
    reference = Reference(settings)
    steps = [reference.step(samples_of(step, texts_between)) for step in range(_num_steps(texts_between))]
    return [(loss, norm, gradients if step == 0 else {}) for step, (loss, norm, gradients) in enumerate(steps)]
