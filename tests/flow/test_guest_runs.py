"""Runs of guests on one rank and on several: steps, resuming, export."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mmtrain.balance import assign
from mmtrain.checkpoint import open_newest_good
from mmtrain.data import BatchBuilder, build_index
from mmtrain.models.guest_factory import GUEST_PREFIX
from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.planning import Plan
from mmtrain.planning.whatif import plan_again
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, load_run_recipe
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import World
from mmtrain.weights import export_folder, open_pretrained
from tests.distributed import run_ranks
from tests.flow.gather import copy, whole
from tests.flow.runs import assert_same_end, refuse, run_all, tensors
from tests.flow.tiny_families import TINY_FAMILIES, load_tiny_recipe
from tests.guests.folders import write_folder
from tests.plans import plan_recipe as planner

# name -> (ranks, `parallel` of the recipe)
LAYOUTS = {
    "one rank": (1, "{placement: replicated}"),
    "two shards": (2, "{shard: all}"),
    "two copies": (2, "{shard: 1}"),
    "two shards, recomputed": (2, "{shard: all, llm: {recompute: all}}"),
    "weights gathered once": (2, "{shard: all, zero: 2}"),
    "whole weights": (2, "{zero: 1}"),
    "four ranks, two copies of two shards": (4, "{shard: 2}"),
}
QUICK = {"two shards, recomputed", "whole weights"}


@dataclass(frozen=True)
class Expected:
    """A guest, and what `transformers` computes with it."""

    folder: Path
    model: nn.Module  # with gradients of the loss
    loss: float


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Expected]:
    @cache
    def compute(name: str) -> Expected:
        folder = tmp_path_factory.mktemp("guests") / "model"
        model = write_folder(name, folder)
        loss = TINY_FAMILIES["llama"].loss(model, folder, load_tiny_recipe(folder, "{}").recipe)
        loss.backward()
        return Expected(folder, model, loss.item())

    return compute


def _train_one_step(recipe: Recipe, plan: Plan) -> tuple[float, list[NamedShard]]:
    """Train on the held-out samples."""
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    context = build_rank_context(recipe, plan, world, pretrained=open_pretrained(recipe))
    index, counts = build_index(recipe, "validation"), context.num_microbatches
    groups = np.array_split(np.arange(len(index.samples)), context.dp["llm"] * counts["llm"])
    meta = assign(0, 0, groups, index.lengths, context.dp, counts)
    outcome = context.train(BatchBuilder(index, recipe, context.needs, counts).build(meta), lr=0.01)
    return outcome.loss, [copy(g) for unit in context.optimizer.units.values() for g in unit.gradients()]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(pytest.param("starcoder2", layout, marks=[] if layout in QUICK else pytest.mark.slow) for layout in LAYOUTS),
        pytest.param("mamba", "two shards", marks=pytest.mark.slow),
    ],
)
def test_a_step_equals_one_of_transformers(name: str, layout: str, expected: Callable[[str], Expected]) -> None:
    theirs, (num_ranks, parallel) = expected(name), LAYOUTS[layout]
    recipe = load_tiny_recipe(theirs.folder, parallel).recipe
    lengths = build_index(recipe, "validation").lengths
    plan = planner(recipe, lengths, world_size=num_ranks, hardware="cpu-core", recipe_sha256="")
    assert (plan.placement, plan.world_size) == ("replicated", num_ranks)
    ranks = run_ranks(num_ranks, _train_one_step, recipe, plan)
    assert sum(part for part, _ in ranks) == pytest.approx(theirs.loss, rel=1e-4)
    gradients = whole([shard for _, shards in ranks for shard in shards])
    wanted = {f"{GUEST_PREFIX}{name}": param.grad for name, param in theirs.model.named_parameters()}
    assert gradients.keys() == wanted.keys()
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert (gradients[name] - gradient).norm() <= 1e-3 * max(float(gradient.norm()), 1e-3 * largest), name


@pytest.mark.slow
def test_a_run_that_stops_ends_like_one_that_does_not_and_its_export_opens(
    expected: Callable[[str], Expected], tmp_path: Path
) -> None:
    """Resume on as many ranks, bit for bit, and on another number; export what the run trained."""
    from transformers import AutoModelForCausalLM

    folder = expected("olmo2").folder

    def request(name: str, steps: int, num_ranks: int, resume: bool) -> TrainRequest:
        changes = (f"train.steps={steps}", "train.checkpoint.every=2", "train.optimizer.schedule=constant")
        loaded = load_tiny_recipe(folder, "{shard: all}", *changes)
        return TrainRequest(loaded, planner, plan_again, "cpu-core", num_ranks, tmp_path / name, resume=resume)

    unbroken, stopped = request("unbroken", 4, 2, False), request("stopped", 2, 2, False)
    assert run_all(unbroken, unbroken) == ["", ""]
    assert run_all(stopped, stopped) == ["", ""]
    resumed = request("stopped", 4, 2, True)
    assert run_all(resumed, resumed) == ["", ""]
    assert_same_end(tmp_path / "stopped", tmp_path / "unbroken", 4)
    alone = request("stopped", 5, 1, True)
    assert run_all(alone) == [""]

    recipe = load_run_recipe(tmp_path / "unbroken")
    checkpoint = open_newest_good(tmp_path / "unbroken" / CHECKPOINTS_FOLDER, refuse)
    export_folder(recipe, checkpoint, tmp_path / "out")
    trained = tensors(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, param in model.named_parameters():
        assert torch.equal(param, trained[f"{GUEST_PREFIX}{name}"]), name
    started = load_file(folder / "model.safetensors")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == started.keys()
    assert any(not torch.equal(param, started[name]) for name, param in model.named_parameters())
